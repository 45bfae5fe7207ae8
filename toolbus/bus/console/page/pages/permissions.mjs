// Shows who may do what: rules of users, sources that may offer tools, keys, changes that wait for an approval, and why
// a call is or is not allowed; and changes it.

import { admin } from "../api.mjs";
import { now } from "../clock.mjs";
import { askName, toast } from "../dialogs.mjs";
import { Filter, filtered } from "../filter.mjs";
import { html, useEffect, useState } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { Failed, Nothing, Panel, useAct } from "../parts.mjs";
import { link, refine } from "../router.mjs";
import { catalog, connection, may, sources } from "../store.mjs";
import { ago, count, moment, plural, shown } from "../text.mjs";

const MAX_ROWS = 200; // of one table; the filter finds the others
const KINDS = [
  ["tools", "Tool"],
  ["roles", "Role"],
  ["sources", "Source"],
];
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

/** Reads what a tool of the bus answers, again after each change: [value, error, read]. */
function useAnswer(name) {
  const [state, setState] = useState({ value: undefined, error: null });
  const live = connection.value === "live";
  const read = async () => {
    try {
      setState({ value: await admin(name), error: null });
    } catch (error) {
      setState((before) => ({ ...before, error }));
    }
  };
  useEffect(() => {
    if (live) read();
  }, [live]);
  return [state.value, state.error, read];
}

/** Draws rows of a table, at most `MAX_ROWS`, with a line about the others. */
function Table({ heads, rows, empty }) {
  if (!rows.length) return empty;
  return html`<div class="scroll">
      <table class="table">
        <thead><tr>${heads.map((head) => html`<th>${head}</th>`)}</tr></thead>
        <tbody>${rows.slice(0, MAX_ROWS)}</tbody>
      </table>
    </div>
    ${rows.length > MAX_ROWS && html`<p class="note">${count(rows.length - MAX_ROWS)} more: filter to find them.</p>`}`;
}

// -- which users may call ------------------------------------------------------------------------------------------

