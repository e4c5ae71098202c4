// The tokens of an answer: a span for each, in the colour of its origin, with its log-probability.

const ORIGINS = new Set(["drafted", "forced", "corrected", "bonus", "target", "local"]);
const told = new WeakMap(); // span → its tokens' entries in the chunk's logprobs, mostly one

/** Return the entries of a span's tokens; null if there are none. */
export const toldOf = (span) => told.get(span) ?? null;

/**
 * Cuts an answer's text into its tokens. The text arrives later than its tokens and lacks some of
 * them, such as the marks around a call, so the text is searched for in the tokens' text.
 */
export class Ribbon {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #begun = []; // entries of tokens that end within a character
  #tokens = []; // tokens not shown yet: { text, origin, told: entries }

  /** Add a chunk's tokens. logprobs: the chunk's; without them its tokens stay unknown. */
  push(logprobs, origin) {
    for (const one of logprobs?.content ?? []) {
      const text = this.#decoder.decode(new Uint8Array(one.bytes), { stream: true });
      this.#begun.push(one);
      if (!text) continue;
      this.#tokens.push({ text, origin, told: this.#begun });
      this.#begun = [];
    }
  }

  /** Cut a text into pieces, one per token. origin: of the text, if its tokens are unknown. */
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

/** An element to which tokens are added. */
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
    // leading white space is not underlined, but a token of white space alone gets a span
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

/** Make a span in the colour of an origin; "" has no colour. */
function token(text, origin) {
  const span = document.createElement("span");
  span.className = "token";
  span.dataset.origin = origin;
  span.textContent = text;
  return span;
}
