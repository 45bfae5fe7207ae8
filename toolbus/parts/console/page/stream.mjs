// Follows the bus: one stream of digests for all tabs of the browser, which comes back by itself.
//
// The tab that holds a lock of the browser has the stream, and hands each digest to the others; where a browser has no
// locks (a page that is not secure), each tab has its own. A new tab, and one that missed a digest, asks the bus for
// everything.

import { ApiError, admin, get, send } from "./api.mjs";
import { effect } from "./html.mjs";
import { parseRoute, route } from "./router.mjs";
import { applyDigest, bus, catalog, connection, login, me, toolKey, trouble } from "./store.mjs";
import { restrictedTools } from "./tool_declarations.mjs";

const STREAM = "/api/console/stream";
const CHANNEL = "toolbus-console";
const RETRY = [300, 900]; // ms until the next try: at least, and at random on top
const BUSY_RETRY = [10000, 10000]; // where the bus has as many streams as it serves
const SILENCE = 5000; // ms without a digest after which the connection counts as lost; the bus sends one in 2 s
const CATALOG_AFTER = 100; // ms after a change of the catalog, at least: more come in a row
const CATALOG_RETRY = 100; // ms that a reading counts as, if the bus did not answer all of it
const CATALOG_SHARE = 10; // so many times as long as reading the catalog took, nothing is read
const CATALOG_AT_LATEST = 30000; // ms after which it is read all the same: a busy machine may have taken seconds for it

const SEEN_EVERY = 1000; // ms after which a tab that is seen without a connection tells the one with the stream

let channel = null; // to the other tabs; null until the page follows
let overdue = () => {}; // tries again at once, in the tab with the stream, if its timer should have done so

/** Begins to follow, until the page has to log in. */
export async function startStream() {
  channel = new BroadcastChannel(CHANNEL);
  channel.onmessage = ({ data }) => hear(data);
  if (!navigator.locks) return void lead();
  const leads = await new Promise((decided) => {
    navigator.locks.request(CHANNEL, { ifAvailable: true }, (lock) => {
      decided(lock !== null);
      return lock && lead();
    });
  });
  if (leads) return;
  navigator.locks.request(CHANNEL, () => login.value === null && lead()); // given when the tab that has it is closed
  await join();
}

/** Gets everything once, for a tab that only listens. */
async function join() {
  setInterval(() => document.hidden || connection.value !== "lost" || channel.postMessage({ kind: "seen" }), SEEN_EVERY);
  try {
    me.value = await get("/api/console/me");
    await catchUp();
    channel.postMessage({ kind: "hello" });
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) refused(error);
    // Otherwise the bus does not answer: the tab with the stream says so.
  }
}

// -- the tab that has the stream -----------------------------------------------------------------------------------

/** Keeps a stream open; returns a promise that ends where the page has to log in. */
function lead() {
  return new Promise((resolve) => {
    let source = null;
    let timer = 0; // until the next try, or until the silence is too long
    let due = 0; // when it ends, by performance.now(): a browser wakes a hidden tab once a minute

    const open = async () => {
      clearTimeout(timer);
      timer = 0;
      source?.close(); // one that has told nothing yet
      try {
        // A bus that is stopped, or a network that is gone, answers nothing at all.
        me.value = await get("/api/console/me", { signal: AbortSignal.timeout(SILENCE) });
        channel.postMessage({ kind: "me", me: me.value });
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 401) return lose();
        refused(error);
        return resolve();
      }
      let came = false;
      source = new EventSource(STREAM);
      source.addEventListener("digest", (event) => {
        came = true;
        wait(SILENCE, lose);
        apply(JSON.parse(event.data));
        say("live");
        channel.postMessage({ kind: "digest", digest: event.data });
      });
      // The bus ends a stream that is one too many, and one that is read too slowly.
      source.addEventListener("busy", (event) => lose(JSON.parse(event.data).detail, came ? RETRY : BUSY_RETRY));
      source.addEventListener("error", async (event) => {
        const refusedIt = event.target.readyState === EventSource.CLOSED; // by a status, which the browser does not tell
        lose();
        if (refusedIt && !came) await admin("digest", { since: -1 }).catch((error) => error.message && lose(error.message, BUSY_RETRY));
      });
      wait(SILENCE, lose);
    };
    const wait = (length, act) => {
      clearTimeout(timer);
      due = performance.now() + length;
      timer = setTimeout(() => act(), length);
    };
    const lose = (why = "", [least, random] = RETRY) => {
      source?.close(); // its own reconnecting has no jitter, and stops at the first refusal
      source = null;
      say("lost", why);
      wait(least + Math.random() * random, open);
    };
    const woken = () => {
      if (!document.hidden && connection.value === "lost" && timer) open();
    };
    addEventListener("visibilitychange", woken);
    addEventListener("online", woken);
    overdue = () => timer && connection.value === "lost" && performance.now() >= due && open();
    open();
  });
}

