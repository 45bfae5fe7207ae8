import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.requestAnimationFrame = (draw) => setTimeout(draw);
const { go, link, parseRoute, refine } = await import("../../../../toolbus/parts/console/page/router.mjs");

test("an address gives back the state that made it", () => {
  for (const [page, parts, query] of [
    ["tools", [], {}],
    ["tools", ["a/b", "c d"], { q: "x&y=z #1" }],
    ["calls", ["100%"], { status: "failed" }],
    ["sources", ["شجرة", "<img src=x>"], { q: "?" }],
  ]) {
    assert.deepEqual(parseRoute(link(page, parts, query)), { page, parts, query });
  }
});

test("an empty address is the first page, and a lone % does not break one", () => {
  assert.equal(parseRoute("").page, "overview");
  assert.deepEqual(parseRoute("#/tools/100%").parts, ["100%"]);
});

test("empty values are left out of the address", () => {
  assert.equal(link("tools", [], { q: "", role: undefined, source: null }), "#/tools");
});

test("the back button leads to what was typed into the filter, however soon a row was opened", () => {
  const written = [];
  globalThis.location = { hash: "#/tools" };
  globalThis.history = {
    replaceState: (_state, _title, address) => written.push(["in place", address]),
    pushState: (_state, _title, address) => written.push(["anew", address]),
  };
  refine({ q: "a" });
  refine({ q: "ab" });
  go("tools", ["s", "abc"], { q: "ab" });
  assert.deepEqual(written, [["in place", "#/overview?q=ab"], ["anew", "#/tools/s/abc?q=ab"]]);
});
