import assert from "node:assert/strict";
import test from "node:test";

import { history, keyOf, merged, selects, skipped, textOf } from "../../../../toolbus/parts/console/page/call_history.mjs";
import { applyDigest } from "../../../../toolbus/parts/console/page/store.mjs";

const call = (number, more = {}) => ({ number, id: `i${number}`, name: "t", source: "s", caller: "h", user_id: "u", outcome: "OK", ...more });
const numbers = (calls) => calls.map(({ number }) => number);

test("calls of digests and calls that were asked for are one list, newest first, each once", () => {
  assert.deepEqual(numbers(merged([call(9), call(7), call(3)], [call(8), call(7), call(1)])), [9, 8, 7, 3, 1]);
  assert.deepEqual(numbers(merged([], [call(2), call(1)])), [2, 1]);
  assert.deepEqual(numbers(merged([call(2)], [])), [2]);
});

test("of a call that was asked for, the record with its contents counts", () => {
  const [found] = merged([call(7)], [call(7, { arguments: "{}" })]);
  assert.equal(found.arguments, "{}");
});

test("each filter selects by one value, and what runs has neither failed nor succeeded", () => {
  const failed = call(1, { outcome: "TIMEOUT" });
  const running = call(1, { outcome: undefined });
  for (const query of [{ tool: "t" }, { source: "s" }, { caller: "h" }, { user: "u" }, { outcome: "TIMEOUT" }, { status: "failed" }, {}]) {
    assert.ok(selects(query, failed), JSON.stringify(query));
  }
  for (const query of [{ tool: "x" }, { source: "x" }, { caller: "x" }, { user: "x" }, { outcome: "OK" }, { status: "running" }]) {
    assert.ok(!selects(query, failed), JSON.stringify(query));
  }
  assert.ok(selects({ status: "running" }, running) && !selects({ status: "failed" }, running));
  assert.ok(!selects({ status: "failed" }, call(1, { outcome: "INPUT_REQUIRED" })));
});

test("words are looked for in names, owners, ids, outcome and message", () => {
  const text = textOf(call(1, { call_id: "C-1", trace_id: "ABC", outcome: "TOOL", failure: { message: "No Card" } }));
  for (const word of ["t", "s", "h", "u", "i1", "c-1", "abc", "tool", "no card"]) assert.ok(text.includes(word), word);
});

test("a call that was refused before it had an id is named by its number", () => {
  assert.equal(keyOf(call(4)), "i4");
  assert.equal(keyOf(call(4, { id: "" })), "n4");
});

test("calls that digests leave out are counted from the opening of the page until the bus is another", () => {
  const digest = (number, more = {}) => ({ number, instance: "a", at: 1, calls: [], running: [], ...more });
  applyDigest(digest(1, { full: true, skipped: 50 }));
  assert.equal(skipped.value, 0); // they ended before the page was there
  applyDigest(digest(2, { skipped: 7, calls: [call(5)] }));
  applyDigest(digest(3, { skipped: 2 }));
  applyDigest(digest(3, { skipped: 2 })); // the same once more
  assert.equal(skipped.value, 9);
  assert.deepEqual(numbers(history.value), [5]);
  applyDigest(digest(1, { instance: "b", full: true, skipped: 3 }));
  assert.equal(skipped.value, 0);
});
