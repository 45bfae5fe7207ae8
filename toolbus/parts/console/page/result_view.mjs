// Draws what a call answered: its output, its content, or why it failed.

import { html, useMemo, useState } from "./html.mjs";
import { parseJson, writeJson } from "./json.mjs";
import { JsonTree } from "./json_tree.mjs";
import { Picture, PICTURES } from "./picture.mjs";
import { count, duration, shown, shownLines, size } from "./text.mjs";

const MAX_SHOWN = 65_536; // characters of an output
const STAGES = {
  NOT_DISPATCHED: "not dispatched: the plugin has not seen it",
  DISPATCHED: "dispatched: it may have run",
  ACCEPTED: "accepted: the plugin had it",
  UNKNOWN: "unknown: it may have run",
};

/** Draws an invoke's answer and how long it took. */
export function ResultView({ answer, seconds }) {
  const { output, content = [], is_error, error, call_id, input_requests } = answer;
  const blocks = Array.isArray(content) ? content : [];
  const onlyText = blocks.length === 1 && blocks[0].text?.text === output;
  return html`<section class=${is_error ? "panel alert" : "panel"} aria-label="Result">
    <h3>
      ${is_error ? html`<span class="bad">${error?.code ?? "Failed"}</span>` : html`<span class="ok">OK</span>`}
      <span class="muted num">${duration(seconds)}</span><span class="spring"></span>
      <span class="muted">id <code>${shown(call_id ?? "")}</code></span>
    </h3>
    ${is_error && html`<${Why} error=${error ?? {}} />`}
    ${input_requests && html`<p class="note warn">The tool asks its caller, which this page does not answer:</p>
      <${Output} value=${input_requests} />`}
    ${!(is_error && (output === null || output === error?.message)) && !input_requests && html`<${Output} value=${output} />`}
    ${!onlyText && blocks.map((block, at) => html`<${Block} key=${at} block=${block} />`)}
  </section>`;
}

/** Draws why a call failed: the message, how far it had got, whether to call again; `unsaid` where it has no message. */
export function Why({ error, unsaid = "The tool failed without a message." }) {
  const facts = whyFacts(error).filter(([, value]) => value);
  return html`<p class="error any">${shown(error.message || unsaid)}</p>
    <dl class="facts">${facts.map(([term, value]) => html`<dt>${term}</dt><dd class="any">${shown(String(value))}</dd>`)}</dl>`;
}

/** Returns what is known of a failure beside its message: [term, value] pairs, some without a value. */
export function whyFacts({ stage, retry_safe, limit, retry_after_seconds, reason }) {
  const unseen = String(stage).toUpperCase() === "NOT_DISPATCHED";
  return [
    ["Stage", STAGES[String(stage ?? "").toUpperCase()] ?? stage],
    ["Call again", retry_safe === undefined ? "" : retry_safe ? "yes, that is safe" : unseen ? "not as it is: it would fail again" : "with care: it may have run"],
    ["Retry after", Number(retry_after_seconds) > 0 && duration(retry_after_seconds)],
    ["Limit", limit && `${limit.name} = ${Number(limit.value)}`],
    ["Reason", reason],
  ];
}

/** Draws an output: text as text, all else as a tree, or as the JSON text that it is. */
export function Output({ value }) {
  const [asText, setAsText] = useState(false);
  const [whole, setWhole] = useState(false);
  const isText = typeof value === "string";
  const json = useMemo(() => (isText ? value : writeJson(value, 2)), [value]);
  if (value === null || value === undefined) return html`<p class="inside muted">null</p>`;
  const cut = !whole && json.length > MAX_SHOWN;
  const text = isText || asText || cut;
  return html`${!isText &&
    !cut &&
    html`<div class="tabs" role="group" aria-label="How to show it">
      <button type="button" aria-current=${asText ? undefined : "true"} onClick=${() => setAsText(false)}>Tree</button>
      <button type="button" aria-current=${asText ? "true" : undefined} onClick=${() => setAsText(true)}>JSON</button>
    </div>`}
    ${text ? html`<pre class="text any" tabindex="0">${shownLines(cut ? json.slice(0, MAX_SHOWN) : json)}</pre>` : html`<${JsonTree} value=${value} />`}
    ${cut &&
    html`<p class="inside">
      Cut after ${count(MAX_SHOWN)} of ${count(json.length)} characters.
      <button type="button" onClick=${() => setWhole(true)}>Show all</button>
    </p>`}`;
}

function Block({ block }) {
  if (block.text) return html`<pre class="text any" tabindex="0">${shownLines(String(block.text.text ?? ""))}</pre>`;
  const { image } = block;
  if (image && PICTURES.has(image.mime_type)) return html`<${Picture} image=${image} />`;
  const heavy = image ?? block.audio ?? block.resource;
  if (heavy) return html`<p class="inside muted">${shown(heavy.mime_type ?? "data")}, ${size(((heavy.data ?? heavy.blob ?? "").length * 3) / 4)}: not shown here</p>`;
  return html`<${JsonTree} value=${block} />`;
}

/** Returns the value of a JSON text, or the text itself. */
export function readJson(text) {
  try {
    return parseJson(text);
  } catch {
    return text;
  }
}
