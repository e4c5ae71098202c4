// The text of an answer with code in a code face: fenced blocks and `inline` code of Markdown.
//
// The text arrives in pieces. Nothing of it is lost or changed: the fences and the backticks around
// code stay in the document, but are not shown. Only the few characters that may become a fence or the
// end of a run of backticks wait for the next piece. Inline code ends on its line, else its backtick is
// an ordinary character.

import { copyButton } from "./clipboard.js";
import { TokenText } from "./tokens.js";

const LONGEST_INFO = 100; // characters after an opening fence
// The bounds keep the time for each piece small, whatever the text is.
const OPENING = /^[ \t]{0,20}(`{3,100}|~{3,100})([^\n]*)(\n?)/;
const MAYBE_OPENING = /^[ \t]{0,20}(`{0,100}|~{0,100})$/;
const TICKS = /^`{1,100}/;

export class CodeText {
  #element;
  #tokens;
  #pieces = []; // pieces not shown yet, whose texts together are #rest
  #rest = "";
  #lineStart = true;
  #block = null; // the open block: { closing, maybeClosing, code, element }
  #inline = null; // the open inline code: { ticks, element, mark }

  constructor(element) {
    this.#element = element;
    this.#tokens = new TokenText(element);
  }

  /** Add a piece { text, kind, entries }. */
  add(piece) {
    this.#pieces.push({ ...piece });
    this.#rest += piece.text;
    this.#read(false);
  }

  /** Show what waits, because the text has ended. */
  end() {
    this.#read(true);
    this.#unwrapInline();
  }

  #read(ended) {
    while (this.#rest && this.#step(ended)) continue;
  }

  /** Show the next part of the text; return false if it must wait for more text. */
  #step(ended) {
    if (this.#block) return this.#readBlock(ended);
    if (this.#inline) return this.#readInline(ended);
    if (this.#lineStart) {
      if (this.#rest[0] === "\n") {
        const gap = createSpan("gap");
        this.#element.append(gap);
        this.#take(1, gap);
        return true;
      }
      const opening = OPENING.exec(this.#rest);
      if (opening && this.#isFence(opening)) {
        if (!opening[3] && !ended) return false;
        this.#openBlock(opening);
        return true;
      }
      if (!ended && MAYBE_OPENING.test(this.#rest)) return false;
      this.#lineStart = false;
    }
    return this.#readText(ended);
  }

  #isFence([, fence, info]) {
    return info.length <= LONGEST_INFO && !(fence[0] === "`" && info.includes("`"));
  }

  #openBlock([line, fence, info]) {
    const element = document.createElement("div");
    element.className = "block";
    element.dir = "ltr";
    element.dataset.language = info.trim().split(/\s/u)[0] || "code";
    const pre = document.createElement("pre");
    const code = document.createElement("code");
    pre.append(code);
    element.append(
      copyButton("Copy", "Copy this code", () => code.textContent),
      pre,
    );
    this.#element.append(element);
    const mark = createSpan("mark");
    element.prepend(mark);
    this.#take(line.length, mark);
    this.#block = {
      closing: new RegExp(`^[ \\t]{0,20}${fence[0]}{${fence.length},100}[ \\t]{0,20}(\\n|$)`),
      maybeClosing: new RegExp(`^[ \\t]{0,20}${fence[0]}{0,100}[ \\t]{0,20}$`),
      code,
      element,
    };
    this.#lineStart = true;
  }

  #readBlock(ended) {
    const { closing, maybeClosing, code, element } = this.#block;
    if (this.#lineStart) {
      const fence = closing.exec(this.#rest);
      if (fence && (fence[1] || ended)) {
        const mark = createSpan("mark");
        element.append(mark);
        this.#take(fence[0].length, mark);
        this.#block = null;
        return true;
      }
      if (!ended && maybeClosing.test(this.#rest)) return false;
    }
    const length = this.#rest.indexOf("\n") + 1;
    this.#take(length || this.#rest.length, code);
    this.#lineStart = length > 0;
    return true;
  }

  #readText(ended) {
    const length = this.#rest.search(/[`\n]/);
    if (length !== 0) {
      this.#take(length < 0 ? this.#rest.length : length, this.#element);
      return true;
    }
    if (this.#rest[0] === "\n") {
      this.#take(1, this.#element);
      this.#lineStart = true;
      return true;
    }
    const ticks = TICKS.exec(this.#rest)[0].length;
    if (ticks === this.#rest.length && !ended) return false;
    const element = document.createElement("code");
    const mark = createSpan("mark");
    element.append(mark);
    this.#element.append(element);
    this.#take(ticks, mark);
    this.#inline = { ticks, element, mark };
    return true;
  }

  #readInline(ended) {
    const { ticks, element } = this.#inline;
    const length = this.#rest.search(/[`\n]/);
    if (length !== 0) {
      this.#take(length < 0 ? this.#rest.length : length, element);
      return true;
    }
    if (this.#rest[0] === "\n") {
      this.#unwrapInline();
      return true;
    }
    const run = TICKS.exec(this.#rest)[0].length;
    if (run === this.#rest.length && !ended) return false;
    if (run === ticks) {
      const mark = createSpan("mark");
      element.append(mark);
      this.#take(run, mark);
      this.#inline = null;
    } else this.#take(run, element);
    return true;
  }

  /** Show inline code that has no end as ordinary text. */
  #unwrapInline() {
    if (!this.#inline) return;
    const { element, mark } = this.#inline;
    mark.replaceWith(...mark.childNodes);
    element.replaceWith(...element.childNodes);
    this.#inline = null;
  }

  /** Move the first `count` characters of the text to an element. */
  #take(count, target) {
    this.#rest = this.#rest.slice(count);
    for (let left = count; left > 0; ) {
      const piece = this.#pieces[0];
      const text = piece.text.slice(0, left);
      this.#tokens.add({ ...piece, text }, target);
      left -= text.length;
      piece.text = piece.text.slice(text.length);
      if (!piece.text) this.#pieces.shift();
    }
  }
}

/** Show a whole text that is no answer, so it has no tokens, with its code in a code face. */
export function showWithCode(element, text) {
  element.replaceChildren();
  const reader = new CodeText(element);
  reader.add({ text, kind: null, entries: null });
  reader.end();
  for (const span of element.querySelectorAll(".token")) span.replaceWith(...span.childNodes);
  element.classList.remove("tokens");
}

/** Create a span of a CSS class. "mark": not shown. "gap": an empty line, not shown beside a block. */
function createSpan(kind) {
  const span = document.createElement("span");
  span.className = kind;
  return span;
}
