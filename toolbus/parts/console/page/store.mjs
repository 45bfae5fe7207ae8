// Holds what is known of the bus, as signals, and brings it up to date with each digest. Everything is bounded.

import { batch, signal } from "./html.mjs";

export const MAX_LISTED = 1000; // sessions, and as many sources, that the bus tells
export const MAX_CALLS = 2000;
export const MAX_TOOLS = 20000;
export const RATES = 60;
export const POINTS = 30; // of a tool's history
const POINT_SECONDS = 2; // that a point of it stands for

/** The newest digest's scalar fields. Empty until the first one came. */
export const bus = signal({});
/** The last 60 rates, calls a second, oldest first. */
export const rates = signal([]);
/** "SOURCE\nNAME" → {source, name, calls, failed, p50, p95, last, history}. */
export const tools = signal(new Map());
/** Calls that ended, newest first. */
export const calls = signal([]);
/** The 100 oldest calls in flight. */
export const running = signal([]);
/** By id. */
export const sessions = signal(new Map());
/** By name. */
export const sources = signal(new Map());
/** "live", "connecting" or "lost". */
export const connection = signal("connecting");
/** Why there is no connection, in the bus's words; "" where it does not answer at all. */
export const trouble = signal("");
/** Who looks at the page: {identity, administer, version, bus_id, home}; null until it is known. */
export const me = signal(null);
/** The tools that are offered: [{name, source, description}], by name. */
export const catalog = signal([]);
/** How many calls ended without being told, since the page was opened: overwritten before they were read. */
export const lost = signal(0);
/** Why the page has to log in; null: it need not. */
export const login = signal(null);

/** Tells whether who looks may use that verb of the bus. */
export function may(verb) {
  const verbs = me.value?.administer ?? [];
  return verbs.includes("*") || verbs.includes(verb);
}

export const toolKey = (source, name) => `${source}\n${name}`;

const LISTS = new Set(["tools", "calls", "running", "sessions", "closed", "sources", "gone"]);

/** Takes in a digest: what changed, or, where it is full, everything. */
export function applyDigest(digest) {
  batch(() => {
    const restarted = bus.value.instance !== undefined && bus.value.instance !== digest.instance;
    const scalars = Object.fromEntries(Object.entries(digest).filter(([name]) => !LISTS.has(name)));
    if (digest.full && !restarted && calls.value.length) scalars.skipped = unseen(calls.value, digest.calls ?? []);
    const before = bus.value.at ?? digest.at; // the time of the digest before
    bus.value = restarted || digest.full ? scalars : { ...bus.value, ...scalars };
    rates.value = [...(restarted ? [] : rates.value), digest.rate ?? 0].slice(-RATES);
    lost.value = (restarted ? 0 : lost.value) + (digest.lost ?? 0);
    running.value = digest.running ?? [];
    if (restarted || digest.full || digest.tools?.length) {
      tools.value = withTools(restarted ? new Map() : tools.value, digest, before);
    }
    if (restarted || digest.calls?.length) {
      calls.value = withCalls(restarted ? [] : calls.value, digest);
    }
    sessions.value = replaced(sessions.value, digest, "sessions", "session", "closed");
    sources.value = replaced(sources.value, digest, "sources", "source", "gone");
  });
}

function replaced(before, digest, list, key, gone) {
  if (!digest.full && !digest[list]?.length && !digest[gone]?.length) return before;
  const after = digest.full ? new Map() : new Map(before);
  for (const name of digest[gone] ?? []) after.delete(name);
  for (const each of digest[list] ?? []) after.set(each[key], each);
  return after;
}

function withTools(before, digest, since) {
  const after = digest.full ? new Map() : new Map(before);
  const slot = slotOf(digest.at);
  // Calls from before a full digest ended at any time since the digest before it, which may be hours ago.
  const points = digest.full ? Math.max(1, slot - slotOf(since)) : 1;
  for (const [source, name, count, failed, p50, p95, last] of digest.tools ?? []) {
    const key = toolKey(source, name);
    const known = before.get(key);
    const history = known ? padded(known, slot) : Array(POINTS).fill(0);
    const added = known ? Math.max(0, count - known.calls) / POINT_SECONDS / points : 0;
    for (let at = Math.max(0, POINTS - points); added && at < POINTS; at++) history[at] += added;
    after.set(key, { source, name, calls: count, failed, p50, p95, last, history, slot });
  }
  if (after.size > MAX_TOOLS) {
    const oldest = [...after].sort(([, one], [, other]) => (one.last ?? 0) - (other.last ?? 0));
    for (const [key] of oldest.slice(0, after.size - MAX_TOOLS)) after.delete(key);
  }
  return after;
}

const slotOf = (at) => Math.floor(at / POINT_SECONDS);

/** Returns a tool's history as it is in a slot of time: moved on by what passed without a call. */
function padded(tool, slot) {
  const passed = Math.min(POINTS, Math.max(0, slot - tool.slot));
  return [...tool.history.slice(passed), ...Array(passed).fill(0)];
}

/** Returns the calls a second of a tool over the last minute, oldest first, as of the newest digest. */
export function historyOf(tool) {
  if (!tool?.history) return NO_HISTORY;
  const slot = slotOf(bus.value.at ?? 0);
  const read = histories.get(tool);
  if (read?.slot === slot) return read.history;
  const history = padded(tool, slot);
  histories.set(tool, { slot, history });
  return history;
}

const NO_HISTORY = [];
const histories = new WeakMap(); // tool → its history as of a slot: the same list until it changes, so that it is drawn once

function withCalls(before, { calls: newer = [], full }) {
  if (!before.length) return newer.slice(0, MAX_CALLS);
  const near = full ? before : before.slice(0, 2 * newer.length + 200); // a full digest has failed calls of any age
  const known = new Set(near.map(({ number }) => number));
  const all = [...newer.filter(({ number }) => !known.has(number)), ...before];
  if (full) all.sort((one, other) => other.number - one.number);
  return all.slice(0, MAX_CALLS);
}

/** Returns how many calls ended since the newest known one and are not in the list of a full digest. */
function unseen(before, newer) {
  const newest = before[0].number;
  const told = newer.filter(({ number }) => number > newest).length;
  return Math.max(0, (newer[0]?.number ?? newest) - newest - told);
}