function Rules({ query }) {
  const [tables, error, read] = useAnswer("permissions");
  const [run, busy, failure] = useAct();
  const [undo, setUndo] = useState(null); // the last change: {kind, name, before, after}
  const [draft, setDraft] = useState({ kind: "tools", name: "", users: "" });
  const rules = KINDS.flatMap(([kind]) => Object.entries(tables?.[kind] ?? {}).map(([name, users]) => ({ kind, name, users })));
  const items = filtered(rules, query.q, ({ kind, name, users }) => `${kind}\n${name}\n${users.join("\n")}`.toLowerCase());

  const permit = (kind, name, users, remember = true) => {
    const before = tables?.[kind]?.[name] ?? null;
    return run(
      () => admin("permit", { kind, name, users }),
      ({ note }) => {
        setUndo(remember ? { kind, name, before, after: users, note } : null);
        read();
      },
    );
  };
  const takeBack = () => {
    if (!undo) return false;
    permit(undo.kind, undo.name, undo.before, false);
  };
  useKeys({ u: takeBack }, undo ? { u: "undo the last change" } : "");
  const add = async (event) => {
    event.preventDefault();
    const users = listOf(draft.users);
    if (await permit(draft.kind, draft.name.trim(), users)) setDraft({ ...draft, name: "", users: "" });
  };
  const set = (field) => (event) => setDraft({ ...draft, [field]: event.currentTarget.value });
  return html`
    ${undo &&
    html`<p class="note ok inline" role="status">
      <span>${wordsOf(undo.kind, undo.name, undo.after)}${undo.note && html` <span class="muted">${shown(undo.note)}</span>`}</span>
      <button type="button" class="small" disabled=${busy} onClick=${takeBack}>Undo</button>
    </p>`}
    <${Panel} title="Which users may call">
      <${Failed} error=${error} what="The rules" />
      <${Table}
        heads=${["Of", "Name", "Users that may call", ""]}
        rows=${items.map(({ kind, name, users }) => html`<${Rule} key=${kind + "\n" + name} kind=${kind} name=${name} users=${users} busy=${busy} onPermit=${permit} />`)}
        empty=${tables && (rules.length ? html`<${Nothing} title="No such rule">Remove a part of the filter.<//>` : html`<${Nothing} title="Everyone may call everything">A rule limits a tool, a role or a source to some users.<//>`)}
      />
    <//>
    <${Panel} title="Add a rule">
      <form class="form" onSubmit=${add}>
        <div class="inline end">
          <div class="field"><label for="rule-kind">Of</label><select id="rule-kind" value=${draft.kind} onChange=${set("kind")}>${KINDS.map(([kind, label]) => html`<option value=${kind}>${label}</option>`)}</select></div>
          <div class="field"><label for="rule-name">Name</label><input id="rule-name" required autocomplete="off" spellcheck="false" list="rule-names" value=${draft.name} onInput=${set("name")} /></div>
          <div class="field"><label for="rule-users">Users</label><input id="rule-users" autocomplete="off" spellcheck="false" placeholder="u-17, u-12" value=${draft.users} onInput=${set("users")} /></div>
          <button type="submit" class="primary" disabled=${busy || !draft.name.trim()}>Permit</button>
        </div>
        <datalist id="rule-names">${namesOf(draft.kind, draft.name).map((name) => html`<option value=${name}></option>`)}</datalist>
        <p class="hint">Separate users by commas. <code>*</code> is everyone; nothing at all is no user.</p>
        <${Failed} error=${failure} what="Not changed" />
      </form>
    <//>
  `;
}

function Rule({ kind, name, users, busy, onPermit }) {
  const [draft, setDraft] = useState(null); // the users as text while they are changed; null: they are not
  const save = async (event) => {
    event.preventDefault();
    if (await onPermit(kind, name, listOf(draft))) setDraft(null);
  };
  return html`<tr>
    <td>${KINDS.find(([each]) => each === kind)[1]}</td>
    <td class="any">${shown(name)}</td>
    <td>
      ${draft === null
        ? html`<span class="chips">${users.length ? users.map((user) => html`<span class="chip" title=${shown(user)}>${user === "*" ? "everyone" : shown(user)}</span>`) : html`<span class="chip warn">no user</span>`}</span>`
        : html`<form class="inline" onSubmit=${save}><input aria-label="Users of ${name}" autocomplete="off" spellcheck="false" value=${draft} onInput=${(event) => setDraft(event.currentTarget.value)} /><button type="submit" class="small primary" disabled=${busy}>Save</button></form>`}
    </td>
    <td class="acts-cell">
      <button type="button" class="small" onClick=${() => setDraft(draft === null ? users.join(", ") : null)}>${draft === null ? "Change" : "Cancel"}</button>${" "}
      <button type="button" class="small danger" disabled=${busy} onClick=${() => onPermit(kind, name, null)}>Remove</button>
    </td>
  </tr>`;
}

const listOf = (text) => text.split(",").map((user) => user.trim()).filter(Boolean);

function wordsOf(kind, name, users) {
  const what = `${KINDS.find(([each]) => each === kind)[1].toLowerCase()} ${shown(name)}`;
  if (users === null) return `The rule of ${what} is removed.`;
  if (users.includes("*")) return `Everyone may call ${what}.`;
  return users.length ? `${users.map(shown).join(", ")} may call ${what}.` : `No user may call ${what}.`;
}

function namesOf(kind, typed) {
  const names = kind === "tools" ? catalog.value.map(({ name }) => name) : kind === "sources" ? [...sources.value.keys()] : [];
  return names.filter((name) => name.includes(typed)).slice(0, 30);
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
  if (source in generation) return generation[source];
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
      <span class=${granted ? "chip ok" : "chip"}>${granted ? "yes" : "no"}</span>
      ${source.endsWith("*") ? null : html`<button type="button" class="small" disabled=${busy} onClick=${change}>${granted ? "Revoke" : "Grant"}${granted && permission === "tools" && " …"}</button>`}
    </span>
    <${Failed} error=${error} />`;
}

// -- what changed since it was trusted -----------------------------------------------------------------------------

