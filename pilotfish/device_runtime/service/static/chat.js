// A conversation: its messages, and the running answer. All text goes into text nodes, never into HTML.

import { Answer } from "./answer.js";
import { chunks, describeError } from "./stream.js";

// px: the log follows the answer if it is scrolled to less than this above its end
const NEAR = 80;
// tokens: longer answers are painted less often, because painting them takes long
const MANY = 1000;

export class Chat {
  #log;
  #announce;
  #send;
  #history = []; // answered messages and their answers
  #openCalls = null; // the last answer's Calls, if their results have not been sent
  #running = null; // AbortController of the running answer

  /**
   * log: element for the turns. announce: called with a line for screen readers. send: called with a
   * message to send it again after its answer failed, or with null to send only the results of calls;
   * it returns whether the request was sent.
   */
  constructor(log, announce, send) {
    this.#log = log;
    this.#announce = announce;
    this.#send = send;
  }

  get busy() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#history = [];
    this.#openCalls = null;
    this.#log.replaceChildren();
  }

  /**
   * Send the results of open calls and the message `text` (null: only the results), and show the
   * answer while it arrives. parameters: further fields of the request. Never throws.
   */
  async say(text, parameters) {
    const question = text === null ? null : this.#turn("user");
    if (question) question.body.textContent = text;
    const running = (this.#running = new AbortController());
    const history = this.#history;
    const calls = this.#openCalls;
    const added = calls?.results ?? [];
    if (text !== null) added.push({ role: "user", content: text });
    const answer = new Answer(this.#turn("assistant"));
    let complete = true;
    this.#announce("Answering.");
    try {
      const messages = [...history, ...added];
      await this.#stream({ ...parameters, messages }, answer, running.signal);
      const more = answer.endsInCalls ? " It calls tools." : "";
      this.#announce(`Answer complete, ${answer.tokens} tokens.${more}`);
    } catch (error) {
      complete = running.signal.aborted; // an answer that the user stopped stays in the conversation
      this.#followEnd(() => {
        if (complete) answer.addLine("stopped", "Stopped.");
        else this.#offerRetry(text, question, answer.addLine("failure", describeError(error)));
      });
      this.#announce(complete ? "Stopped." : "The answer failed.");
    }
    this.#followEnd(() => answer.end());
    if (this.#running === running) this.#running = null;
    // If the history is another object, a new conversation has begun meanwhile.
    if (complete && history === this.#history) this.#addToHistory(added, answer, calls);
  }

  /**
   * Add messages and their answer to the history, unless the answer has neither text nor calls.
   * calls: the Calls whose results are among the messages, or null.
   */
  #addToHistory(messages, answer, calls) {
    if (answer.hasBrokenCalls) {
      answer.addLine("stopped", "The answer was cut off within a call. The call is dropped.");
    }
    if (!answer.message) return;
    this.#history.push(...messages, answer.message);
    calls?.close();
    this.#openCalls = answer.endsInCalls ? answer.calls : null;
    if (!this.#openCalls) return;
    this.#followEnd(() => this.#openCalls.showResultFields(() => this.busy || this.#send(null)));
  }

  async #stream(request, answer, signal) {
    for await (const chunk of chunks(request, signal)) {
      const choice = chunk.choices?.[0];
      if (choice && answer.add(choice)) {
        paintSoon(() => this.#followEnd(() => answer.show()), answer.tokens > MANY);
      }
      if (chunk.pilotfish) answer.summary = chunk.pilotfish;
    }
  }

  /** Add to the line about a failure a button that sends the message again. */
  #offerRetry(text, question, failure) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try again";
    button.addEventListener("click", () => {
      if (this.busy || !this.#send(text)) return;
      if (failure.parentElement.querySelector(".text").textContent === "") {
        failure.parentElement.remove();
        question?.turn.remove();
      } else button.remove();
    });
    failure.setAttribute("role", "alert");
    failure.append(" ", button);
  }

  #turn(role) {
    const turn = document.createElement("article");
    turn.dataset.role = role;
    const name = document.createElement("h3");
    name.textContent = role === "user" ? "You" : "Pilotfish";
    const body = document.createElement("div");
    body.className = "text";
    body.dir = "auto";
    const note = document.createElement("p");
    note.className = "note";
    turn.append(name, body, note);
    this.#log.append(turn);
    this.#log.scrollTop = this.#log.scrollHeight;
    return { turn, body, note };
  }

  /** Run a change of the log; keep the end of the log in sight unless the user has scrolled away. */
  #followEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#log.scrollTop = this.#log.scrollHeight;
  }
}

/** Run a change at the next frame, or after 200 ms if `seldom` or if the page is hidden (no frames). */
function paintSoon(change, seldom) {
  if (seldom || document.hidden) setTimeout(change, 200);
  else requestAnimationFrame(change);
}
