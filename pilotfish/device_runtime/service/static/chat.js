// A conversation: its messages, and the running answer. All text goes into text nodes, never into HTML.

import { Answer } from "./answer.js";
import { copyButton } from "./clipboard.js";
import { showWithCode } from "./code.js";
import { curlCommand } from "./curl.js";
import { forgetTurns, loadTurns, saveTurns } from "./store.js";
import { chunks, describeError, modelName } from "./stream.js";

// px: the log follows the answer if it is scrolled to less than this above its end
const NEAR = 80;
// tokens: longer answers are painted less often, because painting them takes long
const MANY = 1000;

export class Chat {
  #log;
  #announce;
  #send;
  // answered turns: { messages, parameters, answer, earlier }; messages: those before the answer;
  // earlier: the answered turns before this one, also of a turn that fails
  #turns = [];
  #openCalls = null; // the last answer's Calls, if their results have not been sent
  #running = null; // AbortController of the running answer
  #unfinished = null; // the turn of the running answer
  #atEnd = true; // whether the end of the log is in sight

  /**
   * log: element for the turns. announce: called with a line for screen readers. send: called with a
   * message to send it again after its answer failed, or with null to send only the results of calls;
   * it returns whether the request was sent.
   */
  constructor(log, announce, send) {
    this.#log = log;
    this.#announce = announce;
    this.#send = send;
    log.addEventListener("scroll", () => (this.#atEnd = isAtEnd(log)), { passive: true });
    // the log becomes lower when a notice appears above the prompt
    new ResizeObserver(() => this.#atEnd && this.#scrollToEnd()).observe(log);
    // a page that is left may not come back
    addEventListener("pagehide", () => this.busy && this.#save());
  }

  get busy() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    this.#unfinished = null;
    this.#openCalls = null;
    this.#log.replaceChildren();
    forgetTurns();
  }

  /** Show the saved conversation; return whether there is one. A broken one is deleted. */
  restore() {
    const { turns, cut } = loadTurns();
    try {
      this.#replay(turns, cut);
    } catch {
      this.clear();
      return false;
    }
    this.#scrollToEnd();
    return turns.length > 0;
  }

  #replay(turns, cut) {
    if (cut) this.#addRemark("Earlier messages are no longer kept.");
    for (const { messages, parameters, record } of turns) {
      const results = messages.filter(({ role }) => role === "tool");
      if (results.length) this.#openCalls?.close(results.map(({ content }) => content));
      const question = messages.find(({ role }) => role === "user");
      if (question) showWithCode(this.#turn("user").body, question.content);
      const elements = this.#turn("assistant");
      const answer = new Answer(elements);
      const turn = { messages, parameters, answer, earlier: [...this.#turns] };
      answer.replay(record);
      this.#addFoot(elements, turn);
      this.#addTurn(turn);
    }
  }

  /**
   * Send the results of open calls and the message `text` (null: only the results), and show the
   * answer while it arrives. parameters: further fields of the request. Never throws.
   */
  async say(text, parameters) {
    const question = text === null ? null : this.#turn("user");
    if (question) showWithCode(question.body, text);
    const running = (this.#running = new AbortController());
    const turns = this.#turns;
    const calls = this.#openCalls;
    const messages = calls?.results ?? [];
    if (text !== null) messages.push({ role: "user", content: text });
    const elements = this.#turn("assistant");
    const answer = new Answer(elements);
    answer.begin();
    const turn = { messages, parameters, answer, earlier: [...this.#turns] };
    this.#unfinished = turn;
    let complete = true;
    this.#announce("Answering.");
    try {
      const request = { ...parameters, messages: messagesUntil(turn) };
      await this.#stream(request, answer, running.signal);
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
    this.#followEnd(() => {
      answer.end();
      this.#addFoot(elements, turn);
    });
    if (this.#running === running) this.#running = this.#unfinished = null;
    // If the turns are another object, a new conversation has begun meanwhile.
    if (!complete || turns !== this.#turns) return;
    if (answer.hasBrokenCalls) {
      answer.addLine("stopped", "The answer was cut off within a call. The call is dropped.");
    }
    if (!answer.message) return;
    calls?.close();
    this.#addTurn(turn);
    this.#save();
  }

  /** Add an answered turn, and show fields for the results if its answer ends in calls. */
  #addTurn(turn) {
    const { answer } = turn;
    if (!answer.message) return;
    this.#turns.push(turn);
    this.#openCalls = answer.endsInCalls ? answer.calls : null;
    if (!this.#openCalls) return;
    this.#followEnd(() => this.#openCalls.showResultFields(() => this.busy || this.#send(null)));
  }

  /** Save the turns, and the running answer as far as it goes. */
  #save() {
    const running = this.#unfinished ? [this.#unfinished] : [];
    saveTurns(
      [...this.#turns, ...running].map(({ messages, parameters, answer }) => ({
        messages,
        parameters,
        record: answer.record,
      })),
    );
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

  /** Show below an answer why its protocol was taken, and a button for its request. */
  #addFoot({ foot }, turn) {
    const { summary } = turn.answer;
    foot.append(
      copyButton("Copy as curl", "Copy as curl: the request of this answer", () => {
        const { logprobs, top_logprobs, ...fields } = turn.parameters; // only the page needs these
        return curlCommand({ model: modelName(), messages: messagesUntil(turn), ...fields });
      }),
    );
    if (summary) foot.append(createReason(summary, turn.parameters));
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
    const foot = document.createElement("div");
    foot.className = "foot";
    turn.append(name, body, note, foot);
    this.#log.append(turn);
    this.#scrollToEnd();
    return { turn, body, note, foot };
  }

  #addRemark(text) {
    const remark = document.createElement("p");
    remark.className = "stopped";
    remark.textContent = text;
    this.#log.append(remark);
  }

  /** Run a change of the log; keep the end of the log in sight unless the user has scrolled away. */
  #followEnd(change) {
    const follows = isAtEnd(this.#log);
    change();
    if (follows) this.#scrollToEnd();
  }

  #scrollToEnd() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}

/** Return the messages of the request for a turn: all earlier ones and its own. */
function messagesUntil({ earlier, messages }) {
  const said = earlier.flatMap((turn) => [...turn.messages, turn.answer.message]);
  return [...said, ...messages];
}

/** Whether the end of the log is in sight. */
function isAtEnd({ scrollHeight, scrollTop, clientHeight }) {
  return scrollHeight - scrollTop - clientHeight < NEAR;
}

/** Create the folded reason for an answer's protocol. parameters: the request's fields. */
function createReason({ protocol, choice }, parameters) {
  const fold = document.createElement("details");
  fold.className = "why";
  const question = document.createElement("summary");
  question.textContent = `Why ${protocol}?`;
  const reason = document.createElement("p");
  const named = parameters.pilotfish?.protocol === protocol;
  reason.textContent =
    choice ?? (named ? "You chose it in the options." : "It is the service’s own setting.");
  fold.append(question, reason);
  return fold;
}

/** Run a change at the next frame, or after 200 ms if `seldom` or if the page is hidden (no frames). */
function paintSoon(change, seldom) {
  if (seldom || document.hidden) setTimeout(change, 200);
  else requestAnimationFrame(change);
}
