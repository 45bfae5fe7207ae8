import assert from "node:assert/strict";
import test from "node:test";

import { areasOf } from "../../../../toolbus/parts/console/page/findings.mjs";
import { around, rowsOf, whyNone } from "../../../../toolbus/parts/console/page/log_lines.mjs";
import { shortAge } from "../../../../toolbus/parts/console/page/text.mjs";

const NOW = 1_000_000;
const DAY = 86400;
const BUS = { draining: false, stuck: 0, loop_lag: 0.001, settings_age: null };
const WELL = {
  bus: BUS,
  calls: [{ name: "a", source: "s", outcome: "OK", ended: NOW - 1 }],
  sources: [{ source: "s", state: "attached", refused: 0 }],
  plugins: { plugins: [{ plugin: "s", source: "run.x", state: "running" }], errors: {} },
  mounts: { mounts: [{ name: "files", state: "live" }, { name: "lazy", state: "stopped" }] },
  keys: { keys: [], certificates: {} },
  changes: [],
  held: [],
  now: NOW,
};

/** Returns the findings of a state that differs from one where all is well: "KIND WHAT: WHY" each. */
const found = (differs) => areasOf({ ...WELL, ...differs }).flatMap(({ findings }) => findings.map(({ kind, what, why }) => `${kind} ${what}: ${why}`));
const failure = (outcome, more = {}) => ({ name: "pay", source: "bank", outcome, ended: NOW - 5, failure: { message: "no money" }, ...more });
const key = (days, more = {}) => ({ identity: "chat", kind: "token", expires: NOW + days * DAY, revoked: null, ...more });

test("a bus where all is well has no findings, and says of each area how it is", () => {
  const areas = areasOf(WELL);
  assert.deepEqual(areas.map(({ title }) => title), ["Tools", "Sources", "Plugins", "Mounts", "Keys", "Approvals", "Bus"]);
  assert.deepEqual(found({}), []);
  for (const { title, sum } of areas) assert.ok(sum, title);
});

test("what one may not read, or has not read yet, is no area", () => {
  const titles = areasOf({ bus: BUS, sources: [], now: NOW }).map(({ title }) => title);
  assert.deepEqual(titles, ["Sources", "Bus"]);
});

test("a tool whose newest call failed does not work; one that recovered, or reports errors, is to be looked at", () => {
  assert.deepEqual(found({ calls: [failure("UNAVAILABLE")] }), ["bad pay: fails: its only call, last with UNAVAILABLE: no money"]);
  const recovered = [{ ...failure("OK"), ended: NOW - 1 }, failure("DEADLINE_EXCEEDED")];
  assert.deepEqual(found({ calls: recovered }), ["warn pay: failed: 1 of 2 calls, last with DEADLINE_EXCEEDED: no money"]);
  assert.deepEqual(found({ calls: [failure("TOOL"), failure("TOOL")] }), ["warn pay: failed: all of 2 calls, last with TOOL: no money"]);
});

test("mistakes of callers and old failures say nothing about a tool", () => {
  const calls = [failure("INVALID_ARGUMENTS"), failure("CANCELLED"), failure("UNAVAILABLE", { ended: NOW - 601 })];
  assert.deepEqual(found({ calls }), []);
});

test("of many tools that fail, five are named and all are counted", () => {
  const calls = Array.from({ length: 9 }, (_, at) => failure("UNAVAILABLE", { name: `t${at}` }));
  const [tools] = areasOf({ ...WELL, calls });
  assert.deepEqual([tools.findings.length, tools.findings[5].what, tools.bad, tools.total], [6, "and 4 more", 9, 9]);
});

test("sources that hang, are away, may not offer or were refused are found", () => {
  const one = (more) => found({ sources: [{ source: "s", state: "attached", refused: 0, ...more }] });
  assert.match(one({ state: "suspect" })[0], /^bad s: does not answer heartbeats/);
  assert.match(one({ state: "offline", offline_since: NOW - 60, offline_until: NOW + 30 })[0], /^warn s: is offline for 1m 00s; .* 30 s more/);
  assert.match(one({ silenced: true })[0], /^warn s: may not offer tools/);
  assert.match(one({ refused: 2 })[0], /^warn s: 2 tools of it were refused/);
});

