// Tool calls of an answer, and the fields for their results.

import { TokenText } from "./tokens.js";

const NONE = "No result.";

export class Calls {
  told = []; // calls: { id, name, arguments }
  #place;
  #texts = []; // for each call, the TokenText of its arguments
  #fields = [];
  #button = null;

  /** place: an empty element for the calls. */
  constructor(place) {
    this.#place = place;
  }

  get count() {
    return this.told.length;
  }

  /** Add a part of a call; returns the TokenText for the added arguments. */
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

  /** The calls as the field `tool_calls` of the assistant's message. */
  get message() {
    return this.told.map(({ id, name, arguments: told }) => {
      return { id, type: "function", function: { name, arguments: told } };
    });
  }

  /** Show fields for the results, and a button that calls `send`. */
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

  /** Return the results as messages of the next request. */
  results() {
    return this.told.map(({ id }, at) => {
      return { role: "tool", tool_call_id: id, content: this.#fields[at].value || NONE };
    });
  }

  /** Make the fields read-only after the results were sent. */
  close() {
    for (const field of this.#fields) {
      field.value ||= NONE;
      field.readOnly = true;
    }
    this.#button.remove();
  }
}
