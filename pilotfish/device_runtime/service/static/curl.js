// A request as a command line for a POSIX shell.

import { hasKey } from "./service.js";

const KEY = "PILOTFISH_API_KEY"; // the shell's variable that stands for the user's key

/**
 * Return the curl command of a chat request. body: the request's fields. The command names a variable
 * in place of the API key.
 */
export function curlCommand(body) {
  const url = new URL("v1/chat/completions", document.baseURI).href;
  const lines = [`curl ${quote(url)}`, `-H 'Content-Type: application/json'`];
  if (hasKey()) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  lines.push(`--data-raw ${quote(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

/** Quote a text for the shell: nothing within single quotes has a meaning. */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
