// What the pages share: the line that tells the state, and the model that the server has.
import { request } from "./connection.js";

export const find = (id) => document.getElementById(id);
export const base = new URL("./", location.href);
export const key = () => find("key").value;

export function say(text, kind = "") {
  find("state").textContent = text;
  find("state").className = kind;
}

/** Ask the server for its model; undefined where it first asks for a key, which the page then does too. */
export async function servedModel() {
  try {
    const { data: [model] } = await request(base, "v1/models", key());
    return model;
  } catch (error) {
    if (error.code !== "unauthorized") throw error;
    find("access").open = true;
    find("key").focus();
    say("This server asks for a key");
    return undefined;
  }
}
