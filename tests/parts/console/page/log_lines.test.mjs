import assert from "node:assert/strict";
import test from "node:test";

import { newestLines } from "../../../../toolbus/parts/console/page/log_lines.mjs";

const line = (number, text = `line ${number}`) => ({ number, at: 1, stream: "stdout", text });

test("newer lines are added once, and the oldest go", () => {
  const first = newestLines([], [line(1), line(2), line(3)], 4);
  const second = newestLines(first, [line(3), line(4), line(5)], 4);
  assert.deepEqual(second.map(({ number }) => number), [2, 3, 4, 5]);
});

test("lines are plain text of a bounded width, and are found whatever their case", () => {
  const [colored, long] = newestLines([], [line(1, "\x1b[31mError\x1b[0m"), line(2, "x".repeat(70000))], 10);
  assert.deepEqual([colored.text, colored.search], ["Error", "error"]);
  assert.equal(long.text.length, 4000);
});
