// Draws a schema as what it asks for: names, kinds, limits, descriptions; what is closed is not read.

import { html, useState } from "./html.mjs";
import { writeJson } from "./json.mjs";
import { modelOf, typeName } from "./schema_model.mjs";
import { shortened, shown } from "./text.mjs";

const MAX_VALUES = 200; // characters

/** Draws the tree of a schema. */
export function SchemaTree({ schema }) {
  const below = partsOf(modelOf(schema, schema));
  if (!below.length) return html`<p class="inside muted">The schema names no fields.</p>`;
  return html`<div class="json">${below.map((part) => html`<${Part} key=${part.name} ...${part} depth=${0} />`)}</div>`;
}

function Part({ name, model, required = false, depth }) {
  const [open, setOpen] = useState(depth < 1);
  const head = html`<span class="strong any">${shown(String(name))}</span>${required && html`<span class="bad" title="required">*</span>`}
    <span class="key"> ${typeName(model)}</span>`;
  const about = html`${model.description && html`<div class="hint any">${shown(model.description)}</div>`}
    ${[valuesOf(model), model.hint, model.why, model.fallback !== undefined && `default: ${cut(model.fallback)}`]
      .filter(Boolean)
      .map((text) => html`<div class="hint any">${shown(text)}</div>`)}`;
  const parts = open || !mayHaveParts(model) ? partsOf(model) : null;
  if (parts && !parts.length) return html`<div>${head}${about}</div>`;
  return html`<details open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${head}</summary>
    <div>${about}${open && parts.map((part) => html`<${Part} key=${part.name} ...${part} depth=${depth + 1} />`)}</div>
  </details>`;
}

const mayHaveParts = ({ kind }) => kind === "object" || kind === "array" || kind === "union";

/** Returns what lies below a model: {name, model, required}. */
function partsOf(model) {
  if (model.kind === "object") {
    const own = model.properties.map(({ name, required, below }) => ({ name, required, model: below() }));
    if (!model.more) return own;
    const more = model.more();
    const says = more.kind !== "json" || model.names.length > 0;
    return says ? [...own, { name: model.names.join(" or ") || "any other name", model: more }] : own;
  }
  if (model.kind === "array") {
    if (model.tuple) return Array.from({ length: model.tuple }, (_, at) => ({ name: `[${at}]`, model: model.below(at) }));
    const each = model.below(0);
    return each.kind === "json" && !each.why ? [] : [{ name: "each item", model: each }];
  }
  if (model.kind !== "union") return [];
  const names = model.names();
  return model.options.map((option, at) => ({ name: names[at], model: option() }));
}

const cut = (value) => shortened(writeJson(value), MAX_VALUES);

function valuesOf(model) {
  if (model.kind === "const") return `always ${cut(model.value)}`;
  return model.kind === "enum" ? shortened(model.values.map((each) => writeJson(each)).join(" | "), MAX_VALUES) : "";
}
