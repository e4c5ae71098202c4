// The page: the prompt and its buttons, the conversation, and the panel beside it.

import { watchTokens } from "./bubble.js";
import { Chat } from "./chat.js";
import { Form } from "./form.js";
import { watch } from "./panel.js";

const ALTERNATIVES = 5; // whose probabilities are told beside a token's own

const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const hint = at("hint");
const form = new Form();
const chat = new Chat(at("log"), (line) => (at("announce").textContent = line), send);

/** Send a message, or with null the results of calls alone, unless the form is at fault. */
function send(text) {
  const sound = form.check();
  if (sound) converse(text);
  return sound;
}

async function converse(text) {
  hint.remove();
  answering(true);
  await chat.say(text, {
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    ...(at("probabilities").checked && { logprobs: true, top_logprobs: ALTERNATIVES }),
    ...form.parameters(text !== null),
  });
  if (!chat.busy) answering(false);
}

/** What a field holds; undefined, and so not sent, if that is no number. */
function number(id) {
  const { value, valueAsNumber } = at(id);
  return value === "" ? undefined : valueAsNumber;
}

function answering(busy) {
  const focused = [at("send"), at("stop")].includes(document.activeElement);
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  if (focused) (busy ? at("stop") : prompt).focus();
}

/** The prompt is as high as its text, within limits that the style sheet sets. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || chat.busy || !send(text)) return;
  prompt.value = "";
  fit();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
// a fault in a field that is folded away could not be shown
for (const fold of [at("options"), at("form")]) {
  fold.addEventListener("invalid", () => (fold.open = true), true);
}
at("stop").addEventListener("click", () => chat.stop());
at("new-chat").addEventListener("click", () => {
  chat.clear();
  at("log").append(hint);
  prompt.focus();
});

prompt.focus();
watchTokens(at("log"), at("bubble"));
watch();
