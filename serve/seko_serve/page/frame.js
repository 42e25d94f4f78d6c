// What the pages share: the line that tells the state, and the model that the server has.
import { request } from "./connection.js";

export const find = (id) => document.getElementById(id);
export const base = new URL("./", location.href);
export const key = () => find("key").value.trim();

export function say(text, kind = "") {
  if (find("state").textContent !== text) find("state").textContent = text; // a screen reader reads each change
  find("state").className = kind;
}

/** Tell an error; where the server lacks a key that it knows, open the field for it. */
export function fail(error) {
  if (error.code === "unauthorized") {
    find("access").open = true;
    find("key").focus();
  }
  say(error.message, error.code === "unauthorized" && !key() ? "" : "error");
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
