// Key pads as a control describes them: the set of keys that are held, by keyboard or by pointer, told when it changes.
export class KeyPad {
  constructor(section, changed) {
    this.section = section;
    this.changed = changed;
    this.held = new Set();
    this.buttons = new Map(); // by each key's code, so that two keys of one meaning light one button
    document.addEventListener("keydown", (event) => {
      if (this.section.hidden || event.target.matches("textarea, input, select") || event.ctrlKey || event.metaKey) return;
      if (!this.buttons.has(event.code)) return;
      event.preventDefault();
      this.hold(event.code, true); // also where it was pressed before keys steered
    });
    document.addEventListener("keyup", (event) => {
      if (event.code.startsWith("Meta")) this.letGo(); // macOS does not tell which keys were released beside it
      else this.hold(event.code, false);
    });
    window.addEventListener("blur", () => this.letGo());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.letGo(); });
  }

  /** Draw the keys of a control: on each pad its buttons, as they are described, and what else moves it. */
  show({ keys = [], mouse = {}, gamepad = {} }) {
    this.letGo();
    this.buttons.clear();
    const pads = new Map();
    for (const key of keys) {
      if (!pads.has(key.pad)) {
        const pad = document.createElement("div");
        pad.className = "keys";
        pad.setAttribute("role", "group");
        pad.setAttribute("aria-label", key.pad);
        pads.set(key.pad, pad);
      }
      const button = this.button(key);
      for (const code of key.codes) this.buttons.set(code, button);
      pads.get(key.pad).append(button);
    }
    const faces = [...pads.keys()].map((pad) => `${pad}: ${keys.filter((key) => key.pad === pad).map(named).join(" ")}`);
    const more = [
      ...(mouse.pixels ? ["Click the picture to look around with the mouse, or drag a finger over it"] : []),
      ...(Object.keys(gamepad).length ? ["A gamepad works, too"] : []),
    ];
    this.help = keys.length ? `${["Hold a key", ...faces, "They work whenever you are not writing", ...more].join(". ")}.` : "";
    this.section.replaceChildren(...pads.values());
    this.section.hidden = !keys.length;
  }

  button(key) {
    const button = document.createElement("button"), code = key.codes[0];
    button.type = "button";
    button.dataset.code = code;
    button.textContent = key.face;
    button.setAttribute("aria-label", key.label);
    button.addEventListener("pointerdown", (event) => { button.setPointerCapture(event.pointerId); this.hold(code, true); });
    for (const end of ["pointerup", "pointercancel"]) button.addEventListener(end, () => this.hold(code, false));
    for (const [kind, down] of [["keydown", true], ["keyup", false]]) { // by keyboard alone: Space or Enter on it
      button.addEventListener(kind, (event) => {
        if (event.key === " " || event.key === "Enter") { event.preventDefault(); this.hold(code, down); }
      });
    }
    button.addEventListener("blur", () => this.hold(code, false));
    return button;
  }

  hold(code, down) {
    const button = this.buttons.get(code);
    if (!button || this.held.has(code) === down) return;
    down ? this.held.add(code) : this.held.delete(code);
    button.classList.toggle("held", [...this.held].some((other) => this.buttons.get(other) === button));
    this.changed([...this.held]);
  }

  letGo() { for (const code of [...this.held]) this.hold(code, false); }
}

/** What is written on a key, or its arrow: W, and for a key with another face also its letter. */
function named(key) {
  const letter = key.codes[0].replace(/^(Key|Digit)/, "");
  return letter === key.face || letter.startsWith("Arrow") ? key.face : `${key.face} or ${letter}`;
}
