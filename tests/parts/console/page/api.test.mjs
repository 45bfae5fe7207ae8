import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.requestAnimationFrame = (draw) => setTimeout(draw);
const { events } = await import("../../../../toolbus/parts/console/page/api.mjs");

function body(bytes, length) {
  const parts = Array.from({ length: Math.ceil(bytes.length / length) }, (_, at) => bytes.slice(at * length, (at + 1) * length));
  return new ReadableStream({ pull: (to) => (parts.length ? to.enqueue(parts.shift()) : to.close()) });
}

async function read(text, length) {
  const found = [];
  for await (const { kind, data } of events(body(new TextEncoder().encode(text), length))) found.push([kind, data]);
  return found;
}

test("events are read however their bytes are cut", async () => {
  const text = "event: progress\r\ndata: {\"ä\": 1}\r\n\r\n: a comment\n\ndata: one\ndata: two\n\nevent: result\ndata: 3\n\ndata: cut off";
  const expected = [["progress", '{"ä": 1}'], ["message", "one\ntwo"], ["result", "3"]];
  for (const length of [1, 2, 3, 5, 1000]) assert.deepEqual(await read(text, length), expected, `${length} bytes at once`);
});

test("an event of ten megabytes is looked through once, not again with each part of it", async (t) => {
  const { split } = String.prototype;
  let seen = 0; // characters
  t.mock.method(String.prototype, "split", function (...words) {
    seen += this.length;
    return Reflect.apply(split, this, words);
  });
  const [[, data]] = await read(`data: ${"x".repeat(1e7)}\n\n`, 16_384);
  assert.equal(data.length, 1e7);
  assert.ok(seen < 2.1e7, `${seen} characters: the parts as they come, and the event once`);
});
