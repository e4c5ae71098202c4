// Request an answer, and read its stream of chunks.

import { ask } from "./service.js";

/** Yield an answer's chunks, parsed; throws the service's error. */
export async function* chunks(request, signal) {
  const models = await failing(await ask("v1/models", { signal }));
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model: (await models.json()).data[0].id, stream: true, ...request }),
    signal,
  });
  for await (const data of events((await failing(response)).body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("The service broke the answer off.");
}

/** Describe an error in a sentence. */
export function reason(error) {
  return error instanceof TypeError ? "The service does not answer." : error.message;
}

/** Yield the data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
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

/** Return a response; throws the service's message if it is an error. */
async function failing(response) {
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `The service answered ${response.status}.`);
}
