import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.requestAnimationFrame = (draw) => setTimeout(draw);
const { revealed, windowOf } = await import("../../../../toolbus/parts/console/page/rows.mjs");

test("never more than 60 rows are drawn, and those in sight are among them", () => {
  for (const count of [0, 1, 59, 60, 61, 1000, 250_000]) {
    for (const room of [0, 300, 900, 1500]) {
      for (const top of [0, 15, 3000, count * 30 - room]) {
        const [first, end] = windowOf(count, 30, Math.max(0, top), room);
        assert.ok(first >= 0 && end <= count && end - first <= 60);
        const inSight = Math.min(count, Math.max(0, Math.floor(top / 30)));
        assert.ok(first <= inSight && Math.min(count, inSight + Math.floor(room / 30)) <= end, `${count} ${room} ${top}`);
      }
    }
  }
});

test("a row in sight stays where it is, one that a key reaches comes to the edge, one that is opened to the middle", () => {
  for (const middle of [false, true]) assert.equal(revealed(10, 30, 300, 300, middle), 300);
  assert.equal(revealed(9, 30, 300, 300), 270);
  assert.equal(revealed(20, 30, 300, 300), 330);
  assert.equal(revealed(100, 30, 0, 330, true), 2850);
  assert.equal(revealed(2, 30, 300, 330, true), 0);
});
