import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.requestAnimationFrame = (draw) => setTimeout(draw);
globalThis.location = { hash: "" };
globalThis.addEventListener = () => {};
const { startCatalog } = await import("../../../../toolbus/parts/console/page/stream.mjs");
const { bus, catalog, connection } = await import("../../../../toolbus/parts/console/page/store.mjs");

const tool = (name) => ({ name, source: "billing", description: "" });
const refused = { is_error: true, error: { code: "UNAVAILABLE", message: "the bus stood still" } };

const until = async (met) => {
  for (let looks = 0; looks < 4000 && !met(); looks++) await new Promise((done) => setTimeout(done, 5));
  assert.ok(met());
};

test("tools for certain users are asked for again where the bus refused them for a moment", async () => {
  let answer = refused;
  globalThis.fetch = async (path) => Response.json(path === "/api/tools" ? { tools_by_role: { "": [tool("print_slip")] } } : answer);
  connection.value = "live";
  bus.value = { instance: "a", revision: 1 };
  startCatalog();
  await until(() => catalog.value.length === 1);
  answer = { is_error: false, output: [tool("charge_card")] };
  await until(() => catalog.value.length === 2);
});
