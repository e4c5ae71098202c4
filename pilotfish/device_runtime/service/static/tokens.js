// The tokens of an answer: each has a span in the colour of its origin, and a log-probability. A kind
// is a chunk's { origin, key }; key: whether the drafts were key tokens.

const ORIGINS = new Set(["drafted", "forced", "corrected", "bonus", "target", "local"]);
const entriesBySpan = new WeakMap(); // span → the logprobs entries of its tokens; mostly one token

/** Return the logprobs entries of a span's tokens; null if they are unknown. */
export const tokenEntries = (span) => entriesBySpan.get(span) ?? null;

/**
 * Splits an answer's text into its tokens. The text may arrive later than its tokens. It lacks some
 * tokens, such as the marks around a call. So each text is searched for in the text of the tokens.
 */
export class TokenSplitter {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #unfinished = []; // entries of tokens that end within a character
  #tokens = []; // tokens without a text so far: { text, kind, entries }

  /** Add the tokens of a chunk. logprobs: the chunk's field; without it the tokens are unknown. */
  push(logprobs, kind) {
    for (const entry of logprobs?.content ?? []) {
      const text = this.#decoder.decode(new Uint8Array(entry.bytes), { stream: true });
      this.#unfinished.push(entry);
      if (!text) continue;
      this.#tokens.push({ text, kind, entries: this.#unfinished });
      this.#unfinished = [];
    }
  }

  /**
   * Split a text into pieces { text, kind, entries }, one for each token. If the tokens are unknown,
   * the text is one piece of the given kind.
   */
  split(text, kind) {
    const tokenText = this.#tokens.map((token) => token.text).join("");
    // length of the tokens before the text
    let skipped = tokenText.startsWith(text) ? 0 : tokenText.lastIndexOf(text);
    if (skipped < 0) {
      this.#tokens = [];
      return [{ text, kind, entries: null }];
    }
    const pieces = [];
    for (let left = text.length; left > 0; ) {
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

  /**
   * Add a piece to `target`, an element within this one. Pieces with unknown tokens and the same kind
   * share a span.
   */
  add({ text, kind, entries }, target = this.#element) {
    const known = { origin: ORIGINS.has(kind?.origin) ? kind.origin : "", key: Boolean(kind?.key) };
    const continues = this.#last?.parentElement === target && isOfKind(this.#last, known);
    if (!entries && continues && text[0] !== "\n" && !entriesBySpan.has(this.#last)) {
      this.#last.firstChild.appendData(text);
      return;
    }
    // Leading white space stays outside the span, so that it is not underlined. A token of only white
    // space gets a span, so that the bubble can show its probability.
    const [, space, word] = /^(\s*)(.*)$/su.exec(text);
    this.#last = word || entries ? createSpan(word || space, known) : null;
    if (this.#last && !word) this.#last.classList.add("blank");
    target.append(...[word ? space : "", this.#last ?? space].filter(Boolean));
    if (!entries) return;
    entriesBySpan.set(this.#last, entries);
    if (this.#element.tabIndex === 0) return;
    this.#element.tabIndex = 0;
    this.#element.setAttribute("role", "group");
    this.#element.setAttribute("aria-label", "Text. The arrow keys move from token to token.");
  }
}

/** Whether a span is of this kind. */
const isOfKind = (span, { origin, key }) =>
  span.dataset.origin === origin && (span.dataset.key !== undefined) === key;

/** Create a span in the colour of an origin; origin "" has no colour. */
function createSpan(text, { origin, key }) {
  const span = document.createElement("span");
  span.className = "token";
  span.dataset.origin = origin;
  if (key) span.dataset.key = "";
  span.textContent = text;
  return span;
}
