// The page: connects the prompt, its buttons, the conversation and the panel.

import { watchTokens } from "./bubble.js";
import { Chat } from "./chat.js";
import { Form } from "./form.js";
import { watch } from "./panel.js";

const ALTERNATIVES = 5; // number of likeliest tokens to request for each position

const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const hint = at("hint");
const form = new Form();
const chat = new Chat(at("log"), (line) => (at("announce").textContent = line), send);

/** Send a message (null: only results of calls), unless the form has a fault. */
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

/** Return a field's number; undefined, which is not sent, if the field is empty. */
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

/** Make the prompt as high as its text, within the style sheet's limits. */
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
// unfold fields with a fault, so that the browser can show the fault
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
