import assert from "node:assert/strict";
import test from "node:test";

import { failed, familyOf, groupKey, groupsOf, layout } from "../../../../toolbus/parts/console/page/spans_layout.mjs";

const call = (id, parent, started, ended, more = {}) => ({ id, parent, started, ended, outcome: "OK", ...more });
const ROOT = call("a", "", 100, 110, { number: 5 });
const CHILD = call("b", "a", 101, 109, { number: 4 });
const GRANDCHILD = call("c", "b", 102, 104, { number: 1, outcome: "TIMEOUT" });
const SECOND = call("d", "a", 101.5, 102, { number: 2 });
const OTHER = call("x", "", 90, 120, { number: 9 });
const ENDED = [OTHER, ROOT, CHILD, SECOND, GRANDCHILD];

const drawn = (rows) => rows.map((row) => [row.call.id, row.depth]);

test("whichever call of a family is asked for, the whole family comes, from its oldest ancestor", () => {
  for (const id of ["a", "b", "c", "d"]) {
    const { calls, missing } = familyOf(id, ENDED, []);
    assert.equal(calls[0].id, "a");
    assert.deepEqual(calls.map((each) => each.id).sort(), ["a", "b", "c", "d"]);
    assert.equal(missing, "");
  }
});

test("a parent that is not recorded any more is named", () => {
  const { calls, missing } = familyOf("c", [CHILD, GRANDCHILD], []);
  assert.deepEqual(calls.map((each) => each.id), ["b", "c"]);
  assert.equal(missing, "a");
  assert.deepEqual(familyOf("unknown", ENDED, []), { calls: [], missing: "" });
});

test("calls that are each other's parents end in a family of both", () => {
  const { calls } = familyOf("p", [call("p", "q", 1, 2), call("q", "p", 1, 2), call("s", "s", 1, 2)], []);
  assert.deepEqual(calls.map((each) => each.id).sort(), ["p", "q"]);
  assert.equal(layout(calls, 3).rows.length, 2);
  assert.equal(layout(familyOf("s", [call("s", "s", 1, 2)], []).calls, 3).rows.length, 1);
});

test("of a call that runs and has ended, the end counts", () => {
  const running = { id: "a", parent: "", started: 100 };
  assert.equal(familyOf("a", [ROOT], [running]).calls[0].ended, 110);
});

test("rows come parents first, siblings in the order in which they began, bars within a millisecond", () => {
  const { began, seconds, rows } = layout(familyOf("b", ENDED, []).calls, 0);
  assert.deepEqual([began, seconds], [100, 10]);
  assert.deepEqual(drawn(rows), [["a", 0], ["b", 1], ["c", 2], ["d", 1]]);
  for (const row of rows) {
    assert.ok(Math.abs(row.left * seconds + began - row.call.started) < 0.001);
    assert.ok(Math.abs(row.width * seconds - (row.call.ended - row.call.started)) < 0.001);
  }
  assert.deepEqual(rows.map((row) => row.children), [2, 1, 0, 0]);
});

test("a running call lasts until now, and so does its whole", () => {
  const running = [{ id: "r", parent: "", started: 100 }, { id: "s", parent: "r", started: 106 }];
  const { seconds, rows } = layout(familyOf("s", [], running).calls, 108);
  assert.equal(seconds, 8);
  assert.deepEqual(rows.map((row) => [row.running, row.left, row.width]), [[true, 0, 1], [true, 0.75, 0.25]]);
});

test("only what failed, or was slow, is shown with its ancestors", () => {
  const calls = familyOf("a", ENDED, []).calls;
  const only = layout(calls, 0, "failed");
  assert.deepEqual(drawn(only.rows), [["a", 0], ["b", 1], ["c", 2]]);
  assert.equal(only.left_out, 1);
  assert.deepEqual(drawn(layout(calls, 0, "slow").rows), [["a", 0], ["b", 1], ["c", 2]]);
  const deep = [call("1", "", 0, 9), call("2", "1", 1, 2), call("3", "2", 1, 2, { outcome: "TOOL" }), call("4", "1", 3, 4), call("5", "4", 3, 4), call("6", "1", 5, 6, { outcome: "TOOL" })];
  assert.deepEqual(drawn(layout(deep, 0, "failed").rows), [["1", 0], ["2", 1], ["3", 2], ["6", 1]]);
});

test("a question is not a failure, and neither is a running call", () => {
  assert.ok(!failed({ outcome: "INPUT_REQUIRED" }) && !failed({ outcome: "OK" }) && !failed({}));
  assert.ok(failed({ outcome: "CANCELLED" }));
});

test("failed calls come by tool and code, the group with the newest call first", () => {
  const of = (number, name, outcome, source = "s") => call(`${number}`, "", number, number, { number, name, outcome, source });
  const calls = [of(9, "a", "TOOL"), of(8, "b", "TIMEOUT"), of(7, "a", "OK"), of(6, "a", "TOOL"), of(5, "a", "TIMEOUT"), of(4, "a b/c", "NOT_FOUND", "")];
  const groups = groupsOf(calls);
  assert.deepEqual(groups.map(({ name, outcome, count }) => [name, outcome, count]), [["a", "TOOL", 2], ["b", "TIMEOUT", 1], ["a", "TIMEOUT", 1], ["a b/c", "NOT_FOUND", 1]]);
  assert.equal(groups[0].newest.number, 9);
  assert.deepEqual(groups.map(({ key }) => key), ["a/TOOL/s", "b/TIMEOUT/s", "a/TIMEOUT/s", groupKey("a b/c", "NOT_FOUND")]);
});

test("calls that took no time and no calls at all have a layout", () => {
  assert.equal(layout([], 5).rows.length, 0);
  const [row] = layout([call("a", "", 5, 5)], 9).rows;
  assert.deepEqual([row.left, row.width], [0, 1]);
});

test("5,000 calls, one below the other, are laid out at once", () => {
  const chain = Array.from({ length: 5000 }, (_, at) => call(`${at}`, at ? `${at - 1}` : "", at, 5000));
  const before = performance.now();
  const { rows } = layout(familyOf("4999", chain, []).calls, 0, "slow");
  assert.ok(performance.now() - before < 2000);
  assert.ok(rows.length > 4000);
});
