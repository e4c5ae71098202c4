// Buttons that copy a text.

const SHOWN = 2000; // ms for which a button tells the result

/** Make a button. label: its text. name: its accessible name. read: returns the text to copy. */
export function copyButton(label, name, read) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  // The label is an attribute that the style sheet shows, so that the answer's text stays exact.
  button.dataset.label = label;
  button.setAttribute("aria-label", name);
  button.addEventListener("click", async () => {
    const copied = await copy(read());
    button.dataset.label = copied ? "Copied" : "Not copied";
    document.getElementById("announce").textContent = copied
      ? "Copied."
      : "The browser did not allow the page to copy.";
    setTimeout(() => (button.dataset.label = label), SHOWN);
  });
  return button;
}

/** Copy a text; return whether it was copied. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}

/** Copy by a selection: browsers have no `navigator.clipboard` on http, except on this machine. */
function copySelection(text) {
  const field = document.createElement("textarea");
  field.className = "unseen";
  field.value = text;
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}
