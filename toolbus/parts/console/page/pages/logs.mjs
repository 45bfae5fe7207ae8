// Shows the output of plugins: which have some, and the newest lines of one, followed as it writes.

import { admin } from "../api.mjs";
import { now } from "../clock.mjs";
import { askName } from "../dialogs.mjs";
import { Filter, filtered } from "../filter.mjs";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { ListPage } from "../list_page.mjs";
import { newestLines, rowsOf, whyNone } from "../log_lines.mjs";
import { Cut, DetailHead, Failed, Nothing, useAct, useAnswer } from "../parts.mjs";
import { go, refine } from "../router.mjs";
import { windowOf } from "../rows.mjs";
import { connection, may, sources } from "../store.mjs";
import { age, clock, count, moment, plural, shown } from "../text.mjs";

const SUPERVISORS = "run."; // sources of `toolbus run`, which have the output of others
const TABLE_EVERY = 5000; // ms
const FIRST_LINES = 1000;
const MORE_LINES = 2000; // of one answer
const MAX_LINES = 5000; // that the page holds; and the newest of them that are searched
const MAX_WRAPPED = 200; // lines that are drawn where they wrap, as their heights are not known
const WAIT_SECONDS = 20;
const AGAIN = 1500; // ms after a request that failed
const MAX_DRAWN = 200; // lines at once: more than the tallest screen has
const HEIGHT = 18; // of a line, as in style.css
const AT_END = 30; // pixels: a log that is scrolled so near to its end follows
const KINDS = new Map([["running", "ok"], ["given_up", "bad"], ["starting", "busy"], ["restarting", "warn"]]);

