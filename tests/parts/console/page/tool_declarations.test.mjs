import assert from "node:assert/strict";
import { test } from "node:test";

let asked; // the bodies of all requests
let answers; // what the bus answers to them, in turn: [status, body]; null: nothing
globalThis.fetch = async (path, { body }) => {
  asked.push(JSON.parse(body));
  const answer = answers.shift();
  if (!answer) throw new TypeError("no connection");
  return new Response(JSON.stringify(answer[1]), { status: answer[0] });
};
const { declarationOf, restrictedTools } = await import("../../../../toolbus/parts/console/page/tool_declarations.mjs");

function expect(...list) {
  asked = [];
  answers = list;
}

const failed = (code) => [200, { is_error: true, error: { code, message: "no" } }];

test("a bus that drains or is full leaves out the tools for certain users, and is asked for them again", async () => {
  for (const code of ["UNAVAILABLE", "OVERLOADED"]) {
    expect(failed(code), [200, { is_error: false, output: [{ name: "pay" }] }]);
    assert.equal(await restrictedTools(), null);
    assert.deepEqual(await restrictedTools(), [{ name: "pay" }]);
  }
});

test("where the bus does not answer, that is an error, which is tried again", async () => {
  expect(null);
  await assert.rejects(restrictedTools(), { name: "ApiError", status: 0 });
});

test("who may not state the level of an operator is refused once, and asks for the rest without it", async () => {
  expect([403, { detail: "you may not state level 90" }], [200, { is_error: false, output: [{ name: "sum" }] }]);
  assert.deepEqual(await restrictedTools(), []);
  assert.deepEqual(await restrictedTools(), []);
  assert.deepEqual(await declarationOf("maths", "sum"), { name: "sum" });
  assert.deepEqual(asked.map(({ context }) => context !== undefined), [true, false]);
});
