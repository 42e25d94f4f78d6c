// A session and its socket: opens, sends controls, comes back after a lost socket.
import { packFrame, packVoice, parseMedia } from "./protocol.js";

const FIRST_RETRY_MS = 200, LONGEST_RETRY_MS = 4000;
const GIVE_UP_MS = 600_000; // a session that has no row any more is saved, and the server says so if it is not

// Seconds without a word, counted one by one: a tab whose timers are slow is not taken for a silent server. Before
// `ready` a saved session is read, and nothing answers.
const TICK_MS = 1000, SILENT_TICKS = 6, UNREADY_TICKS = 30;
const ANSWER_MS = 30_000;

const WAITED_FOR = ["full", "too_many_requests"]; // refusals after which a page tries again by itself

const SILENT_LINE_MS = 5000; // without news of the line

const WAITING_BYTES = 256 << 10; // of a socket that is slow: no further frame is sent meanwhile

const WITHOUT_ID = ["ack", "close", "ping"];

export const AWAY = "The connection was lost. Try again when it is back";
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

const unreached = (text) => Object.assign(new Error(text), { code: "unreached" });

/** The answer to a request; a Refusal where the server refuses it, an Error in plain words where another one answers. */
export async function answered(base, path, key, body, more = {}, method = body ? "POST" : "GET", signal = undefined) {
  if (key && !/^[ -~]*$/.test(key)) throw new Refusal({ code: "unauthorized", message: UNKNOWN_KEY }); // no header holds it
  const headers = { ...more, ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  const answer = await fetch(new URL(path, base), {
    method, headers, body: body && JSON.stringify(body), signal, keepalive: method === "DELETE", // also of a page that is left
  }).catch(() => { throw unreached("The server does not answer"); });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => ({}))).error; // a proxy's page is no JSON
  if (!error?.code) throw unreached(`The server is not reached: a proxy answers ${answer.status}`);
  const message = answer.status !== 401 ? error.message
    : key ? UNKNOWN_KEY : "This server asks for an API key";
  throw new Refusal({ ...error, message });
}

/** The JSON of an answer that comes within a time. */
export async function request(base, path, key, body, more = {}, method = body ? "POST" : "GET") {
  return (await answered(base, path, key, body, more, method, AbortSignal.timeout(ANSWER_MS))).json();
}

const rest = (ms, signal) => new Promise((resolve) => {
  setTimeout(resolve, ms);
  signal.addEventListener("abort", resolve, { once: true });
});

/** A place in the line, which the server keeps while this listens. Timers of a background tab are too slow to keep it. */
class Place {
  constructor(base, key, token, tell) {
    Object.assign(this, { token, tell, over: false, listening: new AbortController() });
    this.news = this.follow(base, key).catch(() => false).finally(() => { this.over = true; });
  }

  /** Tell the numbers of the place; return whether it is this page's turn. */
  async follow(base, key) {
    const more = { "seko-queue": this.token, accept: "text/event-stream" };
    const { body } = await answered(base, "v1/queue", key, undefined, more, "GET", this.listening.signal);
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = "", part = await reader.read(); !part.done; part = await reader.read()) {
      this.heardAt = performance.now();
      const events = (text + part.value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const facts = JSON.parse(event.slice("data: ".length));
        if (facts.admitted || facts.error) return facts.admitted;
        this.tell(facts.place);
      }
    }
    return false;
  }

  /** Wait for the turn, or until it is time to ask by a request: where the line is lost, or a proxy keeps its news back. */
  async turn(retryMs, signal) {
    this.heardAt = performance.now();
    const silence = async () => {
      while (!this.over && !signal.aborted && performance.now() - this.heardAt < SILENT_LINE_MS) await rest(retryMs, signal);
    };
    const given = new Promise((resolve) => { signal.addEventListener("abort", resolve, { once: true }); });
    const lost = async () => { if (!await this.news) await rest(retryMs, signal); };
    await Promise.race([lost(), silence(), given]);
  }

  /** Give the place up. */
  close() { this.listening.abort(); }
}

/** Open by `attempt(token)`; where all places are taken, wait in the line until `signal` says that the person gives up. */
export async function admitted(base, key, attempt, say, signal) {
  const tell = (number) => {
    if (!signal.aborted) say(`All places are taken.${number ? ` You are number ${number} in line.` : ""}`);
  };
  let token = "join", place;
  try {
    for (;;) {
      try {
        return await attempt(token);
      } catch (error) {
        token = error.facts?.queue_token ?? token;
        if (signal.aborted) return undefined;
        if (!WAITED_FOR.includes(error.code) || !error.retryAfter) throw error;
        const retryMs = error.retryAfter * 1000;
        if (error.code !== "full") say(`${error.message}. Trying again`);
        else tell(error.facts.place);
        if (error.facts.queue_token) {
          if (!place || place.over) place = new Place(base, key, token, tell);
          await place.turn(retryMs, signal);
        } else {
          await rest(retryMs, signal);
        }
        if (signal.aborted) return undefined;
      }
    }
  } finally {
    place?.close();
    if (signal.aborted && token !== "join") {
      answered(base, "v1/queue", key, undefined, { "seko-queue": token }, "DELETE").catch(() => {});
    }
  }
}

