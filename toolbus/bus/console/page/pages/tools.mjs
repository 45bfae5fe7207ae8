// Shows tools: what each is, how it fares, and a form to call it.

import { invoke } from "../api.mjs";
import { now } from "../clock.mjs";
import { askName } from "../dialogs.mjs";
import { Filter } from "../filter.mjs";
import { ArgumentsForm } from "../form.mjs";
import { computed, html, useEffect, useRef, useState } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { Cut, DetailHead, Facts, Failed, Nothing, Outcome, Panel, Split } from "../parts.mjs";
import { Output, readJson, ResultView } from "../result_view.mjs";
import { go, link, refine, route } from "../router.mjs";
import { Rows } from "../rows.mjs";
import { argumentsModel } from "../schema_model.mjs";
import { SchemaTree } from "../schema_tree.mjs";
import { Sparkline } from "../sparkline.mjs";
import { bus, calls, catalog, connection, historyOf, toolKey, tools } from "../store.mjs";
import { ago, clock, count, duration, moment, plural, shown } from "../text.mjs";
import { declarationOf } from "../tool_declarations.mjs";

const BUS = "toolbus"; // the source of the bus's own tools
const MAX_CALLS = 8; // newest calls of a tool
const MAX_CHUNKS = 65_536; // characters of output that is shown before the result
const HINTS = { read_only: "read only", idempotent: "idempotent", destructive: "destructive", open_world: "open world" };

// Column → how rows are ordered by it: largest first, but for texts.
const ORDERS = {
  name: null,
  source: (item) => item.source,
  calls: (item, counts) => -(counts?.calls ?? 0),
  failed: (item, counts) => -(counts?.failed ?? 0),
  p50: (item, counts) => -(counts?.p50 ?? -1),
  p95: (item, counts) => -(counts?.p95 ?? -1),
};

function View({ parts, query }) {
  const [source, name] = parts;
  const open = name !== undefined;
  return html`<${Split}
    list=${html`<${List} selected=${open ? toolKey(source, name) : ""} query=${query} />`}
    detail=${open && html`<${Detail} key=${toolKey(source, name)} source=${source} name=${name} query=${query} />`}
  />`;
}

// -- the list ------------------------------------------------------------------------------------------------------

