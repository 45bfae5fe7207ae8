// Shows sources and their sessions: who is attached, in which state, how much of each window is used, what was refused.

import { admin } from "../api.mjs";
import { askName, toast } from "../dialogs.mjs";
import { filtered } from "../filter.mjs";
import { html, useEffect, useState } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { rowsOf, whyNone } from "../log_lines.mjs";
import { ListPage } from "../list_page.mjs";
import { Ago, Cut, DetailHead, Facts, Failed, Nothing, Panel, useAct, useAnswer } from "../parts.mjs";
import { go, link } from "../router.mjs";
import { bus, catalog, connection, MAX_LISTED, may, sessions, sources, tools } from "../store.mjs";
import { count, firstLine, moment, plural, shown } from "../text.mjs";
import { refusedTools } from "../tool_declarations.mjs";

// State → the class of its sign, and what it means.
const STATES = {
  attached: ["ok", "attached"],
  suspect: ["warn", "suspect: it does not answer heartbeats"],
  offline: ["off", "offline: its tools keep their places for the grace period"],
  draining: ["busy", "draining: it takes no new calls"],
  revoked: ["warn", "attached; its permission to offer tools was revoked"],
};
const WORST_FIRST = ["suspect", "offline", "draining", "revoked", "attached"];
const MAX_TOOLS = 100; // of a source that are named

