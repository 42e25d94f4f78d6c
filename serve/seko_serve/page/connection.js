// A session and its socket: opens, sends controls, comes back after a lost socket.
const RETRY_MS = [200, 500, 1000, 2000, 4000];

export class Connection extends EventTarget {
  constructor(base, key) {
    super();
    this.base = base;
    this.key = key;
    this.serial = 0;
    this.tries = 0;
    this.controls = 0;
    this.ended = false;
  }

  async open(session, codecs) {
    this.codecs = codecs;
    const headers = { "content-type": "application/json" };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const answer = await fetch(new URL("v1/sessions", this.base), {
      method: "POST", headers, body: JSON.stringify(session),
    });
    const opened = await answer.json();
    if (!answer.ok) throw new Error(opened.error.message);
    this.id = opened.id;
    this.leaseMs = opened.lease_s * 1000;
    this.connect(`seko.ticket.${opened.ticket}`);
  }

  connect(entrance) {
    const url = new URL(`v1/sessions/${this.id}/stream`, this.base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, ["seko.v1", entrance]);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => socket.send(JSON.stringify({ type: "hello", codecs: this.codecs, buffer: 1 }));
    socket.onmessage = ({ data }) => {
      if (data instanceof ArrayBuffer) {
        this.dispatchEvent(new CustomEvent("media", { detail: data }));
        return;
      }
      const told = JSON.parse(data);
      if (told.type === "ready") {
        this.resume = told.resume;
        this.tries = 0;
      } else if (told.type === "error") {
        this.ended = !told.retryable;
      } else if (told.type === "end") {
        this.ended = true;
      }
      this.dispatchEvent(new CustomEvent("told", { detail: told }));
    };
    socket.onclose = () => this.lost();
    this.socket = socket;
  }

  lost() {
    this.dispatchEvent(new CustomEvent("lost", { detail: { ended: this.ended } }));
    if (this.ended || !this.resume || this.tries >= RETRY_MS.length) return;
    setTimeout(() => this.connect(`seko.resume.${this.resume}.${this.serial}`), RETRY_MS[this.tries++]);
  }

  send(type, fields = {}) {
    if (this.socket?.readyState !== WebSocket.OPEN) return "";
    const id = type === "ack" || type === "close" ? undefined : String(++this.controls);
    this.socket.send(JSON.stringify({ type, ...(id && { id }), ...fields }));
    return id ?? "";
  }

  close() {
    this.ended = true;
    this.send("close");
    this.socket?.close();
  }
}
