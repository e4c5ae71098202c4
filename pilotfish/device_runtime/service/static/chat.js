// One conversation: what was said, and the answer that is coming. Text only ever becomes text nodes.

import { Answer } from "./answer.js";
import { chunks, reason } from "./stream.js";

const NEAR = 80; // px from the end: then the log follows the answer
const MANY = 1000; // tokens: such an answer is painted seldom, for that takes long

export class Chat {
  #log;
  #tell;
  #send;
  #past = []; // messages that were answered, and their answers
  #open = null; // calls at the end of the past, whose results have not been sent
  #running = null;

  /**
   * log: where the turns go. tell: takes a line for those who do not see the screen. send: is given
   * a message whose answer failed, when the user wants it sent once more; null: results of calls.
   * It returns whether they are sent.
   */
  constructor(log, tell, send) {
    this.#log = log;
    this.#tell = tell;
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
    this.#past = [];
    this.#open = null;
    this.#log.replaceChildren();
  }

  /**
   * Send a message and stream the answer; null: only the results of calls, which go before any
   * message. `parameters` go into the request. Never throws.
   */
  async say(text, parameters) {
    const question = text === null ? null : this.#turn("user");
    if (question) question.body.textContent = text;
    const running = (this.#running = new AbortController());
    const past = this.#past;
    const calls = this.#open;
    const sent = calls?.results() ?? [];
    if (text !== null) sent.push({ role: "user", content: text });
    const answer = new Answer(this.#turn("assistant"));
    let whole = true;
    this.#tell("Answering.");
    try {
      const messages = [...past, ...sent];
      await this.#stream({ ...parameters, messages }, answer, running.signal);
      const more = answer.calling ? " It calls tools." : "";
      this.#tell(`Answer complete, ${answer.tokens} tokens.${more}`);
    } catch (error) {
      whole = running.signal.aborted; // what its reader has stopped counts as said
      this.#following(() => {
        if (whole) answer.remark("stopped", "Stopped.");
        else this.#offer(text, question, answer.remark("failure", reason(error)));
      });
      this.#tell(whole ? "Stopped." : "The answer failed.");
    }
    this.#following(() => answer.end());
    if (this.#running === running) this.#running = null;
    // a new conversation may have begun meanwhile
    if (whole && past === this.#past) this.#keep(sent, answer, calls);
  }

  /** The answer is part of the conversation, unless it says nothing. */
  #keep(sent, answer, calls) {
    if (answer.broken) answer.remark("stopped", "It was cut off within a call, which is dropped.");
    if (!answer.message) return;
    this.#past.push(...sent, answer.message);
    calls?.close();
    this.#open = answer.calling ? answer.calls : null;
    if (!this.#open) return;
    this.#following(() => this.#open.offer(() => this.busy || this.#send(null)));
  }

  async #stream(request, answer, signal) {
    for await (const chunk of chunks(request, signal)) {
      const choice = chunk.choices?.[0];
      if (choice && answer.take(choice)) {
        soon(() => this.#following(() => answer.show()), answer.tokens > MANY);
      }
      if (chunk.pilotfish) answer.summary = chunk.pilotfish;
    }
  }

  /** A button beside what went wrong, to send the message once more. */
  #offer(text, question, failure) {
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

  /** Keep the end in sight, unless the reader has scrolled away from it. */
  #following(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#log.scrollTop = this.#log.scrollHeight;
  }
}

/** Soon, and not more often than the screen is painted; a hidden page is never painted. */
function soon(change, seldom) {
  if (seldom || document.hidden) setTimeout(change, 200);
  else requestAnimationFrame(change);
}
