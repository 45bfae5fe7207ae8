// Shows the identities of peers elsewhere with their scopes and keys, and revokes keys.

import { admin } from "./api.mjs";
import { askName, toast } from "./dialogs.mjs";
import { filtered } from "./filter.mjs";
import { html } from "./html.mjs";
import { Ago, Failed, Nothing, Panel, Reading, Table, useAct, useAnswer, Words } from "./parts.mjs";
import { moment, plural, shown } from "./text.mjs";

/** Draws the tables. */
export function KeyTables({ query }) {
  const [answer, error, read] = useAnswer("keys");
  const keys = filtered(answer?.keys ?? [], query.q, (key) => [key.id, key.identity, key.kind, key.state].join("\n").toLowerCase());
  const identities = filtered(Object.entries(answer?.identities ?? {}), query.q, ([name, scopes]) => `${name}\n${Object.values(scopes).flat().join("\n")}`.toLowerCase());
  if (answer?.note) return html`<${Nothing} title="No keys"><${Words} of=${answer.note} /><//>`;
  if (!answer) return error ? html`<${Failed} error=${error} what="The keys" />` : html`<${Reading} />`;
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
          <td title=${key.expires ? moment(key.expires) : ""}>${key.revoked ? html`<span class="muted">revoked <${Ago} at=${key.revoked} /></span>` : key.expires ? html`<${Ago} at=${key.expires} />` : "never"}</td>
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
