// The tool calls of an answer, and a field for the result of each call.

import { TokenText } from "./tokens.js";

const NO_RESULT = "No result."; // sent in place of an empty field

export class Calls {
  #calls = []; // calls: { id, name, arguments }
  #container;
  #texts = []; // for each call, the TokenText of its arguments
  #fields = []; // for each call, the text area of its result
  #button = null;

  /** container: an empty element for the calls. */
  constructor(container) {
    this.#container = container;
  }

  get count() {
    return this.#calls.length;
  }

  /** Add a part of a call; return the TokenText that shows the call's arguments. */
  add({ index, id, function: { name, arguments: added } }) {
    if (name !== undefined) this.#addCall(index, id, name);
    this.#calls[index].arguments += added ?? "";
    return this.#texts[index];
  }

  #addCall(index, id, name) {
    this.#calls[index] = { id, name, arguments: "" };
    const call = document.createElement("div");
    call.className = "call";
    const head = document.createElement("h4");
    head.textContent = name;
    const text = document.createElement("pre");
    text.className = "arguments";
    call.append(head, text);
    this.#container.append(call);
    this.#texts[index] = new TokenText(text);
  }

  /** The calls as the field `tool_calls` of the assistant's message. */
  get message() {
    return this.#calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  }

  /** Show fields for the results, and a button that calls `send`. */
  showResultFields(send) {
    [...this.#container.children].forEach((call, index) => {
      const label = document.createElement("label");
      label.textContent = "Result ";
      const field = document.createElement("textarea");
      field.rows = 2;
      field.placeholder = `What ${this.#calls[index].name} returns`;
      label.append(field);
      call.append(label);
      this.#fields.push(field);
    });
    this.#button = document.createElement("button");
    this.#button.type = "button";
    this.#button.textContent = this.count > 1 ? "Send results" : "Send result";
    this.#button.addEventListener("click", send);
    this.#container.append(this.#button);
  }

  /** The results as messages of the next request. */
  get results() {
    return this.#calls.map(({ id }, index) => {
      return { role: "tool", tool_call_id: id, content: this.#fields[index].value || NO_RESULT };
    });
  }

  /** Make the fields read-only, because their results were sent. results: those sent earlier. */
  close(results = []) {
    this.#fields.forEach((field, index) => {
      field.value ||= results[index] ?? NO_RESULT;
      field.readOnly = true;
    });
    this.#button.remove();
  }
}
