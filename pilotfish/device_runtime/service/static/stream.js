// Request an answer, and read its stream of chunks.

import { request } from "./service.js";

let model = "pilotfish"; // name of the service's model, as the service last told it

export const modelName = () => model;

/**
 * Request an answer and yield its chunks, parsed; throws the service's error.
 * fields: fields of the request other than `model` and `stream`.
 */
export async function* chunks(fields, signal) {
  const models = await throwIfFailed(await request("v1/models", { signal }));
  model = (await models.json()).data[0].id;
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, stream: true, ...fields }),
    signal,
  });
  for await (const data of events((await throwIfFailed(response)).body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("The service ended the answer too early.");
}

/** Describe an error in a sentence. A TypeError means that `fetch` got no response. */
export function describeError(error) {
  return error instanceof TypeError ? "The service does not answer." : error.message;
}

/** Yield the data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = ""; // the last line, which is not complete yet
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    await reader.cancel();
  }
}

/** Return the response; throw the service's error message if the status is not 2xx. */
async function throwIfFailed(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The service answered with HTTP status ${response.status}.`);
}
