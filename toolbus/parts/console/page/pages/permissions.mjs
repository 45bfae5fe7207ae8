// Shows who may do what: rules of users, sources that may offer tools, keys, changes that wait for an approval, and why
// a call is or is not allowed; and changes it.

import { admin } from "../api.mjs";
import { askName, toast } from "../dialogs.mjs";
import { Filter, filtered } from "../filter.mjs";
import { html, useEffect, useState } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { KeyTables } from "../key_tables.mjs";
import { Ago, Facts, Failed, fieldsOf, Nothing, Panel, Table, useAct, useAnswer } from "../parts.mjs";
import { namesOf, Rules } from "../permit_rules.mjs";
import { link, refine } from "../router.mjs";
import { may, sources } from "../store.mjs";
import { age, plural, shown } from "../text.mjs";

const HELD_EVERY = 2000; // ms
const TABS = [
  { name: "rules", title: "Users", verb: "permit", view: Rules },
  { name: "sources", title: "Sources", verb: "permit", view: Sources },
  { name: "approvals", title: "Approvals", verb: "permit", view: Approvals },
  { name: "keys", title: "Keys", verb: "keys", view: KeyTables },
  { name: "explain", title: "Explain", verb: "permit", view: Explain },
];

function View({ query }) {
  const tabs = TABS.filter(({ verb }) => may(verb));
  const at = Math.max(0, tabs.findIndex(({ name }) => name === query.tab));
  const step = (by) => () => refine({ tab: tabs[(at + by + tabs.length) % tabs.length].name, q: "" });
  useKeys({ "]": step(1), "[": step(-1) }, { "[ ]": "the tab before, the next one" });
  if (!tabs.length) return null;
  const { name, view: Tab } = tabs[at];
  return html`<section class="list">
    <div class="head">
      <div class="toolbar"><h1>Permissions</h1>${name !== "explain" && html`<${Filter} label="Filter" />`}</div>
      <nav class="tabs" aria-label="Parts">
        ${tabs.map((tab) => html`<a href=${link("permissions", [], { tab: tab.name })} aria-current=${tab.name === name ? "page" : undefined}>${tab.title}</a>`)}
      </nav>
    </div>
    <div class="body"><${Tab} key=${name} query=${query} /></div>
  </section>`;
}

// -- what sources may do -------------------------------------------------------------------------------------------

function Sources({ query }) {
  const [tables, error, read] = useAnswer("permissions");
  const silenced = new Set(tables?.silenced ?? []);
  const generation = tables?.generation ?? {};
  const names = [...new Set([...silenced, ...Object.keys(generation), ...sources.value.keys()])].sort();
  const items = filtered(names, query.q, (name) => name.toLowerCase());
  return html`<${Panel} title="What sources may do">
    <${Failed} error=${error} what="The permissions" />
    <${Table}
      heads=${["Source", "Offer tools", "Use the models of hosts"]}
      rows=${items.map(
        (name) => html`<tr key=${name}>
          <td class="any">${shown(name)}${!sources.value.has(name) && html` <span class="muted">not attached</span>`}</td>
          <td><${Grant} source=${name} permission="tools" granted=${!silenced.has(name)} onChange=${read} /></td>
          <td><${Grant} source=${name} permission="generation" granted=${generates(generation, name)} onChange=${read} /></td>
        </tr>`,
      )}
      empty=${tables && html`<${Nothing} title="No such source" />`}
    />
  <//>`;
}

function generates(generation, source) {
  if (Object.hasOwn(generation, source)) return generation[source];
  return Object.entries(generation).some(([name, granted]) => granted && name.endsWith("*") && source.startsWith(name.slice(0, -1)));
}

function Grant({ source, permission, granted, onChange }) {
  const [run, busy, error] = useAct();
  const change = async () => {
    if (granted && permission === "tools") {
      const sure = await askName("Revoke", source, "Its tools are withdrawn at once, and it offers none until it is granted again.");
      if (!sure) return;
    }
    run(() => admin(granted ? "revoke" : "grant", { source, permission }), onChange);
  };
  return html`<span class="inline line">
      <span class="narrow-only muted">${permission === "tools" ? "tools" : "models"}</span>
      <span class=${granted ? "chip ok" : "chip"}>${granted ? "yes" : "no"}</span>
      ${source.endsWith("*") ? null : html`<button type="button" class="small" disabled=${busy} onClick=${change}>${granted ? "Revoke" : "Grant"}${granted && permission === "tools" && " …"}</button>`}
    </span>
    <${Failed} error=${error} />`;
}

// -- what changed since it was trusted -----------------------------------------------------------------------------

