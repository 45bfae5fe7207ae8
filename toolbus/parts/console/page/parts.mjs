// Draws what several pages have: the list and the detail beside it, states, facts, errors next to what caused them.

import { admin } from "./api.mjs";
import { now } from "./clock.mjs";
import { html, useEffect, useRef, useState } from "./html.mjs";
import { link } from "./router.mjs";
import { failed } from "./spans_layout.mjs";
import { connection } from "./store.mjs";
import { ago, count, shortAge, shown } from "./text.mjs";

const MAX_ROWS = 200; // of one table; the filter finds the others

/** Draws the head of a detail: the way back to the list, a title, what can be done. */
export function DetailHead({ back, title, query = {}, name, children }) {
  return html`<div class="head">
    <div class="crumbs"><a class="back" href=${link(back, [], query)}>‹ ${title}</a></div>
    <div class="inline"><h2 class="any">${shown(name)}</h2>${children}</div>
  </div>`;
}

/** Draws a text from outside, cut where it is too long, in full for those who point at it; `more` follows it in grey. */
export function Cut({ text, kind = "", more = "" }) {
  const [whole, rest] = [shown(String(text ?? "")), shown(more)];
  return html`<span class=${"cut " + kind} title=${rest ? `${whole}: ${rest}` : whole} dir="auto">${whole}${rest && html` <bdi class="sub">${rest}</bdi>`}</span>`;
}

/** Draws how long ago, or in how long, something is; only the length where it is `short`. */
export function Ago({ at, short = false }) {
  return short ? shortAge(now.value - at) : ago(at, now.value);
}

/** Draws a sentence of the bus: what stands between backquotes is code. */
export function Words({ of }) {
  return shown(of).split("`").map((part, at, all) => (at % 2 && at < all.length - 1 ? html`<code>${part}</code>` : at % 2 ? "`" + part : part));
}

/** Draws how a call ended, or that it runs. */
export function Outcome({ call }) {
  if (call.outcome === undefined) return html`<span class="chip busy"><i class="dot busy"></i>running</span>`;
  if (call.outcome === "OK") return html`<span class="muted">OK</span>`;
  const kind = failed(call) ? "chip bad" : "chip warn";
  return html`<span class=${kind} title=${call.outcome}>${call.outcome === "INPUT_REQUIRED" ? "asked" : call.outcome}</span>`;
}

/** Draws [term, value] pairs; those without a value are left out. */
export function Facts({ of }) {
  const given = of.filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  return html`<dl class="facts">${given.map(([term, value]) => html`<dt>${term}</dt><dd class="any">${value}</dd>`)}</dl>`;
}

/** Draws why something failed, as the bus said it. `error` is an ApiError, or null. */
export function Failed({ error, what = "" }) {
  if (!error) return null;
  const { code, stage } = error;
  return html`<p class="error" role="alert">
    ${what && html`<span class="strong">${what}: </span>`}<${Words} of=${error.message} />
    ${code && html` <span class="muted">(${code}${stage && `, ${stage}`})</span>`}
  </p>`;
}

/** Draws a panel with a heading. */
export function Panel({ title, aside, kind = "", children }) {
  return html`<section class=${"panel " + kind}>
    ${title && html`<h3>${title}${aside && html`<span class="spring"></span>${aside}`}</h3>`}${children}
  </section>`;
}

/** Draws that an answer is waited for. */
export function Reading() {
  return html`<${Nothing} title=${connection.value === "live" ? "Reading …" : "Waiting for the bus …"} />`;
}

/** Draws that there is nothing to show, and what to do about it. */
export function Nothing({ title, children }) {
  return html`<div class="empty"><h3>${title}</h3>${children && html`<p>${children}</p>`}</div>`;
}

/**
 * Runs acts, and draws what went wrong beside them: `const [run, busy, error] = useAct()`; `run(act, then)` hands the
 * value of the promise that `act()` returns to `then`.
 */
export function useAct() {
  const [state, setState] = useState({ busy: false, error: null });
  const run = async (act, then = () => {}) => {
    setState({ busy: true, error: null });
    try {
      then(await act());
      setState({ busy: false, error: null });
      return true;
    } catch (error) {
      setState({ busy: false, error });
      return false;
    }
  };
  return [run, state.busy, state.error];
}

/** Returns what a form holds, by the names of its fields: what was typed a moment ago is not drawn yet. */
export const fieldsOf = (form) => Object.fromEntries(new FormData(form));

/**
 * Reads what a tool of the bus answers, or what `ask()` promises, again every so many milliseconds, if any:
 * [value, error, read]. After an error the value before stays.
 */
export function useAnswer(ask, every = 0) {
  const [state, setState] = useState({ value: undefined, error: null });
  const live = connection.value === "live";
  const newest = useRef(0); // the number of the newest request: an answer that a newer one overtook is old
  const read = async () => {
    const number = ++newest.current;
    const set = (change) => number === newest.current && setState(change);
    try {
      const value = await (typeof ask === "string" ? admin(ask) : ask());
      set({ value, error: null });
    } catch (error) {
      set((before) => ({ ...before, error }));
    }
  };
  useEffect(() => {
    if (!live) return;
    read();
    if (!every) return;
    const timer = setInterval(() => document.hidden || read(), every);
    return () => clearInterval(timer);
  }, [live]);
  return [state.value, state.error, read];
}

/** Draws rows of a table, at most `MAX_ROWS`, with a line about the others. */
export function Table({ heads, rows, empty }) {
  if (!rows.length) return empty;
  return html`<div class="scroll">
      <table class="table cards">
        <thead><tr>${heads.map((head) => html`<th>${head}</th>`)}</tr></thead>
        <tbody>${rows.slice(0, MAX_ROWS)}</tbody>
      </table>
    </div>
    ${rows.length > MAX_ROWS && html`<p class="note">${count(rows.length - MAX_ROWS)} more: filter to find them.</p>`}`;
}
