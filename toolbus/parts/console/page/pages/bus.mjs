// Shows the bus itself: where it listens, what it does now, how it ended calls so far; and drains it.

import { admin } from "../api.mjs";
import { now } from "../clock.mjs";
import { askName } from "../dialogs.mjs";
import { html, useState } from "../html.mjs";
import { Facts, Failed, fieldsOf, Panel, Reading, Table, useAct, useAnswer } from "../parts.mjs";
import { link } from "../router.mjs";
import { Sparkline } from "../sparkline.mjs";
import { bus, MAX_LISTED, may, me, rates, sessions, sources } from "../store.mjs";
import { age, count, duration, moment, plural, rate, shown, size } from "../text.mjs";

const STATS_EVERY = 2000; // ms
const SLOW_EVERY = 5000;
const LEVELS = ["debug", "info", "warning", "error"];
const LEVEL_SECONDS = [
  [60, "1 minute"],
  [600, "10 minutes"],
  [3600, "1 hour"],
  [86400, "1 day"],
];

function View() {
  return html`<section class="list">
    <div class="head"><div class="toolbar"><h1>Bus</h1>${bus.value.draining && html`<span class="chip warn">draining</span>`}</div></div>
    <div class="body">
      <${Now} />
      <div class="grid">
        <div class="stack"><${About} />${may("drain") && html`<${Drain} />`}</div>
        <div class="stack">${may("metrics") && html`<${Counted} />`}${may("logs") && html`<${SlowCalls} /><${LogLevels} />`}</div>
      </div>
    </div>
  </section>`;
}

function Now() {
  const { in_flight, stuck, late, held_bytes, loop_lag, watchers } = bus.value;
  const figures = [
    ["in flight", count(in_flight)],
    ["stuck", count(stuck), stuck > 0 && "bad", "calls that were given up and still run at their plugin"],
    ["late results", count(late), "", "results that came after their call had ended"],
    ["held", size(held_bytes), "", "bytes of the arguments of calls in flight"],
    ["loop lag", duration(loop_lag), loop_lag > 0.1 && "warn", "how late the bus's own loop is"],
    ["watchers", count(watchers), "", "consoles and others that follow this bus"],
    ["sessions", known(sessions.value)],
    ["sources", known(sources.value)],
  ];
  return html`<${Panel} title="Now" aside=${html`<span class="num">${rate(bus.value.rate)}</span> <span class="muted">calls a second</span>`}>
    <div class="inside"><${Sparkline} values=${rates.value} kind="wide" label="Calls a second, the newest 60 readings" /></div>
    <div class="figures">
      ${figures.filter(([, value]) => value !== "–").map(([label, value, kind = "", title = ""]) => html`<div title=${title}><span class="muted">${label}</span><span class=${"value " + (kind || "")}>${value}</span></div>`)}
    </div>
  <//>`;
}

/** Returns how many rows of a list there are; the bus tells of so many and no more. */
const known = ({ size: rows }) => count(rows) + (rows >= MAX_LISTED ? "+" : "");

function About() {
  const { version, instance, bus_id, began, addresses = {}, roles = [], revision } = bus.value;
  return html`<${Panel} title="About">
    <${Facts} of=${[
      ["Machine", shown(me.value?.home ?? "")],
      ["Version", version],
      ["Running", began && html`for ${age(now.value - began)} <span class="muted">since ${moment(began)}</span>`],
      ["gRPC", addresses.grpc?.length > 0 && html`<code>${addresses.grpc.join(" ")}</code>`],
      ["HTTP", addresses.http && html`<code>${addresses.http}</code>`],
      ["HTTPS", addresses.https && html`<code>${addresses.https}</code>`],
      ["Roles", roles.length > 0 && shown(roles.join(", "))],
      ["Catalog", html`revision ${String(revision ?? "–")}`],
      ["You are", me.value?.identity ? shown(me.value.identity) : "a program of this machine"],
      ["You may", me.value && (me.value.administer.includes("*") ? "everything" : me.value.administer.join(", ") || "look at nothing")],
      ["Bus", bus_id && html`<code>${bus_id}</code>`],
      ["Instance", instance && html`<code>${instance}</code>`],
      ["Metrics", may("metrics") && html`<a href="/metrics" target="_blank" rel="noreferrer">/metrics</a> <span class="muted">for Prometheus</span>`],
    ]} />
  <//>`;
}

function Counted() {
  const [stats, error] = useAnswer("stats", STATS_EVERY);
  return html`<${Outcomes} stats=${stats} error=${error} />${stats?.limits && html`<${Limits} of=${stats.limits} />`}`;
}

/** Shows the limits in force, as the configuration names them. */
function Limits({ of }) {
  return html`<${Panel} title="Limits">
    <details class="inside">
      <summary>${plural(Object.keys(of).length, "value")} in force</summary>
      <${Facts} of=${Object.entries(of).map(([name, value]) => [html`<code>${name}</code>`, name.includes("bytes") ? size(value) : count(value)])} />
    </details>
  <//>`;
}

