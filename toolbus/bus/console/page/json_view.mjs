// Draws a value of JSON as a tree that opens and closes; long texts and lists are cut until they are asked for.

import { html, useState } from "./html.mjs";
import { isObject, JsonNumber, writeJson } from "./json.mjs";
import { count, plural, shown } from "./text.mjs";

const MAX_TEXT = 2000; // characters of one text
const MAX_ITEMS = 100; // of one object or list
const OPEN_DEPTH = 2;
const OPEN_ITEMS = 30; // an object or list with more is closed at first

/** Draws a value as of `parseJson`. */
export function Json({ value }) {
  return html`<div class="json"><${Value} value=${value} depth=${0} /></div>`;
}

function Value({ value, depth, name }) {
  const label = name !== undefined && html`<span class="key">${shown(String(name))}</span>: `;
  const list = Array.isArray(value);
  if (!list && !isObject(value)) return html`<div>${label}<${Plain} value=${value} /></div>`;
  const entries = list ? value.map((each, at) => [at, each]) : Object.entries(value);
  if (!entries.length) return html`<div>${label}<span class="muted">${list ? "[]" : "{}"}</span></div>`;
  return html`<${Nested} label=${label} entries=${entries} list=${list} depth=${depth} />`;
}

function Nested({ label, entries, list, depth }) {
  const [open, setOpen] = useState(depth < OPEN_DEPTH && entries.length <= OPEN_ITEMS);
  const [most, setMost] = useState(MAX_ITEMS);
  return html`<details open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${label}<span class="muted">${list ? `[${count(entries.length)}]` : `{${count(entries.length)}}`}</span></summary>
    ${open &&
    html`<div>
      ${entries.slice(0, most).map(([name, value]) => html`<${Value} key=${name} name=${name} value=${value} depth=${depth + 1} />`)}
      ${entries.length > most &&
      html`<button type="button" class="plain" onClick=${() => setMost(most * 10)}>${plural(entries.length - most, "more entry", "more entries")}</button>`}
    </div>`}
  </details>`;
}

function Plain({ value }) {
  const [whole, setWhole] = useState(false);
  if (typeof value === "string") {
    const long = value.length > MAX_TEXT && !whole;
    return html`<span class="string" dir="auto">${writeJson(long ? value.slice(0, MAX_TEXT) : value)}</span>${long &&
    html`<button type="button" class="plain" onClick=${() => setWhole(true)}>${count(value.length - MAX_TEXT)} more characters</button>`}`;
  }
  const number = typeof value === "number" || value instanceof JsonNumber;
  return html`<span class=${number ? "number" : "literal"}>${String(value)}</span>`;
}
