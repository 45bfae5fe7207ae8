// Says what needs attention: tools that fail, sources that do not answer, mounts that failed, what expires, what waits.
// Pure; times are seconds since the epoch.

import { failed } from "./spans_layout.mjs";
import { age, count, plural } from "./text.mjs";

export const RECENT = 600; // s: failures from before need no attention any more
const DAY = 86400;
const KEY_DAYS = 14; // before a key expires
const SERVER_DAYS = 14; // the bus renews its certificate 30 days before
const ROOT_DAYS = 180; // every credential changes with a new root
const LOGIN_SECONDS = 900; // before the login of a browser ends
const SETTINGS_SECONDS = 15; // since shared settings were read
const LAG_SECONDS = 0.5;
const MAX_NAMED = 5; // of one kind of finding; the others are counted
// Mistakes of callers, which say nothing about a tool.
const OF_CALLERS = new Set(["CANCELLED", "INVALID_ARGUMENTS", "PERMISSION_DENIED", "CATALOG_STALE", "REPEATED", "NOT_FOUND"]);

/**
 * Returns the areas that were looked at, in order: {title, page, query, findings, bad, total, sum}. A finding is {kind:
 * "bad" or "warn", what, why, parts, at}; its `parts` lead to a row of the page. `bad` of `total` things do not work.
 * `sum` says how it is where nothing needs attention. An area is left out where `from` knows nothing of it: {bus, tools, calls, sources, plugins, mounts, keys,
 * changes, held, login, now}.
 */
export function areasOf(from) {
  return AREAS.flatMap(({ title, page, query = {}, needs, look, sum }) => {
    if (needs.some((name) => from[name] === undefined)) return [];
    const all = look(from).sort((one, other) => (one.kind === other.kind ? 0 : one.kind === "bad" ? -1 : 1));
    const findings = all.slice(0, MAX_NAMED);
    const others = all.slice(MAX_NAMED);
    if (others.length) findings.push({ kind: others[0].kind, what: `and ${count(others.length)} more`, why: "" });
    const bad = all.filter(({ kind }) => kind === "bad").length;
    return [{ title, page, query, findings, bad, total: all.length, sum: sum(from) }];
  });
}

const AREAS = [
  {
    title: "Tools",
    page: "errors",
    needs: ["calls"],
    look: ({ calls, now }) => failingTools(calls, now),
    sum: ({ calls, now }) => `no tool failed in the last 10 minutes, in ${plural(calls.filter(({ ended }) => now - ended < RECENT).length, "call")}`,
  },
  {
    title: "Sources",
    page: "sources",
    needs: ["sources"],
    look: ({ sources, now }) => sources.flatMap((source) => badSource(source, now)),
    sum: ({ sources }) => `${plural(sources.length, "source")}, all of them answer`,
  },
  {
    title: "Plugins",
    page: "logs",
    needs: ["plugins"],
    look: ({ plugins: { plugins, errors } }) => [
      ...plugins.filter(({ state }) => state === "given_up" || state === "restarting").map(({ plugin, source, state, last_exit }) => ({
        kind: state === "given_up" ? "bad" : "warn",
        what: plugin,
        why: `${state === "given_up" ? "was given up" : "is being restarted"}${last_exit ? `: ${last_exit}` : ""}`,
        parts: [source, plugin],
      })),
      ...Object.entries(errors).map(([what, why]) => ({ kind: "warn", what, why })),
    ],
    sum: ({ plugins: { plugins } }) => (plugins.length ? `${plural(plugins.length, "plugin")} with output, all of them run` : "none runs under toolbus run"),
  },
  {
    title: "Mounts",
    page: "sources",
    needs: ["mounts"],
    look: ({ mounts }) => badMounts(mounts),
    sum: ({ mounts }) => (mounts.mounts.length ? `${plural(mounts.mounts.length, "MCP server")}, all of them work` : "no MCP server is mounted"),
  },
  {
    title: "Keys",
    page: "permissions",
    query: { tab: "keys" },
    needs: ["keys"],
    look: ({ keys, now }) => expiring(keys, now),
    sum: ({ keys }) => (keys.keys.length ? `none of ${plural(keys.keys.length, "key")} expires in the next ${KEY_DAYS} days` : "there are none: only programs of this machine connect"),
  },
  {
    title: "Approvals",
    page: "permissions",
    query: { tab: "approvals" },
    needs: ["changes", "held"],
    look: ({ changes, held, now }) => [
      ...held.map(({ tool, caller, user_id, asked }) => ({ kind: "warn", what: tool, why: `a call of ${user_id || caller} waits for you, for ${age(now - asked)}` })),
      ...changes.map(({ tool, subject, source }) => ({ kind: "warn", what: tool || subject, why: `${source} declares it otherwise than when it was trusted` })),
    ],
    sum: () => "nothing waits for you",
  },
  { title: "Bus", page: "bus", needs: ["bus"], look: badBus, sum: ({ bus }) => `it answers${bus.settings_age == null ? "" : `, and read its shared settings ${age(bus.settings_age)} ago`}` },
];

