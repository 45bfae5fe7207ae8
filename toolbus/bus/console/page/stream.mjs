// Follows the bus: one stream of digests for all tabs of the browser, which comes back by itself.
//
// The tab that holds a lock of the browser has the stream, and hands each digest to the others; where a browser has no
// locks (a page that is not secure), each tab has its own. A new tab, and one that missed a digest, asks the bus for
// everything.

import { ApiError, admin, get } from "./api.mjs";
import { effect } from "./html.mjs";
import { parseJson } from "./json.mjs";
import { applyDigest, bus, catalog, connection, login, me } from "./store.mjs";

const STREAM = "/api/console/stream";
const CHANNEL = "toolbus-console";
const RETRY = [300, 900]; // ms until the next try: at least, and at random on top
const SILENCE = 12000; // ms without a digest after which the connection counts as lost; the bus sends one in 5 s
const CATALOG_AFTER = 300; // ms after a change of the catalog; more come in a row
const CATALOG_PAUSE = 2000; // ms between two readings of it

let channel = null;
let stop = () => {}; // ends the stream that this tab has

/** Begins to follow. Ends itself where the page has to log in, and is then called again. */
export async function startStream() {
  stop();
  channel ??= new BroadcastChannel(CHANNEL);
  channel.onmessage = ({ data }) => hear(data);
  if (!navigator.locks) {
    stop = lead();
    return;
  }
  const given = new AbortController();
  let ended = () => {};
  stop = () => {
    given.abort();
    ended();
  };
  navigator.locks
    .request(CHANNEL, { signal: given.signal }, () => {
      const end = lead();
      return new Promise((resolve) => {
        ended = () => {
          end();
          resolve();
        };
      });
    })
    .catch(() => {}); // aborted while it waited
  await join();
}

/** Gets everything once, for a tab that may be one of those that only listen. */
async function join() {
  try {
    me.value = await get("/api/console/me");
    apply(await admin("digest", { since: -1 }));
    channel.postMessage({ kind: "hello" });
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) refused(error);
    // Otherwise the bus does not answer: the tab with the stream says so.
  }
}

// -- the tab that has the stream -----------------------------------------------------------------------------------

/** Keeps a stream open; returns what ends it. */
function lead() {
  let source = null;
  let timer = 0; // until the next try, or until the silence is too long
  let over = false;

  const open = async () => {
    clearTimeout(timer);
    if (over) return;
    try {
      me.value = await get("/api/console/me");
    } catch (error) {
      if (over) return;
      if (error instanceof ApiError && error.status === 401) return refused(error);
      return lose();
    }
    if (over) return;
    source = new EventSource(STREAM);
    source.addEventListener("digest", (event) => {
      clearTimeout(timer);
      timer = setTimeout(lose, SILENCE);
      const digest = parseJson(event.data);
      apply(digest);
      say("live");
      channel.postMessage({ kind: "digest", digest: event.data });
    });
    source.addEventListener("error", lose);
    timer = setTimeout(lose, SILENCE);
  };
  const lose = () => {
    source?.close(); // its own reconnecting has no jitter, and stops at the first refusal
    source = null;
    if (over) return;
    clearTimeout(timer);
    say("lost");
    timer = setTimeout(open, RETRY[0] + Math.random() * RETRY[1]);
  };
  const say = (state) => {
    if (connection.value !== state) channel.postMessage({ kind: "connection", state });
    connection.value = state;
  };
  const woken = () => {
    if (!document.hidden && connection.value === "lost") open();
  };
  addEventListener("visibilitychange", woken);
  addEventListener("online", woken);
  open();
  return () => {
    over = true;
    clearTimeout(timer);
    source?.close();
    removeEventListener("visibilitychange", woken);
    removeEventListener("online", woken);
  };
}

function refused(error) {
  stop();
  channel.postMessage({ kind: "refused", why: error.message });
  login.value = error.message;
}

// -- the others ----------------------------------------------------------------------------------------------------

function hear(message) {
  if (message.kind === "digest") {
    const digest = parseJson(message.digest);
    const { number, instance } = bus.value;
    if (digest.full || (digest.instance === instance && digest.number === number + 1)) {
      apply(digest);
      connection.value = "live";
    } else if (digest.instance !== instance || digest.number > number) catchUp();
  } else if (message.kind === "connection") connection.value = message.state;
  else if (message.kind === "refused") login.value = message.why;
  else if (message.kind === "hello" && connection.value !== "connecting") {
    channel.postMessage({ kind: "connection", state: connection.value });
  }
}

let catching = false;

/** Gets everything, as this tab missed something. */
async function catchUp() {
  if (catching) return;
  catching = true;
  try {
    apply(await admin("digest", { since: -1 }));
    connection.value = "live";
  } catch {
    // The tab with the stream says when the bus is back; its next digest is tried again.
  } finally {
    catching = false;
  }
}

function apply(digest) {
  const { instance, number } = bus.value;
  if (digest.instance === instance && digest.number < number) return; // an answer that a newer digest overtook
  applyDigest(digest);
}

// -- the catalog ---------------------------------------------------------------------------------------------------

/** Reads the catalog again whenever its revision changes, at most every two seconds. */
export function startCatalog() {
  let known; // the revision that was read
  let timer = 0;
  let read = 0; // when
  const fetchCatalog = async () => {
    const { instance, revision } = bus.value;
    read = performance.now();
    try {
      const { tools_by_role } = await get("/api/tools");
      known = `${instance} ${revision}`;
      catalog.value = flat(tools_by_role);
    } catch {
      // A refusal or a bus that went away: the next revision tries again.
    }
    timer = 0;
    follow();
  };
  const follow = () => {
    const { instance, revision } = bus.value;
    if (revision === undefined || timer || `${instance} ${revision}` === known || connection.value === "lost") return;
    timer = setTimeout(fetchCatalog, known === undefined ? 0 : Math.max(CATALOG_AFTER, read + CATALOG_PAUSE - performance.now()));
  };
  effect(follow);
}

/** Returns the tools of all roles, each once, by name. */
function flat(byRole) {
  const all = new Map();
  for (const [role, tools] of Object.entries(byRole)) {
    for (const tool of tools) {
      const key = `${tool.source}\n${tool.name}`;
      if (all.has(key)) all.get(key).roles.push(role);
      else all.set(key, { ...tool, roles: [role] });
    }
  }
  return [...all.values()].sort((one, other) => (one.name < other.name ? -1 : one.name > other.name ? 1 : 0));
}

// -- logging in ----------------------------------------------------------------------------------------------------

/** Exchanges the code of the address, if it has one, for a cookie, and takes it out of the address. */
export async function exchangeCode() {
  const code = new URLSearchParams(location.hash.replace(/^#/, "")).get("code");
  if (!location.hash.startsWith("#code=") || !code) return;
  history.replaceState(null, "", location.pathname + location.search);
  const response = await fetch("/api/console/login", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ code }),
  });
  if (!response.ok) login.value = "This code was used already, or is older than a minute.";
}
