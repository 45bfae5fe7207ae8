// Knows the calls of which the page has records: those that the digests brought, and older ones that it asked for.

import { get } from "./api.mjs";
import { computed, effect, signal } from "./html.mjs";
import { failed } from "./spans_layout.mjs";
import { bus, calls, running } from "./store.mjs";

export const MAX_FETCHED = 1000; // what the bus remembers

const fetched = signal([]); // newest first
/** How many calls ended since the page was opened without being listed in a digest: the bus may remember them. */
export const skipped = signal(0);

let instance; // of the bus that the fetched calls are of; undefined until the first digest
let counted; // the number of the digest whose skipped calls are counted

effect(() => {
  const { instance: newest, number, skipped: more = 0 } = bus.value;
  if (newest === undefined || (number === counted && newest === instance)) return;
  const restarted = instance !== undefined && newest !== instance;
  if (restarted) {
    fetched.value = [];
    covered = -1;
  }
  skipped.value = restarted || counted === undefined ? 0 : skipped.peek() + more;
  [instance, counted] = [newest, number];
});

/** Every ended call that is known, newest first. */
export const history = computed(() => merged(calls.value, fetched.value));

/** Returns two lists, newest first, as one; of a call that both have, the second's record, which may hold contents. */
export function merged(one, other) {
  if (!other.length) return one;
  const all = [];
  let [at, there] = [0, 0];
  while (at < one.length || there < other.length) {
    const [left, right] = [one[at]?.number ?? -1, other[there]?.number ?? -1];
    if (left >= right) at++;
    if (right >= left) there++;
    all.push(right >= left ? other[there - 1] : one[at - 1]);
  }
  return all;
}

/** Returns the name of a call in addresses: the bus's id of it, or its number where it was refused before it had one. */
export const keyOf = (call) => call.id || `n${call.number}`;

/** Returns a call that runs or has ended; undefined where nothing is known of it. */
export function callOf(key) {
  return history.value.find((call) => keyOf(call) === key) ?? running.value.find((call) => call.id === key);
}

/** Asks the bus for ended calls: the newest that the exact filters of a query select. Throws ApiError. */
export async function fetchCalls(query = {}, limit = MAX_FETCHED) {
  const asked = { name: query.tool, source: query.source, caller: query.caller, user_id: query.user, outcome: query.outcome };
  const given = Object.entries(asked).filter(([, value]) => value);
  const answer = await get(`/api/calls?${new URLSearchParams([...given, ["limit", limit]])}`);
  fetched.value = merged(answer.calls, fetched.value).slice(0, MAX_FETCHED);
}

let covered = -1; // `skipped` when all that the bus remembers was asked for last: since then nothing is missing; -1: never

/** Asks for what may be missing of a call and of those around it: its contents, or all calls. Throws ApiError. */
export async function fetchAround(call) {
  const missing = skipped.peek();
  if (call && covered === missing && (!call.parent || callOf(call.parent))) {
    const { calls: found } = await get(`/api/calls?since=${call.number - 1}&limit=1`); // digests have no contents
    fetched.value = merged(found.filter(({ number }) => number === call.number), fetched.value).slice(0, MAX_FETCHED);
    return;
  }
  await fetchCalls();
  covered = missing;
}

/** Tells whether a query selects a call. What is running has no outcome, and neither has failed nor succeeded. */
export function selects({ tool, source, caller, user, outcome, status }, call) {
  if (tool && call.name !== tool) return false;
  if (source && call.source !== source) return false;
  if (caller && call.caller !== caller) return false;
  if (user && call.user_id !== user) return false;
  if (outcome && call.outcome !== outcome) return false;
  if (status === "failed" && !failed(call)) return false;
  return !(status === "running" && call.outcome !== undefined);
}

const texts = new WeakMap(); // call → what a filter by words looks at

/** Returns what a filter by words looks at. */
export function textOf(call) {
  let text = texts.get(call);
  if (text === undefined) {
    const { name, source, caller, user_id, outcome = "running", call_id, id, trace_id, failure } = call;
    text = [name, source, caller, user_id, outcome, call_id, id, trace_id, failure?.message].join("\n").toLowerCase();
    texts.set(call, text);
  }
  return text;
}
