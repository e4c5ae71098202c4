// OpenAI's client for node: prints an object with the outcome of each use.
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0 });
const messages = [{ role: 'user', content: 'ab' }];
const short = { model: 'pilotfish', messages, temperature: 0, max_tokens: 12 };
const parameters = {
  type: 'object',
  properties: { to: { enum: ['here', 'there'] } },
  required: ['to'],
  additionalProperties: false,
};
const answers = { models: [], stream: '' };

for await (const model of client.models.list()) answers.models.push(model.id);
answers.chat = (await client.chat.completions.create(short)).choices[0].message.content;
const chunks = await client.chat.completions.create({
  ...short,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  answers.stream += chunk.choices[0]?.delta?.content ?? '';
  answers.usage = chunk.usage?.completion_tokens;
}
const runner = client.chat.completions.runTools(
  {
    ...short,
    max_tokens: 150,
    tool_choice: 'required',
    parallel_tool_calls: false,
    tools: [
      {
        type: 'function',
        function: { name: 'move', parse: JSON.parse, parameters, function: ({ to }) => to },
      },
    ],
  },
  { maxChatCompletions: 1 },
);
answers.result = await runner.finalFunctionToolCallResult();
const structured = await client.chat.completions.create({
  ...short,
  max_tokens: 150,
  response_format: {
    type: 'json_schema',
    json_schema: { name: 'move', strict: true, schema: parameters },
  },
});
answers.structured = JSON.parse(structured.choices[0].message.content);
answers.response = (
  await client.responses.create({ model: 'pilotfish', input: 'ab', max_output_tokens: 16 })
).output_text;
const stopped = await client.chat.completions.create({ ...short, max_tokens: 2000, stream: true });
for await (const _ of stopped) {
  stopped.controller.abort();
  break;
}
try {
  await client.chat.completions.create({ ...short, temperature: -1 });
} catch (error) {
  answers.error = [error.status, error.param, error.message];
}
console.log(JSON.stringify(answers));
