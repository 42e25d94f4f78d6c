// What the pages share: the line that tells the state, what stands where the picture is, and the model of the server.
import { request } from "./connection.js";

export const find = (id) => document.getElementById(id);
export const base = new URL("./", location.href);
export const key = () => find("key").value.trim();

/** Give a button another icon and name. */
export function face(button, icon, name) {
  button.querySelector("use").setAttribute("href", `page/icons.svg#${icon}`);
  button.title = name;
  button.setAttribute("aria-label", name);
}

const NOTICE_MS = 8000;
let said = ["Connecting", ""], notice; // how things stand, and what shows an error over it for a while

function show(text, kind) {
  const line = find("state");
  if (line.textContent !== text) line.textContent = text; // a screen reader reads each change
  line.className = kind;
  line.classList.toggle("twice", !find("notice").hidden && find("notice-text").textContent === text);
}

/** Tell how things stand: nothing, `live`, `wait` or `error` is its kind. */
export function say(text, kind = "") {
  if (notice && text === said[0]) return;
  said = [text, kind];
  settle();
}

/** Tell an error of something that does not change how things stand: a while later that is told again. */
export function complain(text) {
  clearTimeout(notice);
  notice = setTimeout(settle, NOTICE_MS);
  show(text, "error");
}

/** End what `complain` tells. */
export function settle() {
  clearTimeout(notice);
  notice = undefined;
  show(...said);
}

let offered = ""; // the names of the ways that are drawn: a button that has the focus stays

/** Tell where the picture is why there is none, with the ways on: what each button does, by its name. */
export function block(text, ways = {}, kind = "") {
  find("notice-text").textContent = text;
  find("notice").className = kind;
  find("notice").hidden = false;
  find("stage").classList.add("blocked");
  const names = Object.keys(ways);
  if (names.join("\n") !== offered) {
    offered = names.join("\n");
    find("ways").replaceChildren(...names.map((name) => Object.assign(document.createElement("button"), { type: "button", textContent: name })));
  }
  if (names.length) document.exitPointerLock?.(); // for they are pressed by it
  for (const button of find("ways").children) button.onclick = ways[button.textContent];
  if (!notice) show(...said);
}

/** The picture is seen again. */
export function unblock() {
  find("notice").hidden = true;
  find("stage").classList.remove("blocked");
  if (!notice) show(...said);
}

/** Tell an error that ends what was tried, with the ways on; where the server lacks a key that it knows, ask for it. */
export function fail(error, ways) {
  const asked = error.code === "unauthorized";
  if (asked) find("access").hidden = false;
  say(error.message, asked && !key() ? "wait" : "error");
  block(error.message, asked ? { "Use this key": () => find("key").blur() } : ways, asked ? "" : "error");
  if (asked) find("key").focus();
}

/** Ask the server for the model of this page. */
export async function servedModel() {
  const { data: models } = await request(base, "v1/models", key());
  if (!models.length) throw new Error("The server has no model now");
  const wanted = new URLSearchParams(location.search).get("model");
  showOthers(models);
  return models.find(({ id }) => id === wanted) ?? models.sort((a, b) => (a.id < b.id ? -1 : 1))[0];
}

/** Show links to the pages of all models, if the server is a gateway with several. */
function showOthers(models) {
  find("models").replaceChildren(...(models.length > 1 ? models : []).map(({ id }) => {
    const link = document.createElement("a");
    link.href = `?model=${encodeURIComponent(id)}`;
    link.textContent = id;
    return link;
  }));
}
