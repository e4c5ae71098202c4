// An answer on the screen: its thought, text and tool calls, and a line with speed and other values.

import { Calls } from "./calls.js";
import { TokenSplitter, TokenText } from "./tokens.js";

export class Answer {
  text = "";
  tokens = 0;
  summary = null; // the service's summary, from the last chunk
  calls;
  #finish = null; // finish_reason
  #thought = "";
  #elements;
  #splitter = new TokenSplitter();
  #textTokens;
  #thoughtTokens = null; // null: no thought yet
  #waiting = []; // pieces not shown yet: [TokenText, pieces]
  #began = performance.now(); // ms
  #timer;

  /** elements: the empty elements of the turn: { turn, body, note }. */
  constructor(elements) {
    this.#elements = elements;
    this.#textTokens = new TokenText(elements.body);
    const calls = document.createElement("div");
    calls.className = "calls";
    elements.body.after(calls);
    this.calls = new Calls(calls);
    elements.turn.setAttribute("aria-busy", "true");
    elements.turn.classList.add("coming");
    this.#timer = setInterval(() => this.#updateNote(), 500);
  }

  /** Add a chunk's `choice`; return whether it is the first that waits for `show`. */
  add({ delta, pilotfish, logprobs, finish_reason: finish }) {
    const idle = !this.#waiting.length;
    this.tokens += pilotfish?.tokens ?? 0;
    this.#finish ??= finish;
    this.#splitter.push(logprobs, pilotfish);
    const thought = delta?.reasoning_content;
    const text = delta?.content;
    if (thought) {
      this.#thought += thought;
      this.#enqueue((this.#thoughtTokens ??= this.#createThought()), thought, pilotfish);
    }
    if (text) {
      this.text += text;
      this.#enqueue(this.#textTokens, text, pilotfish);
    }
    for (const part of delta?.tool_calls ?? []) {
      this.#enqueue(this.calls.add(part), part.function.arguments ?? "", pilotfish);
    }
    return idle && this.#waiting.length > 0;
  }

  /** Let a text wait for `show`. tokenText: the TokenText that will show it. */
  #enqueue(tokenText, text, kind) {
    if (text) this.#waiting.push([tokenText, this.#splitter.split(text, kind)]);
  }

  /** Create the folded element of the thought; return its TokenText. */
  #createThought() {
    const fold = document.createElement("details");
    fold.className = "thought";
    const name = document.createElement("summary");
    name.textContent = "Thought";
    const text = document.createElement("div");
    text.dir = "auto";
    fold.append(name, text);
    this.#elements.body.before(fold);
    return new TokenText(text);
  }

  /** Show the waiting pieces. Called once per frame, so that fast answers do not block the page. */
  show() {
    for (const [tokenText, pieces] of this.#waiting.splice(0)) {
      for (const piece of pieces) tokenText.add(piece);
    }
  }

  /** Whether the answer ends in complete calls. */
  get endsInCalls() {
    return this.#finish === "tool_calls" && this.calls.count > 0;
  }

  /** Whether the answer was cut off within its calls, so that the user cannot return results. */
  get hasBrokenCalls() {
    return !this.endsInCalls && this.calls.count > 0;
  }

  /** The answer as a message of the next request; null if it has neither text nor calls. */
  get message() {
    if (!this.text && !this.endsInCalls) return null;
    const message = { role: "assistant", content: this.text };
    if (this.#thought) message.reasoning_content = this.#thought;
    if (this.endsInCalls) message.tool_calls = this.calls.message;
    return message;
  }

  /** Add a line of CSS class `kind` below the answer; return the line. */
  addLine(kind, message) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = message;
    this.#elements.note.before(line);
    return line;
  }

  end() {
    this.show();
    clearInterval(this.#timer);
    this.#elements.turn.removeAttribute("aria-busy");
    this.#elements.turn.classList.remove("coming");
    this.#updateNote();
  }

  /** Write the line with tokens, speed and the service's summary. */
  #updateNote() {
    const seconds = (performance.now() - this.#began) / 1000;
    const parts = [];
    if (this.tokens) {
      const speed = (this.tokens / seconds).toFixed(1);
      parts.push(`${this.tokens} tokens in ${seconds.toFixed(1)} s, ${speed} a second`);
    }
    if (this.summary) parts.push(...summaryPhrases(this.summary));
    const { state } = document.getElementById("pill").dataset;
    if (this.#elements.turn.ariaBusy && state === "down") parts.push("the link is down");
    this.#elements.note.textContent = parts.join(" · ");
  }
}

/** Format the service's summary of an answer as short phrases. */
function summaryPhrases({ protocol, window, rounds, acceptance, forced, key, recoveries, ...bytes }) {
  const parts = [protocol + (window ? `, window ${window}` : "")];
  if (window) parts.push(`${Math.round(100 * acceptance)}\u00a0% accepted in ${rounds} rounds`);
  if (forced) parts.push(`${forced} forced`);
  if (key) parts.push(`${key} key`);
  const { uplink_bytes: up, downlink_bytes: down } = bytes;
  if (up) parts.push(`${byteSize(up)} up, ${byteSize(down)} down`);
  if (recoveries.length) parts.push(`link lost ${recoveries.length} ×`);
  return parts;
}

function byteSize(count) {
  if (count < 1000) return `${count} B`;
  return count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}
