// The tokens of an answer: spans in the colour of where they came from, and what is told of each.

const ORIGINS = new Set(["drafted", "forced", "corrected", "bonus", "target", "local"]);
const told = new WeakMap(); // of a span: its tokens, mostly one, as the service tells them

/** What is told of a token on the screen; null where nothing is. */
export const toldOf = (span) => told.get(span) ?? null;

/**
 * Cuts an answer's text into its tokens. What is shown lags behind the tokens and lacks some of
 * them, as the marks around a call; so it is looked for in their text.
 */
export class Ribbon {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #begun = []; // tokens of a character that is not complete
  #tokens = []; // told and not shown: text, origin, told

  /** Tokens have come. logprobs: of a chunk; without them tokens are not told apart. */
  push(logprobs, origin) {
    for (const one of logprobs?.content ?? []) {
      const text = this.#decoder.decode(new Uint8Array(one.bytes), { stream: true });
      this.#begun.push(one);
      if (!text) continue;
      this.#tokens.push({ text, origin, told: this.#begun });
      this.#begun = [];
    }
  }

  /** The pieces of a text that is shown now, in order. origin: where nothing better is known. */
  cut(shown, origin) {
    const text = this.#tokens.map((token) => token.text).join("");
    let skipped = text.startsWith(shown) ? 0 : text.lastIndexOf(shown);
    if (skipped < 0) {
      this.#tokens = [];
      return [{ text: shown, origin, told: null }];
    }
    const pieces = [];
    for (let left = shown.length; left > 0; ) {
      const token = this.#tokens[0];
      const rest = token.text.slice(skipped);
      skipped = Math.max(0, skipped - token.text.length);
      const taken = rest.slice(0, left);
      if (taken) pieces.push({ ...token, text: taken });
      left -= taken.length;
      if (taken.length < rest.length) token.text = rest.slice(taken.length);
      else this.#tokens.shift();
    }
    return pieces;
  }
}

/** An element that tokens are added to. */
export class TokenText {
  #element;
  #last = null;

  constructor(element) {
    this.#element = element;
    element.classList.add("tokens");
  }

  add({ text, origin, told: its }) {
    const known = ORIGINS.has(origin) ? origin : "";
    if (!its && this.#last?.dataset.origin === known && !told.has(this.#last)) {
      this.#last.firstChild.appendData(text);
      return;
    }
    // what stands before the word is not underlined; white space alone is a token all the same
    const [, space, word] = /^(\s*)(.*)$/su.exec(text);
    this.#last = word || its ? token(word || space, known) : null;
    if (this.#last && !word) this.#last.classList.add("blank");
    this.#element.append(...[word ? space : "", this.#last ?? space].filter(Boolean));
    if (!its) return;
    told.set(this.#last, its);
    if (this.#element.tabIndex === 0) return;
    this.#element.tabIndex = 0;
    this.#element.setAttribute("role", "group");
    this.#element.setAttribute("aria-label", "Text; the arrow keys go from token to token");
  }
}

/** A span in the colour of an origin; "" has none. */
function token(text, origin) {
  const span = document.createElement("span");
  span.className = "token";
  span.dataset.origin = origin;
  span.textContent = text;
  return span;
}
