// The mouse, a finger and a gamepad, as a control describes them: they move its axes and press its keys.
const TELL_MS = 50; // a chunk lasts longer, and a movement counts in the next one
const DEAD = .15; // where a stick that nobody touches may stand

/** The axis that a name means, and whether it goes against it. */
const signed = (target) => target.startsWith("-") ? [target.slice(1), -1] : [target, 1];

/** A mouse that the picture holds after a click, or a finger that drags over it: told as `moved`, in limits of the axis. */
export class Looking {
  constructor(surface, moved) {
    Object.assign(this, { surface, moved, mouse: {}, way: { x: 0, y: 0 } });
    surface.addEventListener("pointerdown", (event) => {
      if (!this.on) return;
      if (event.pointerType === "mouse") surface.requestPointerLock?.()?.catch?.(() => {}); // not everywhere, nor at once again
      else surface.setPointerCapture(event.pointerId);
      this.last = event;
    });
    surface.addEventListener("pointermove", (event) => {
      if (!this.on) return;
      if (document.pointerLockElement === surface) this.go(event.movementX, event.movementY);
      else if (this.last?.pointerId === event.pointerId && event.pointerType !== "mouse") {
        this.go(event.clientX - this.last.clientX, event.clientY - this.last.clientY);
        this.last = event;
      }
    });
    for (const end of ["pointerup", "pointercancel"]) surface.addEventListener(end, () => { this.last = undefined; });
  }

  get on() { return Object.keys(this.mouse).length > 0; }

  /** Follow what a control says of the mouse: an axis for `x` and `y`, and the `pixels` of its limit. */
  show(mouse = {}) {
    this.mouse = mouse;
    this.surface.classList.toggle("looking", this.on);
  }

  go(x, y) {
    this.way.x += x;
    this.way.y += y;
    this.due ??= setTimeout(() => this.tell(), TELL_MS);
  }

  tell() {
    this.due = undefined;
    const { way, mouse } = this, moved = {};
    this.way = { x: 0, y: 0 };
    for (const along of ["x", "y"]) {
      if (!mouse[along] || !way[along]) continue;
      const [axis, sign] = signed(mouse[along]);
      moved[axis] = (moved[axis] ?? 0) + sign * way[along] / mouse.pixels;
    }
    if (Object.keys(moved).length) this.moved(moved);
  }
}

/** The gamepads that are plugged in: their buttons press keys of a `KeyPad`, their sticks are told as `axes`. */
export class Gamepads {
  constructor(pad, pushed) {
    Object.assign(this, { pad, pushed, means: {}, down: new Set(), told: {} });
    setInterval(() => this.look(), TELL_MS);
  }

  /** Follow what a control says: by `button0`, `axis0`, `axis0-` and `axis0+`, a key's code or an axis. */
  show(means = {}) {
    this.letGo();
    this.means = means;
  }

  /** Whether one is there that does something. */
  get there() { return Object.keys(this.means).length > 0 && plugged().length > 0; }

  look() {
    if (!Object.keys(this.means).length) return;
    const down = new Set(), axes = Object.fromEntries(Object.keys(this.told).map((axis) => [axis, 0])); // of one that is gone
    for (const { buttons, axes: sticks } of plugged()) {
      const stands = sticks.map((value) => Math.abs(value) < DEAD ? 0 : Math.round(100 * value) / 100);
      for (const [place, target] of Object.entries(this.means)) {
        const [, kind, number, half] = place.match(/^(button|axis)(\d+)([+-]?)$/) ?? [];
        if (kind === "button") { if (buttons[number]?.pressed) down.add(target); }
        else if (half) { if ((half === "+" ? 1 : -1) * (stands[number] ?? 0) > .5) down.add(target); }
        else if (kind) {
          const [axis, sign] = signed(target), value = sign * (stands[number] ?? 0) || 0; // and never -0
          if (Math.abs(value) >= Math.abs(axes[axis] ?? 0)) axes[axis] = value;
        }
      }
    }
    for (const code of down) if (!this.down.has(code)) this.pad.hold(code, true);
    for (const code of this.down) if (!down.has(code)) this.pad.hold(code, false);
    this.down = down;
    const changed = Object.entries(axes).filter(([axis, value]) => value !== (this.told[axis] ?? 0));
    if (!changed.length) return;
    this.told = { ...this.told, ...axes };
    this.pushed(Object.fromEntries(changed));
  }

  /** Tell all axes again: nobody knows what the server has. */
  tellAgain() { for (const axis of Object.keys(this.told)) this.told[axis] = NaN; }

  letGo() {
    for (const code of this.down) this.pad.hold(code, false);
    this.down.clear();
    this.told = {};
  }
}

const plugged = () => [...(navigator.getGamepads?.() ?? [])].filter((pad) => pad?.connected);
