// Shows calls: those that run, those that ended, and of each one what it was, why it failed and which calls it made.

import { admin } from "../api.mjs";
import { callOf, fetchAround, fetchCalls, history, keyOf, MAX_FETCHED, selects, skipped, textOf } from "../call_history.mjs";
import { now } from "../clock.mjs";
import { askName } from "../dialogs.mjs";
import { filtered } from "../filter.mjs";
import { html, signal, useEffect } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { ListPage } from "../list_page.mjs";
import { Ago, Cut, DetailHead, Facts, Failed, Nothing, Outcome, Panel, useAct } from "../parts.mjs";
import { Why } from "../result_view.mjs";
import { go, link, refine } from "../router.mjs";
import { OutputNear } from "../source_output.mjs";
import { familyOf } from "../spans_layout.mjs";
import { calls, connection, lost, may, running } from "../store.mjs";
import { age, clock, count, duration, moment, plural, shown } from "../text.mjs";
import { TextsOfErrors } from "../texts_of_errors.mjs";
import { Waterfall } from "../waterfall.mjs";

const MAX_RUNNING = 12; // rows above those that ended; "Running" has all
const STATUSES = [
  ["", "All"],
  ["running", "Running"],
  ["failed", "Failed"],
];
const EXACT = ["tool", "source", "caller", "user", "outcome"]; // filters by one value, which the bus applies as well

const paused = signal(null); // what the list shows while it does not move: {history, running, newest}; null: it moves

// -- the list ------------------------------------------------------------------------------------------------------

function View({ parts: [id], query }) {
  const [fetch, fetching, error] = useAct();
  const exact = EXACT.filter((name) => query[name]);
  const asked = exact.map((name) => `${name}=${query[name]}`).join("&");
  const live = connection.value === "live";
  useEffect(() => {
    if (live) fetch(() => fetchCalls(query, exact.length ? MAX_FETCHED : 200));
  }, [asked, live]);
  const pause = () => {
    paused.value = paused.value ? null : { history: history.value, running: running.value };
  };
  const onlyFailed = () => refine({ status: query.status === "failed" ? "" : "failed" });
  useKeys({ p: pause, f: onlyFailed }, { p: "pause the list, or let it go on", f: "only failed calls" });

  const from = paused.value ?? { history: history.value, running: running.value };
  const items = itemsOf(from, query);
  const missed = paused.value ? (history.value[0]?.number ?? 0) - (paused.value.history[0]?.number ?? 0) : 0;
  return html`<${ListPage}
    title="Calls"
    one="call"
    aside=${html`<div class="chips" role="group" aria-label="Which calls">
        ${STATUSES.map(
          ([name, label]) =>
            html`<button type="button" aria-pressed=${(query.status ?? "") === name} onClick=${() => refine({ status: name })}>
              ${label}${name === "running" && running.value.length > 0 && html` <span class="num">${running.value.length}${running.value.length >= 100 && "+"}</span>`}
            </button>`,
        )}
      </div>
      <button type="button" aria-pressed=${paused.value !== null} onClick=${pause}>
        ${paused.value ? html`Go on${missed > 0 && html` <span class="num">+${count(missed)}</span>`}` : "Pause"}
      </button>`}
    below=${html`${exact.length > 0 &&
      html`<div class="toolbar">
        ${exact.map(
          (name) =>
            html`<span class="chip busy">${name}: ${shown(query[name])}
              <button type="button" aria-label="Remove the filter ${name}" onClick=${() => refine({ [name]: "" })}>×</button></span>`,
        )}
      </div>`}
      <${Missing} fetching=${fetching} onFetch=${() => fetch(() => fetchCalls(query))} />`}
    error=${error}
    columns="cols-calls"
    heads=${html`<span class="narrow-off">Ended</span><span>Tool</span><span class="opt">Source</span><span class="opt">Caller</span><span>Outcome</span><span class="num">Took</span>`}
    items=${items}
    id=${idOf}
    row=${rowOf}
    selected=${id ?? ""}
    onOpen=${(item) => item.call && go("calls", [keyOf(item.call)], query)}
    narrowed=${query.q || exact.length > 0}
    hint=${`The bus remembers the newest ${count(MAX_FETCHED)} calls, and none of them passes the filter. Remove a part of it.`}
    none=${html`<${NoCalls} status=${query.status} />`}
    detail=${id && html`<${Detail} key=${id} id=${id} query=${query} />`}
  />`;
}

