// The AI SDK with its provider for compatible servers: prints an object with the outcome of each use.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const provider = createOpenAICompatible({
  name: 'pilotfish',
  baseURL: process.argv[2],
  apiKey: process.argv[3],
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider('pilotfish');
const short = { model, prompt: 'ab', temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const long = { ...short, maxOutputTokens: 150 };
const answers = { stream: '' };

answers.chat = (await generateText(short)).text;
const streamed = streamText(short);
for await (const delta of streamed.textStream) answers.stream += delta;
answers.usage = (await streamed.usage).outputTokens;
const called = await generateText({
  ...long,
  toolChoice: 'required',
  stopWhen: stepCountIs(1),
  tools: {
    move: tool({
      inputSchema: z.object({ to: z.enum(['here', 'there']) }),
      execute: async ({ to }) => to,
    }),
  },
});
answers.result = called.toolResults[0].output;
answers.structured = (
  await generateText({
    ...long,
    output: Output.object({
      schema: z.object({ kind: z.enum(['shark', 'pilot']), big: z.boolean() }),
    }),
  })
).output;
try {
  await generateText({ ...short, temperature: -1 });
} catch (error) {
  answers.error = [error.statusCode, null, error.message];
}
console.log(JSON.stringify(answers));
