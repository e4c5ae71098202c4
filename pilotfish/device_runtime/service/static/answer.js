// An answer on the screen: thought, words, calls of tools, and what it took.

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
  #waiting = []; // where, and what
  #began = performance.now();
  #timer;

  /** place: the turn and its parts, all empty. */
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

  /** A piece has come. Tells whether it is the first that waits to be shown. */
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

  /** A fold for the thought. */
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

  /** Bring to the screen what has come: once a frame, or a fast answer would keep it busy. */
  show() {
    for (const [where, pieces] of this.#waiting.splice(0)) {
      for (const piece of pieces) where.add(piece);
    }
  }

  /** Whether it ends in calls that are complete. */
  get calling() {
    return this.#finish === "tool_calls" && this.calls.count > 0;
  }

  /** Whether there are calls that nobody can answer: it was cut off. */
  get broken() {
    return !this.calling && this.calls.count > 0;
  }

  /** As it is said to the service with the next request; null where it says nothing. */
  get message() {
    if (!this.text && !this.calling) return null;
    const message = { role: "assistant", content: this.text };
    if (this.#thought) message.reasoning_content = this.#thought;
    if (this.calling) message.tool_calls = this.calls.message;
    return message;
  }

  /** A line below it, of this class. */
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

/** What the service says of a whole answer, in a few words. */
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
