// An answer on the screen: its thought, text and tool calls, and a line with its figures.

import { Calls } from "./calls.js";
import { Ribbon, TokenText } from "./tokens.js";

export class Answer {
  text = "";
  tokens = 0;
  summary = null;
  calls;
  #finish = null;
  #thought = "";
  #place;
  #ribbon = new Ribbon();
  #words;
  #thinking = null;
  #waiting = []; // pieces not shown yet: [TokenText, pieces]
  #began = performance.now();
  #timer;

  /** place: the empty elements of the turn. */
  constructor(place) {
    this.#place = place;
    this.#words = new TokenText(place.body);
    const calls = document.createElement("div");
    calls.className = "calls";
    place.body.after(calls);
    this.calls = new Calls(calls);
    place.turn.setAttribute("aria-busy", "true");
    place.turn.classList.add("coming");
    this.#timer = setInterval(() => this.#note(), 500);
  }

  /** Add a chunk's piece; returns whether it is the first that waits for `show`. */
  take({ delta, pilotfish, logprobs, finish_reason: finish }) {
    const idle = !this.#waiting.length;
    const origin = pilotfish?.origin;
    this.tokens += pilotfish?.tokens ?? 0;
    this.#finish ??= finish;
    this.#ribbon.push(logprobs, origin);
    const thought = delta?.reasoning_content;
    const words = delta?.content;
    if (thought) {
      this.#thought += thought;
      this.#wait((this.#thinking ??= this.#think()), thought, origin);
    }
    if (words) {
      this.text += words;
      this.#wait(this.#words, words, origin);
    }
    for (const part of delta?.tool_calls ?? []) {
      this.#wait(this.calls.take(part), part.function.arguments ?? "", origin);
    }
    return idle && this.#waiting.length > 0;
  }

  #wait(where, added, origin) {
    if (added) this.#waiting.push([where, this.#ribbon.cut(added, origin)]);
  }

  /** Make the folded element for the thought. */
  #think() {
    const fold = document.createElement("details");
    fold.className = "thought";
    const name = document.createElement("summary");
    name.textContent = "Thought";
    const text = document.createElement("div");
    text.dir = "auto";
    fold.append(name, text);
    this.#place.body.before(fold);
    return new TokenText(text);
  }

  /** Show the waiting pieces. Called once per frame, so that fast answers do not block the page. */
  show() {
    for (const [where, pieces] of this.#waiting.splice(0)) {
      for (const piece of pieces) where.add(piece);
    }
  }

  /** Whether the answer ends in complete calls. */
  get calling() {
    return this.#finish === "tool_calls" && this.calls.count > 0;
  }

  /** Whether the answer was cut off within its calls, so that nobody can return results. */
  get broken() {
    return !this.calling && this.calls.count > 0;
  }

  /** The answer as a message of the next request; null if it has neither text nor calls. */
  get message() {
    if (!this.text && !this.calling) return null;
    const message = { role: "assistant", content: this.text };
    if (this.#thought) message.reasoning_content = this.#thought;
    if (this.calling) message.tool_calls = this.calls.message;
    return message;
  }

  /** Add a line of class `kind` below the answer. */
  remark(kind, message) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = message;
    this.#place.note.before(line);
    return line;
  }

  end() {
    this.show();
    clearInterval(this.#timer);
    this.#place.turn.removeAttribute("aria-busy");
    this.#place.turn.classList.remove("coming");
    this.#note();
  }

  #note() {
    const seconds = (performance.now() - this.#began) / 1000;
    const parts = [];
    if (this.tokens) {
      const speed = (this.tokens / seconds).toFixed(1);
      parts.push(`${this.tokens} tokens in ${seconds.toFixed(1)} s, ${speed} a second`);
    }
    if (this.summary) parts.push(...told(this.summary));
    const { state } = document.getElementById("pill").dataset;
    if (this.#place.turn.ariaBusy && state === "down") parts.push("the link is down");
    this.#place.note.textContent = parts.join(" · ");
  }
}

/** Format the service's summary of an answer as short phrases. */
function told({ protocol, window, rounds, acceptance, forced, recoveries, ...bytes }) {
  const parts = [protocol + (window ? `, window ${window}` : "")];
  if (window) parts.push(`${Math.round(100 * acceptance)}\u00a0% accepted in ${rounds} rounds`);
  if (forced) parts.push(`${forced} forced`);
  const { uplink_bytes: up, downlink_bytes: down } = bytes;
  if (up) parts.push(`${size(up)} up, ${size(down)} down`);
  if (recoveries.length) parts.push(`link lost ${recoveries.length} ×`);
  return parts;
}

function size(count) {
  if (count < 1000) return `${count} B`;
  return count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}