/** Every tool: those that are offered, then those that were called and are not in the list that this page gets. */
const everything = computed(() => {
  const items = catalog.value.map((tool) => ({ ...tool, key: toolKey(tool.source, tool.name), text: textOf(tool) }));
  const known = new Set(items.map(({ key }) => key));
  for (const [key, { source, name }] of tools.value) {
    if (!known.has(key) && source !== BUS) items.push({ source, name, key, other: true, text: textOf({ source, name }) });
  }
  return items;
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

function List({ selected: open, query }) {
  const items = selected(everything.value, query, tools.value);
  const column = (name, label, kind = "") => html`<span class=${kind} aria-sort=${(query.sort ?? "name") === name ? "other" : undefined}>
    <button type="button" title=${`order by ${label}`} onClick=${() => refine({ sort: name === "name" ? "" : name })}>${label}</button>
  </span>`;
  return html`
    <div class="head">
      <div class="toolbar"><h1>Tools</h1><${Filter} label="Filter tools" count=${plural(items.length, "tool")} />
        ${query.source &&
        html`<span class="chip busy">source: ${shown(query.source)}
          <button type="button" aria-label="Remove the filter source" onClick=${() => refine({ source: "" })}>×</button></span>`}
      </div>
    </div>
    <div class="columns cols-tools">
      ${column("name", "Tool")}${column("source", "Source", "narrow-off")}<span class="opt">Last minute</span>
      ${column("calls", "Calls", "num")}${column("failed", "Errors", "num opt")}${column("p50", "p50", "num opt")}${column("p95", "p95", "num")}
    </div>
    <${Rows}
      label="Tools"
      items=${items}
      id=${(item) => item.key}
      row=${rowOf}
      columns="cols-tools"
      selected=${open}
      onOpen=${(item) => go("tools", [item.source, item.name], withoutArguments(query))}
      empty=${html`<${NoTools} query=${query} />`}
    />
  `;
}

const withoutArguments = ({ args: _args, ...rest }) => rest;

function rowOf(item) {
  return html`<${Row} item=${item} />`;
}

function Row({ item }) {
  const counts = tools.value.get(item.key);
  return html`
    <${Cut} kind=${item.other ? "muted" : ""} text=${item.name} />
    <${Cut} kind="sub narrow-off" text=${item.source} />
    <span class="opt">${counts && html`<${Sparkline} values=${historyOf(counts)} label="calls a second, the last minute" />`}</span>
    <span class="num">${counts ? count(counts.calls) : ""}</span>
    <span class=${counts?.failed ? "num opt bad" : "num opt"}>${counts?.failed ? count(counts.failed) : ""}</span>
    <span class="num opt">${counts && counts.p50 !== null ? duration(counts.p50) : ""}</span>
    <span class="num">${counts && counts.p95 !== null ? duration(counts.p95) : ""}</span>
  `;
}

function NoTools({ query }) {
  if (query.q || query.source) return html`<${Nothing} title="No such tool">Remove a part of the filter.<//>`;
  if (connection.value !== "live") return html`<${Nothing} title="Waiting for the bus …" />`;
  return html`<${Nothing} title="No tools yet">Start a plugin, or add a folder of tools: <code>toolbus serve --tools DIR</code><//>`;
}

// -- one tool ------------------------------------------------------------------------------------------------------

function Detail({ source, name, query }) {
  const [read, setRead] = useState({ tool: null, error: null, done: false });
  const { instance, revision } = bus.value;
  const live = connection.value === "live";
  useEffect(() => {
    if (!live) return undefined;
    const gone = new AbortController();
    declarationOf(source, name, gone.signal).then(
      (tool) => setRead({ tool, error: null, done: true }),
      (error) => error.name === "AbortError" || setRead((before) => ({ ...before, error, done: true })),
    );
    return () => gone.abort();
  }, [source, name, instance, revision, live]);

  const { tool, error, done } = read;
  const head = html`<${DetailHead} back="tools" title="Tools" query=${query} name=${tool?.display_name || name}>
    ${tool && html`<${Chips} tool=${tool} />`}
  <//>`;
  return html`${head}
    <div class="body" aria-busy=${done ? undefined : "true"}>
      <${Failed} error=${error} what="What the tool declares" />
      ${tool && html`<${Warnings} tool=${tool} />${tool.description && html`<p class="any description" dir="auto">${shownText(tool.description)}</p>`}<${Try} tool=${tool} query=${query} />`}
      ${done && !tool && !error && html`<${Nothing} title="This tool is not there">No source offers it now, or not to you.<//>`}
      <${Figures} source=${source} name=${name} />
      ${tool && html`<${About} tool=${tool} /><${Schemas} tool=${tool} />`}
      <${LastCalls} source=${source} name=${name} />
    </div>`;
}

const shownText = (text) => text.split("\n").map(shown).join("\n");

function Chips({ tool }) {
  return html`${Object.entries(HINTS).map(
    ([hint, words]) => tool.hints?.[hint] === true && html`<span class=${hint === "destructive" ? "chip bad" : "chip"}>${words}</span>`,
  )}
  ${tool.state !== "live" && html`<span class="chip warn">${shown(String(tool.state))}</span>`}`;
}

function Warnings({ tool }) {
  return html`${(tool.warnings ?? []).map((text) => html`<p class="note warn any">${shown(String(text))}</p>`)}
  ${tool.last_error && html`<p class="note bad any">It went offline: ${shown(tool.last_error)}</p>`}`;
}

function Figures({ source, name }) {
  const counts = tools.value.get(toolKey(source, name));
  if (!counts) return null;
  const { failed, p50, p95, last } = counts;
  const figure = (label, value, kind = "") => html`<div><span class="muted">${label}</span><span class=${"value " + kind}>${value}</span></div>`;
  return html`<${Panel}>
    <div class="figures">
      ${figure("Calls", count(counts.calls))}${figure("Errors", count(failed), failed ? "bad" : "")}${figure("p50", duration(p50))}${figure("p95", duration(p95))}
      <div title=${moment(last)}><span class="muted">Last</span><span class="value"><${Ago} at=${last} /></span></div>
    </div>
    <div class="inside"><${Sparkline} kind="wide" values=${historyOf(counts)} label="calls a second, the last minute" /></div>
  <//>`;
}

function Ago({ at }) {
  return ago(at, now.value);
}

function About({ tool }) {
  const { source, roles = [], schema_hash, timeout_seconds, needs = [], min_level, sessions, hints_trusted } = tool;
  return html`<${Panel} title="The tool">
    <${Facts} of=${[
      ["Name", html`<code>${shown(tool.name)}</code>`],
      ["Source", html`<a href=${link("sources", [source])}>${shown(source)}</a>`],
      ["Sessions", sessions > 0 && count(sessions)],
      ["Roles", roles.filter(Boolean).map(shown).join(", ")],
      ["Timeout", timeout_seconds > 0 && duration(timeout_seconds)],
      ["Access level", min_level > 0 && `at least ${min_level}`],
      ["Asks for", needs.map(shown).join(", ")],
      ["Hints", hints_trusted === false && "not trusted: they are the words of a foreign server"],
      ["Hash", html`<code>${schema_hash}</code>`],
    ]} />
  <//>`;
}

function Schemas({ tool }) {
  return html`<${SchemaPanel} title="Arguments" text=${tool.parameters_json} />
    ${tool.output_schema_json && html`<${SchemaPanel} title="Output" text=${tool.output_schema_json} />`}`;
}

function SchemaPanel({ title, text }) {
  const [asJson, setAsJson] = useState(false);
  const schema = readJson(text);
  return html`<${Panel} title=${title} aside=${html`<span class="chips" role="group" aria-label="How to show it">
    <button type="button" aria-pressed=${!asJson} onClick=${() => setAsJson(false)}>Tree</button>
    <button type="button" aria-pressed=${asJson} onClick=${() => setAsJson(true)}>JSON</button>
  </span>`}>
    ${asJson ? html`<${Output} value=${JSON.stringify(schema, null, 2) ?? text} />` : html`<${SchemaTree} schema=${schema} />`}
  <//>`;
}

function LastCalls({ source, name }) {
  const found = [];
  for (const call of calls.value) {
    if (call.name === name && call.source === source && found.push(call) === MAX_CALLS) break;
  }
  return html`<${Panel} title="Last calls" aside=${html`<a href=${link("calls", [], { tool: name, source })}>All</a>`}>
    ${found.length
      ? html`<table class="table">
          <tbody>
            ${found.map(
              (call) => html`<tr key=${call.number}>
                <td class="muted">${clock(call.ended)}</td>
                <td><a href=${link("calls", [call.id || `n${call.number}`])}>${shown(call.caller)}</a></td>
                <td><${Outcome} call=${call} />${call.failure?.message && html` <span class="any">${shown(call.failure.message)}</span>`}</td>
                <td class="num">${duration(call.seconds)}</td>
              </tr>`,
            )}
          </tbody>
        </table>`
      : html`<p class="inside muted">None since this page was opened.</p>`}
  <//>`;
}

// -- trying it -----------------------------------------------------------------------------------------------------

function Try({ tool, query }) {
  const [drawn, setDrawn] = useState(tool); // the declaration that the form is of
  const [user, setUser] = useState("");
  const [run, setRun] = useState(null); // {answer, seconds, error, progress, chunks, abort}; null: none yet
  const form = useRef(null);
  const current = useRef(0); // the number of the newest run
  const model = useModel(drawn);

  const start = async (args) => {
    if (tool.hints?.destructive === true) {
      const sure = await askName("Run", tool.name, "Its author says that it is destructive: it may delete or overwrite what it works on.");
      if (!sure) return;
    }
    const number = ++current.current;
    const abort = new AbortController();
    const began = performance.now();
    const set = (changes) => number === current.current && setRun((before) => ({ ...before, ...changes }));
    setRun({ abort, progress: null, chunks: "" });
    const onEvent = (kind, data) => {
      if (number !== current.current) return;
      if (kind === "progress") set({ progress: data });
      else setRun((before) => ({ ...before, chunks: (before.chunks + chunkText(data)).slice(-MAX_CHUNKS) }));
    };
    try {
      const more = { schema_hash: drawn.schema_hash, ...(user ? { context: { user_id: user } } : {}) };
      const answer = await invoke(tool.name, args, { onEvent, signal: abort.signal, ...more });
      set({ answer, seconds: (performance.now() - began) / 1000, abort: null });
    } catch (error) {
      set(error.name === "AbortError" ? { abort: null, cancelled: true } : { abort: null, error });
    }
  };
  const cancel = () => {
    if (!run?.abort) return false;
    run.abort.abort();
  };
  useEffect(() => () => current.current++, []);
  useKeys({ r: () => form.current?.run(), x: cancel }, { r: "run the tool with what the form shows", x: "cancel the call that runs" });

  const busy = Boolean(run?.abort);
  return html`<${Panel} title="Try it">
      ${drawn.schema_hash !== tool.schema_hash &&
      html`<p class="note warn">
        The tool has changed since this form was drawn. <button type="button" onClick=${() => setDrawn(tool)}>Draw it again</button>
      </p>`}
      <${ArgumentsForm} key=${drawn.schema_hash} model=${model} text=${query.args ?? null} api=${form} busy=${busy} onRun=${start}>
        ${busy && html`<button type="button" onClick=${cancel}>Cancel</button>`}
        <input type="text" class="user" aria-label="for the user" placeholder="for the user (none)" autocomplete="off" spellcheck=${false} value=${user} onInput=${(event) => setUser(event.currentTarget.value)} />
      <//>
    <//>
    ${run && html`<${Run} run=${run} />`}`;
}

/** Returns the model of a declaration, made once. */
function useModel(tool) {
  const made = useRef({ tool: null, model: null });
  if (made.current.tool !== tool.schema_hash) made.current = { tool: tool.schema_hash, model: argumentsModel(readJson(tool.parameters_json)) };
  return made.current.model;
}

function Run({ run }) {
  const { answer, seconds, error, progress, chunks, abort, cancelled } = run;
  return html`
    ${abort && html`<p class="note" role="status"><i class="dot busy"></i> It runs. <kbd>x</kbd> cancels it.</p>`}
    ${abort && progress && html`<${Progress} of=${progress} />`}
    ${cancelled && html`<p class="note warn" role="status">Cancelled. The tool may have done a part of its work.</p>`}
    <${Failed} error=${error} />
    ${chunks && !answer && html`<${Panel} title="Output until now"><pre class="text any">${shownText(chunks)}</pre><//>`}
    ${answer && html`<${ResultView} key=${answer.call_id} answer=${answer} seconds=${seconds} />`}
  `;
}

function Progress({ of: { progress, total, message } }) {
  const share = Number(total) > 0 ? Math.min(1, Number(progress) / Number(total)) : null;
  return html`<p role="status">
    ${share !== null && html`<span class="bar"><span class="fill" style=${{ width: `${share * 100}%` }}></span></span>`}
    <span class="muted any">${shown(String(message || (share === null ? progress : `${Math.round(share * 100)} %`)))}</span>
  </p>`;
}

const chunkText = (data) => (data?.text?.text ?? data?.text ?? (typeof data === "string" ? data : JSON.stringify(data))) + "";

export const page = { key: "t", name: "tools", title: "Tools", view: View };