function failingTools(calls, now) {
  const tools = new Map(); // newest call first
  for (const call of calls) {
    if (now - call.ended > RECENT || OF_CALLERS.has(call.outcome)) continue;
    const key = `${call.source}\n${call.name}`;
    const tool = tools.get(key) ?? { newest: call, total: 0, failures: [] };
    tool.total++;
    if (failed(call)) tool.failures.push(call);
    tools.set(key, tool);
  }
  return [...tools.values()].filter(({ failures }) => failures.length).map(({ newest, total, failures: [last, ...others] }) => {
    // What a tool itself reports as an error may be all right: no such city.
    const fails = failed(newest) && newest.outcome !== "TOOL";
    const message = last.failure?.message;
    return {
      kind: fails ? "bad" : "warn",
      what: last.name,
      why: `${fails ? "fails" : "failed"}: ${share(others.length + 1, total)}, last with ${last.outcome}${message ? `: ${message}` : ""}`,
      parts: [last.name, last.outcome, last.source],
      at: last.ended,
    };
  });
}

const share = (number, total) => (number < total ? `${count(number)} of ${plural(total, "call")}` : total > 1 ? `all of ${count(total)} calls` : "its only call");

function badSource({ source, state, refused = 0, silenced, offline_since, offline_until }, now) {
  const found = [];
  const add = (kind, why) => found.push({ kind, what: source, why, parts: [source] });
  if (state === "suspect") add("bad", "does not answer heartbeats: it hangs, or its machine is busy");
  if (state === "offline") add("warn", `is offline${offline_since ? ` for ${age(now - offline_since)}; its tools keep their places for ${age(offline_until - now)} more` : ""}`);
  if (state === "draining") add("warn", "drains: it takes no new calls");
  if (silenced) add("warn", "may not offer tools");
  if (refused > 0) add("warn", `${plural(refused, "tool")} of it ${refused === 1 ? "was" : "were"} refused`);
  return found;
}

const BAD_MOUNTS = { failed: "bad", "needs login": "warn", degraded: "warn", restarting: "warn" };

function badMounts({ mounts, refused = {}, errors = {} }) {
  return [
    ...mounts.filter(({ state }) => Object.hasOwn(BAD_MOUNTS, state)).map(({ name, state, reason, fix }) => ({
      kind: BAD_MOUNTS[state],
      what: name,
      why: [state, reason, fix].filter(Boolean).join(": "),
      parts: [name],
    })),
    ...Object.entries({ ...refused, ...errors }).map(([what, why]) => ({ kind: "bad", what, why })),
  ];
}

function expiring({ keys, certificates = {} }, now) {
  const found = [];
  const add = (what, expires, days, fix) => {
    const left = expires - now;
    if (left > days * DAY) return;
    found.push({ kind: left < 2 * DAY ? "bad" : "warn", what, why: `${left > 0 ? `expires in ${age(left)}` : `expired ${age(-left)} ago`}: ${fix}` });
  };
  const newest = new Map(); // by identity and kind: a renewed one replaces those before it
  for (const key of keys) {
    if (key.revoked || key.expires === null) continue;
    const id = `${key.identity}\n${key.kind}`;
    if (!(newest.get(id)?.expires > key.expires)) newest.set(id, key);
  }
  const told = new Set(); // a credential has a key of each kind, which expire together
  for (const { identity, expires } of newest.values()) {
    if (told.has(`${identity} ${expires}`)) continue;
    told.add(`${identity} ${expires}`);
    add(identity, expires, KEY_DAYS, `toolbus keys renew ${identity}`);
  }
  if (certificates.server) add("The certificate of the bus", certificates.server, SERVER_DAYS, "it was not renewed, which needs the key of the authority: toolbus keys init on the machine that has it");
  if (certificates.root) add("The root of all certificates", certificates.root, ROOT_DAYS, "toolbus keys rotate-ca");
  return found;
}

function badBus({ bus: { draining, stuck, loop_lag, settings_age }, login, now }) {
  const found = [];
  const add = (kind, what, why) => found.push({ kind, what, why });
  if (draining) add("warn", "Draining", "it takes no new calls");
  if (stuck > 0) add("warn", "Stuck calls", `${plural(stuck, "call")} that the bus gave up still ${stuck === 1 ? "runs" : "run"} at their plugins`);
  if (loop_lag > LAG_SECONDS) add("warn", "Busy", `its own loop is ${loop_lag.toFixed(1)} s late`);
  if (settings_age > SETTINGS_SECONDS) add("bad", "Shared settings", `they were read ${age(settings_age)} ago: the database does not answer, and changes of other buses are missing`);
  if (login && login - now < LOGIN_SECONDS) add("warn", "Your login", `it ends in ${age(login - now)}: toolbus console makes a new one`);
  return found;
}
