// The conversation in the browser's storage, so that it survives a reload.
//
// Each tab keeps its own conversation. A new tab begins with the conversation that was saved last, by
// any tab. If the service has API keys, the conversation is kept as long as the key: in this tab only.

import { hasKey } from "./service.js";

const NAME = "pilotfish-chat";
const VERSION = 1;
const MOST = 400_000; // characters; older turns are dropped

/** Save the turns, as far as they fit: the newest ones. turns: values that JSON can hold. */
export function saveTurns(turns) {
  const texts = turns.map((turn) => JSON.stringify(turn));
  let size = 0;
  let first = texts.length;
  while (first > 0 && (size += texts[first - 1].length) <= MOST) first -= 1;
  // The results of calls need the turn with the calls.
  while (first > 0 && turns[first]?.messages[0]?.role === "tool") first += 1;
  const saved = `{"version":${VERSION},"cut":${first > 0},"turns":[${texts.slice(first)}]}`;
  write(sessionStorage, saved);
  if (hasKey()) localStorage.removeItem(NAME); // from before the keys
  else write(localStorage, saved);
}

/** Return the saved { turns, cut }; cut: whether older turns were dropped. */
export function loadTurns() {
  if (hasKey()) localStorage.removeItem(NAME);
  for (const storage of hasKey() ? [sessionStorage] : [sessionStorage, localStorage]) {
    try {
      const saved = JSON.parse(storage.getItem(NAME));
      if (saved?.version === VERSION) return saved;
    } catch {
      storage.removeItem(NAME);
    }
  }
  return { turns: [], cut: false };
}

export function forgetTurns() {
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
}

/** Write to a storage; a storage that is full or forbidden keeps nothing. */
function write(storage, text) {
  try {
    storage.setItem(NAME, text);
  } catch {
    storage.removeItem(NAME);
  }
}
