// Shows which tools fail, and how: the failed calls that the bus remembers, by tool and code.

import { fetchCalls, history, keyOf, MAX_FETCHED, textOf } from "../call_history.mjs";
import { filtered } from "../filter.mjs";
import { html, useEffect } from "../html.mjs";
import { ListPage } from "../list_page.mjs";
import { Ago, Cut, DetailHead, Facts, Nothing, Panel, useAct } from "../parts.mjs";
import { whyFacts } from "../result_view.mjs";
import { go, link } from "../router.mjs";
import { groupKey, groupsOf } from "../spans_layout.mjs";
import { OutputNear } from "../source_output.mjs";
import { connection, toolKey, tools } from "../store.mjs";
import { count, duration, moment, plural, shown } from "../text.mjs";
import { TextsOfErrors } from "../texts_of_errors.mjs";

const UNSAID = "not recorded"; // of a call from when texts were not
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
  return html`<${ListPage}
    title="Errors"
    one="error"
    count=${plural(items.length, "kind")}
    below=${html`<${TextsOfErrors} />`}
    error=${error}
    columns="cols-errors"
    heads=${html`<span>Tool</span><span>Code</span><span class="num">Calls</span><span class="opt">Last message</span><span class="num">Last</span>`}
    label="Errors by tool and code"
    items=${items}
    id=${(group) => group.key}
    row=${rowOf}
    selected=${key}
    onOpen=${(group) => go("errors", [group.name, group.outcome, group.source], query)}
    narrowed=${query.q}
    none=${html`<${Nothing} title="No errors">None of the newest ${count(MAX_FETCHED)} calls failed.<//>`}
    detail=${parts.length > 0 && html`<${Detail} group=${open} parts=${parts} query=${query} />`}
  />`;
}

function rowOf(group) {
  return html`
    <${Cut} text=${group.name} />
    <span class="chip bad" title=${group.outcome}>${group.outcome}</span>
    <span class="num">${count(group.count)}</span>
    <${Cut} kind="sub opt" text=${group.newest.failure?.message || UNSAID} />
    <span class="num muted"><${Ago} at=${group.newest.ended} short /></span>
  `;
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
        <p class=${message ? "error any" : "note"}>${message ? shown(message) : `The text is ${UNSAID}.`}</p>
        <${Facts} of=${[
          ...whyFacts(failure),
          ["When", html`${moment(group.newest.ended, 3)} <span class="muted"><${Ago} at=${group.newest.ended} /></span>`],
          ["Tool", source ? html`<a href=${link("tools", [source, name])}>${shown(name)}</a>` : shown(name)],
          ["Source", shown(source)],
          ["Failed so", `${plural(group.count, "call")} of those that the bus remembers`],
          ["Failed", calls !== undefined && `${count(failed)} of ${plural(calls, "call")} since the bus started`],
        ]} />
      <//>
      <${OutputNear} call=${group.newest} />
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
