// The figures of an answer while it arrives: its speed now, and the accepted share of its drafts.

import { percent } from "./figures.js";

const NOW = 2500; // ms: "now" is a mean over this time
const PASSED = new Set(["drafted", "forced"]); // origins of accepted drafts

export class LiveFigures {
  #began = performance.now(); // ms
  #seconds = null; // duration of the answer, once it has ended
  #arrivals = []; // [ms, tokens] of the chunks of the last NOW ms
  #accepted = 0;
  #rejected = 0;

  /** Duration of the answer until now, or until its end. */
  get seconds() {
    return this.#seconds ?? (performance.now() - this.#began) / 1000;
  }

  /** Count the tokens of a chunk. pilotfish: the chunk's field, with their number and origin. */
  add(pilotfish) {
    if (!pilotfish?.tokens) return;
    this.#arrivals.push([performance.now(), pilotfish.tokens]);
    if (PASSED.has(pilotfish.origin)) this.#accepted += pilotfish.tokens;
    // a correction stands in the place of one rejected draft
    else if (pilotfish.origin === "corrected") this.#rejected += 1;
  }

  /** The answer has ended. seconds: its duration, if it ended earlier. */
  end(seconds = this.seconds) {
    this.#seconds ??= seconds;
  }

  /** Format the figures as short phrases. */
  phrases() {
    const now = performance.now();
    while (this.#arrivals.length && now - this.#arrivals[0][0] > NOW) this.#arrivals.shift();
    const tokens = this.#arrivals.reduce((sum, [, count]) => sum + count, 0);
    const seconds = Math.min(NOW, now - this.#began) / 1000;
    const parts = [`${(tokens / seconds).toFixed(1)} a second now`];
    const verified = this.#accepted + this.#rejected;
    if (verified) parts.push(`${percent(this.#accepted / verified)} accepted`);
    return parts;
  }
}
