// Shows councils: the newest runs, what each member's tools gave, and who takes part as the bus is configured.

import { get, send } from "../api.mjs";
import { filtered } from "../filter.mjs";
import { html, useEffect, useState } from "../html.mjs";
import { ListPage } from "../list_page.mjs";
import { Ago, Cut, DetailHead, Facts, Failed, Nothing, Panel, useAct, useAnswer } from "../parts.mjs";
import { go, link } from "../router.mjs";
import { connection } from "../store.mjs";
import { clock, count, duration, moment, plural, shown } from "../text.mjs";

const RUNS_EVERY = 3000; // ms
const SETTINGS = "settings"; // instead of the id of a run

function View({ parts, query }) {
  const [{ runs = null } = {}, error, read] = useAnswer(() => get("/api/council/runs"), RUNS_EVERY);
  if (error?.status === 404) {
    return html`<section class="list"><div class="head"><div class="toolbar"><h1>Council</h1></div></div>
      <div class="body"><${Nothing} title="This bus has no council">Hosts that call over HTTP let members look at a conversation before the main model is asked. The bus was started without that part.<//></div></section>`;
  }
  const [id] = parts;
  const items = filtered(runs ?? [], query.q, (run) => [run.chatId, run.runId, ...run.members].join("\n").toLowerCase());
  return html`<${ListPage}
    title="Council"
    one="run"
    count=${runs && plural(items.length, "run")}
    aside=${html`<span class="spring"></span>
      <a class="button" href=${link("council", [SETTINGS])} aria-current=${id === SETTINGS ? "page" : undefined}>Members and settings</a>`}
    error=${error}
    known=${runs !== null}
    columns="cols-runs"
    heads=${html`<span class="narrow-off">Ended</span><span>Members</span><span class="opt">Chat</span><span>Tools</span><span class="num">Took</span>`}
    label="Runs of councils"
    items=${items}
    id=${(run) => run.runId}
    row=${rowOf}
    selected=${id}
    onOpen=${(run) => go("council", [run.runId], query)}
    narrowed=${runs?.length}
    none=${html`<${Nothing} title="No runs yet">A host asks for one with <code>POST /api/council/run</code>; the newest 100 stand here until the bus stops.<//>`}
    detail=${id === SETTINGS ? html`<${Settings} query=${query} />` : id && html`<${Run} key=${id} id=${id} known=${runs !== null} line=${runs?.find((run) => run.runId === id)} query=${query} onChange=${read} />`}
  />`;
}

function rowOf(run) {
  return html`
    <span class="narrow-off muted">${clock(run.ended)}</span>
    <${Cut} text=${run.members.join(", ")} />
    <${Cut} kind="sub opt" text=${run.chatId || "–"} />
    <${Tally} run=${run} />
    <span class="num">${duration(run.totalDurationMs / 1000)}</span>
  `;
}

function Tally({ run: { successCount, failedCount, skippedCount } }) {
  return html`<span class="nowrap">
    <span title="worked">${count(successCount)} ok</span>
    ${failedCount > 0 && html` <span class="chip bad">${count(failedCount)} failed</span>`}
    ${skippedCount > 0 && html` <span class="chip warn">${count(skippedCount)} skipped</span>`}
  </span>`;
}

// -- one run -------------------------------------------------------------------------------------------------------

function Run({ id, known, line, query, onChange }) {
  const [run, setRun] = useState(null);
  const [act, busy, error] = useAct();
  const live = connection.value === "live";
  useEffect(() => {
    if (live && line) act(() => get(`/api/council/runs/${encodeURIComponent(line.runId)}`), setRun);
  }, [live, line?.runId, line?.failedCount]);
  const retry = () => act(() => send("POST", "/api/council/retry", { run_id: id }), (answer) => { setRun(answer); onChange(); });
  const results = run?.results ?? [];
  const failed = results.filter((result) => !result.success).length;
  return html`<${DetailHead} back="council" title="Council" query=${query} name=${line?.members.join(", ") || "Run"} />
    <div class="body">
      <${Failed} error=${error} />
      ${known && !line && html`<${Nothing} title="This run is not known">The bus keeps the newest 100 until it stops.<//>`}
      ${run &&
      html`
        <${Panel} title="The run" aside=${failed > 0 && html`<button type="button" class="small" disabled=${busy} onClick=${retry}>Retry what failed</button>`}>
          <${Facts} of=${[
            ["Ended", line && html`${moment(line.ended)} <span class="muted"><${Ago} at=${line.ended} /></span>`],
            ["Took", duration(run.totalDurationMs / 1000)],
            ["Chat", line?.chatId && shown(line.chatId)],
            ["Reused", run.reused && "yes: nothing had changed since the chat's last run"],
            ["Id", html`<code>${shown(run.runId)}</code>`],
          ]} />
        <//>
        <${Panel} title="What the tools gave">
          ${results.length
            ? html`<div class="scroll"><table class="table">
                <thead><tr><th>Member</th><th>Tool</th><th>Result</th><th class="num">Took</th></tr></thead>
                <tbody>${results.map((result) => html`<tr>
                  <td class="any">${shown(result.memberName)}</td>
                  <td><a href=${link("calls", [], { tool: result.toolName })} title="Calls of this tool">${shown(result.toolDisplayName || result.toolName)}</a></td>
                  <td class="any">${result.success ? shown(result.content ?? "") : html`<span class="bad">failed: ${shown(result.error ?? "")}</span>`}</td>
                  <td class="num">${duration(result.durationMs / 1000)}</td>
                </tr>`)}</tbody>
              </table></div>`
            : html`<div class="empty">No tool ran.</div>`}
          ${(run.skipped ?? []).map(({ memberId, toolName, why }) => html`<p class="note warn"><span class="strong">${shown(toolName)}</span> of ${shown(memberId)} was skipped: ${shown(why)}</p>`)}
        <//>
        <${Panel} title="What the main model reads"><pre class="text">${shown(run.deliberation ?? "")}</pre><//>
      `}
    </div>`;
}

// -- members and settings ------------------------------------------------------------------------------------------

function Settings({ query }) {
  const [council, setCouncil] = useState(null);
  const [act, , error] = useAct();
  const live = connection.value === "live";
  useEffect(() => {
    if (live) act(() => get("/api/council"), setCouncil);
  }, [live]);
  const { members = [], settings = {}, sidecar = {} } = council ?? {};
  return html`<${DetailHead} back="council" title="Council" query=${query} name="Members and settings" />
    <div class="body">
      <${Failed} error=${error} />
      ${council &&
      html`
        <${Panel} title="Members">
          ${members.length
            ? html`<table class="table"><thead><tr><th>Name</th><th>Role</th><th>Tools</th><th class="num">Chance</th></tr></thead>
                <tbody>${members.map((member) => html`<tr><td class="any">${shown(member.name)}</td><td class="any">${shown(member.role ?? "")}</td><td class="any">${shown((member.tools ?? []).join(", "))}</td><td class="num">${String(member.chance ?? 100)} %</td></tr>`)}</tbody></table>`
            : html`<div class="empty">No members: requests bring their own, or the council file names them.</div>`}
        <//>
        <${Panel} title="Settings"><${Facts} of=${Object.entries(settings).map(([name, value]) => [name.replaceAll("_", " "), shown(String(value))])} /><//>
        <${Panel} title="Sidecar model">
          ${sidecar.available ? html`<${Facts} of=${[["Model", shown(sidecar.model)], ["Connection", shown(sidecar.connection)]]} />` : html`<p class="note">${shown(sidecar.reason ?? "")}</p>`}
        <//>
      `}
    </div>`;
}

export const page = { key: "o", name: "council", title: "Council", verb: "council", view: View };
