// Lays out calls and the calls that they made as rows with bars: which belong together, in which order, how deep, from
// where to where. Pure; times are seconds since the epoch.

const SLOW = 0.1; // of the whole: calls that take longer are worth a look

/** Returns a call's failure for people and filters: it ended, and neither with a result nor with a question. */
export function failed(call) {
  return call.outcome !== undefined && call.outcome !== "OK" && call.outcome !== "INPUT_REQUIRED";
}

/**
 * Returns the family of a call: {calls, missing}. The calls are its oldest known ancestor and all that came from that
 * one; of a call that is both running and ended, the end counts. `missing` is the id of the parent of the oldest
 * ancestor, where there was one and nothing is known of it; else "".
 */
export function familyOf(id, ended, running) {
  const known = new Map();
  for (const call of running) if (call.id) known.set(call.id, call);
  for (const call of ended) if (call.id) known.set(call.id, call);
  let root = known.get(id);
  if (!root) return { calls: [], missing: "" };
  const passed = new Set([root.id]);
  while (root.parent && known.has(root.parent) && !passed.has(root.parent)) {
    root = known.get(root.parent);
    passed.add(root.id);
  }
  const children = new Map();
  for (const call of known.values()) {
    if (!call.parent || call.id === root.id) continue;
    if (!children.has(call.parent)) children.set(call.parent, []);
    children.get(call.parent).push(call);
  }
  const calls = [];
  const taken = new Set();
  const waiting = [root];
  while (waiting.length) {
    const call = waiting.pop();
    if (taken.has(call.id)) continue;
    taken.add(call.id);
    calls.push(call);
    waiting.push(...(children.get(call.id) ?? []));
  }
  return { calls, missing: root.parent && !known.has(root.parent) ? root.parent : "" };
}

/**
 * Returns {began, seconds, rows, left_out}: a row for each call of a family, parents before their children, those in
 * the order in which they began. A row is {call, depth, left, width, running, failed, children}; left and width are
 * parts of the whole, 0 to 1. A running call lasts until `now`. `only` is "failed" or "slow", which leave out the
 * other calls except the ancestors of those that stay; `left_out` counts them.
 */
export function layout(calls, now, only = "") {
  if (!calls.length) return { began: 0, seconds: 0, rows: [], left_out: 0 };
  const end = (call) => Math.max(call.started, call.ended ?? now);
  let began = Infinity;
  let last = -Infinity;
  for (const call of calls) {
    began = Math.min(began, call.started);
    last = Math.max(last, end(call));
  }
  const seconds = last - began;
  const part = (time) => (seconds > 0 ? (time - began) / seconds : 0);
  const ids = new Set(calls.map((call) => call.id));
  const children = new Map();
  const roots = [];
  for (const call of calls) {
    if (!call.parent || !ids.has(call.parent) || call === calls[0]) roots.push(call);
    else if (children.has(call.parent)) children.get(call.parent).push(call);
    else children.set(call.parent, [call]);
  }
  const inOrder = (some) => some.sort((a, b) => b.started - a.started || (b.number ?? Infinity) - (a.number ?? Infinity));
  const rows = [];
  const waiting = inOrder(roots).map((call) => [call, 0]); // taken from its end: the first to begin is the last
  while (waiting.length) {
    const [call, depth] = waiting.pop();
    const below = inOrder(children.get(call.id) ?? []);
    const left = part(call.started);
    rows.push({
      call,
      depth,
      left,
      width: seconds > 0 ? part(end(call)) - left : 1,
      seconds: end(call) - call.started,
      running: call.ended === undefined,
      failed: failed(call),
      children: below.length,
    });
    for (const child of below) waiting.push([child, depth + 1]);
  }
  const kept = only ? keep(rows, seconds, only) : rows;
  return { began, seconds, rows: kept, left_out: rows.length - kept.length };
}

function keep(rows, seconds, only) {
  const wanted = only === "failed" ? (row) => row.failed : (row) => row.failed || row.seconds >= seconds * SLOW;
  const kept = new Array(rows.length).fill(false);
  let depth = -1; // of the last kept row: from the end, the next row above that depth is its parent
  for (let at = rows.length - 1; at >= 0; at--) {
    const row = rows[at];
    if (wanted(row) || row.depth < depth) {
      kept[at] = true;
      depth = row.depth;
    }
  }
  return rows.filter((_row, at) => kept[at]);
}

/** Returns the key of a group of `groupsOf`; a call that was refused before its tool was known has no source. */
export const groupKey = (name, outcome, source = "") => [name, outcome, source].map(encodeURIComponent).join("/");

/**
 * Returns the failed ones of some calls, newest first, by tool and code: {key, source, name, outcome, count, newest,
 * calls} each, the group with the newest call first.
 */
export function groupsOf(calls) {
  const groups = new Map();
  for (const call of calls) {
    if (!failed(call)) continue;
    const key = groupKey(call.name, call.outcome, call.source);
    let group = groups.get(key);
    if (!group) {
      group = { key, source: call.source, name: call.name, outcome: call.outcome, count: 0, newest: call, calls: [] };
      groups.set(key, group);
    }
    group.count++;
    group.calls.push(call);
  }
  return [...groups.values()];
}
