// The page: connects the prompt, its buttons, the conversation and the panel.

import { watchTokens } from "./bubble.js";
import { Chat } from "./chat.js";
import { Form } from "./form.js";
import { optionFields } from "./options.js";
import { watchStatus } from "./panel.js";

const element = (id) => document.getElementById(id);
const prompt = element("prompt");
const hint = element("hint");
const form = new Form();
const chat = new Chat(element("log"), (line) => (element("announce").textContent = line), send);

/**
 * Send a message, unless the form has a fault; return whether it was sent. text: null sends only the
 * results of calls.
 */
function send(text) {
  const valid = form.check();
  if (valid) requestAnswer(text);
  return valid;
}

/** Request an answer; show the button "Stop" until the answer ends. */
async function requestAnswer(text) {
  hint.remove();
  setAnswering(true);
  await chat.say(text, { ...optionFields(), ...form.parameters(text !== null) });
  if (!chat.busy) setAnswering(false);
}

/** Show the button "Stop" while an answer runs, else the button "Send". */
function setAnswering(busy) {
  const focused = [element("send"), element("stop")].includes(document.activeElement);
  element("send").hidden = busy;
  element("stop").hidden = !busy;
  if (focused) (busy ? element("stop") : prompt).focus();
}

/** Make the prompt as high as its text, within the style sheet's limits. */
function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || chat.busy || !send(text)) return;
  prompt.value = "";
  fitPrompt();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
// Unfold an element with a faulty field, because the browser shows faults only of visible fields.
for (const fold of [element("options"), element("form")]) {
  fold.addEventListener("invalid", () => (fold.open = true), true);
}
element("stop").addEventListener("click", () => chat.stop());
element("new-chat").addEventListener("click", () => {
  chat.clear();
  element("log").append(hint);
  prompt.focus();
});

if (chat.restore()) hint.remove();
else element("log").append(hint);
prompt.focus();
watchTokens(element("log"), element("bubble"));
watchStatus();