function Approvals({ query }) {
  const [answer, error, read] = useAnswer("approvals");
  const changes = filtered(answer?.changes ?? [], query.q, (each) => `${each.source}\n${each.subject}\n${each.tool}`.toLowerCase());
  return html`
    <${Failed} error=${error} what="The changes" />
    ${changes.map((change) => html`<${Change} key=${change.source + change.subject} change=${change} onChange=${read} />`)}
    ${answer && !changes.length && html`<${Nothing} title="Nothing waits for an approval">Where <code>pin</code> is set for a source, what it declares otherwise than when it was trusted stands here.<//>`}
  `;
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

// -- keys ----------------------------------------------------------------------------------------------------------

function KeyTables({ query }) {
  const [answer, error, read] = useAnswer("keys");
  const keys = filtered(answer?.keys ?? [], query.q, (key) => [key.id, key.identity, key.kind, key.state].join("\n").toLowerCase());
  const identities = filtered(Object.entries(answer?.identities ?? {}), query.q, ([name, scopes]) => `${name}\n${Object.values(scopes).flat().join("\n")}`.toLowerCase());
  if (!answer) return error && html`<${Nothing} title="No keys">${shown(error.message)}<//>`;
  return html`
    <${Failed} error=${error} what="The keys" />
    <${Panel} title="Identities and their scopes">
      <${Table}
        heads=${["Identity", "Scopes", ""]}
        rows=${identities.map(([name, scopes]) => html`<tr key=${name}>
          <td class="any">${shown(name)}</td>
          <td><span class="chips">${Object.entries(scopes).map(([scope, value]) => html`<span class="chip" title=${shown([value].flat().join(", "))}>${scope}: ${shown([value].flat().join(", "))}</span>`)}${!Object.keys(scopes).length && html`<span class="muted">none: it may attach, and nothing else</span>`}</span></td>
          <td class="acts-cell"><${Revoke} name=${name} what="All of its keys end, and with them its sessions." onChange=${read} /></td>
        </tr>`)}
        empty=${html`<${Nothing} title="No such identity" />`}
      />
    <//>
    <${Panel} title="Keys">
      <${Table}
        heads=${["Key", "Identity", "Kind", "State", "Expires", ""]}
        rows=${keys.map((key) => html`<tr key=${key.id}>
          <td><code>${shown(key.id)}</code></td>
          <td class="any">${shown(key.identity)}</td>
          <td>${shown(key.kind)}</td>
          <td><span class=${"chip " + (key.state === "live" ? "ok" : key.revoked || key.state === "expired" ? "bad" : "warn")}>${shown(key.state)}</span></td>
          <td title=${key.expires ? moment(key.expires) : ""}>${key.revoked ? html`<span class="muted">revoked ${ago(key.revoked, now.value)}</span>` : key.expires ? ago(key.expires, now.value) : "never"}</td>
          <td class="acts-cell">${!key.revoked && html`<${Revoke} name=${key.id} what="Sessions that it proved end at once." onChange=${read} />`}</td>
        </tr>`)}
        empty=${html`<${Nothing} title="No such key" />`}
      />
    <//>
  `;
}

function Revoke({ name, what, onChange }) {
  const [run, busy, error] = useAct();
  const revoke = async () => {
    if (await askName("Revoke", name, `${what} This cannot be undone.`)) {
      run(() => admin("key_revoke", { name }), ({ revoked }) => { toast(`${plural(revoked.length, "key")} revoked`); onChange(); });
    }
  };
  return html`<button type="button" class="small danger" disabled=${busy} onClick=${revoke}>Revoke …</button><${Failed} error=${error} />`;
}

// -- why a call is or is not allowed -------------------------------------------------------------------------------

function Explain({ query }) {
  const [answer, setAnswer] = useState(null);
  const [run, busy, error] = useAct();
  const asked = { tool: query.tool ?? "", user: query.user ?? "", role: query.role ?? "", identity: query.identity ?? "" };
  const ask = (event) => {
    event?.preventDefault();
    if (asked.tool) run(() => admin("explain", asked), setAnswer);
  };
  useEffect(ask, []);
  const field = (name, label, more = {}) => html`<div class="field">
    <label for=${"explain-" + name}>${label}</label>
    <input id=${"explain-" + name} autocomplete="off" spellcheck="false" value=${asked[name]} onInput=${(event) => refine({ [name]: event.currentTarget.value })} ...${more} />
  </div>`;
  return html`
    <${Panel} title="Why is a call allowed, or not?">
      <form class="form" onSubmit=${ask}>
        <div class="inline end">
          ${field("tool", "Tool", { required: true, list: "explain-names" })} ${field("user", "User")} ${field("role", "Role")} ${field("identity", "Identity")}
          <button type="submit" class="primary" disabled=${busy || !asked.tool}>Explain</button>
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