function View({ parts, query }) {
  const [name] = parts;
  const items = filtered(everySource(), query.q, ({ source, kind, state }) => `${source}\n${kind}\n${state}`.toLowerCase());
  return html`<${ListPage}
    title="Sources"
    one="source"
    count=${plural(items.length, "source") + (sources.value.size < MAX_LISTED ? "" : ` of the first ${count(MAX_LISTED)}`)}
    columns="cols-sources"
    heads=${html`<span>Source</span><span>State</span><span class="num">Tools</span><span class="num narrow-off">Sessions</span><span class="opt">Window</span>`}
    items=${items}
    id=${(item) => item.source}
    row=${rowOf}
    selected=${name ?? ""}
    onOpen=${(item) => go("sources", [item.source], query)}
    narrowed=${query.q}
    none=${html`<${Nothing} title="Nothing is attached yet">Start a plugin: <code>toolbus run plugin.py</code><//>`}
    detail=${name !== undefined && html`<${Detail} key=${name} name=${name} query=${query} />`}
  />`;
}

// -- the list ------------------------------------------------------------------------------------------------------

/** Returns every source, those that need attention first. A host that offers nothing is known by its sessions. */
function everySource() {
  const all = new Map([...sources.value].map(([name, source]) => [name, { ...source, used: 0, room: 0 }]));
  for (const session of sessions.value.values()) {
    const { source, kind, state, in_flight = 0, max_in_flight = 0 } = session;
    if (!all.has(source)) all.set(source, { source, kind, state, tools: 0, sessions: 0, refused: 0, used: 0, room: 0, only: true });
    const item = all.get(source);
    if (item.only) item.sessions++;
    item.used += Number(in_flight);
    item.room += Number(max_in_flight);
  }
  for (const item of all.values()) if (item.silenced && item.state === "attached") item.state = "revoked";
  const rank = ({ state }) => (WORST_FIRST.indexOf(state) + WORST_FIRST.length) % WORST_FIRST.length;
  return [...all.values()].sort((one, other) => rank(one) - rank(other) || (one.source < other.source ? -1 : 1));
}

function rowOf(item) {
  return html`
    <${Cut} text=${item.source} />
    <span class="cut"><${State} of=${item.state} short /></span>
    <span class="num">${item.tools ? count(item.tools) : ""}${refusedOf(item) ? html`<span class="bad" title=${`${plural(refusedOf(item), "tool")} refused`}> +${refusedOf(item)}</span>` : ""}</span>
    <span class="num narrow-off">${count(item.sessions)}</span>
    <span class="opt"><${Window} used=${item.used} room=${item.room} /></span>
  `;
}

const refusedOf = ({ refused }) => (Array.isArray(refused) ? refused.length : Number(refused ?? 0));

function State({ of, short = false }) {
  const [kind, words] = Object.hasOwn(STATES, of) ? STATES[of] : ["", of];
  return html`<span class=${kind} title=${words}><i class=${"dot " + kind}></i>${short ? of : words}</span>`;
}

/** Draws how much of a window is used: calls in flight of those that may be. */
function Window({ used, room }) {
  if (!Number(room)) return used ? html`<span class="muted">${count(used)} in flight</span>` : "";
  const share = Math.min(1, used / room);
  const kind = share >= 1 ? "fill bad" : share >= 0.8 ? "fill warn" : "fill";
  return html`<span class="bar" role="img" aria-label=${`${used} of ${room} calls in flight`} title=${`${used} of ${room} calls in flight`}>
    <span class=${kind} style=${{ width: `${share * 100}%` }}></span>
  </span>`;
}

// -- one source ----------------------------------------------------------------------------------------------------

function Detail({ name, query }) {
  const item = everySource().find(({ source }) => source === name);
  const [run, busy, error] = useAct();
  const mayDrain = may("drain") && item?.state !== "draining" && own(name).length > 0;
  const drain = async () => {
    const text = "Its sessions finish their calls and end. Its program decides whether it comes back.";
    if (!mayDrain || !(await askName("Drain", name, text))) return;
    run(
      () => admin("drain", { source: name }),
      ({ sessions: ended }) => toast(`${name} drains: ${plural(ended, "session")}`),
    );
  };
  useKeys(mayDrain ? { d: () => void drain() } : {}, mayDrain ? { d: "drain the source" } : "");
  const head = html`<${DetailHead} back="sources" title="Sources" query=${query} name=${name}>
    ${item && html`<span class="chip">${shown(String(item.kind ?? ""))}</span>`}
    ${mayDrain && html`<span class="spring"></span><button type="button" class="danger" disabled=${busy} onClick=${drain}>Drain …</button>`}
  <//>`;
  if (!item) {
    const title = connection.value === "live" ? "This source is not there" : "Waiting for the bus …";
    return html`${head}<div class="body"><${Nothing} title=${title}>It may have left, or its grace period has ended.<//></div>`;
  }
  return html`${head}
    <div class="body">
      <${Failed} error=${error} what="Drain" />
      <${Panel}>
        <${Facts} of=${[
          ["State", item.offline_since ? html`<${Offline} since=${item.offline_since} until=${item.offline_until} />` : html`<${State} of=${item.state} />`],
          ["May offer tools", item.silenced && html`no: <a href=${link("permissions", [], { tab: "sources", q: name })}>grant it again</a>`],
          ["Tools", item.tools > 0 && html`<a href=${link("tools", [], { source: name })}>${plural(item.tools, "tool")}</a>`],
          ["In flight", item.room > 0 && html`${count(item.used)} of ${count(item.room)} <${Window} used=${item.used} room=${item.room} />`],
          ["Output", may("logs") && html`<${Output} item=${item} />`],
          ["Calls", html`<a href=${link("calls", [], { source: name })}>to its tools</a>, <a href=${link("calls", [], { caller: name })}>made by it</a>`],
        ]} />
      <//>
      <${Refused} name=${name} number=${refusedOf(item)} />
      ${own(name).map((session) => html`<${Session} key=${session.session} of=${session} />`)}
      <${ToolsOf} name=${name} number=${item.tools ?? 0} />
    </div>`;
}

/** Draws where the output of a source is, or why there is none. */
function Output({ item: { source, kind } }) {
  const [answer] = useAnswer("plugin_logs");
  if (!answer) return "";
  const rows = rowsOf(source, answer.plugins);
  if (!rows.length) return html`<span class="muted">none here: ${whyNone(kind)}</span>`;
  return rows.map((row, at) => html`${at > 0 && ", "}<a href=${link("logs", [row.source, row.plugin])}>${plural(row.lines, "line")} of ${shown(row.plugin)}</a>`);
}

