// Shows tools: how each fares, and the one that is open.

import { computed, html } from "../html.mjs";
import { ListPage } from "../list_page.mjs";
import { Cut, Nothing } from "../parts.mjs";
import { go, refine } from "../router.mjs";
import { Sparkline } from "../sparkline.mjs";
import { catalog, historyOf, toolKey, tools } from "../store.mjs";
import { count, duration, firstLine, plural, shown } from "../text.mjs";
import { ToolDetail } from "../tool_detail.mjs";

const BUS = "toolbus"; // the source of the bus's own tools

// Column → how rows are ordered by it: largest first, but for texts.
const ORDERS = {
  name: null,
  source: (item) => item.source,
  calls: (item, counts) => -(counts?.calls ?? 0),
  failed: (item, counts) => -(counts?.failed ?? 0),
  p50: (item, counts) => -(counts?.p50 ?? -1),
  p95: (item, counts) => -(counts?.p95 ?? -1),
};

const offered = computed(() => {
  const items = catalog.value.map((tool) => ({ ...tool, key: toolKey(tool.source, tool.name), text: textOf(tool) }));
  return { items, keys: new Set(items.map(({ key }) => key)) };
});

/** Every tool: those that are offered, then those that were called and are not in the list that this page gets. */
const everything = computed(() => {
  const { items, keys } = offered.value;
  const others = [...tools.value].filter(([key, { source }]) => source !== BUS && !keys.has(key));
  return [...items, ...others.map(([key, { source, name }]) => ({ source, name, key, other: true, text: textOf({ source, name }) }))];
});

const textOf = ({ name, source, description = "" }) => `${name}\n${source}\n${description}`.toLowerCase();

/** Returns the tools of a query, those whose name has the words first. */
export function selected(items, { q = "", source = "", sort = "" }, counts) {
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  let found = items;
  if (source) found = found.filter((item) => item.source === source);
  if (words.length) {
    found = found.filter(({ text }) => words.every((word) => text.includes(word)));
    const named = (item) => words.every((word) => item.name.toLowerCase().includes(word));
    found = [...found.filter(named), ...found.filter((item) => !named(item))];
  }
  const order = Object.hasOwn(ORDERS, sort) ? ORDERS[sort] : null;
  if (!order) return found;
  const keyed = found.map((item) => [order(item, counts.get(item.key)), item]);
  return keyed.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0)).map(([, item]) => item);
}

function View({ parts: [source, name], query }) {
  const open = name === undefined ? "" : toolKey(source, name);
  const items = selected(everything.value, query, tools.value);
  const column = (name, label, kind = "") => html`<span class=${kind}>
    <button type="button" aria-pressed=${(query.sort || "name") === name} title=${`order by ${label}`} onClick=${() => refine({ sort: name === "name" ? "" : name })}>${label}</button>
  </span>`;
  return html`<${ListPage}
    title="Tools"
    one="tool"
    count=${plural(items.length, "tool")}
    aside=${query.source &&
    html`<span class="chip busy">source: ${shown(query.source)}
      <button type="button" aria-label="Remove the filter source" onClick=${() => refine({ source: "" })}>×</button></span>`}
    columns="cols-tools"
    heads=${html`${column("name", "Tool")}${column("source", "Source", "narrow-off")}<span class="opt">Last minute</span>
      ${column("calls", "Calls", "num")}${column("failed", "Errors", "num opt")}${column("p50", "p50", "num opt")}${column("p95", "p95", "num")}`}
    items=${items}
    id=${(item) => item.key}
    row=${rowOf}
    selected=${open}
    onOpen=${(item) => go("tools", [item.source, item.name], withoutArguments(query))}
    narrowed=${query.q || query.source}
    none=${html`<${Nothing} title="No tools yet">Start a plugin, or add a folder of tools: <code>toolbus serve --tools-dir DIR</code><//>`}
    detail=${open && html`<${ToolDetail} key=${open} source=${source} name=${name} query=${query} />`}
  />`;
}

const withoutArguments = ({ args: _args, ...rest }) => rest;

function rowOf(item) {
  return html`<${Row} item=${item} />`;
}

function Row({ item }) {
  const counts = tools.value.get(item.key);
  return html`
    <${Cut} kind=${item.other ? "muted" : ""} text=${item.name} more=${firstLine(item.description)} />
    <${Cut} kind="sub narrow-off" text=${item.source} />
    <span class="opt">${counts && html`<${Sparkline} values=${historyOf(counts)} label="calls a second, the last minute" />`}</span>
    <span class="num">${counts ? count(counts.calls) : ""}</span>
    <span class=${counts?.failed ? "num opt bad" : "num opt"}>${counts?.failed ? count(counts.failed) : ""}</span>
    <span class="num opt">${counts && counts.p50 !== null ? duration(counts.p50) : ""}</span>
    <span class="num">${counts && counts.p95 !== null ? duration(counts.p95) : ""}</span>
  `;
}

export const page = { key: "t", name: "tools", title: "Tools", view: View };