function socketOf(base, id) {
  const url = new URL(`v1/sessions/${id}/stream`, base);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url;
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

  get url() { return this.elsewhere ?? socketOf(this.base, this.id); }

  connect(entrance) {
    if (this.socket) this.leave(this.socket); // one that still connects would take the session from this one
    const { url } = this;
    const socket = new WebSocket(url, ["seko.v1", entrance]);
    socket.binaryType = "arraybuffer";
    let quiet = 0, most = SILENT_TICKS;
    clearInterval(this.watch);
    this.watch = setInterval(() => {
      quiet += 1;
      if (quiet >= most) this.dropSilent(socket);
      else if (quiet > 1 && most === SILENT_TICKS) this.send("ping", { t: performance.now() });
    }, TICK_MS);
    socket.onopen = () => {
      [quiet, most] = [0, UNREADY_TICKS];
      socket.send(JSON.stringify({ type: "hello", ...this.hello, buffer: this.buffer }));
    };
    socket.onmessage = ({ data }) => {
      [quiet, most] = [0, SILENT_TICKS];
      if (data instanceof ArrayBuffer) {
        const media = parseMedia(data);
        this.serial = media.serial;
        this.dispatchEvent(new CustomEvent("media", { detail: { media, data } }));
        return;
      }
      const message = JSON.parse(data);
      if (message.type === "ready") {
        this.resume = message.resume || this.resume;
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
    socket.onclose = () => this.again();
    this.socket = socket;
  }

  /** Give up a socket on which nothing comes: its close would wait for the server. */
  dropSilent(socket) {
    this.leave(socket);
    this.again();
  }

  leave(socket) {
    socket.onopen = socket.onmessage = socket.onclose = undefined;
    socket.close();
  }

  /** Connect again after a while, unless the session has ended; a gateway says first which server has it. */
  again() {
    clearInterval(this.watch);
    this.lostAt ??= performance.now();
    const late = performance.now() - this.lostAt > GIVE_UP_MS, gone = this.ended || !this.resume || late;
    if (gone && !this.ended) this.reason ??= late ? "The server did not come back" : "The connection was lost";
    this.dispatchEvent(new CustomEvent("lost", { detail: { ended: gone, reason: this.reason } }));
    if (gone && !this.resume) this.abandon();
    if (gone) return;
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.hurry(), this.retryMs);
    this.retryMs = Math.min(2 * this.retryMs, LONGEST_RETRY_MS);
  }

  /** Try at once, where a socket was lost. */
  hurry() {
    clearTimeout(this.retry);
    if (!this.ended && !this.isOpen) this.comeBack();
  }

  /** Give up a socket on which nothing of use comes, and connect again. */
  reconnect() { this.dropSilent(this.socket); }

  async comeBack() {
    const attempt = this.attempt = {}; // the newest one: an earlier one may still wait for a gateway
    try {
      if (this.elsewhere) {
        const { url } = await request(this.base, `v1/sessions/${this.id}`, this.key);
        if (attempt !== this.attempt) return;
        this.take(url);
      }
    } catch (error) {
      if (attempt !== this.attempt) return;
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
    const id = WITHOUT_ID.includes(type) ? undefined : String(++this.controls);
    this.socket.send(JSON.stringify({ type, ...(id && { id }), ...fields }));
    return id ?? "";
  }

  sendVoice(samples, last = false) {
    if (this.isOpen) this.socket.send(packVoice(++this.controls, samples, last));
  }

  /** Send a frame of an input video; return whether it was, as frames before it may still wait to be sent. `named` is
      called with the id of a frame that shall get receipts. */
  sendFrame(jpeg, dropped, named) {
    const free = this.isOpen && this.socket.bufferedAmount < WAITING_BYTES;
    if (!free) return false;
    if (named) named(String(++this.controls));
    this.socket.send(packFrame(named ? this.controls : 0, jpeg, dropped));
    return true;
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

/** The socket of one who watches the session of another, by a token that this one gave away. */
export class Watch extends Connection {
  constructor(base, session, token) {
    super(base, "");
    Object.assign(this, { session, token });
  }

  get url() { return socketOf(this.base, this.session); }

  open(hello) {
    this.hello = hello;
    this.resume = this.token; // it comes back as it came
    this.retryMs = FIRST_RETRY_MS;
    this.connect(`seko.watch.${this.token}`);
  }

  async comeBack() { this.connect(`seko.watch.${this.token}`); }

  /** Nothing that who watches does is told. */
  send(type, fields) { return type === "ping" || type === "close" ? super.send(type, fields) : ""; }
}