/** Returns the rows: {call}, or {words} for a line about the others. */
function itemsOf({ history, running }, query) {
  const selected = (all) => filtered(all.filter((call) => selects(query, call)), query.q, textOf);
  const ended = query.status === "running" ? [] : selected(history);
  const done = new Set(ended.slice(0, 200).map(({ id }) => id));
  const current = query.status === "failed" || query.outcome ? [] : selected(running).filter(({ id }) => !done.has(id));
  const room = query.status === "running" ? current.length : MAX_RUNNING;
  const items = current.slice(0, room).map((call) => ({ call }));
  if (current.length > room) items.push({ words: `and ${count(current.length - room)} more that run` });
  for (const call of ended) items.push({ call });
  return items;
}

const idOf = (item) => (item.call ? keyOf(item.call) : "more");

function rowOf({ call, words }) {
  if (!call) return html`<span class="whole">${words}</span>`;
  const runs = call.outcome === undefined;
  return html`
    <span class="narrow-off muted">${runs ? "" : clock(call.ended)}</span>
    <${Cut} text=${call.parent ? "↳ " + call.name : call.name} />
    <${Cut} kind="sub opt" text=${call.source} />
    <${Cut} kind="sub opt" text=${call.caller} />
    <${Outcome} call=${call} />
    <span class="num">${runs ? html`<${Age} since=${call.started} />` : duration(call.seconds)}</span>
  `;
}

function Age({ since }) {
  return age(now.value - since);
}

/** Says honestly which calls are not in the list. */
function Missing({ fetching, onFetch }) {
  if (!skipped.value && !lost.value) return null;
  return html`<div class="toolbar muted">
    ${skipped.value > 0 &&
    html`<span>${plural(skipped.value, "call")} skipped: too many to list one by one.</span>
      <button type="button" class="small" disabled=${fetching} onClick=${onFetch}>Get the newest ${count(MAX_FETCHED)}</button>`}
    ${lost.value > 0 && html`<span class="warn">${plural(lost.value, "call")} lost: the bus forgot them before they were read.</span>`}
  </div>`;
}

function NoCalls({ status }) {
  if (status === "failed") return html`<${Nothing} title="No failed calls">Of the calls that the bus remembers, none failed.<//>`;
  if (status === "running") return html`<${Nothing} title="Nothing runs">Calls stand here from their start to their end.<//>`;
  return html`<${Nothing} title="No calls yet">Run a tool from its page, or in a terminal: <code>toolbus call NAME</code><//>`;
}

// -- one call ------------------------------------------------------------------------------------------------------

