import assert from "node:assert/strict";
import { test } from "node:test";

import { z } from "zod";

import { schemaJson, validated } from "../src/schema.js";
import { callError, CallFailed, image, link, parseJson, Result, resource, SetupError, text, toJson } from "../src/values.js";

for (const json of ["123456789012345678901234567890", '{"a":[-9007199254740993,1.5,"1234567890123456"],"b":{}}', '"\\u00e9 \\"12345678901234567890\\""']) {
  test(`JSON keeps ${json}`, () => {
    assert.deepEqual(JSON.parse(toJson(parseJson(json))), JSON.parse(json));
    assert.equal(toJson(parseJson(json)).includes("9007199254740993"), json.includes("9007199254740993"));
  });
}

test("large integers are bigints, and small ones and fractions are numbers", () => {
  assert.deepEqual(parseJson("[9007199254740993, 9007199254740991, 0.1234567890123456789]"), [9007199254740993n, 9007199254740991, 0.1234567890123456789]);
  assert.equal(toJson({ big: 2n ** 80n, none: undefined }), '{"big":1208925819614629174706176}');
});

test("text that is not JSON is refused, also where it has many digits", () => {
  for (const json of ["{1234567890123456: 1}", "[12345678901234567 8]", "1234567890123456x"]) assert.throws(() => parseJson(json), SyntaxError);
});

test("a result shows a model the error, the output and the content, each once", () => {
  const error = callError("TOOL", "ACCEPTED", "no such city");
  assert.equal(new Result({ error, outputJson: '{"near":"Paris"}' }).text, 'no such city\n{"near":"Paris"}');
  const content = [text("sunny"), image(new Uint8Array(3)), link("https://a.example", "map"), resource("file:///a", "body")];
  assert.equal(new Result({ outputJson: '"sunny"', content }).text, "sunny\n[image: image/png, 3 bytes]\n[map: https://a.example]\nbody");
  assert.equal(new Result({}).text, "null");
});

test("unwrap returns the output, or throws the error as data", () => {
  assert.deepEqual(new Result({ outputJson: '{"a":1}' }).unwrap(), { a: 1 });
  const failed = new Result({ error: callError("NOT_FOUND", "NOT_DISPATCHED", "no tool") });
  assert.throws(() => failed.unwrap(), (problem) => problem instanceof CallFailed && problem.error.code === "NOT_FOUND");
  const asks = new Result({ inputRequestsJson: '{"day":{"method":"elicitation/create"}}' });
  assert.throws(() => asks.unwrap(), (problem) => problem instanceof CallFailed && problem.error.reason === "needs_input");
});

test("a schema of zod becomes JSON Schema, and its defaults and faults reach the handler", async () => {
  const schema = z.object({ city: z.string(), days: z.int().default(1) });
  const written = JSON.parse(schemaJson(schema, "input", "t"));
  assert.deepEqual(written.required, ["city"]);
  assert.deepEqual(await validated(schema, { city: "Oslo" }), { value: { city: "Oslo", days: 1 } });
  const outcome = await validated(schema, { city: 3 });
  assert.match("fault" in outcome ? outcome.fault : "", /arguments\.city/);
});

test("a schema library that cannot write JSON Schema is named with the fix", () => {
  const schema = { "~standard": { validate: (value: unknown) => ({ value }) } };
  assert.throws(() => schemaJson(schema, "input", "forecast"), (problem) => problem instanceof SetupError && /forecast.*pass JSON Schema/.test(problem.message));
});
