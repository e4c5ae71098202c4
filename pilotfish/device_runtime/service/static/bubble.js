// A bubble with the probabilities of the token under the pointer or chosen with the arrow keys.

import { tokenEntries } from "./tokens.js";

const ORIGIN_TEXTS = {
  drafted: "drafted on this device, accepted by the target",
  forced: "forced: the form allows no other token; drafted without a model",
  corrected: "chosen by the target, in place of a draft",
  bonus: "chosen by the target, after a window of accepted drafts",
  target: "chosen by the target, without a draft",
  local: "chosen by this device, not verified",
};
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/** Show the bubble for the tokens within the element `log`. */
export function watchTokens(log, bubble) {
  let shown = null;

  function show(span) {
    hide();
    shown = span;
    span.classList.add("chosen");
    bubble.replaceChildren(...lines(span));
    bubble.hidden = false;
    place(bubble, span);
  }
  function hide() {
    shown?.classList.remove("chosen");
    shown = null;
    bubble.hidden = true;
  }
  function moveByKey(event) {
    const text = event.target;
    if (event.key === "Escape") hide();
    if (event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
    if (!(event.key in STEPS) || !text.classList.contains("tokens")) return;
    const spans = [...text.querySelectorAll(".token:not(.mark *)")];
    if (!spans.length) return;
    event.preventDefault();
    const step = STEPS[event.key];
    const from = spans.indexOf(shown);
    const to = from < 0 && step === -1 ? spans.length - 1 : from + step;
    const span = spans[Math.min(Math.max(to, 0), spans.length - 1)];
    span.scrollIntoView({ block: "nearest" });
    show(span);
  }

  log.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) show(span);
    else hide();
  });
  log.addEventListener("pointerleave", hide);
  log.addEventListener("keydown", moveByKey);
  log.addEventListener("focusout", hide);
  addEventListener("resize", hide);
  log.addEventListener("scroll", () => shown && place(bubble, shown), { passive: true });
}

/** Place the bubble above the token, or below it if there is no room. */
function place(bubble, span) {
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = bubble.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - width - 8);
  const top = box.top - height - 6;
  bubble.style.left = `${Math.max(8, left)}px`;
  bubble.style.top = `${top < 8 ? box.bottom + 6 : top}px`;
}

/** Return the bubble's lines for a span: the probabilities of its tokens, and their origin. */
function lines(span) {
  const key = span.dataset.key === undefined ? "" : "; the draft was a key token";
  const origin = line("origin", (ORIGIN_TEXTS[span.dataset.origin] ?? "") + key);
  const entries = tokenEntries(span) ?? [];
  return [...entries.flatMap(probabilities), origin].filter((element) => element.textContent);
}

/** Return lines with a token's own probability, and with the likeliest tokens at its position. */
function probabilities({ token, logprob, top_logprobs: top }) {
  const head = line("head", visible(token));
  if (logprob === null) return [head, line("origin", "The service sent no probability.")];
  head.append(" ", line("share", percent(logprob), "span"));
  const list = document.createElement("ol");
  for (const alternative of top) {
    const row = document.createElement("li");
    if (alternative.token === token) row.className = "own";
    const bar = line("bar", "", "span");
    bar.style.width = `${100 * Math.exp(alternative.logprob ?? -Infinity)}%`;
    const share = line("share", percent(alternative.logprob), "span");
    row.append(bar, line("word", visible(alternative.token), "span"), share);
    list.append(row);
  }
  return [head, list];
}

function line(kind, text, tag = "p") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}

/** Return a token's text with visible marks for white space. */
function visible(text) {
  const marks = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
  const mark = (space) => [...space].map((character) => marks[character]).join("");
  return text.replace(/^ +| +$|[\n\t\r]/gu, mark);
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob ?? -Infinity);
  if (share > 0 && share < 0.01) return "< 0.01\u00a0%";
  return `${share.toFixed(share < 10 ? 2 : 1)}\u00a0%`;
}
