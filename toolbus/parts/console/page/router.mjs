// Says what the page shows, as the address has it: `#/calls/ID?status=failed` is {page, parts, query}.

import { effect, signal } from "./html.mjs";

export const HOME = "overview";
const WRITE_AFTER = 250; // ms; browsers refuse addresses that change with every key

/** Returns the route of an address's fragment. */
export function parseRoute(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page, ...parts] = path.split("/").filter(Boolean).map(decoded);
  return { page: page || HOME, parts, query: Object.fromEntries(new URLSearchParams(search)) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // written by hand, with a lone %
  }
}

/** Returns the address of a state, for `href`. Empty values of the query are left out. */
export function link(page, parts = [], query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const search = new URLSearchParams(kept).toString();
  return "#/" + [page, ...parts].map(encodeURIComponent).join("/") + (search && "?" + search);
}

export const route = signal(parseRoute(globalThis.location?.hash ?? ""));

let pending = 0; // the timer that writes the address; 0: none
let unwritten = ""; // the address that it writes

/** Shows a state. With `replace` the back button does not return to the one before: for what is being typed. */
export function go(page, parts = [], query = {}, { replace = false } = {}) {
  const address = link(page, parts, query);
  if (replace) {
    clearTimeout(pending);
    unwritten = address;
    pending = setTimeout(write, WRITE_AFTER);
  } else {
    if (pending) write(); // the back button leads to what was typed
    if (location.hash !== address) history.pushState(null, "", address);
  }
  route.value = parseRoute(address);
}

function write() {
  clearTimeout(pending);
  pending = 0;
  history.replaceState(null, "", unwritten);
}

/** Changes values of the query in place, without a step for the back button. */
export function refine(changes) {
  const { page, parts, query } = route.value;
  go(page, parts, { ...query, ...changes }, { replace: true });
}

/** Follows the address; `title` gives the document's title of a route. */
export function startRouter(title) {
  const follow = () => {
    clearTimeout(pending);
    pending = 0;
    route.value = parseRoute(location.hash);
  };
  addEventListener("hashchange", follow);
  addEventListener("popstate", follow);
  effect(() => {
    document.title = title(route.value);
  });
}
