// Calls of tools in an answer, and the fields for their results.

import { TokenText } from "./tokens.js";

const NONE = "No result.";

export class Calls {
  told = []; // id, name, arguments
  #place;
  #texts = []; // of each call, where its arguments go
  #fields = [];
  #button = null;

  /** place: an element that is empty. */
  constructor(place) {
    this.#place = place;
  }

  get count() {
    return this.told.length;
  }

  /** A part of a call has come; returns where what is added to its arguments goes. */
  take({ index, id, function: { name, arguments: added } }) {
    if (name !== undefined) this.#begin(index, id, name);
    this.told[index].arguments += added ?? "";
    return this.#texts[index];
  }

  #begin(index, id, name) {
    this.told[index] = { id, name, arguments: "" };
    const call = document.createElement("div");
    call.className = "call";
    const head = document.createElement("h4");
    head.textContent = name;
    const text = document.createElement("pre");
    text.className = "arguments";
    call.append(head, text);
    this.#place.append(call);
    this.#texts[index] = new TokenText(text);
  }

  /** As a message of the assistant has them. */
  get message() {
    return this.told.map(({ id, name, arguments: told }) => {
      return { id, type: "function", function: { name, arguments: told } };
    });
  }

  /** Ask for the results; `send` is called when they are to be sent. */
  offer(send) {
    [...this.#place.children].forEach((call, at) => {
      const label = document.createElement("label");
      label.textContent = "Result ";
      const field = document.createElement("textarea");
      field.rows = 2;
      field.placeholder = `What ${this.told[at].name} returns`;
      label.append(field);
      call.append(label);
      this.#fields.push(field);
    });
    this.#button = document.createElement("button");
    this.#button.type = "button";
    this.#button.textContent = this.count > 1 ? "Send results" : "Send result";
    this.#button.addEventListener("click", send);
    this.#place.append(this.#button);
  }

  /** The results as messages. */
  results() {
    return this.told.map(({ id }, at) => {
      return { role: "tool", tool_call_id: id, content: this.#fields[at].value || NONE };
    });
  }

  /** The results have been sent. */
  close() {
    for (const field of this.#fields) {
      field.value ||= NONE;
      field.readOnly = true;
    }
    this.#button.remove();
  }
}
