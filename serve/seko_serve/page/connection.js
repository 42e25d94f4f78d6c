// A session and its socket: opens, sends controls, comes back after a lost socket.
import { packVoice, parseMedia } from "./protocol.js";

const FIRST_RETRY_MS = 200, LONGEST_RETRY_MS = 4000;
const GIVE_UP_MS = 600_000; // a session that has no row any more is saved, and the server says so if it is not

const UNKNOWN_KEY = "The server does not know this API key";

/** A message of the server, which begins with a small letter, as people read it. */
export const sentence = (message) => message[0].toUpperCase() + message.slice(1);

/** An error that the server told: its code, and the seconds after which to try again. */
export class Refusal extends Error {
  constructor({ message, code, retryable, retry_after: retryAfter, ...facts }) {
    super(sentence(message));
    Object.assign(this, { code, retryable, retryAfter, facts });
  }
}

/** The answer to a request; a Refusal where the server refuses it, an Error in plain words where another one answers. */
export async function answered(base, path, key, body, more = {}, method = body ? "POST" : "GET") {
  if (key && !/^[ -~]*$/.test(key)) throw new Refusal({ code: "unauthorized", message: UNKNOWN_KEY }); // no header holds it
  const headers = { ...more, ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  const answer = await fetch(new URL(path, base), {
    method, headers, body: body && JSON.stringify(body), keepalive: method === "DELETE", // also of a page that is left
  }).catch(() => { throw new Error("The server does not answer"); });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => ({}))).error; // a proxy's page is no JSON
  if (!error?.code) throw new Error(`The server is not reached: a proxy answers ${answer.status}`);
  const message = answer.status !== 401 ? error.message
    : key ? UNKNOWN_KEY : "This server asks for an API key";
  throw new Refusal({ ...error, message });
}

export const request = async (...what) => (await answered(...what)).json();

const rest = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

/** Open by `attempt(place)`; where all places are taken, wait in the line for as long as `wanted` says so. */
export async function admitted(attempt, say, wanted) {
  let place = "join";
  for (;;) {
    try {
      return await attempt(place);
    } catch (error) {
      if (error.code !== "full" || !error.retryAfter) throw error;
      place = error.facts?.queue_token ?? place;
      const line = error.facts?.place ? ` You are number ${error.facts.place} in line.` : "";
      for (let left = Math.ceil(error.retryAfter); left > 0 && wanted(); left -= 1) {
        say(`All places are taken.${line} Trying again in ${left} s`, "error");
        await rest(1000);
      }
      if (!wanted()) return undefined;
    }
  }
}

export class Connection extends EventTarget {
  constructor(base, key, buffer = 1) {
    super();
    Object.assign(this, { base, key, buffer, controls: 0, ended: false, serial: undefined, lostAt: undefined });
  }

  async open(session, hello, place) {
    this.hello = hello;
    const opened = await request(this.base, "v1/sessions", this.key, session, { "seko-queue": place });
    this.id = opened.id;
    if (this.ended) { this.abandon(); return; } // the person gave up meanwhile
    this.take(opened.url);
    this.connect(`seko.ticket.${opened.ticket}`);
  }

  /** Note the address of the socket, if it is at another server: a gateway gives the whole address. */
  take(url) {
    this.elsewhere = /^wss?:/.test(url) ? url : undefined;
  }

  get url() {
    if (this.elsewhere) return this.elsewhere;
    const url = new URL(`v1/sessions/${this.id}/stream`, this.base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    return url;
  }

  connect(entrance) {
    const { url } = this;
    const socket = new WebSocket(url, ["seko.v1", entrance]);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => socket.send(JSON.stringify({ type: "hello", ...this.hello, buffer: this.buffer }));
    socket.onmessage = ({ data }) => {
      if (data instanceof ArrayBuffer) {
        const media = parseMedia(data);
        this.serial = media.serial;
        this.dispatchEvent(new CustomEvent("media", { detail: { media, data } }));
        return;
      }
      const message = JSON.parse(data);
      if (message.type === "ready") {
        this.resume = message.resume;
        this.lostAt = this.reason = undefined;
        this.retryMs = FIRST_RETRY_MS;
      } else if (message.type === "error") {
        this.ended = !message.retryable;
        const away = this.resume && (message.code === "not_found" || message.code === "lost");
        this.reason = away ? "The server no longer has this session" : sentence(message.message);
      } else if (message.type === "end") {
        this.ended = true;
      }
      this.dispatchEvent(new CustomEvent("told", { detail: message }));
    };
    socket.onclose = () => this.lost(socket);
    this.socket = socket;
  }

  lost(socket) {
    if (socket === this.socket) this.again();
  }

  /** Connect again after a while, unless the session has ended; a gateway says first which server has it. */
  again() {
    this.lostAt ??= performance.now();
    const late = performance.now() - this.lostAt > GIVE_UP_MS, gone = this.ended || !this.resume || late;
    if (gone && !this.ended) this.reason ??= late ? "The server did not come back" : "The connection was lost";
    this.dispatchEvent(new CustomEvent("lost", { detail: { ended: gone, reason: this.reason } }));
    if (gone && !this.resume) this.abandon();
    if (gone) return;
    setTimeout(() => { if (!this.ended) this.comeBack(); }, this.retryMs);
    this.retryMs = Math.min(2 * this.retryMs, LONGEST_RETRY_MS);
  }

  async comeBack() {
    try {
      if (this.elsewhere) this.take((await request(this.base, `v1/sessions/${this.id}`, this.key)).url);
    } catch (error) {
      this.ended ||= error.retryable === false;
      if (this.ended) this.reason = error.message;
      this.again();
      return;
    }
    if (!this.ended) this.connect(`seko.resume.${this.resume}.${this.serial ?? ""}`);
  }

  get isOpen() { return this.socket?.readyState === WebSocket.OPEN; }

  send(type, fields = {}) {
    if (!this.isOpen) return "";
    const id = type === "ack" || type === "close" ? undefined : String(++this.controls);
    this.socket.send(JSON.stringify({ type, ...(id && { id }), ...fields }));
    return id ?? "";
  }

  sendVoice(samples, last = false) {
    if (this.isOpen) this.socket.send(packVoice(++this.controls, samples, last));
  }

  close() {
    this.ended = true;
    if (this.isOpen) {
      this.send("close");
      this.id = undefined;
    }
    this.abandon();
    this.socket?.close();
  }

  /** End a session that no socket can end: the server would keep its row for the lease. */
  abandon() {
    if (this.id) answered(this.base, `v1/sessions/${this.id}`, this.key, undefined, {}, "DELETE").catch(() => {});
    this.id = undefined;
  }
}
