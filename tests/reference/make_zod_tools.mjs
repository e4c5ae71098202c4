// Print the JSON schemas of zod's types, each as the argument `e` of a tool, in the form of the AI SDK
// (zod 4, draft 7, input). Arguments are validated instead where a file of them is named.
//
//   npm install zod && node make_zod_tools.mjs > zod.json
//   node make_zod_tools.mjs arguments.json          [[type, arguments], …]: prints those that are refused
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { z } from 'zod';

const object = (e) => z.object({ e });
export const TYPES = {
  email: object(z.email()),
  'string().email': object(z.string().email()),
  url: object(z.url()),
  uuid: object(z.uuid()),
  guid: object(z.guid()),
  nanoid: object(z.nanoid()),
  cuid: object(z.cuid()),
  cuid2: object(z.cuid2()),
  ulid: object(z.ulid()),
  emoji: object(z.emoji()),
  ipv4: object(z.ipv4()),
  ipv6: object(z.ipv6()),
  cidrv4: object(z.cidrv4()),
  base64: object(z.base64()),
  base64url: object(z.base64url()),
  jwt: object(z.jwt()),
  'iso.datetime': object(z.iso.datetime()),
  'iso.date': object(z.iso.date()),
  'iso.time': object(z.iso.time()),
  'iso.duration': object(z.iso.duration()),
  int: object(z.int()),
  int32: object(z.int32()),
  float32: object(z.float32()),
  'number().positive': object(z.number().positive()),
  record: object(z.record(z.string(), z.any())),
  'record(enum)': object(z.record(z.enum(['a', 'b']), z.number())),
  partialRecord: object(z.partialRecord(z.enum(['a', 'b']), z.number())),
  tuple: object(z.tuple([z.string(), z.number()])),
  union: object(z.union([z.string().max(3), z.number()])),
  discriminatedUnion: object(
    z.discriminatedUnion('k', [
      z.object({ k: z.literal('a') }),
      z.object({ k: z.literal('b'), v: z.int() }),
    ]),
  ),
  intersection: object(z.intersection(z.object({ a: z.int() }), z.object({ b: z.int() }))),
  nullable: object(z.string().max(3).nullable()),
  optional: object(z.string().max(3).optional()),
  default: object(z.string().max(3).default('x')),
  literal: object(z.literal([1, 2, 'x'])),
  any: object(z.any()),
  unknown: object(z.unknown()),
  never: object(z.never().optional()),
  looseObject: z.looseObject({ e: z.int() }),
  strictObject: z.strictObject({ e: z.int() }),
  startsWith: object(z.string().startsWith('ab').max(6)),
  includes: object(z.string().includes('ab')),
  'regex with look-ahead': object(z.string().regex(/^(?=.*\d)\w{4}$/)),
  lazy: object(z.lazy(() => z.array(z.int()).max(2))),
  json: object(z.json()),
  hostname: object(z.hostname()),
  e164: object(z.e164()),
  hex: object(z.hex()),
  templateLiteral: object(z.templateLiteral(['a', z.number()])),
  boolean: object(z.boolean()),
};

if (process.argv[2]) {
  const cases = JSON.parse(readFileSync(process.argv[2], 'utf8'));
  const refused = cases.flatMap(([type, given]) => {
    const read = TYPES[type].safeParse(given);
    return read.success ? [] : [[type, given, read.error.issues[0].message]];
  });
  refused.forEach((one) => console.log(JSON.stringify(one)));
  console.error(`${cases.length - refused.length} of ${cases.length} valid`);
} else {
  const options = { target: 'draft-7', io: 'input', reused: 'inline' };
  const version = createRequire(import.meta.url)('zod/package.json').version;
  const types = Object.entries(TYPES).map(([name, type]) => [name, z.toJSONSchema(type, options)]);
  console.log(JSON.stringify({ made: `zod ${version}`, types: Object.fromEntries(types) }));
}
