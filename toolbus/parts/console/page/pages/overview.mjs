// Shows in a glance whether all is well: what needs attention, what was looked at, and how many calls there are.

import { admin } from "../api.mjs";
import { fetchCalls, history } from "../call_history.mjs";
import { now } from "../clock.mjs";
import { areasOf } from "../findings.mjs";
import { html, useEffect } from "../html.mjs";
import { Ago, Failed, Panel, useAct, useAnswer } from "../parts.mjs";
import { link } from "../router.mjs";
import { Sparkline } from "../sparkline.mjs";
import { bus, connection, may, me, rates, sources } from "../store.mjs";
import { count, list, plural, rate, shown } from "../text.mjs";

const EVERY = 5000; // ms
const SLOWLY = 30000; // for what changes seldom

const ASKED = [
  ["plugins", "plugin_logs", "logs", EVERY],
  ["mounts", "mounts", "catalog", EVERY],
  ["held", "held_calls", "permit", EVERY],
  ["changes", "approvals", "permit", SLOWLY],
  ["keys", "keys", "keys", SLOWLY],
];

function View() {
  const [fetch, fetching, error] = useAct();
  const live = connection.value === "live";
  const mayCalls = may("calls");
  useEffect(() => {
    if (live && mayCalls) fetch(() => fetchCalls());
  }, [live, mayCalls]);
  const from = { bus: bus.value, sources: [...sources.value.values()], now: now.value, login: me.value?.expires };
  if (mayCalls && !fetching) from.calls = history.value;
  const errors = [];
  for (const [name, tool, verb, every] of ASKED) {
    const [answer, refusal] = useAnswer(() => ask(tool, verb), every);
    if (answer !== undefined) from[name] = name === "changes" ? answer.changes : answer;
    if (refusal) errors.push([tool, refusal]);
  }
  const known = bus.value.at !== undefined;
  const areas = known ? areasOf(from) : [];
  const findings = areas.flatMap(({ page, query, findings: all }) => all.map((each) => ({ page, query, ...each })));
  findings.sort((one, other) => (one.kind === other.kind ? 0 : one.kind === "bad" ? -1 : 1));
  return html`<section class="list">
    <div class="head"><div class="toolbar"><h1>Overview</h1></div></div>
    <div class="body">
      ${known && html`<${Verdict} areas=${areas} />`}
      <${Failed} error=${error} what="The calls" />
      ${errors.map(([tool, refusal]) => html`<${Failed} error=${refusal} what=${tool} />`)}
      ${known && html`<${Findings} of=${findings} />`}
      <div class="grid">
        <${Looked} areas=${areas} />
        <${Now} />
      </div>
    </div>
  </section>`;
}

/** Asks a tool of the bus; undefined where one may not, or where the bus lacks the part that has it. */
async function ask(tool, verb) {
  if (!may(verb)) return undefined;
  return admin(tool).catch((error) => {
    if (error.status !== 404) throw error;
  });
}

function Verdict({ areas }) {
  const [bad, total] = [sumOf(areas, "bad"), sumOf(areas, "total")];
  const lost = connection.value === "lost";
  const kind = lost || bad ? "bad" : total ? "warn" : "ok";
  const words = lost
    ? "The bus does not answer"
    : !total
      ? "All is well"
      : bad
        ? `${plural(bad, "thing")} ${bad === 1 ? "does" : "do"} not work${total > bad ? `, ${count(total - bad)} more to look at` : ""}`
        : `${plural(total, "thing")} to look at`;
  return html`<p class=${"verdict " + kind} role="status"><i class=${"dot " + kind}></i><span>${words}
    ${!total && !lost && html` <small class="muted">${list(areas.map(({ title }) => title.toLowerCase()))} were looked at</small>`}</span></p>`;
}

const sumOf = (areas, name) => areas.reduce((sum, area) => sum + area[name], 0);

function Findings({ of }) {
  if (!of.length) return null;
  return html`<${Panel} title="What needs attention">
    <ul class="findings">
      ${of.map(({ kind, what, why, parts = [], query, page, at }) => html`<li key=${page + what + why}>
        <i class=${"dot " + kind} title=${kind === "bad" ? "does not work" : "to look at"}></i>
        <a class="any strong" href=${link(page, parts, parts.length ? {} : query)}>${shown(what)}</a>
        <span class="any">${shown(why)}${at && html` <span class="muted nowrap"><${Ago} at=${at} /></span>`}</span>
      </li>`)}
    </ul>
  <//>`;
}

function Looked({ areas }) {
  return html`<${Panel} title="What was looked at">
    <table class="table"><tbody>
      ${areas.map(({ title, page, query, findings, total, sum }) => {
        const kind = findings[0]?.kind ?? "ok";
        return html`<tr key=${title}>
          <td class="nowrap"><i class=${"dot " + kind}></i> <a href=${link(page, [], query)}>${title}</a></td>
          <td class="any muted">${total ? `${plural(total, "thing")} above` : sum}</td>
        </tr>`;
      })}
    </tbody></table>
  <//>`;
}

function Now() {
  const { ended = 0, failed = 0, in_flight, total, total_failed } = bus.value;
  const share = total > 0 ? `${((100 * total_failed) / total).toFixed(total_failed && total_failed / total < 0.1 ? 1 : 0)} %` : "–";
  const figures = [
    ["calls a second", rate(bus.value.rate)],
    ["in flight", count(in_flight)],
    ["calls", count(total)],
    ["failed", share, failed > 0 && ended > 0 && "bad", `${count(total_failed)} of ${plural(total ?? 0, "call")} since the bus started`],
  ];
  return html`<${Panel} title="Now" aside=${html`<a href=${link("bus")}>more</a>`}>
    <div class="inside"><${Sparkline} values=${rates.value} kind="wide" label="Calls a second, the newest 60 readings" /></div>
    <div class="figures">
      ${figures.map(([label, value, kind = "", title = ""]) => html`<div title=${title}><span class="muted">${label}</span><span class=${"value " + (kind || "")}>${value}</span></div>`)}
    </div>
  <//>`;
}

export const page = { key: "h", name: "overview", title: "Overview", view: View };
