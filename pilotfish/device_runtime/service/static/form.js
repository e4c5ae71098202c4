// The form below the prompt: a schema for answers and a list of tools, as JSON from the user.

const element = (id) => document.getElementById(id);

/**
 * A text field with JSON, which shows what is wrong with its text. value: the converted value; null
 * for an empty or a faulty field. convert: converts the parsed JSON; throws if it is wrong. changed:
 * called after each change.
 */
class JsonField {
  value = null;
  #field;
  #fault;
  #convert;

  constructor(id, convert, changed) {
    this.#field = element(id);
    this.#fault = element(`${id}-fault`);
    this.#convert = convert;
    this.#field.addEventListener("input", () => {
      this.check();
      changed();
    });
    this.check(); // the browser may have restored the text of an earlier visit
  }

  /** Convert the field's text and show what is wrong with it; return whether the text is valid. */
  check() {
    const text = this.#field.value.trim();
    let fault = "";
    this.value = null;
    try {
      if (text) this.value = this.#convert(parseJson(text));
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
  #schema = new JsonField("schema", toSchema, () => this.#updateTitle());
  #tools = new JsonField("tools", toTools, () => this.#updateTitle());

  constructor() {
    element("must-call").addEventListener("change", () => this.#updateTitle());
    this.#updateTitle();
  }

  /** Check both fields and focus the first faulty field; return whether both are valid. */
  check() {
    const faulty = [this.#schema, this.#tools].find((field) => !field.check());
    if (faulty) element("form").open = true;
    faulty?.focus();
    return !faulty;
  }

  /** Return the form's request fields. mayForceCall: whether "must call a tool" applies to the request. */
  parameters(mayForceCall) {
    const fields = {};
    if (this.#schema.value) {
      const schema = { name: "answer", strict: true, schema: this.#schema.value };
      fields.response_format = { type: "json_schema", json_schema: schema };
    }
    if (this.#tools.value) fields.tools = this.#tools.value;
    const mustCall = mayForceCall && element("must-call").checked;
    if (fields.tools && mustCall) fields.tool_choice = "required";
    return fields;
  }

  /** Show in the title what the form contains, because the form may be folded. */
  #updateTitle() {
    const parts = [];
    if (this.#schema?.value) parts.push("schema");
    const count = this.#tools?.value?.length ?? 0;
    if (count) parts.push(`${count} tool${count > 1 ? "s" : ""}`);
    element("form-name").textContent = parts.length ? `Form: ${parts.join(", ")}` : "Form";
  }
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The text is no JSON: ${error.message}`);
  }
}

function toSchema(value) {
  if (!isObject(value)) {
    throw new Error("A JSON schema must be an object, such as {\"type\": \"object\"}.");
  }
  return value;
}

function toTools(value) {
  if (!Array.isArray(value)) throw new Error("The tools must be a list, in [ ].");
  value.forEach((tool, i) => {
    if (tool?.type !== "function" || typeof tool.function?.name !== "string") {
      throw new Error(`Tool ${i + 1} must have "type": "function", and a function with a name.`);
    }
  });
  return value.length ? value : null;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
