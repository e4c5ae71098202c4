// An answer on the screen: its thought, text and tool calls, and a line with speed and other values.

import { Calls } from "./calls.js";
import { CodeText } from "./code.js";
import { byteSize } from "./figures.js";
import { LiveFigures } from "./live.js";
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
  #waiting = []; // pieces not shown yet: [TokenText or CodeText, pieces]
  #live = new LiveFigures();
  #parts = []; // the answer's chunks without probabilities, adjacent ones of a kind as one
  #lines = []; // lines below the answer: [CSS class, text]
  #timer = null; // null: the answer has ended

  /** elements: the empty elements of the turn: { turn, body, note, foot }. */
  constructor(elements) {
    this.#elements = elements;
    this.#textTokens = new CodeText(elements.body);
    const calls = document.createElement("div");
    calls.className = "calls";
    elements.body.after(calls);
    this.calls = new Calls(calls);
  }

  /** Show that the answer is coming, until `end`. */
  begin() {
    this.#elements.turn.setAttribute("aria-busy", "true");
    this.#elements.turn.classList.add("coming");
    this.#timer = setInterval(() => this.#updateNote(), 500);
  }

  /** Add a chunk's `choice`; return whether it is the first that waits for `show`. */
  add(choice) {
    const { delta, pilotfish, logprobs, finish_reason: finish } = choice;
    const idle = !this.#waiting.length;
    this.tokens += pilotfish?.tokens ?? 0;
    this.#live.add(pilotfish);
    this.#finish ??= finish;
    this.#keep(choice);
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

  /** Keep a chunk for `record`; it continues the last one if both have text of the same kind. */
  #keep({ delta, pilotfish, finish_reason: finish }) {
    const last = this.#parts.at(-1);
    const [field, ...others] = Object.keys(delta ?? {}).filter((name) => delta[name]);
    const isText = field === "content" || field === "reasoning_content";
    const continues =
      last?.delta?.[field] !== undefined &&
      last.pilotfish?.origin === pilotfish?.origin &&
      last.pilotfish?.key === pilotfish?.key;
    if (isText && !others.length && !finish && continues) {
      last.delta[field] += delta[field];
      if (pilotfish) last.pilotfish.tokens += pilotfish.tokens;
    } else if (field !== undefined || pilotfish?.tokens || finish) {
      const kept = isText && !others.length ? { [field]: delta[field] } : delta;
      this.#parts.push({ delta: kept, pilotfish: pilotfish && { ...pilotfish }, finish_reason: finish });
    }
  }

  /** Let a text wait for `show`. tokenText: the TokenText or CodeText that will show it. */
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

  /** The answer as a value that JSON can hold; `replay` shows it again, without probabilities. */
  get record() {
    const { key_positions, ...summary } = this.summary ?? {};
    return {
      parts: this.#parts,
      seconds: this.#live.seconds,
      summary: this.summary && summary,
      lines: this.#timer === null ? this.#lines : [["stopped", "The page was left meanwhile."]],
    };
  }

  /** Show an answer from its `record`. */
  replay({ parts, seconds, summary, lines }) {
    for (const part of parts) this.add(part);
    this.summary = summary;
    for (const [kind, message] of lines) this.addLine(kind, message);
    this.#live.end(seconds);
    this.end();
  }

  /** Add a line of CSS class `kind` below the answer; return the line. */
  addLine(kind, message) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = message;
    this.#lines.push([kind, message]);
    this.#elements.note.before(line);
    return line;
  }

  end() {
    this.show();
    this.#textTokens.end();
    clearInterval(this.#timer);
    this.#timer = null;
    this.#live.end();
    this.#elements.turn.removeAttribute("aria-busy");
    this.#elements.turn.classList.remove("coming");
    this.#updateNote();
  }

  /** Write the line with tokens, speed and the service's summary. */
  #updateNote() {
    const parts = [];
    if (this.#timer !== null) {
      if (this.tokens) parts.push(`${this.tokens} tokens`, ...this.#live.phrases());
      if (document.getElementById("pill").dataset.state === "down") parts.push("the link is down");
    } else if (this.tokens) {
      const { seconds } = this.#live;
      const speed = (this.tokens / seconds).toFixed(1);
      parts.push(`${this.tokens} tokens in ${seconds.toFixed(1)} s, ${speed} a second`);
    }
    if (this.summary) parts.push(...summaryPhrases(this.summary));
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
