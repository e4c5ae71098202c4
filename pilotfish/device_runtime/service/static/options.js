// The options below the prompt: protocol, window, seed and sampling, as fields of a request.

const ALTERNATIVES = 5; // number of likeliest tokens to request for each position

const element = (id) => document.getElementById(id);
const protocol = element("protocol-choice");
const windowField = element("window");
let protocols = []; // the service's: { name, window, lossless }

/** Return the request's fields. Empty fields are undefined, which JSON leaves out. */
export function optionFields() {
  const drafting = {
    protocol: protocol.value || undefined,
    window: windowField.disabled ? undefined : number("window"),
  };
  const drafts = drafting.protocol !== undefined || drafting.window !== undefined;
  return {
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    ...(drafts && { pilotfish: drafting }),
    ...(element("probabilities").checked && { logprobs: true, top_logprobs: ALTERNATIVES }),
  };
}

/** Offer the protocols that the service has. The user's choice stays while the service has it. */
export function offerProtocols(offered) {
  if (JSON.stringify(offered) === JSON.stringify(protocols)) return;
  protocols = offered;
  const chosen = protocol.value;
  const choices = offered.map(({ name, lossless }) => {
    const kind = name === "local" ? " (this device alone)" : lossless ? "" : " (lossy)";
    return new Option(name + kind, name);
  });
  protocol.replaceChildren(new Option("service’s own", ""), ...choices);
  protocol.value = offered.some(({ name }) => name === chosen) ? chosen : "";
  updateWindow();
}

/** Disable the window under protocols that have none, and show in the title what is chosen. */
function updateWindow() {
  const chosen = protocols.find(({ name }) => name === protocol.value);
  windowField.disabled = chosen !== undefined && !chosen.window;
  const { pilotfish: drafting, seed } = optionFields();
  const parts = [];
  if (drafting?.protocol) parts.push(drafting.protocol);
  if (drafting?.window !== undefined) parts.push(`window ${drafting.window}`);
  if (seed !== undefined) parts.push(`seed ${seed}`);
  element("options-name").textContent = parts.length ? `Options: ${parts.join(", ")}` : "Options";
}

/** Return a field's number, or undefined for an empty field. */
function number(id) {
  const { value, valueAsNumber } = element(id);
  return value === "" ? undefined : valueAsNumber;
}

for (const field of [protocol, windowField, element("seed")]) {
  field.addEventListener("input", updateWindow);
}
updateWindow();