const own = (name) => [...sessions.value.values()].filter(({ source }) => source === name);

function Session({ of }) {
  const { session, state, attached, identity, peer, in_flight, max_in_flight, pending, stuck, tools: offered } = of;
  return html`<${Panel} title=${html`Session <code>${shown(session)}</code>`}>
    <${Facts} of=${[
      ["State", html`<${State} of=${state} />`],
      ["Attached", attached > 0 && html`${moment(attached)} <span class="muted"><${Ago} at=${attached} /></span>`],
      ["Identity", identity && shown(identity)],
      ["Peer", peer && html`<code>${shown(peer)}</code>`],
      ["Tools", offered > 0 && count(offered)],
      ["In flight", max_in_flight > 0 && html`${count(in_flight)} of ${count(max_in_flight)} <${Window} used=${in_flight} room=${max_in_flight} />`],
      ["Waits for", pending > 0 && plural(pending, "call")],
      ["Stuck", stuck > 0 && html`<span class="bad">${plural(stuck, "call")} that the bus gave up and that still runs</span>`],
    ]} />
  <//>`;
}

/** Draws since when a source is offline, and until when its tools keep their places. */
function Offline({ since, until }) {
  return html`<span class="off"><i class="dot off"></i>offline since ${moment(since)}</span> <span class="muted">(<${Ago} at=${since} />)</span>
    <div>Its tools keep their places until ${moment(until)} <span class="muted">(<${Ago} at=${until} />)</span></div>`;
}

function Refused({ name, number }) {
  const [read, setRead] = useState({ rows: [], error: null });
  const { instance, revision } = bus.value;
  useEffect(() => {
    if (!number) return undefined;
    const gone = new AbortController();
    refusedTools(gone.signal).then(
      (rows) => setRead({ rows: rows.filter(({ source }) => source === name), error: null }),
      (error) => error.name === "AbortError" || setRead({ rows: [], error }),
    );
    return () => gone.abort();
  }, [name, number, instance, revision]);
  if (!number) return null;
  return html`<${Panel} kind="alert" title=${html`<span class="bad">${plural(number, "tool")} refused</span>`}>
    <${Failed} error=${read.error} />
    <table class="table">
      <tbody>
        ${read.rows.map(
          ({ name: tool, role, error }) => html`<tr>
            <td class="name"><code>${shown(tool)}</code>${role && html` <span class="muted">${shown(role)}</span>`}</td>
            <td class="any">${shown(error)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

function ToolsOf({ name, number }) {
  const own = catalog.value.filter(({ source }) => source === name);
  const others = number - new Set(own.map((tool) => tool.name)).size;
  if (!own.length && others <= 0) return null;
  return html`<${Panel} title="Tools" aside=${own.length > 0 && html`<a href=${link("tools", [], { source: name })}>All ${count(own.length)}</a>`}>
    <table class="table">
      <tbody>
        ${own.slice(0, MAX_TOOLS).map(
          (tool) => html`<tr key=${tool.name}>
            <td class="name any"><a href=${link("tools", [name, tool.name])}>${shown(tool.name)}</a></td>
            <td class="any muted">${shown(firstLine(tool.description))}</td>
            <td class="num">${count(tools.value.get(`${name}\n${tool.name}`)?.calls ?? 0)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
    ${own.length > MAX_TOOLS && html`<p class="inside muted">and ${count(own.length - MAX_TOOLS)} more</p>`}
    ${others > 0 && html`<p class="inside muted">${own.length ? "and " : ""}${plural(others, "tool")} that only some users may call</p>`}
  <//>`;
}

export const page = { key: "s", name: "sources", title: "Sources", view: View };
