// Shows which users may call which tools, those of a role or of a source, and changes it; a change can be undone.

import { admin } from "./api.mjs";
import { filtered } from "./filter.mjs";
import { html, useState } from "./html.mjs";
import { useKeys } from "./keys.mjs";
import { Failed, fieldsOf, Nothing, Panel, Table, useAct, useAnswer } from "./parts.mjs";
import { catalog, sources } from "./store.mjs";
import { count, itemsOf, lineOf, shortened, shown } from "./text.mjs";

const KINDS = [
  ["tools", "Tool"],
  ["roles", "Role"],
  ["sources", "Source"],
];
const MAX_USERS = 50; // of a rule that are drawn

/** Draws the rules, and a form for one more. */
export function Rules({ query }) {
  const [tables, error, read] = useAnswer("permissions");
  const [run, busy, failure] = useAct();
  const [undo, setUndo] = useState(null); // the last change: {kind, name, before, after}
  const [draft, setDraft] = useState({ kind: "tools", name: "", users: "" });
  const rules = KINDS.flatMap(([kind]) => Object.entries(tables?.[kind] ?? {}).map(([name, users]) => ({ kind, name, users })));
  const items = filtered(rules, query.q, ({ kind, name, users }) => `${kind}\n${name}\n${users.join("\n")}`.toLowerCase());

  const permit = (kind, name, users, remember = true) => {
    const rules = tables?.[kind] ?? {};
    const before = Object.hasOwn(rules, name) ? rules[name] : null;
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
    const { kind, name, users } = fieldsOf(event.currentTarget);
    if (await permit(kind, name.trim(), itemsOf(users))) setDraft({ kind, name: "", users: "" });
  };
  const set = (field) => ({ currentTarget: { value } }) => setDraft((old) => ({ ...old, [field]: value })); // several may come in a frame
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
          <div class="field"><label for="rule-kind">Of</label><select id="rule-kind" name="kind" value=${draft.kind} onChange=${set("kind")}>${KINDS.map(([kind, label]) => html`<option value=${kind}>${label}</option>`)}</select></div>
          <div class="field"><label for="rule-name">Name</label><input id="rule-name" name="name" required autocomplete="off" spellcheck="false" list="rule-names" value=${draft.name} onInput=${set("name")} /></div>
          <div class="field"><label for="rule-users">Users</label><input id="rule-users" name="users" autocomplete="off" spellcheck="false" placeholder="u-17, u-12" value=${draft.users} onInput=${set("users")} /></div>
          <button type="submit" class="primary" disabled=${busy}>Permit</button>
        </div>
        <datalist id="rule-names">${namesOf(draft.kind, draft.name).map((name) => html`<option value=${name}></option>`)}</datalist>
        <p class="hint">Separate users by commas; write one that has a comma as <code>"a,b"</code>. <code>*</code> is everyone; an empty field allows no user.</p>
        <${Failed} error=${failure} what="Not changed" />
      </form>
    <//>
  `;
}

function Rule({ kind, name, users, busy, onPermit }) {
  const [draft, setDraft] = useState(null); // the users as text while they are changed; null: they are not
  const save = async (event) => {
    event.preventDefault();
    if (await onPermit(kind, name, itemsOf(fieldsOf(event.currentTarget).users))) setDraft(null);
  };
  return html`<tr>
    <td>${KINDS.find(([each]) => each === kind)[1]}</td>
    <td class="any" title=${shown(name)}>${shortened(shown(name), 120)}</td>
    <td>
      ${draft === null
        ? html`<span class="chips">${users.length ? users.slice(0, MAX_USERS).map((user) => html`<span class="chip" title=${shown(user)}>${user === "*" ? "everyone" : shown(user)}</span>`) : html`<span class="chip warn">no user</span>`}${users.length > MAX_USERS && html`<span class="muted">and ${count(users.length - MAX_USERS)} more</span>`}</span>`
        : html`<form class="inline" onSubmit=${save}><input name="users" aria-label="Users of ${name}" autocomplete="off" spellcheck="false" value=${draft} onInput=${(event) => setDraft(event.currentTarget.value)} /><button type="submit" class="small primary" disabled=${busy}>Save</button></form>`}
    </td>
    <td class="acts-cell">
      <button type="button" class="small" onClick=${() => setDraft(draft === null ? lineOf(users) : null)}>${draft === null ? "Change" : "Cancel"}</button>${" "}
      <button type="button" class="small danger" disabled=${busy} onClick=${() => onPermit(kind, name, null)}>Remove</button>
    </td>
  </tr>`;
}

function wordsOf(kind, name, users) {
  const what = `${KINDS.find(([each]) => each === kind)[1].toLowerCase()} ${shown(name)}`;
  if (users === null) return `The rule of ${what} is removed.`;
  if (users.includes("*")) return `Everyone may call ${what}.`;
  return users.length ? `${users.map(shown).join(", ")} may call ${what}.` : `No user may call ${what}.`;
}

/** Returns names of what a rule of a kind could be for. */
export function namesOf(kind, typed) {
  const names = kind === "tools" ? catalog.value.map(({ name }) => name) : kind === "sources" ? [...sources.value.keys()] : [];
  return names.filter((name) => name.includes(typed)).slice(0, 30);
}
