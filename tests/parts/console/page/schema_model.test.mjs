import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const { parseJson, writeJson } = await import("../../../../toolbus/parts/console/page/json.mjs");
const { argumentsModel, modelOf, typeName } = await import("../../../../toolbus/parts/console/page/schema_model.mjs");
const { pathText, startOf, stateOf, writeArguments, writeState } = await import("../../../../toolbus/parts/console/page/form_state.mjs");

const CASES = parseJson(readFileSync(new URL("schemas.json", import.meta.url), "utf8"));
const model = (schema) => argumentsModel(schema);
const of = (schema) => modelOf(schema, schema);

/** Does with a state what hands do with a form, so that it shows a value. */
function filled(place, value) {
  const state = startOf(place);
  switch (place.kind) {
    case "string":
      return { text: value };
    case "number":
      return { text: String(value) };
    case "boolean":
      return { value };
    case "enum":
      return { at: place.values.findIndex((each) => writeJson(each) === writeJson(value)) };
    case "object": {
      const known = place.properties.map(({ name }) => name);
      return {
        fields: place.properties.map(({ name, below }, at) =>
          Object.hasOwn(value, name) ? { on: true, state: filled(below(), value[name]) } : state.fields[at],
        ),
        more: Object.entries(value)
          .filter(([name]) => !known.includes(name))
          .map(([name, each]) => ({ name, state: filled(place.more(), each) })),
      };
    }
    case "array":
      return { items: value.map((each, at) => filled(place.below(at), each)) };
    case "union": {
      const at = place.options.findIndex((option) => stateOf(option(), value));
      return { at, state: filled(place.options[at](), value) };
    }
    case "json":
      return { text: writeJson(value) };
    default:
      return {};
  }
}

test("there are twelve schemas", () => assert.equal(CASES.length, 12));

for (const { name, about, schema, arguments: text } of CASES) {
  test(`${name}: what is typed is what is sent (${about})`, () => {
    const place = model(schema);
    const value = parseJson(text);
    const typed = writeState(place, filled(place, value));
    assert.deepEqual(typed.problems, []);
    assert.deepEqual(sorted(parseJson(typed.text)), sorted(value));
    // The same arguments, read from JSON text, are shown by the form without loss.
    const state = stateOf(place, value);
    assert.ok(state, "the form shows them");
    assert.deepEqual(sorted(parseJson(writeState(place, state).text)), sorted(value));
  });
}

/** Returns a value in which the order of keys does not count, and every number is its text. */
function sorted(value) {
  if (value?.text !== undefined) return `number ${value.text}`;
  if (Array.isArray(value)) return value.map(sorted);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
}

test("numbers are sent as they were typed", () => {
  const place = of({ type: "object", properties: { n: { type: "number" } }, required: ["n"] });
  for (const text of ["9223372036854775808", "1.0", "-0", "1E5", "0.1000"]) {
    assert.equal(writeState(place, { fields: [{ on: true, state: { text } }], more: [] }).text, `{"n":${text}}`);
  }
});

test("what is not a number in JSON is named and not sent", () => {
  const place = of({ type: "object", properties: { list: { type: "array", items: { type: "integer" } } }, required: ["list"] });
  for (const text of ["", "x", "01", "1.", "NaN", "0x10", "1 2", "--1", "١"]) {
    const { problems } = writeState(place, { fields: [{ on: true, state: { items: [{ text: "1" }, { text }] } }], more: [] });
    assert.equal(problems.length, 1, text);
    assert.equal(pathText(problems[0].path), "list[1]");
  }
});

test("an optional field is sent only if it is switched on, also with an empty text", () => {
  const place = of({ type: "object", properties: { a: { type: "string", default: "x" }, b: { type: "string" } }, required: ["b"] });
  const state = startOf(place);
  assert.equal(writeState(place, state).text, '{"b":""}');
  state.fields[0] = { on: true, state: { text: "" } };
  assert.equal(writeState(place, state).text, '{"a":"","b":""}');
});

test("a required field begins with its default, as it is written in the schema", () => {
  const schema = parseJson('{"type":"object","properties":{"a":{"type":"number","default":1.0},"b":{"enum":["x","y"],"default":"y"}},"required":["a","b"]}');
  const place = model(schema);
  assert.equal(writeState(place, startOf(place)).text, '{"a":1.0,"b":"y"}');
});

