// The key pad: the set of keys that are held, by keyboard or by pointer, told whenever it changes.
const PADS = { move: ["KeyW", "KeyA", "KeyS", "KeyD"], look: ["KeyI", "KeyJ", "KeyK", "KeyL"] };
const ARROWS = { ArrowUp: "KeyI", ArrowLeft: "KeyJ", ArrowDown: "KeyK", ArrowRight: "KeyL" };
const NAMES = {
  KeyW: "ahead", KeyA: "left", KeyS: "back", KeyD: "right", KeyI: "up", KeyJ: "left", KeyK: "down", KeyL: "right",
};
const SIGNS = { KeyI: "↑", KeyJ: "←", KeyK: "↓", KeyL: "→" };
const STEERING = Object.values(PADS).flat();

export class KeyPad {
  constructor(find, changed) {
    this.held = new Set();
    this.changed = changed;
    this.section = find("pad");
    this.buttons = new Map();
    for (const [id, codes] of Object.entries(PADS)) {
      for (const code of codes) find(id).append(this.button(code, id));
    }
    document.addEventListener("keydown", (event) => {
      const code = ARROWS[event.code] ?? event.code;
      if (this.section.hidden || event.target.matches("textarea, input") || event.ctrlKey || event.metaKey) return;
      if (!STEERING.includes(code)) return;
      event.preventDefault();
      if (!event.repeat) this.hold(code, true);
    });
    document.addEventListener("keyup", (event) => this.hold(ARROWS[event.code] ?? event.code, false));
    window.addEventListener("blur", () => this.letGo());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.letGo(); });
  }

  button(code, pad) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.code = code;
    button.textContent = SIGNS[code] ?? code.slice(3);
    button.setAttribute("aria-label", `${pad === "move" ? "Move" : "Look"} ${NAMES[code]}`);
    button.addEventListener("pointerdown", (event) => { button.setPointerCapture(event.pointerId); this.hold(code, true); });
    for (const end of ["pointerup", "pointercancel"]) button.addEventListener(end, () => this.hold(code, false));
    for (const [kind, down] of [["keydown", true], ["keyup", false]]) { // by keyboard alone: Space or Enter on it
      button.addEventListener(kind, (event) => {
        if (event.key === " " || event.key === "Enter") { event.preventDefault(); this.hold(code, down); }
      });
    }
    button.addEventListener("blur", () => this.hold(code, false));
    this.buttons.set(code, button);
    return button;
  }

  hold(code, down) {
    if (!STEERING.includes(code) || this.held.has(code) === down) return;
    down ? this.held.add(code) : this.held.delete(code);
    this.buttons.get(code).classList.toggle("held", down);
    this.changed([...this.held]);
  }

  letGo() { for (const code of [...this.held]) this.hold(code, false); }
}