function say(state, why = "") {
  if (connection.value === state && trouble.value === why) return;
  channel.postMessage({ kind: "connection", state, why });
  [connection.value, trouble.value] = [state, why];
}

function refused(error) {
  channel.postMessage({ kind: "refused", why: error.message });
  login.value = error.message;
}

// -- the others ----------------------------------------------------------------------------------------------------

function hear(message) {
  if (message.kind === "digest") {
    const digest = JSON.parse(message.digest);
    const { number, instance } = bus.value;
    if (digest.full || (digest.instance === instance && digest.number === number + 1)) apply(digest);
    else if (digest.instance !== instance || digest.number > number) catchUp().catch(() => {}); // the next digest tries again
  } else if (message.kind === "connection") {
    [connection.value, trouble.value] = [message.state, message.why];
  } else if (message.kind === "me") me.value = message.me;
  else if (message.kind === "refused") login.value = message.why;
  else if (message.kind === "seen") overdue();
  else if (message.kind === "hello") channel.postMessage({ kind: "connection", state: connection.value, why: trouble.value });
}

let catching = null; // the promise of the answer that is waited for

/** Gets everything, for a tab that missed something. Throws ApiError. */
function catchUp() {
  catching ??= admin("digest", { since: -1 })
    .then(apply)
    .finally(() => (catching = null));
  return catching;
}

function apply(digest) {
  const { instance, number } = bus.value;
  if (digest.instance === instance && digest.number < number) return; // an answer that a newer digest overtook
  applyDigest(digest);
}

// -- the catalog ---------------------------------------------------------------------------------------------------

/** Reads the catalog again whenever its revision changes; the longer that takes, the more seldom. */
export function startCatalog() {
  let known; // the revision that was read
  let timer = 0;
  let took = 0; // ms that the last reading took
  const fetchCatalog = async () => {
    const { instance, revision } = bus.value;
    const began = performance.now();
    let pause = 0;
    try {
      const [{ tools_by_role }, others] = await Promise.all([get("/api/tools"), restrictedTools()]);
      catalog.value = byName([...Object.values(tools_by_role).flat(), ...(others ?? [])]);
      if (others) known = `${instance} ${revision}`;
      else pause = CATALOG_RETRY;
    } catch (error) {
      if (error.status) known = `${instance} ${revision}`; // it was refused; another revision may not be
      else pause = CATALOG_RETRY;
    }
    took = Math.max(pause, performance.now() - began);
    timer = 0;
    follow();
  };
  const follow = () => {
    const { instance, revision } = bus.value;
    if (revision === undefined || timer || `${instance} ${revision}` === known || connection.value === "lost") return;
    timer = setTimeout(fetchCatalog, took ? Math.max(CATALOG_AFTER, Math.min(took * CATALOG_SHARE, CATALOG_AT_LATEST)) : 0);
  };
  effect(follow);
}

/** Returns tools by name; one that several roles have is there once. */
function byName(tools) {
  const all = new Map(tools.map((tool) => [toolKey(tool.source, tool.name), tool]));
  return [...all.values()].sort((one, other) => (one.name < other.name ? -1 : one.name > other.name ? 1 : 0));
}

// -- logging in ----------------------------------------------------------------------------------------------------

const CODE = "#code=";

/** Exchanges the code of the address, if it has one, for a cookie, and takes it out of the address. */
export async function exchangeCode() {
  addEventListener("hashchange", () => location.hash.startsWith(CODE) && location.reload()); // a new code was pasted
  if (!location.hash.startsWith(CODE)) return;
  const code = location.hash.slice(CODE.length); // of letters, digits, - and _: what else stands there is no code
  history.replaceState(null, "", location.pathname + location.search);
  route.value = parseRoute(""); // the code was no page
  try {
    await send("POST", "/api/console/login", { code });
  } catch (error) {
    if (await get("/api/console/me").then(() => true, () => false)) return; // it need not: it is logged in already
    login.value = error.status === 401 ? CODE_REFUSED : error.message;
  }
}

const CODE_REFUSED = "This code was used already, or is older than a minute.";