test("an enum of several values begins without one, and is not sent so", () => {
  const place = of({ enum: ["a", "b"] });
  assert.equal(writeState(place, startOf(place)).problems.length, 1);
  assert.equal(writeState(of({ enum: ["a"] }), startOf(of({ enum: ["a"] }))).text, '"a"');
});

test("arguments as JSON are sent as they stand, and only if they are an object", () => {
  assert.deepEqual(writeArguments(' {"a" : 1.0} '), { text: '{"a" : 1.0}', problems: [] });
  for (const text of ["", "{", "[1]", "5", "null", '{"a":1,}']) assert.equal(writeArguments(text).problems.length, 1, text);
});

test("JSON below a form is checked in its place", () => {
  const place = of({ type: "object", properties: { any: {} }, required: ["any"] });
  const { problems } = writeState(place, { fields: [{ on: true, state: { text: "{no}" } }], more: [] });
  assert.deepEqual(problems[0].path, ["any"]);
});

test("a name that is there twice is named and not sent", () => {
  const place = of({ type: "object", properties: { a: { type: "string" } }, additionalProperties: { type: "string" } });
  const state = { fields: [{ on: true, state: { text: "1" } }], more: [{ name: "a", state: { text: "2" } }] };
  assert.match(writeState(place, state).problems[0].message, /twice/);
});

test("names that mean something to JavaScript are names", () => {
  const schema = JSON.parse('{"type":"object","properties":{"__proto__":{"type":"string"},"constructor":{"type":"string"}},"required":["__proto__","constructor","toString"]}');
  const place = model(schema);
  assert.deepEqual(place.properties.map(({ name }) => name), ["__proto__", "constructor", "toString"]);
  const text = '{"__proto__":"a","constructor":"b","toString":1}';
  assert.equal(writeState(place, stateOf(place, JSON.parse(text))).text, text);
});

test("a schema that contains itself without end begins with a choice or a list, not without end", () => {
  const schema = { $defs: { a: { type: "object", properties: { a: { $ref: "#/$defs/a" } }, required: ["a"] } }, $ref: "#/$defs/a" };
  startOf(model(schema));
  const lists = { type: "object", properties: { x: { $ref: "#/$defs/l" } }, $defs: { l: { type: "array", items: { $ref: "#/$defs/l" }, minItems: 3 } } };
  startOf(model(lists));
  const choices = { $defs: { u: { anyOf: [{ $ref: "#/$defs/u" }, { type: "null" }] } }, properties: { u: { $ref: "#/$defs/u" } }, required: ["u"] };
  startOf(model(choices));
  model(choices).properties[0].below().names();
});

test("schemas that are wrong in any way are JSON text, never an error", () => {
  const wrong = [
    5, null, "x", [], false, { type: 7 }, { type: "constructor" }, { type: [] }, { type: {} }, { $ref: 5 }, { $ref: "#/a/b" }, { $ref: "#/%" },
    { enum: 5 }, { properties: 5, type: "object" }, { type: "object", properties: { a: 5 }, required: [{}, 1] }, { prefixItems: 5 }, { allOf: [5] },
    { allOf: [{ $ref: "#" }] }, { anyOf: [null, 5, true] }, { type: "array", minItems: "x" }, { type: "array", items: [] }, { minimum: {} },
    { type: "string", format: "constructor" }, { properties: { a: { required: 5 } }, allOf: [{ required: 5 }], required: 5 }, { title: {}, description: [] },
  ];
  for (const schema of wrong) {
    for (const place of [of(schema), model(schema)]) {
      writeState(place, startOf(place));
      typeName(place);
      assert.equal(typeof place.hint, "string");
      assert.equal(typeof place.title + typeof place.description, "stringstring");
      stateOf(place, { a: [1, "x", null] });
      if (place.kind === "union") place.names();
      if (place.kind === "object") place.properties.forEach(({ below }) => startOf(below()));
    }
  }
});

test("a text that a field would show differently is JSON text, so that nothing is changed by looking at it", () => {
  const lines = of({ type: "string" });
  assert.ok(stateOf(lines, "a\nb"));
  assert.equal(stateOf(lines, "a\r\nb"), null);
  assert.equal(stateOf(of({ type: "string", format: "email" }), "a\nb"), null);
});
