// Wells of pictures as a control describes them: each holds a picture with which the next session begins.
import { pictureUrl } from "./uploads.js";

const made = (tag, properties, ...content) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...content);
  return element;
};

export class PictureWell {
  /** Draw a well; `chosen` is called with each file that a person chooses. */
  constructor({ field, place, label, required, seconds }, chosen) {
    const id = place === undefined ? field : `${field}-${place}`;
    Object.assign(this, { field, place, label, required, url: "" });
    this.thumbnail = made("img", { id: `${id}-thumbnail`, alt: "", hidden: true });
    this.name = made("span", { id: `${id}-name` }, "or drop one on this page");
    const input = this.input = made("input", { id, type: "file", accept: "image/*" });
    input.onchange = async () => {
      if (input.files[0]) await chosen(input.files[0]);
      input.value = "";
    };
    this.section = made("fieldset", {}, made("legend", {}, required ? label : `${label}, if you like`), made(
      "div", { className: "upload" }, this.thumbnail, made("label", { className: "button" }, "Choose a picture", input), this.name,
    ));
    if (!seconds) return;
    this.seconds = made("input", {
      id: seconds.field, type: "number", value: seconds.default, min: 0, max: seconds.maximum, step: "any",
    });
    this.section.append(made("label", { htmlFor: seconds.field }, seconds.label), this.seconds);
  }

  /** Hold a picture. */
  async take(file) {
    this.thumbnail.src = this.url = await pictureUrl(file);
    this.thumbnail.hidden = false;
    this.name.textContent = file.name;
  }

  /** Add what it holds to the fields of a request that opens a session; one with a place, to the field's list. */
  addTo(fields) {
    if (!this.url) return;
    if (this.place === undefined) fields[this.field] = this.url;
    else (fields[this.field] ??= [])[this.place] = this.url;
    if (this.seconds) fields[this.seconds.id] = Number(this.seconds.value);
  }
}