function Detail({ id, query }) {
  const call = callOf(id);
  const [fetch, fetching, error] = useAct();
  const live = connection.value === "live";
  useEffect(() => {
    if (live && (!call || call.outcome !== undefined)) fetch(() => fetchAround(call));
  }, [id, live, call?.outcome]);
  const [act, busy, refusal] = useAct();
  const mayCancel = call !== undefined && call.outcome === undefined && may("drain");
  const cancel = async () => {
    const sure = await askName("Cancel the call", call.name, "Its caller gets the error CANCELLED at once. The tool may have done a part of its work.");
    if (sure) act(() => admin("cancel_call", { id: call.id }));
  };
  useKeys(mayCancel ? { x: () => void cancel() } : {}, mayCancel ? { x: "cancel the call" } : "");
  if (!call) {
    return html`
      <${DetailHead} back="calls" title="Calls" query=${query} name="Call ${id}" />
      <div class="body">
        <${Failed} error=${error} what="Older calls" />
        ${fetching || !live
          ? html`<${Nothing} title="Looking for the call …" />`
          : html`<${Nothing} title="This call is not known">The bus remembers the newest ${count(MAX_FETCHED)} calls since its start, and this is not one of them.<//>`}
      </div>
    `;
  }
  return html`
    <${DetailHead} back="calls" title="Calls" query=${query} name=${call.name}>
      <${Outcome} call=${call} />
      ${mayCancel && html`<span class="spring"></span><button type="button" class="danger" disabled=${busy} onClick=${cancel}>Cancel …</button>`}
    <//>
    <div class="body">
      <${Failed} error=${refusal} what="Not cancelled" />
      <${Failure} call=${call} />
      ${call.failure && html`<${OutputNear} call=${call} />`}
      <${Family} call=${call} query=${query} />
      <${Summary} call=${call} />
      <${Repairs} of=${call.repairs} />
      <${Contents} call=${call} />
    </div>
  `;
}

function Failure({ call: { failure } }) {
  if (!failure) return null;
  return html`${!failure.message && html`<${TextsOfErrors} />`}<section class="panel alert" aria-label="Why it failed">
    <h3>Why it failed</h3>
    <${Why} error=${failure} unsaid="The text was not recorded." />
  </section>`;
}

function Family({ call, query }) {
  if (!call.id) return null;
  const { calls: family, missing } = familyOf(call.id, history.value, running.value);
  if (family.length < 2 && !missing && call.outcome !== undefined) return null;
  const runs = family.some((each) => each.outcome === undefined);
  return html`<${Waterfall}
    calls=${family}
    missing=${missing}
    current=${call.id}
    now=${runs ? now.value : 0}
    only=${query.only ?? ""}
    onOnly=${(only) => refine({ only })}
    query=${query}
  />`;
}

function Summary({ call }) {
  const ended = call.outcome !== undefined;
  const filter = (name, value, label = value) => value && html`<a href=${link("calls", [], { [name]: value })} title="Calls with this ${name}">${shown(label)}</a>`;
  return html`<${Panel} title="The call">
    <${Facts} of=${[
      ["Tool", html`${call.source ? html`<a href=${link("tools", [call.source, call.name])}>${shown(call.name)}</a>` : shown(call.name)} ${" "}<a class="muted" href=${link("calls", [], { tool: call.name })}>its calls</a>`],
      ["Source", filter("source", call.source)],
      ["Caller", filter("caller", call.caller)],
      ["User", filter("user", call.user_id)],
      ["Round", (call.round > 0 || call.order > 0) && `${call.round}, call ${call.order + 1} of it`],
      ["Started", html`${moment(call.started, 3)} <span class="muted"><${Ago} at=${call.started} /></span>`],
      ["Ended", ended && moment(call.ended, 3)],
      ["Took", ended ? duration(call.seconds) : html`<${Age} since=${call.started} /> until now`],
      ["Deadline", !ended && call.deadline && html`<${Ago} at=${call.deadline} />`],
      ["Stage", !ended && call.stage],
      ["Arguments", ended && plural(call.arguments_size, "character")],
      ["Output", ended && plural(call.output_size, "character")],
      ["Made by", call.parent && html`<a href=${link("calls", [call.parent])}>call ${call.parent}</a>`],
      ["Caller's id", call.call_id && html`<code>${shown(call.call_id)}</code>`],
      ["Bus's id", call.id && html`<code>${call.id}</code>`],
      ["Trace", call.trace_id && html`<code>${call.trace_id}</code>`],
    ]} />
  <//>`;
}

function Repairs({ of }) {
  if (!of?.length) return null;
  return html`<${Panel} title="Repaired arguments">
    <div class="scroll"><table class="table">
      <thead><tr><th>Where</th><th>Was</th><th>Became</th></tr></thead>
      <tbody>${of.map(({ path, from, to }) => html`<tr><td><code>${shown(path || "(all)")}</code></td><td>${shown(String(from))}</td><td>${shown(String(to))}</td></tr>`)}</tbody>
    </table></div>
  <//>`;
}

function Contents({ call }) {
  if (call.outcome === undefined) return null;
  if (call.arguments === undefined) {
    return html`<p class="note">Arguments and outputs are not recorded. <code>record_contents = true</code> in the bus's configuration records them, shortened and without secrets.</p>`;
  }
  return html`
    <${Panel} title="Arguments"><pre class="text">${shown(call.arguments)}</pre><//>
    <${Panel} title="Output"><pre class="text">${shown(call.output || "none")}</pre><//>
  `;
}

export const page = { key: "c", name: "calls", title: "Calls", verb: "calls", view: View };
