// A conversation: its messages, and the running answer. All text goes into text nodes, never HTML.

import { Answer } from "./answer.js";
import { chunks, reason } from "./stream.js";

const NEAR = 80; // px: the log follows the answer if it is scrolled to within this of its end
const MANY = 1000; // tokens: longer answers are painted less often, since that takes long

export class Chat {
  #log;
  #tell;
  #send;
  #past = []; // answered messages and their answers
  #open = null; // the last answer's calls, if their results have not been sent
  #running = null;

  /**
   * log: element for the turns. tell: called with a line for screen readers. send: called with a
   * message to send again after its answer failed, or with null to send the results of calls;
   * returns whether the request was sent.
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
   * Send the results of open calls, then the message `text` (null: results only); stream the
   * answer. parameters: further fields of the request. Never throws.
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
      whole = running.signal.aborted; // an answer that the user stopped stays in the conversation
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

  /** Add the answer to the conversation, unless it has neither text nor calls. */
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

  /** Add a button to the line about a failure; it sends the message again. */
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

  /** Make a change, and keep the log's end in sight unless the user has scrolled away. */
  #following(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#log.scrollTop = this.#log.scrollHeight;
  }
}

/** Run a change at the next frame; if seldom or the page is hidden (no frames), in 200 ms. */
function soon(change, seldom) {
  if (seldom || document.hidden) setTimeout(change, 200);
  else requestAnimationFrame(change);
}