test("a plugin that was given up, and a supervisor that does not answer, are found", () => {
  const plugins = { plugins: [{ plugin: "p", source: "run.x", state: "given_up", last_exit: "died 5 times" }], errors: { "run.y": "no answer" } };
  assert.deepEqual(found({ plugins }), ["bad p: was given up: died 5 times", "warn run.y: no answer"]);
});

test("mounts that failed, need a login or are refused are found, with the fix", () => {
  const mounts = { mounts: [{ name: "m", state: "failed", reason: "no such file", fix: "install it" }, { name: "n", state: "needs login", reason: "", fix: "" }], refused: { o: "two names" } };
  assert.deepEqual(found({ mounts }), ["bad m: failed: no such file: install it", "bad o: two names", "warn n: needs login"]);
});

test("keys and certificates that expire soon are found, once for a credential, not where a newer key is there", () => {
  assert.deepEqual(found({ keys: { keys: [key(15)] } }), []);
  const both = [key(10), key(10, { kind: "certificate" })];
  assert.deepEqual(found({ keys: { keys: both } }), ["warn chat: expires in 10d 0h: toolbus keys renew chat"]);
  assert.deepEqual(found({ keys: { keys: [key(1), key(80)] } }), []);
  assert.deepEqual(found({ keys: { keys: [key(-1)] } }), ["bad chat: expired 1d 0h ago: toolbus keys renew chat"]);
  assert.deepEqual(found({ keys: { keys: [key(-1, { revoked: NOW })] } }), []);
  const certificates = { server: NOW + 5 * DAY, root: NOW + 100 * DAY };
  assert.deepEqual(found({ keys: { keys: [], certificates } }).map((text) => text.split(":")[0]), ["warn The certificate of the bus", "warn The root of all certificates"]);
});

test("what waits for an approval is found: calls, and changes of declarations", () => {
  const held = [{ tool: "pay", caller: "chat", user_id: "ann", asked: NOW - 3 }];
  const changes = [{ tool: "get", subject: "tool:get", source: "files" }];
  assert.deepEqual(found({ held, changes }), ["warn pay: a call of ann waits for you, for 3 s", "warn get: files declares it otherwise than when it was trusted"]);
});

test("old shared settings, a busy or draining bus, stuck calls and a login that ends are found", () => {
  const one = (more, login) => found({ bus: { ...BUS, ...more }, login })[0] ?? "";
  assert.match(one({ settings_age: 40 }), /^bad Shared settings: they were read 40 s ago/);
  assert.equal(one({ settings_age: 14 }), "");
  assert.match(one({ loop_lag: 1.5 }), /^warn Busy/);
  assert.match(one({ draining: true }), /^warn Draining/);
  assert.match(one({ stuck: 1 }), /^warn Stuck calls: 1 call .* still runs/);
  assert.match(one({}, NOW + 60), /^warn Your login: it ends in 1m 00s/);
});

test("the output of a source is that under its name, or of a plugin that attached as it", () => {
  const rows = [{ plugin: "weather", attached_as: "" }, { plugin: "file", attached_as: "weather" }, { plugin: "other", attached_as: "other" }];
  assert.deepEqual(rowsOf("weather", rows).map(({ plugin }) => plugin), ["weather", "file"]);
  assert.match(whyNone("callback"), /URL/);
  assert.match(whyNone("peer"), /where it was started/);
});

test("the lines near a call are those from just before it to soon after it", () => {
  const lines = [0, 9, 10.5, 12, 12.9, 20].map((at) => ({ at }));
  assert.deepEqual(around(lines, { started: 10, ended: 11 }).map(({ at }) => at), [10.5, 12, 12.9]);
});

test("a short age has one unit", () => {
  assert.deepEqual([0.4, 59, 60, 3599, 7300, 400_000].map(shortAge), ["0 s", "59 s", "1 min", "59 min", "2 h", "4 d"]);
});
