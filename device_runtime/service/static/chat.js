// One conversation: what was said, and the answer that is coming. Text only ever becomes text nodes.

import { ask } from "./service.js";

const ORIGINS = new Set(["drafted", "corrected", "bonus", "target", "local"]);
const NEAR = 80; // px from the end: then the log follows the answer

export class Chat {
  #log;
  #tell;
  #again;
  #past = []; // messages that were answered, and their answers
  #running = null;

  /**
   * log: where the turns go. tell: takes a line for those who do not see the screen. again: is given
   * a message whose answer failed, when the user wants it sent once more.
   */
  constructor(log, tell, again) {
    this.#log = log;
    this.#tell = tell;
    this.#again = again;
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
    this.#log.replaceChildren();
  }

  /** Send a message and stream the answer; `parameters` go into the request. Never throws. */
  async say(text, parameters) {
    const question = this.#turn("user");
    question.body.textContent = text;
    const running = (this.#running = new AbortController());
    const past = this.#past;
    const messages = [...past, { role: "user", content: text }];
    const answer = new Answer(this.#turn("assistant"));
    let whole = true;
    this.#tell("Answering.");
    try {
      await this.#stream({ ...parameters, messages }, answer, running.signal);
      this.#tell(`Answer complete, ${answer.tokens} tokens.`);
    } catch (error) {
      whole = running.signal.aborted; // what its reader has stopped counts as said
      this.#following(() => {
        if (whole) answer.remark("stopped", "Stopped.");
        else this.#offer(text, question.turn, answer.remark("failure", reason(error)));
      });
      this.#tell(whole ? "Stopped." : "The answer failed.");
    }
    this.#following(() => answer.end());
    if (whole && answer.text) {
      past.push(messages.at(-1), { role: "assistant", content: answer.text });
    }
    if (this.#running === running) this.#running = null;
  }

  async #stream(request, answer, signal) {
    const models = await failing(await ask("v1/models", { signal }));
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: (await models.json()).data[0].id, stream: true, ...request }),
      signal,
    });
    for await (const data of events((await failing(response)).body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      if (choice && answer.take(choice)) atNextFrame(() => this.#following(() => answer.show()));
      if (chunk.pilotfish) answer.summary = chunk.pilotfish;
    }
    throw new Error("The service broke the answer off.");
  }

  /** A button beside what went wrong, to send the message once more. */
  #offer(text, question, failure) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try again";
    button.addEventListener("click", () => {
      if (this.busy) return;
      if (failure.parentElement.querySelector(".text").textContent === "") {
        failure.parentElement.remove();
        question.remove();
      } else button.remove();
      this.#again(text);
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

/** An answer on the screen. */
class Answer {
  text = "";
  tokens = 0;
  summary = null;
  #place;
  #waiting = [];
  #last = null;
  #began = performance.now();
  #timer;

  constructor(place) {
    this.#place = place;
    place.turn.setAttribute("aria-busy", "true");
    place.turn.classList.add("coming");
    this.#timer = setInterval(() => this.#note(), 500);
  }

  /** A piece has come. Tells whether it is the first that waits to be shown. */
  take({ delta, pilotfish }) {
    this.tokens += pilotfish?.tokens ?? 0;
    const added = delta?.content;
    if (!added) return false;
    this.text += added;
    const origin = ORIGINS.has(pilotfish?.origin) ? pilotfish.origin : "";
    return this.#waiting.push([added, origin]) === 1;
  }

  /** Bring to the screen what has come: once a frame, or a fast answer would keep it busy. */
  show() {
    for (const [added, origin] of this.#waiting.splice(0)) {
      if (this.#last?.dataset.origin === origin) {
        this.#last.firstChild.appendData(added);
        continue;
      }
      // what stands before the word is not underlined
      const [, space, word] = /^(\s*)(.*)$/su.exec(added);
      this.#last = word ? token(word, origin) : null;
      this.#place.body.append(...[space, this.#last].filter(Boolean));
    }
  }

  /** A line below the text, of this class. */
  remark(kind, message) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = message;
    this.#place.body.after(line);
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

/** Soon, and not more often than the screen is painted; a hidden page is never painted. */
function atNextFrame(change) {
  if (document.hidden) setTimeout(change, 200);
  else requestAnimationFrame(change);
}

/** A span in the colour of an origin; "" has none. */
function token(text, origin) {
  const span = document.createElement("span");
  span.className = "token";
  span.dataset.origin = span.title = origin;
  span.textContent = text;
  return span;
}

/** What the service says of a whole answer, in a few words. */
function told({ protocol, window, rounds, acceptance, uplink_bytes, downlink_bytes, recoveries }) {
  const parts = [protocol + (window ? `, window ${window}` : "")];
  if (window) parts.push(`${Math.round(100 * acceptance)}\u00a0% accepted in ${rounds} rounds`);
  if (uplink_bytes) parts.push(`${bytes(uplink_bytes)} up, ${bytes(downlink_bytes)} down`);
  if (recoveries.length) parts.push(`link lost ${recoveries.length} ×`);
  return parts;
}

function bytes(count) {
  if (count < 1000) return `${count} B`;
  return count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}

/** The data of server-sent events, one by one. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    await reader.cancel();
  }
}

/** The response, unless it is an error: then what the service says about it is thrown. */
async function failing(response) {
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `The service answered ${response.status}.`);
}

function reason(error) {
  return error instanceof TypeError ? "The service does not answer." : error.message;
}
