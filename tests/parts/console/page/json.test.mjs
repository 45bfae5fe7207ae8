import assert from "node:assert/strict";
import { test } from "node:test";

const { isNumber, parseJson, writeJson } = await import("../../../../toolbus/parts/console/page/json.mjs");

test("numbers stay what was written", () => {
  for (const text of ["9223372036854775808", "1.0", "-0", "1e400", "0.10000000000000000001", "1E5"]) {
    const value = parseJson(`{"a":[${text}]}`);
    assert.ok(isNumber(value.a[0]));
    assert.equal(writeJson(value), `{"a":[${text}]}`);
  }
  assert.equal(parseJson("5"), 5);
});

test("what is not JSON is an error", () => {
  for (const text of ["", "{", "NaN", "01", "'a'"]) assert.throws(() => parseJson(text), SyntaxError);
});
