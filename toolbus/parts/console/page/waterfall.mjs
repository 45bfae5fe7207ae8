// Draws a family of calls as bars over one scale of time; only the rows that are in sight.

import { html, useEffect, useRef, useState } from "./html.mjs";
import { link } from "./router.mjs";
import { revealed, windowOf } from "./rows.mjs";
import { layout } from "./spans_layout.mjs";
import { duration, plural, shown } from "./text.mjs";

const HEIGHT = 28; // of a row, as in style.css
const ROOM = 420; // of the window, as in style.css
const STEP = 14; // pixels that a child stands to the right of its parent
const MAX_STEPS = 8;
const FILTERS = [
  ["", "All"],
  ["slow", "Slow or failed"],
  ["failed", "Failed"],
];

/**
 * Draws the calls of a family; each row leads to its call.
 *
 * calls: as of `familyOf`. current: id of the call that is shown. now: until when running calls are drawn. only, onOnly:
 * which calls are shown, and what changes that. missing: id of an ancestor that is not recorded any more.
 */
export function Waterfall({ calls, current, now, only = "", onOnly, missing = "", query = {} }) {
  const box = useRef(null);
  const [top, setTop] = useState(0);
  const { seconds, rows, left_out } = layout(calls, now, only);
  const [first, end] = windowOf(rows.length, HEIGHT, top, ROOM);
  const at = rows.findIndex((row) => row.call.id === current);

  useEffect(() => {
    const window = box.current;
    if (!window || at < 0) return;
    window.scrollTop = revealed(at, HEIGHT, window.scrollTop, window.clientHeight, true);
  }, [current, only]);

  const move = (event) => {
    const from = rows.findIndex((row) => row.call.id === event.target.closest?.(".span")?.dataset.id);
    const to = { ArrowDown: from + 1, ArrowUp: from - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (to === undefined || from < 0) return;
    event.preventDefault();
    const next = Math.min(rows.length - 1, Math.max(0, to));
    const window = box.current;
    window.scrollTop = revealed(next, HEIGHT, window.scrollTop, window.clientHeight);
    setTop(window.scrollTop);
    requestAnimationFrame(() =>
      requestAnimationFrame(() => window.querySelector(`[data-at="${next}"]`)?.focus({ preventScroll: true })),
    );
  };

  return html`<section class="panel" aria-label="Calls of this family">
    <h3>
      Waterfall <span class="muted">${plural(calls.length, "call")}, ${duration(seconds)}</span>
      <span class="spring"></span>
      ${calls.length > 2 &&
      FILTERS.map(
        ([name, label]) =>
          html`<button type="button" class="small" aria-pressed=${only === name} onClick=${() => onOnly(name)}>${label}</button>`,
      )}
    </h3>
    ${missing && html`<p class="note">The call ${missing} made the first of these. The bus does not remember it any more.</p>`}
    <div class="waterfall" onKeyDown=${move}>
      <div class="scale" aria-hidden="true">
        <span>Call</span>
        <span class="ticks">${[0, 0.5, 1].map((part) => html`<span>${duration(part * seconds)}</span>`)}</span>
        <span class="num">Took</span>
      </div>
      <div class="window" ref=${box} onScroll=${(event) => setTop(event.currentTarget.scrollTop)}>
        <div class="all" style=${{ height: rows.length * HEIGHT + "px" }}>
          ${rows.slice(first, end).map((row, index) => html`<${Span} key=${row.call.id} row=${row} at=${first + index} current=${current} query=${query} />`)}
        </div>
      </div>
    </div>
    ${left_out > 0 && html`<p class="note">${plural(left_out, "call")} not shown: neither failed${only === "slow" ? " nor slow" : ""}.</p>`}
  </section>`;
}

function Span({ row, at, current, query }) {
  const { call, depth, running, failed } = row;
  const state = running ? "running" : call.outcome;
  const took = duration(row.seconds);
  const kind = running ? "busy" : failed ? "bad" : "ok";
  return html`<a
    class="span"
    href=${link("calls", [call.id], query)}
    data-id=${call.id}
    data-at=${at}
    aria-current=${call.id === current ? "true" : undefined}
    aria-label="${call.name} of ${call.source}, ${state}, ${took}, level ${depth + 1}"
    title="${shown(call.name)} · ${shown(call.source)} · ${state} · ${took}"
    style=${{ top: at * HEIGHT + "px" }}
  >
    <span class="who">
      ${depth > 0 && html`<i class="step" style=${{ width: Math.min(depth, MAX_STEPS) * STEP + "px" }}></i>`}
      ${depth > MAX_STEPS && html`<span class="muted num">${depth}</span>`}
      <i class=${`dot ${kind}`}></i>
      <span class="cut">${shown(call.name)}</span>
      ${failed && html`<span class="chip bad opt">${call.outcome}</span>`}
    </span>
    <span class="track">
      <i
        class=${"piece" + (failed ? " bad" : "") + (running ? " running" : "")}
        style=${{ left: row.left * 100 + "%", width: row.width * 100 + "%" }}
      ></i>
    </span>
    <span class="num">${took}</span>
  </a>`;
}
