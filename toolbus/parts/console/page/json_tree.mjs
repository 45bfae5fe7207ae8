// Draws JSON as a tree; what is closed is not drawn.

import { html, useState } from "./html.mjs";
import { JsonNumber, writeJson } from "./json.mjs";
import { count, plural, shown } from "./text.mjs";

const STEP = 100; // entries that are drawn at once
const OPEN_BELOW = 20; // entries: what has fewer is open from the beginning
const MAX_TEXT = 10_000; // characters of one text

/** Draws a value. */
export function JsonTree({ value }) {
  return html`<div class="json"><${Value} value=${value} depth=${0} /></div>`;
}

function Value({ name, value, depth }) {
  const key = name === undefined ? "" : html`<span class="key">${shown(String(name))}: </span>`;
  if (typeof value === "object" && value !== null && !(value instanceof JsonNumber)) {
    return html`<${Branch} label=${key} value=${value} depth=${depth} />`;
  }
  return html`<div>${key}<${Leaf} value=${value} /></div>`;
}

function Leaf({ value }) {
  const [whole, setWhole] = useState(false);
  if (typeof value !== "string") return html`<span class=${value === null || typeof value === "boolean" ? "literal" : "number"}>${writeJson(value)}</span>`;
  const cut = !whole && value.length > MAX_TEXT;
  return html`<span class="string any">${shown(writeJson(cut ? value.slice(0, MAX_TEXT) : value))}</span>
    ${cut && html` <button type="button" class="plain" onClick=${() => setWhole(true)}>… ${count(value.length - MAX_TEXT)} more characters</button>`}`;
}

function Branch({ label, value, depth }) {
  const list = Array.isArray(value);
  const entries = list ? value.map((each, at) => [at, each]) : Object.entries(value);
  const [open, setOpen] = useState(depth === 0 || (depth < 4 && entries.length <= OPEN_BELOW));
  const [most, setMost] = useState(STEP);
  if (!entries.length) return html`<div>${label}<span class="literal">${list ? "[]" : "{}"}</span></div>`;
  const words = plural(entries.length, list ? "item" : "field");
  return html`<details open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${label}<span class="key">${list ? `[${words}]` : `{${words}}`}</span></summary>
    ${open &&
    html`<div>
      ${entries.slice(0, most).map(([name, each]) => html`<${Value} key=${name} name=${name} value=${each} depth=${depth + 1} />`)}
      ${entries.length > most &&
      html`<button type="button" class="plain" onClick=${() => setMost(most * 10)}>${count(entries.length - most)} more</button>`}
    </div>`}
  </details>`;
}
