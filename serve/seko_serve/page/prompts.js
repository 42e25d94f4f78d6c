// The prompts of a session: when each was asked for, a list of them to press, and a file of them.
const made = (tag, properties, ...content) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...content);
  return element;
};

/** Return a seed as a number; an Error where a browser would round it to another one. */
export function wholeSeed(value) {
  const seed = Math.trunc(Number(value) || 0);
  if (Number.isSafeInteger(seed)) return seed;
  throw new Error(`A page takes seeds from ${Number.MIN_SAFE_INTEGER} to ${Number.MAX_SAFE_INTEGER}`);
}

const minutes = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

export class Timeline {
  /** `list` is an `ol`; `again(prompt)` is called with a prompt that is pressed, `changed()` when there is another one. */
  constructor(list, again, changed) {
    Object.assign(this, { list, again, changed, entries: [], seed: 0, origin: 0, end: 0, seconds: 0 });
  }

  /** A stream begins with this chunk of the session, whose chunks last `seconds`. */
  begin(seed, prompt, origin = 0) {
    Object.assign(this, { entries: [], seed, origin, end: 0 });
    this.list.replaceChildren();
    if (prompt) this.place(this.note({ prompt }), origin, 1);
    else this.changed();
  }

  /** Note a prompt that is asked for; where it is followed is told by `place`. */
  note({ prompt, cut = false, weight = 1, steps = 1 }) {
    const entry = { prompt, cut, weight, steps, chunk: undefined, followed: [], time: made("time", {}) };
    entry.line = made("li", {}, entry.time, made("button", { type: "button", onclick: () => this.again(prompt) }, prompt));
    this.entries.push(entry);
    entry.line.className = "waiting";
    this.list.append(entry.line);
    this.changed();
    return entry;
  }

  /** A prompt, or the next step of its fade, is followed from a chunk of the session on; one chunk may follow two. */
  place(entry, chunk, weight) {
    entry.followed.push({ chunk: Math.max(0, chunk - this.origin), weight });
    if (entry.chunk !== undefined) return;
    entry.chunk = entry.followed[0].chunk;
    entry.line.className = "";
    entry.time.textContent = minutes(entry.chunk * this.seconds);
    this.changed();
  }

  /** A prompt was refused, or another one took its place. */
  drop(entry) {
    this.entries = this.entries.filter((other) => other !== entry);
    entry.line.remove();
    this.changed();
  }

  /** The file: a recording of the session's prompts, as the server and `seko-run run --events` write and read it. */
  text() {
    const [first, ...later] = this.entries.filter(({ chunk }) => chunk !== undefined);
    const lines = [
      { chunk: 0, begin: { seed: this.seed, prompt: first.prompt } },
      ...later.flatMap(({ prompt, cut, followed }) => followed.map(({ chunk, weight }) => (
        { chunk, prompt: { prompt, recache: cut, ...(weight < 1 && { weight }) } }
      ))),
    ];
    lines.push({ chunk: Math.max(this.end, ...lines.map(({ chunk }) => chunk)), end: {} });
    return lines.map((line) => `${JSON.stringify(line)}\n`).join("");
  }
}

/** The weight with which a prompt is mixed in, where it and so many steps behind it lead evenly to the prompt alone. */
export const fadeWeight = (steps) => 1 / steps;

/** Make one change of each fade of a recording, whose steps have the same prompt. */
function together(changes) {
  const runs = [];
  for (const change of changes) {
    const run = runs.at(-1), left = run && Math.round(1 / run[0].weight) - run.length;
    if (left > 0 && run[0].prompt === change.prompt && change.weight === fadeWeight(left)) run.push(change);
    else runs.push([change]);
  }
  return runs.flatMap((run) => run.at(-1).weight === 1 ? [{ ...run[0], weight: 1, steps: run.length }] : run);
}

/** Read a recording: its seed, and its prompts, each with the chunk from which on it is followed; an Error if it is none. */
export function recordedPrompts(text, name) {
  const none = new Error(`${name} is no timeline: expected lines of JSON, the first with "begin"`);
  let lines;
  try {
    lines = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  } catch {
    throw none;
  }
  const begin = lines[0]?.begin;
  const prompts = lines.filter((line) => line?.prompt).map(({ chunk, prompt }) => ({ chunk, prompt: prompt.prompt, cut: prompt.recache === true, weight: prompt.weight ?? 1 }));
  if (typeof begin?.prompt !== "string" || !prompts.every(({ chunk, prompt }) => Number.isInteger(chunk) && typeof prompt === "string")) throw none;
  return { seed: wholeSeed(begin.seed), prompts: [{ chunk: 0, prompt: begin.prompt }, ...together(prompts)] };
}

/** A field in which Enter sends, and the arrows go through what was sent before. */
export class PromptField {
  constructor(field, left) {
    Object.assign(this, { field, sent: [], at: 0 });
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return; // keys of an input method
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        if (!event.repeat) field.form.requestSubmit(); // a key that is held asks once
      }
      if (event.key === "Escape") left();
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key], only = !field.value.includes("\n");
      if (step && only && this.step(step)) event.preventDefault();
    });
  }

  /** Show the prompt before or after, if there is one; behind the last is what was being written. */
  step(by) {
    const to = this.at + by;
    if (to < 0 || to > this.sent.length) return false;
    if (this.at === this.sent.length) this.draft = this.field.value;
    this.at = to;
    this.field.value = this.sent[to] ?? this.draft ?? "";
    return true;
  }

  remember(prompt) {
    this.sent = [...this.sent.filter((other) => other !== prompt), prompt];
    this.at = this.sent.length;
    this.draft = "";
  }
}