function View({ parts, query }) {
  const [{ plugins = null, errors = {} } = {}, error, read] = useAnswer("plugin_logs", TABLE_EVERY);
  const [source, plugin] = parts;
  const silent = plugins ? [...sources.value.values()].filter((each) => !each.source.startsWith(SUPERVISORS) && !rowsOf(each.source, plugins).length) : [];
  const none = silent.map((each) => ({ plugin: each.source, source: "", state: "", why: whyNone(each.kind) }));
  const items = filtered([...(plugins ?? []), ...none], query.q, (row) => `${row.plugin}\n${row.source}\n${row.state}`.toLowerCase());
  const open = plugins?.find((row) => row.source === source && row.plugin === plugin);
  return html`<${ListPage}
    title="Logs"
    one="plugin"
    count=${plugins && plural(items.length - items.filter(({ why }) => why).length, "plugin")}
    below=${Object.entries(errors).map(([name, why]) => html`<p class="note warn" key=${name}>${shown(why)}</p>`)}
    error=${error}
    known=${plugins !== null}
    columns="cols-logs"
    heads=${html`<span>Plugin</span><span>State</span><span class="opt">Runs under</span><span class="num">Lines</span>`}
    label="Plugins with output"
    items=${items}
    id=${keyOf}
    row=${rowOf}
    selected=${parts.map(encodeURIComponent).join("/")}
    onOpen=${(row) => (row.why ? go("sources", [row.plugin]) : go("logs", [row.source, row.plugin], query))}
    narrowed=${plugins?.length || none.length}
    none=${html`<${Nothing} title="No output is kept">The output of plugins is kept where <code>toolbus run</code>, a folder of tool files or a mount runs them. Start one: <code>toolbus run plugin.py</code><//>`}
    detail=${plugin && html`<${Log} key=${parts.join("\n")} source=${source} plugin=${plugin} row=${open} query=${query} onChange=${read} />`}
  />`;
}

const keyOf = (row) => [row.source, row.plugin].map(encodeURIComponent).join("/");

function State({ state }) {
  const kind = KINDS.get(state) ?? "off";
  return html`<span class=${kind}><i class=${"dot " + kind}></i>${shown(String(state ?? ""))}</span>`;
}

function rowOf(row) {
  if (row.why) return html`<${Cut} kind="whole" text=${row.plugin} more=${`no output here: ${row.why}`} />`;
  return html`
    <${Cut} text=${row.plugin} />
    <${State} state=${row.state} />
    <${Cut} kind="sub opt" text=${row.source} />
    <span class="num">${count(row.lines)}</span>
  `;
}

// -- the output of one plugin --------------------------------------------------------------------------------------

function Log({ source, plugin, row, query, onChange }) {
  const [log, setLog] = useState({ lines: [], lost: 0, read: false, error: null });
  const [follows, setFollows] = useState(true);
  const [act, busy, failure] = useAct();
  const live = connection.value === "live";
  useEffect(() => {
    if (!live) return;
    const asking = new AbortController();
    followLog({ plugin, source }, asking.signal, setLog);
    return () => asking.abort();
  }, [live]);
  const wrap = query.wrap === "1";
  useKeys(
    { w: () => refine({ wrap: wrap ? "" : "1" }), f: () => setFollows(!follows) },
    { w: "wrap long lines, or not", f: "follow the log, or stand still" },
  );
  const restart = async () => {
    if (await askName("Restart", plugin, "It finishes its calls first, and is then started anew.")) act(() => admin("plugin_restart", { plugin, source }), onChange);
  };
  const stop = async () => {
    if (await askName("Stop", plugin, "It finishes its calls first, and stays stopped until it is restarted.")) act(() => admin("plugin_stop", { plugin, source }), onChange);
  };
  const lines = filtered(log.lines, query.find, (line) => line.search);
  return html`
    <${DetailHead} back="logs" title="Logs" query=${query} name=${plugin}>
      ${row && html`<${State} state=${row.state} />`}
      <span class="spring"></span>
      ${may("catalog") && html`<button type="button" class="small" disabled=${busy} onClick=${restart}>Restart …</button>`}
      ${may("drain") && html`<button type="button" class="small danger" disabled=${busy} onClick=${stop}>Stop …</button>`}
    <//>
    <div class="head">
      <div class="crumbs">
        ${row?.pid && html`<span>pid ${row.pid}</span>`}
        ${row?.since && html`<span>for ${age(now.value - row.since)}</span>`}
        ${row?.restarts > 0 && html`<span>${plural(row.restarts, "restart")}</span>`}
        ${row?.last_exit && html`<span>last exit: ${shown(String(row.last_exit))}</span>`}
        <span class="cut">${shown(source)}</span>
      </div>
      <div class="inline">
        <div class="filter"><input type="search" aria-label="Find in the output" placeholder="Find in the output" autocomplete="off" spellcheck="false" value=${query.find ?? ""} onInput=${(event) => refine({ find: event.currentTarget.value })} /></div>
        <button type="button" class="small" aria-pressed=${follows} onClick=${() => setFollows(!follows)}>Follow</button>
        <button type="button" class="small" aria-pressed=${wrap} onClick=${() => refine({ wrap: wrap ? "" : "1" })}>Wrap</button>
        <span class="muted num">${query.find ? `${count(lines.length)} of ` : ""}${plural(log.lines.length, "line")}</span>
      </div>
      <${Failed} error=${failure} what="That did not work" />
      <${Failed} error=${log.error} what="The output" />
      ${log.lost > 0 && html`<p class="note warn">${plural(log.lost, "line")} lost: they were written faster than they could be kept.</p>`}
    </div>
    ${lines.length
      ? html`<${Lines} lines=${lines} wrap=${wrap} follows=${follows} onFollows=${setFollows} />`
      : html`<div class="body"><${Nothing} title=${log.lines.length ? "No line has this text" : log.read ? "It has written nothing yet" : log.error ? "" : "Reading …"} /></div>`}
  `;
}

/** Waits until the tab is seen: a request that waits takes one of the six connections that a browser has to a server. */
async function seen() {
  while (document.hidden) await new Promise((resolve) => addEventListener("visibilitychange", resolve, { once: true }));
}

/** Reads the output of a plugin from its newest lines on, until aborted. */
async function followLog(asked, signal, setLog) {
  let since = -1;
  while (!signal.aborted) {
    await seen();
    try {
      const first = since < 0;
      const more = first ? { lines: FIRST_LINES } : { lines: MORE_LINES, wait_seconds: WAIT_SECONDS };
      const answer = await admin("plugin_logs", { ...asked, ...more, since }, { signal });
      const anew = first || answer.next < since; // its supervisor was restarted, and counts from the beginning
      since = Number(answer.next);
      if (answer.lines.length || answer.lost || anew) {
        setLog((before) => ({
          lines: newestLines(anew ? [] : before.lines, answer.lines, MAX_LINES),
          lost: before.lost + (first ? 0 : Number(answer.lost ?? 0)),
          read: true,
          error: null,
        }));
      }
    } catch (error) {
      if (signal.aborted) return;
      setLog((before) => ({ ...before, error }));
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
  }
}

function Lines({ lines, wrap, follows, onFollows }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, room: 600 });
  const drawn = wrap ? lines.slice(-MAX_WRAPPED) : lines;
  const [first, end] = wrap ? [0, drawn.length] : windowOf(lines.length, HEIGHT, view.top, view.room, MAX_DRAWN);
  const newest = lines[lines.length - 1].number;
  useLayoutEffect(() => {
    if (follows) box.current.scrollTop = box.current.scrollHeight;
  }, [newest, follows, wrap, drawn.length]);
  const scrolled = ({ currentTarget: element }) => {
    setView({ top: element.scrollTop, room: element.clientHeight });
    const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < AT_END;
    if (atEnd !== follows && (atEnd || element.scrollTop < view.top)) onFollows(atEnd);
  };
  return html`<div class=${wrap ? "log wrap" : "log"} ref=${box} tabindex="0" role="log" aria-live="off" aria-label="Output" onScroll=${scrolled}>
    ${wrap && lines.length > drawn.length && html`<p class="note">The newest ${count(drawn.length)} lines; without wrapping there are ${count(lines.length)}.</p>`}
    <div class="space" style=${wrap ? { height: "auto" } : { height: lines.length * HEIGHT + "px" }}>
      ${drawn.slice(first, end).map(
        (line, at) => html`<div class="line" key=${line.number} style=${{ top: wrap ? "auto" : (first + at) * HEIGHT + "px" }}>
          <span class="muted" title=${moment(line.at, 3)}>${clock(line.at)}</span>
          <span class="muted" title=${line.stream}>${line.stream === "stderr" ? " err " : "     "}</span><span>${line.text}</span>
        </div>`,
      )}
    </div>
  </div>`;
}

export const page = { key: "l", name: "logs", title: "Logs", verb: "logs", view: View };
