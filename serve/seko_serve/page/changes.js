// Changes of the prompt: the last one is sent until the server has it, a fade goes step by step, a timeline's are due.
import { fadeWeight } from "./prompts.js";

const AMOUNTS = { fade: 4, mix: 50 }; // seconds, percent

export class Changes {
  /** `send(entry, weight)` sends an entry of the timeline and returns its message's id; nothing while the socket is lost. */
  constructor(timeline, send) {
    Object.assign(this, { timeline, send, due: [], wish: undefined, fade: undefined });
  }

  /** Change the video to a prompt; while the connection is lost, it waits, and of those that wait the last one is seen. */
  ask(change) {
    if (this.wish && !this.wish.id) this.drop(this.wish.entry);
    const entry = this.timeline.note(change);
    this.fade = entry.steps > 1 ? { entry, steps: entry.steps } : undefined;
    if (this.fade) this.step();
    else this.sendOn({ entry, weight: entry.weight });
  }

  /** Go a step of a fade: one is due before each chunk. */
  step() {
    const { entry, steps } = this.fade;
    this.fade = steps > 1 ? { entry, steps: steps - 1 } : undefined;
    this.sendOn({ entry, weight: fadeWeight(steps) });
  }

  /** End a fade at once: a stream that begins again begins with its prompt. */
  finish() {
    if (this.fade) this.sendOn({ entry: this.fade.entry, weight: 1 });
    this.fade = undefined;
  }

  sendOn(wish) {
    this.wish = wish;
    wish.id = this.send(wish.entry, wish.weight);
  }

  /** The socket is lost: nobody knows whether the server has the last one. */
  lost() { if (this.wish) this.wish.id = ""; }

  /** The socket is back: send again what the server did not say that it has. */
  resend() { if (this.wish) this.sendOn(this.wish); }

  /** The server has a message. */
  received(id) { if (id && id === this.wish?.id) this.wish = undefined; }

  /** The server refuses a message; what it asked for is not what the video shows. */
  refused(id, entry) {
    this.received(id);
    if (!entry) return;
    if (entry === this.fade?.entry) this.fade = undefined;
    this.timeline.drop(entry);
  }

  /** A chunk was made: ask for what is due with the next one. */
  made(chunk) {
    this.timeline.end = chunk + 1 - this.timeline.origin;
    if (this.wish) return;
    if (this.fade) this.step(); // also where it goes slower than in the recording: what is due then waits
    else if (this.due[0]?.chunk <= this.timeline.end) this.ask(this.due.shift());
  }

  drop(entry) { if (entry.chunk === undefined) this.timeline.drop(entry); }

  /** The session has ended; what it was asked for stays, to be saved. */
  forget() {
    if (this.wish) this.drop(this.wish.entry);
    Object.assign(this, { due: [], wish: undefined, fade: undefined });
  }
}

/** The way in which a prompt changes the video, as a person chooses it beside the prompt. */
export class Way {
  constructor(choice, amount) {
    Object.assign(this, { choice, amount });
    choice.onchange = () => {
      amount.value = AMOUNTS[choice.value] ?? "";
      this.show(true);
    };
  }

  show(now) {
    this.choice.hidden = !now;
    this.amount.hidden = !now || !(this.choice.value in AMOUNTS);
  }

  /** The change to a prompt in a video whose chunks last some `seconds`. */
  to(prompt, seconds) {
    const way = this.choice.value, amount = Math.max(1, Number(this.amount.value) || AMOUNTS[way]);
    return {
      prompt, cut: way === "cut",
      ...(way === "mix" && { weight: Math.min(1, amount / 100) }),
      ...(way === "fade" && { steps: Math.max(1, Math.round(amount / seconds)) }),
    };
  }
}
