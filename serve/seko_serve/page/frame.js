// What the pages share: the line that tells the state, and the model that the server has.
import { request } from "./connection.js";

export const find = (id) => document.getElementById(id);
export const base = new URL("./", location.href);
export const key = () => find("key").value.trim();

const NOTICE_MS = 8000;
let said = ["Connecting", ""], notice; // how things stand, and what shows an error over it for a while

function show(text, kind) {
  if (find("state").textContent !== text) find("state").textContent = text; // a screen reader reads each change
  find("state").className = kind;
}

/** Tell how things stand. */
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

/** Tell an error; where the server lacks a key that it knows, open the field for it. `goesOn`: a session is not ended by it. */
export function fail(error, goesOn = false) {
  if (error.code === "unauthorized") {
    find("access").hidden = false;
    find("access").open = true;
    find("key").focus();
  }
  if (goesOn) complain(error.message);
  else say(error.message, error.code === "unauthorized" && !key() ? "" : "error");
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
