// The form below the prompt: a schema for answers and a list of tools, as JSON from the user.

const at = (id) => document.getElementById(id);

/** A field of JSON that shows its fault. read: converts the value; throws if it is wrong. */
class JsonField {
  value = null;
  #field;
  #fault;
  #read;

  constructor(id, read, changed) {
    this.#field = at(id);
    this.#fault = at(`${id}-fault`);
    this.#read = read;
    this.#field.addEventListener("input", () => {
      this.check();
      changed();
    });
    this.check(); // the browser may have restored an earlier text
  }

  /** Read the field's text and show its fault; returns whether there is none. */
  check() {
    const text = this.#field.value.trim();
    let fault = "";
    this.value = null;
    try {
      if (text) this.value = this.#read(parsed(text));
    } catch (error) {
      fault = error.message;
    }
    this.#field.setCustomValidity(fault);
    this.#field.setAttribute("aria-invalid", String(fault !== ""));
    if (this.#fault.textContent !== fault) this.#fault.textContent = fault;
    return fault === "";
  }

  focus() {
    this.#field.focus();
  }
}

export class Form {
  #schema = new JsonField("schema", asSchema, () => this.#name());
  #tools = new JsonField("tools", asTools, () => this.#name());

  constructor() {
    at("must-call").addEventListener("change", () => this.#name());
    this.#name();
  }

  /** Check all fields; focus the first faulty one. Returns whether there is none. */
  check() {
    const faulty = [this.#schema, this.#tools].find((field) => !field.check());
    if (faulty) at("form").open = true;
    faulty?.focus();
    return !faulty;
  }

  /** Return the form's fields of a request. called: whether "must call a tool" applies to it. */
  parameters(called) {
    const wanted = {};
    if (this.#schema.value) {
      const told = { name: "answer", strict: true, schema: this.#schema.value };
      wanted.response_format = { type: "json_schema", json_schema: told };
    }
    if (this.#tools.value) wanted.tools = this.#tools.value;
    if (wanted.tools && called && at("must-call").checked) wanted.tool_choice = "required";
    return wanted;
  }

  /** Show in the folded form's title what the form contains. */
  #name() {
    const parts = [];
    if (this.#schema?.value) parts.push("schema");
    const count = this.#tools?.value?.length ?? 0;
    if (count) parts.push(`${count} tool${count > 1 ? "s" : ""}`);
    at("form-name").textContent = parts.length ? `Form: ${parts.join(", ")}` : "Form";
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}`);
  }
}

function asSchema(value) {
  if (!isObject(value)) throw new Error("A JSON schema is an object, as {\"type\": \"object\"}.");
  return value;
}

function asTools(value) {
  if (!Array.isArray(value)) throw new Error("Tools are a list, in [ ].");
  value.forEach((tool, i) => {
    if (tool?.type !== "function" || typeof tool.function?.name !== "string") {
      throw new Error(`Tool ${i + 1} lacks "type": "function", or a function with a name.`);
    }
  });
  return value.length ? value : null;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
