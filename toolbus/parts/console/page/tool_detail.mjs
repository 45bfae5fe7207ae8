// Draws one tool: what it declares, how it fares, its last calls, and a form to try it.

import { html, useEffect, useState } from "./html.mjs";
import { admin } from "./api.mjs";
import { Ago, DetailHead, Facts, Failed, Nothing, Outcome, Panel } from "./parts.mjs";
import { Output, readJson } from "./result_view.mjs";
import { link } from "./router.mjs";
import { SchemaTree } from "./schema_tree.mjs";
import { Sparkline } from "./sparkline.mjs";
import { bus, calls, connection, historyOf, toolKey, tools } from "./store.mjs";
import { clock, count, duration, moment, shown, shownLines } from "./text.mjs";
import { declarationOf } from "./tool_declarations.mjs";
import { Try } from "./tool_try.mjs";

const MAX_CALLS = 8; // newest calls of a tool
const HINTS = { read_only: "read only", idempotent: "idempotent", destructive: "destructive", open_world: "open world" };

/** Draws a tool: what it declares and how it fares, with a form to call it. */
export function ToolDetail({ source, name, query }) {
  const [read, setRead] = useState({ tool: null, gone: false, error: null, done: false });
  const { instance, revision } = bus.value;
  const live = connection.value === "live";
  useEffect(() => {
    if (!live) return undefined;
    const gone = new AbortController();
    declarationOf(source, name, gone.signal).then(
      // A form that is being filled stays when its tool goes: a plugin that is started again comes back.
      (tool) => setRead((before) => ({ tool: tool ?? before.tool, gone: tool === null, error: null, done: true })),
      (error) => error.name === "AbortError" || setRead((before) => ({ ...before, error, done: true })),
    );
    return () => gone.abort();
  }, [source, name, instance, revision, live]);

  const { tool, gone, error, done } = read;
  const head = html`<${DetailHead} back="tools" title="Tools" query=${query} name=${tool?.display_name || name}>
    ${gone ? html`<span class="chip warn">gone</span>` : tool && html`<${Chips} tool=${tool} />`}
  <//>`;
  return html`${head}
    <div class="body" aria-busy=${done ? undefined : "true"}>
      <${Failed} error=${error} what="What the tool declares" />
      ${tool && gone && html`<p class="note warn" role="status">No source offers this tool now, or not to you. What you typed stays here.</p>`}
      ${tool && html`<${Warnings} tool=${tool} />${tool.description && html`<p class="any description" dir="auto">${shownLines(tool.description)}</p>`}<${Try} tool=${tool} query=${query} />`}
      ${done && !tool && !error && html`<${Nothing} title="This tool is not there">No source offers it now, or not to you.<//>`}
      <${Figures} source=${source} name=${name} />
      ${tool && html`<${Overlay} name=${tool.name} revision=${revision} /><${About} tool=${tool} /><${Schemas} tool=${tool} />`}
      <${LastCalls} source=${source} name=${name} />
    </div>`;
}

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
      <div title=${moment(last)}><span class="muted">Last</span><span class="value"><${Ago} at=${last} short /> <small>ago</small></span></div>
    </div>
    <div class="inside"><${Sparkline} kind="wide" values=${historyOf(counts)} label="calls a second, the last minute" /></div>
  <//>`;
}

/** Draws what the operator's overlay changes, and what the author declares; nothing for those who may not know. */
function Overlay({ name, revision }) {
  const [why, setWhy] = useState("");
  useEffect(() => {
    const gone = new AbortController();
    admin("explain", { tool: name }, { signal: gone.signal }).then(
      ({ steps }) => setWhy(steps.find(({ step }) => step === "overlay")?.why ?? ""),
      (error) => error.name === "AbortError" || setWhy(""),
    );
    return () => gone.abort();
  }, [name, revision]);
  return why && html`<${Panel} title="Overlay"><p class="inside any" dir="auto">${shownLines(why)}</p><//>`;
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
