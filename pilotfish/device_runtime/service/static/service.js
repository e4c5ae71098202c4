// Requests to the service, with the user's API key if the service requires one.

const STORED = "pilotfish-key";
let asking = null;

/** Return the response; ask the user for a key until it is valid. patience: ms per attempt. */
export async function ask(path, { patience, signal, headers, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const signals = [signal, patience && AbortSignal.timeout(patience)].filter(Boolean);
    const response = await fetch(path, {
      ...options,
      cache: "no-store",
      headers: key === null ? headers : { ...headers, Authorization: `Bearer ${key}` },
      signal: signals.length ? AbortSignal.any(signals) : undefined,
    });
    if (response.status !== 401) return response;
    await response.body?.cancel();
    // unless another request has got a new key meanwhile
    if (sessionStorage.getItem(STORED) === key) await keyAgain(key !== null);
    signal?.throwIfAborted();
  }
}

/** Ask the user for a key; all waiting requests share one dialog. */
function keyAgain(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    document.getElementById("key-text").textContent = refused
      ? "The service refused that key. Try another one."
      : "This service wants an API key. It is kept until this tab is closed.";
    field.value = "";
    dialog.addEventListener("cancel", stay);
    document.getElementById("key-form").addEventListener("submit", take, { once: true });
    dialog.showModal();

    function stay(event) {
      event.preventDefault(); // the page does not work without a key
    }
    function take() {
      sessionStorage.setItem(STORED, field.value.trim());
      field.value = "";
      dialog.removeEventListener("cancel", stay);
      asking = null;
      resolve();
    }
  });
  return asking;
}