function Approvals({ query }) {
  const [answer, error, read] = useAnswer("approvals");
  const [held, problem, readHeld] = useAnswer("held_calls", HELD_EVERY);
  const calls = filtered(held ?? [], query.q, (each) => `${each.source}\n${each.tool}\n${each.caller}`.toLowerCase());
  const changes = filtered(answer?.changes ?? [], query.q, (each) => `${each.source}\n${each.subject}\n${each.tool}`.toLowerCase());
  return html`
    <${Failed} error=${problem} what="The calls that wait" />
    ${calls.map((call) => html`<${HeldCall} key=${call.id} call=${call} onChange=${readHeld} />`)}
    <${Failed} error=${error} what="The changes" />
    ${changes.map((change) => html`<${Change} key=${change.source + change.subject} change=${change} onChange=${read} />`)}
    ${answer && held && !changes.length && !calls.length && html`<${Nothing} title="Nothing waits for an approval">Calls that need one by the rules of <code>[[approvals]]</code> stand here; and, where <code>pin</code> is set for a source, what it declares otherwise than when it was trusted.<//>`}
  `;
}

function HeldCall({ call: { id, tool, source, caller, user_id, role, arguments: text, waiting, asked, expires_in }, onChange }) {
  const [run, busy, error] = useAct();
  const decide = (allow) => () => run(() => admin("decide_call", { id, allow }), () => { toast(`${tool} is ${allow ? "allowed, once" : "denied"}`); onChange(); });
  const acts = html`<button type="button" class="small primary" disabled=${busy} onClick=${decide(true)}>Allow once</button>
    <button type="button" class="small danger" disabled=${busy} onClick=${decide(false)}>Deny</button>`;
  return html`<${Panel} title=${html`<span class="any">${shown(tool)}</span> <span class="muted any">${shown(source)}</span>`} aside=${acts}>
    <${Failed} error=${error} what="Not decided" />
    <${Facts} of=${[
      ["Caller", shown(caller)],
      ["User", user_id && shown(user_id)],
      ["Role", role && shown(role)],
      ["Asked", html`<${Ago} at=${asked} />`],
      ["Waits", waiting > 0 ? plural(waiting, "call") : "no call now: it runs when its caller makes it again"],
      ["Expires", `in ${age(expires_in)}`],
    ]} />
    <pre class="text">${shown(text)}</pre>
  <//>`;
}

function Change({ change: { source, subject, tool, fingerprint, difference }, onChange }) {
  const [run, busy, error] = useAct();
  const approve = async () => {
    const sure = await askName("Approve", source, `What ${shown(tool || subject)} declares now is trusted from then on. Read the difference first.`);
    if (sure) run(() => admin("approve", { source, tool: subject, expected: [fingerprint] }), () => { toast(`${tool || subject} is approved`); onChange(); });
  };
  return html`<${Panel} title=${html`<span class="any">${shown(tool || subject)}</span> <span class="muted any">${shown(source)}</span>`} aside=${html`<button type="button" class="small primary" disabled=${busy} onClick=${approve}>Approve …</button>`}>
    <${Failed} error=${error} what="Not approved" />
    <pre class="text">${difference.split("\n").map((line) => html`<span class=${line.startsWith("+") ? "ok" : line.startsWith("-") ? "bad" : ""}>${shown(line)}${"\n"}</span>`)}</pre>
  <//>`;
}

// -- why a call is or is not allowed -------------------------------------------------------------------------------

function Explain({ query }) {
  const [answer, setAnswer] = useState(null);
  const [run, busy, error] = useAct();
  const asked = { tool: query.tool ?? "", user: query.user ?? "", role: query.role ?? "", identity: query.identity ?? "" };
  const ask = (event) => {
    event?.preventDefault();
    const what = event ? fieldsOf(event.currentTarget) : asked;
    if (what.tool) run(() => admin("explain", what), setAnswer);
  };
  useEffect(ask, []);
  const field = (name, label, more = {}) => html`<div class="field">
    <label for=${"explain-" + name}>${label}</label>
    <input id=${"explain-" + name} name=${name} autocomplete="off" spellcheck="false" value=${asked[name]} onInput=${(event) => refine({ [name]: event.currentTarget.value })} ...${more} />
  </div>`;
  return html`
    <${Panel} title="Why is a call allowed, or not?">
      <form class="form" onSubmit=${ask}>
        <div class="inline end">
          ${field("tool", "Tool", { required: true, list: "explain-names" })} ${field("user", "User")} ${field("role", "Role")} ${field("identity", "Identity")}
          <button type="submit" class="primary" disabled=${busy}>Explain</button>
        </div>
        <datalist id="explain-names">${namesOf("tools", asked.tool).map((name) => html`<option value=${name}></option>`)}</datalist>
        <${Failed} error=${error} />
      </form>
    <//>
    ${answer &&
    html`<${Panel} title=${html`<span class=${"chip " + (answer.callable ? "ok" : "bad")}>${answer.callable ? "callable" : "not callable"}</span> <span class="any">${shown(answer.verdict)}</span>`}>
      <${Table} heads=${["Step", "", "Why"]} rows=${answer.steps.map(({ step, passed, why }) => html`<tr>
        <td>${shown(step)}</td>
        <td class="nowrap">${passed === null ? html`<span class="muted">–</span>` : html`<span class=${passed ? "ok" : "bad"}>${passed ? "passes" : "stops here"}</span>`}</td>
        <td class="any">${shown(why)}</td>
      </tr>`)} />
    <//>`}
  `;
}

export const page = { key: "p", name: "permissions", title: "Permissions", verb: ["permit", "keys"], view: View };
