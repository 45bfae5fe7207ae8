import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

globalThis.requestAnimationFrame = (draw) => setTimeout(draw);
const { applyDigest, bus, calls, historyOf, lost, MAX_CALLS, MAX_TOOLS, POINTS, rates, RATES, sessions, sources, toolKey, tools } =
  await import("../../../../toolbus/parts/console/page/store.mjs");

let number = 0;
const digest = (more = {}) => ({ number: ++number, at: 1000 + number / 2, full: false, instance: "a", rate: 1, ...more });
const call = (of) => ({ number: of, id: `i${of}` });

beforeEach(() => {
  applyDigest(digest({ full: true, instance: "fresh" + number }));
  applyDigest(digest({ full: true }));
});

test("a digest changes what it names and leaves the rest", () => {
  applyDigest(digest({ full: true, sources: [{ source: "x", tools: 1 }, { source: "y", tools: 2 }], draining: false }));
  applyDigest(digest({ sources: [{ source: "x", tools: 9 }], gone: ["y"] }));
  assert.deepEqual([...sources.value.values()], [{ source: "x", tools: 9 }]);
  assert.equal(bus.value.draining, false);
  applyDigest(digest({ sessions: [{ session: "1" }, { session: "2" }] }));
  applyDigest(digest({ closed: ["1"] }));
  assert.deepEqual([...sessions.value.keys()], ["2"]);
});

test("a full digest replaces what is there, also what was lost sight of", () => {
  applyDigest(digest({ sources: [{ source: "x" }], sessions: [{ session: "1" }], tools: [["s", "gone", 1, 0, null, null, null]] }));
  applyDigest(digest({ full: true, sources: [{ source: "z" }], sessions: [], tools: [] }));
  assert.deepEqual([...sources.value.keys()], ["z"]);
  assert.equal(sessions.value.size + tools.value.size, 0);
});

test("a bus that was started again begins with empty histories", () => {
  applyDigest(digest({ calls: [call(5)], tools: [["s", "t", 5, 0, 0.1, 0.2, 1]], lost: 3 }));
  applyDigest(digest({ full: true, instance: "b", calls: [call(1)], tools: [["s", "t", 1, 0, 0.1, 0.2, 1]] }));
  assert.deepEqual(calls.value, [call(1)]);
  assert.equal(rates.value.length, 1);
  assert.equal(lost.value, 0);
  assert.deepEqual(historyOf(tools.value.get(toolKey("s", "t"))), Array(POINTS).fill(0));
});

test("a connection that came back keeps the calls that were seen before", () => {
  applyDigest(digest({ calls: [call(2), call(1)] }));
  applyDigest(digest({ full: true, calls: [call(4), call(3), call(2)] }));
  assert.deepEqual(calls.value.map(({ number: each }) => each), [4, 3, 2, 1]);
});

test("memory is bounded, whatever arrives", () => {
  for (let round = 0; round < 60; round++) {
    const first = round * 50;
    applyDigest(digest({ calls: Array.from({ length: 50 }, (_, at) => call(first + 49 - at)) }));
  }
  assert.equal(calls.value.length, MAX_CALLS);
  assert.equal(calls.value[0].number, 2999);
  assert.equal(rates.value.length, RATES);
  const many = Array.from({ length: MAX_TOOLS + 5 }, (_, at) => ["s", `t${at}`, 1, 0, null, null, at]);
  applyDigest(digest({ tools: many }));
  assert.equal(tools.value.size, MAX_TOOLS);
  assert.ok(!tools.value.has(toolKey("s", "t0")), "the one that was called longest ago goes");
});

test("a tool's history has its calls a second, and moves on while it is silent", () => {
  const at = 2_000_000;
  applyDigest(digest({ at, tools: [["s", "t", 100, 0, null, null, at]] }));
  applyDigest(digest({ at: at + 0.5, tools: [["s", "t", 110, 0, null, null, at]] }));
  const history = () => historyOf(tools.value.get(toolKey("s", "t")));
  assert.equal(history().at(-1), 5);
  applyDigest(digest({ at: at + 4.5 }));
  assert.deepEqual(history().slice(-3), [5, 0, 0]);
  applyDigest(digest({ at: at + 400 }));
  assert.deepEqual(history(), Array(POINTS).fill(0));
});

test("a full digest's older failures are in their places, each once, however deep the list is", () => {
  const numbers = () => calls.value.map(({ number: each }) => each);
  const failed = [1400, 1200]; // told before, and further down than the newest
  for (let round = 0; round < 30; round++) {
    const first = 1000 + round * 50;
    applyDigest(digest({ calls: Array.from({ length: 50 }, (_, at) => call(first + 49 - at)) }));
  }
  applyDigest(digest({ full: true, calls: [2502, 2501, 2500, ...failed, 900].map(call) }));
  assert.equal(new Set(numbers()).size, numbers().length);
  assert.deepEqual(numbers(), [...numbers()].sort((one, other) => other - one));
  assert.deepEqual([numbers()[0], numbers().at(-1)], [2502, 900]);
});

test("calls that ended while the connection was lost and are not told count as skipped", () => {
  applyDigest(digest({ calls: [call(10)] }));
  applyDigest(digest({ full: true, skipped: 3, calls: [call(100), call(99), call(12), call(10), call(4)] }));
  assert.equal(bus.value.skipped, 87);
  applyDigest(digest({ skipped: 2, calls: [call(103)] }));
  assert.equal(bus.value.skipped, 2);
});

test("calls of an hour without a connection are no burst of two seconds", () => {
  const at = 3_000_000;
  applyDigest(digest({ at, tools: [["s", "t", 100, 0, null, null, at]] }));
  applyDigest(digest({ at: at + 3600, full: true, tools: [["s", "t", 7300, 0, null, null, at]] }));
  assert.deepEqual(historyOf(tools.value.get(toolKey("s", "t"))), Array(POINTS).fill(2));
});
