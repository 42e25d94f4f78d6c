// What lies over the picture: controls that fade while nobody does anything, sheets that open, the full screen.
import { face, find } from "./frame.js";

const IDLE_MS = 3500, FIRST_MS = 10_000; // who has just come may read first

export class Stage {
  /** `busy()` says whether controls must stay; `steers(code)` whether a key steers and needs none of them. */
  constructor(busy, steers = () => false) {
    Object.assign(this, { element: find("stage"), busy, steers, touched: false });
    document.addEventListener("pointermove", ({ pointerType }) => {
      if (pointerType === "mouse" && !document.pointerLockElement) this.wake();
    });
    document.addEventListener("pointerdown", ({ target }) => {
      this.element.classList.remove("tabbed");
      this.slept = this.element.classList.contains("idle");
      if (!target.classList.contains("looking")) this.wake();
    });
    document.addEventListener("click", ({ target, pointerType }) => { // a tap on the picture shows or hides what lies over it
      if (!target.matches(".screen > *")) return;
      this.closeSheets();
      if (pointerType === "touch" && !this.slept && !this.busy()) this.rest(); else this.wake();
    });
    document.addEventListener("keydown", (event) => {
      if (event.target.matches("textarea, input, select") || !this.steers(event.code)) this.wake();
      if (event.key === "Escape") this.closeSheets();
      if (event.key === "Tab") this.element.classList.add("tabbed"); // whoever goes by keyboard sees where
    });
    document.addEventListener("fullscreenchange", () => this.wake());
    find("full").hidden = !document.fullscreenEnabled;
    find("full").onclick = () => {
      if (document.fullscreenElement) document.exitFullscreen();
      else this.element.requestFullscreen();
    };
    for (const button of document.querySelectorAll("[aria-controls][aria-expanded]")) {
      button.addEventListener("click", () => this.toggle(button));
    }
    for (const sheet of document.querySelectorAll(".sheet")) {
      const close = find("full").cloneNode(true);
      close.removeAttribute("id");
      face(close, "close", "Close");
      close.hidden = false;
      close.onclick = () => this.closeSheets();
      sheet.append(close);
    }
    if (find("measures")) {
      find("measures").onclick = () => {
        find("figures").hidden = !find("figures").hidden;
        find("measures").setAttribute("aria-pressed", !find("figures").hidden);
      };
      document.addEventListener("keydown", ({ code }) => { if (code === "F2") find("measures").click(); });
    }
    this.later(FIRST_MS);
  }

  wake() {
    this.element.classList.remove("idle");
    this.later(IDLE_MS);
  }

  later(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.rest(), ms);
  }

  /** Let what lies over the picture fade, unless it is needed. */
  rest() {
    const used = document.activeElement?.matches("#dock :is(button, select):focus-visible, header :focus-visible");
    if (this.busy() || used || document.querySelector(".sheet:not([hidden]), #notice:not([hidden])")) this.later(IDLE_MS);
    else this.element.classList.add("idle");
  }

  /** Open the sheet of a button, or close it; one is open at a time. */
  toggle(button) {
    const sheet = find(button.getAttribute("aria-controls")), opens = sheet.hidden;
    this.closeSheets();
    sheet.hidden = !opens;
    button.setAttribute("aria-expanded", opens);
  }

  open(name) {
    this.closeSheets();
    find(name).hidden = false;
    document.querySelector(`[aria-controls=${name}]`)?.setAttribute("aria-expanded", true);
  }

  closeSheets() {
    for (const sheet of document.querySelectorAll(".sheet")) sheet.hidden = true;
    for (const button of document.querySelectorAll("[aria-expanded=true]")) button.setAttribute("aria-expanded", false);
  }
}