function Outcomes({ stats, error }) {
  const outcomes = Object.entries(stats?.outcomes ?? {}).sort(([, one], [, other]) => other - one);
  const total = outcomes.reduce((sum, [, number]) => sum + Number(number), 0);
  return html`<${Panel} title="How calls ended" aside=${stats && html`<span class="muted">${plural(total, "call")} since the start</span>`}>
    <${Failed} error=${error} what="The counts" />
    ${total > 0
      ? html`<table class="table"><tbody>
          ${outcomes.map(
            ([outcome, number]) => html`<tr key=${outcome}>
              <td class="nowrap">${outcome === "OK" || outcome === "INPUT_REQUIRED" ? outcome : html`<a href=${link("calls", [], { outcome })}><span class="chip bad">${outcome}</span></a>`}</td>
              <td class="wide"><span class="bar" aria-hidden="true"><span class=${outcome === "OK" ? "fill" : "fill bad"} style=${{ width: (number / total) * 100 + "%" }}></span></span></td>
              <td class="num">${count(number)}</td>
              <td class="num muted">${((number / total) * 100).toFixed(1)} %</td>
            </tr>`,
          )}
        </tbody></table>`
      : stats ? html`<div class="empty">No call has ended yet.</div>` : html`<${Reading} />`}
  <//>`;
}

/** Shows the levels that were changed, and changes one for a while. */
function LogLevels() {
  const [answer, problem, read] = useAnswer("log_level");
  const [run, busy, error] = useAct();
  const [draft, setDraft] = useState({ logger: "toolbus", level: "debug", seconds: "600" });
  const set = (field) => ({ currentTarget: { value } }) => setDraft((old) => ({ ...old, [field]: value })); // several may come in a frame
  const change = (logger, level, seconds) => run(() => admin("log_level", { logger, level, seconds }), read);
  const submit = (event) => {
    event.preventDefault();
    const { logger, level, seconds } = fieldsOf(event.currentTarget);
    change(logger.trim(), level, Number(seconds));
  };
  const changed = Object.entries(answer?.changed ?? {});
  return html`<${Panel} title="Log level" aside=${answer && html`<span class="muted">toolbus: ${answer.levels.toolbus}</span>`}>
    <${Failed} error=${problem} what="The levels" />
    ${changed.length > 0 &&
    html`<${Table}
      heads=${["Logger", "Level", "Goes back", ""]}
      rows=${changed.map(
        ([logger, { before, seconds }]) => html`<tr key=${logger}>
          <td><code>${logger}</code></td>
          <td>${answer.levels[logger]}</td>
          <td>to ${before || "that of its parent"} in ${age(seconds)}</td>
          <td class="acts-cell"><button type="button" class="small" disabled=${busy} onClick=${() => change(logger, "", 1)}>Put back</button></td>
        </tr>`,
      )}
    />`}
    <form class="form" onSubmit=${submit}>
      <div class="inline end">
        <div class="field"><label for="level-logger">Logger</label><input id="level-logger" name="logger" required autocomplete="off" spellcheck="false" list="level-loggers" value=${draft.logger} onInput=${set("logger")} /></div>
        <div class="field"><label for="level-level">Level</label><select id="level-level" name="level" value=${draft.level} onChange=${set("level")}>${LEVELS.map((level) => html`<option value=${level}>${level}</option>`)}</select></div>
        <div class="field"><label for="level-seconds">For</label><select id="level-seconds" name="seconds" value=${draft.seconds} onChange=${set("seconds")}>${LEVEL_SECONDS.map(([seconds, words]) => html`<option value=${String(seconds)}>${words}</option>`)}</select></div>
        <button type="submit" class="primary" disabled=${busy}>Set</button>
      </div>
      <datalist id="level-loggers">${Object.keys(answer?.levels ?? {}).map((name) => html`<option value=${name}></option>`)}</datalist>
      <${Failed} error=${error} what="Not changed" />
    </form>
  <//>`;
}

function SlowCalls() {
  const [answer, error] = useAnswer("slow_calls", SLOW_EVERY);
  const { slow_seconds, count: number, calls = [] } = answer ?? {};
  return html`<${Panel} title="Slow calls" aside=${answer && html`<span class="muted">${slow_seconds > 0 ? `above ${duration(slow_seconds)}: ${count(number)} since the start` : "not noted"}</span>`}>
    <${Failed} error=${error} what="The slow calls" />
    ${!answer && !error && html`<${Reading} />`}
    ${answer &&
    html`<${Table}
      heads=${["Tool", "Caller", "Ended", "Took"]}
      rows=${calls.map(
        (call) => html`<tr key=${call.id || call.call_id}>
          <td class="any">${call.id ? html`<a href=${link("calls", [call.id])}>${shown(call.tool)}</a>` : shown(call.tool)}${call.outcome !== "OK" && html` <span class="chip bad">${call.outcome}</span>`}</td>
          <td class="any">${shown(call.caller)}</td>
          <td class="nowrap">${moment(call.ended)}</td>
          <td class="num">${duration(call.seconds)}</td>
        </tr>`,
      )}
      empty=${html`<div class="empty">${slow_seconds > 0 ? "None in the last hour." : html`Set <code>slow_seconds</code> in the configuration of the bus.`}</div>`}
    />`}
  <//>`;
}

function Drain() {
  const [run, busy, error] = useAct();
  const name = me.value?.home || bus.value.bus_id || "toolbus";
  const drain = async () => {
    const sure = await askName("Drain the bus", name, "It takes no new calls, finishes those that run, and stops. All plugins and hosts lose it until it is started again.");
    if (sure) run(() => admin("drain"));
  };
  return html`<${Panel} title="Drain">
    <div class="inside">
      <p>The bus takes no new calls, lets those that run come to their end, and stops. One source alone is drained from <a href=${link("sources")}>its page</a>.</p>
      <button type="button" class="danger" disabled=${busy || bus.value.draining} onClick=${drain}>${bus.value.draining ? "It is draining" : "Drain the bus …"}</button>
      <${Failed} error=${error} what="Not drained" />
    </div>
  <//>`;
}

export const page = { key: "b", name: "bus", title: "Bus", view: View };
