// Shows which tools fail, and how: the failed calls that the bus remembers, by tool and code.

import { fetchCalls, history, keyOf, MAX_FETCHED, textOf } from "../call_history.mjs";
import { now } from "../clock.mjs";
import { Filter, filtered } from "../filter.mjs";
import { html, useEffect } from "../html.mjs";
import { Cut, DetailHead, Facts, Failed, Nothing, Panel, Split, useAct } from "../parts.mjs";
import { whyFacts } from "../result_view.mjs";
import { go, link } from "../router.mjs";
import { Rows } from "../rows.mjs";
import { groupKey, groupsOf } from "../spans_layout.mjs";
import { connection, toolKey, tools } from "../store.mjs";
import { ago, count, duration, moment, plural, shown } from "../text.mjs";

const MAX_SHOWN = 30; // newest calls of a group

function View({ parts, query }) {
  const [fetch, , error] = useAct();
  const live = connection.value === "live";
  useEffect(() => {
    if (live) fetch(() => fetchCalls());
  }, [live]);
  const groups = groupsOf(history.value);
  const items = filtered(groups, query.q, (group) => `${group.name}\n${group.source}\n${group.outcome}\n${textOf(group.newest)}`.toLowerCase());
  const key = parts.length > 1 ? groupKey(...parts) : "";
  const open = parts.length > 0 && (groups.find((group) => group.key === key) ?? null);
  const list = html`
    <div class="head">
      <div class="toolbar"><h1>Errors</h1><${Filter} label="Filter errors" count=${plural(items.length, "kind")} /></div>
      <${Failed} error=${error} what="Older calls" />
    </div>
    <div class="columns cols-errors" aria-hidden="true">
      <span>Tool</span><span>Code</span><span class="num">Calls</span><span class="opt">Last message</span><span class="num">Last</span>
    </div>
    <${Rows}
      label="Errors by tool and code"
      items=${items}
      id=${(group) => group.key}
      height=${30}
      columns="cols-errors"
      row=${rowOf}
      selected=${key}
      onOpen=${(group) => go("errors", [group.name, group.outcome, group.source], query)}
      empty=${query.q
        ? html`<${Nothing} title="No such error">Remove a part of the filter.<//>`
        : html`<${Nothing} title="No errors">None of the newest ${count(MAX_FETCHED)} calls failed.<//>`}
    />
  `;
  return html`<${Split} list=${list} detail=${parts.length > 0 && html`<${Detail} group=${open} parts=${parts} query=${query} />`} />`;
}

function rowOf(group) {
  return html`
    <${Cut} text=${group.name} />
    <span class="chip bad" title=${group.outcome}>${group.outcome}</span>
    <span class="num">${count(group.count)}</span>
    <${Cut} kind="sub opt" text=${group.newest.failure?.message || "not recorded"} />
    <span class="num muted"><${Ago} at=${group.newest.ended} /></span>
  `;
}

function Ago({ at }) {
  return ago(at, now.value).replace(" ago", "");
}

function Detail({ group, parts: [name, outcome, source = ""], query }) {
  const head = html`<${DetailHead} back="errors" title="Errors" query=${query} name=${name}><span class="chip bad">${shown(outcome ?? "")}</span><//>`;
  if (!group) return html`${head}<div class="body"><${Nothing} title="Not any more">None of the newest ${count(MAX_FETCHED)} calls failed so.<//></div>`;
  const { calls, failed } = tools.value.get(toolKey(source, name)) ?? {};
  const failure = group.newest.failure ?? {};
  const { message } = failure;
  return html`${head}
    <div class="body">
      <${Panel} title="Last" kind="alert">
        <p class=${message ? "error any" : "note"}>${message ? shown(message) : "The words are not recorded, as they may repeat arguments."}</p>
        <${Facts} of=${[
          ...whyFacts(failure),
          ["When", html`${moment(group.newest.ended, 3)} <span class="muted">${ago(group.newest.ended, now.value)}</span>`],
          ["Tool", source ? html`<a href=${link("tools", [source, name])}>${shown(name)}</a>` : shown(name)],
          ["Source", shown(source)],
          ["Failed so", `${plural(group.count, "call")} of those that the bus remembers`],
          ["Failed", calls !== undefined && `${count(failed)} of ${plural(calls, "call")} since the bus started`],
        ]} />
      <//>
      <${Panel} title="Calls" aside=${html`<a href=${link("calls", [], { tool: name, source, outcome })}>all in the list of calls</a>`}>
        <div class="scroll"><table class="table">
          <thead><tr><th>Ended</th><th>Caller</th><th>Message</th><th class="num">Took</th></tr></thead>
          <tbody>
            ${group.calls.slice(0, MAX_SHOWN).map(
              (call) => html`<tr key=${call.number}>
                <td><a href=${link("calls", [keyOf(call)])}>${moment(call.ended)}</a></td>
                <td><${Cut} text=${call.caller} /></td>
                <td class="any">${shown(call.failure?.message || "–")}</td>
                <td class="num">${duration(call.seconds)}</td>
              </tr>`,
            )}
          </tbody>
        </table></div>
        ${group.count > MAX_SHOWN && html`<p class="note">The newest ${MAX_SHOWN} of ${count(group.count)}.</p>`}
      <//>
    </div>`;
}

export const page = { key: "e", name: "errors", title: "Errors", verb: "calls", view: View };
