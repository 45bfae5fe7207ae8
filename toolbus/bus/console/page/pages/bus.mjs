// Shows the bus itself: where it listens, what it does now, how it ended calls so far; and drains it.

import { admin } from "../api.mjs";
import { now } from "../clock.mjs";
import { askName } from "../dialogs.mjs";
import { html, useEffect, useState } from "../html.mjs";
import { Facts, Failed, Panel, useAct } from "../parts.mjs";
import { link } from "../router.mjs";
import { Sparkline } from "../sparkline.mjs";
import { bus, connection, may, me, rates, sessions, sources } from "../store.mjs";
import { age, count, duration, moment, plural, rate, shown, size } from "../text.mjs";

const STATS_EVERY = 2000; // ms

function View() {
  return html`<section class="list">
    <div class="head"><div class="toolbar"><h1>Bus</h1>${bus.value.draining && html`<span class="chip warn">draining</span>`}</div></div>
    <div class="body">
      <${Now} />
      <div class="grid">
        <${About} />
        ${may("metrics") && html`<${Outcomes} />`}
        ${may("drain") && html`<${Drain} />`}
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
    ["held", size(held_bytes), "", "bytes of calls and results that wait in the bus"],
    ["loop lag", duration(loop_lag), loop_lag > 0.1 && "warn", "how late the bus's own loop is"],
    ["watchers", count(watchers), "", "consoles and others that follow this bus"],
    ["sessions", count(sessions.value.size)],
    ["sources", count(sources.value.size)],
  ];
  return html`<${Panel} title="Now" aside=${html`<span class="num">${rate(bus.value.rate)}</span> <span class="muted">calls a second</span>`}>
    <div class="inside"><${Sparkline} values=${rates.value} kind="wide" label="Calls a second, the newest 60 readings" /></div>
    <div class="figures">
      ${figures.filter(([, value]) => value !== "–").map(([label, value, kind = "", title = ""]) => html`<div title=${title}><span class="muted">${label}</span><span class=${"value " + (kind || "")}>${value}</span></div>`)}
    </div>
  <//>`;
}

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

function Outcomes() {
  const [stats, setStats] = useState(null);
  const live = connection.value === "live";
  useEffect(() => {
    if (!live) return;
    const read = () => document.hidden || admin("stats").then(setStats, () => {});
    read();
    const timer = setInterval(read, STATS_EVERY);
    return () => clearInterval(timer);
  }, [live]);
  const outcomes = Object.entries(stats?.outcomes ?? {}).sort(([, one], [, other]) => other - one);
  const total = outcomes.reduce((sum, [, number]) => sum + Number(number), 0);
  return html`<${Panel} title="How calls ended" aside=${stats && html`<span class="muted">${plural(total, "call")} since the start</span>`}>
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
      : html`<div class="empty">${stats ? "No call has ended yet." : "Reading …"}</div>`}
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
