// Requests to the service, with the user's API key if the service requires one.

const STORED = "pilotfish-key";
let keyRequest = null; // promise of the open key dialog

/**
 * Send a request and return the response. If the service refuses the API key, ask the user for a key
 * and try again. timeout: ms for each attempt.
 */
export async function request(path, { timeout, signal, headers, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const signals = [signal, timeout && AbortSignal.timeout(timeout)].filter(Boolean);
    const response = await fetch(path, {
      ...options,
      cache: "no-store",
      headers: key === null ? headers : { ...headers, Authorization: `Bearer ${key}` },
      signal: signals.length ? AbortSignal.any(signals) : undefined,
    });
    if (response.status !== 401) return response;
    await response.body?.cancel();
    // If the key has changed, another request has asked for it meanwhile.
    if (sessionStorage.getItem(STORED) === key) await askForKey(key !== null);
    signal?.throwIfAborted();
  }
}

/** Whether the user has entered an API key in this tab. */
export const hasKey = () => sessionStorage.getItem(STORED) !== null;

/** Ask the user for a key; all waiting requests share one dialog. refused: whether a key was refused. */
function askForKey(refused) {
  keyRequest ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    document.getElementById("key-text").textContent = refused
      ? "The service refused that key. Try another one."
      : "This service needs an API key. The page keeps the key until you close this tab.";
    field.value = "";
    dialog.addEventListener("cancel", keepOpen);
    document.getElementById("key-form").addEventListener("submit", storeKey, { once: true });
    dialog.showModal();

    function keepOpen(event) {
      event.preventDefault(); // the page does not work without a key
    }
    function storeKey() {
      sessionStorage.setItem(STORED, field.value.trim());
      field.value = "";
      dialog.removeEventListener("cancel", keepOpen);
      keyRequest = null;
      resolve();
    }
  });
  return keyRequest;
}
