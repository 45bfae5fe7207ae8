// Draws a form from a model of arguments. It holds what was typed, as text; `form_state` makes JSON of it.

import { JsonText, Place } from "./form_places.mjs";
import { pathText, startOf, stateOf, writeArguments, writeState } from "./form_state.mjs";
import { html, useEffect, useRef, useState } from "./html.mjs";
import { parseJson, writeJson } from "./json.mjs";

/**
 * Draws the form of a tool's arguments. `onRun(text)` gets them as JSON text, and only if it is sound. `api.current`
 * gets `run()`, for keys, and `changed()`: what was typed as JSON, null where that is nothing or not sound yet.
 * `text` are arguments to begin with, as JSON; `children` stand beside the button.
 */
export function ArgumentsForm({ model, text = null, onRun, busy = false, api, children }) {
  const [typed, setTyped] = useState(() => begin(model, text)); // {state} of the form, or {json} where JSON is written
  const newest = useRef(typed); // the same, also before it is drawn: what was typed last is sent, however quick the hand
  const first = useRef(typed);
  const [problems, setProblems] = useState([]);
  const [refusal, setRefusal] = useState(""); // why the JSON cannot be shown as a form
  const box = useRef(null);

  const change = (next) => {
    newest.current = next;
    setTyped(next);
    if (problems.length) setProblems(writeTyped(model, next).problems);
    if (refusal) setRefusal("");
  };
  const run = () => {
    if (busy) return;
    const sent = writeTyped(model, newest.current);
    setProblems(sent.problems);
    if (sent.problems.length) focusOn(box.current, sent.problems[0].path);
    else onRun(sent.text);
  };
  const toJson = () => {
    const { text: now, problems: found } = writeState(model, newest.current.state);
    change({ json: found.length ? now : writeJson(parseJson(now), 2) });
  };
  const toForm = () => {
    const next = shown(model, newest.current.json);
    if (typeof next === "string") setRefusal(next);
    else change({ state: next });
  };
  const changed = () => {
    const now = writeTyped(model, newest.current);
    return newest.current === first.current || now.problems.length ? null : now.text;
  };
  if (api) api.current = { run, changed };
  useEffect(() => setProblems([]), [model]);

  const asJson = typed.json !== undefined;
  return html`<form
    class="form"
    ref=${box}
    aria-label="Arguments"
    onSubmit=${(event) => {
      event.preventDefault();
      run();
    }}
    onKeyDown=${(event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      run();
    }}
  >
    ${asJson
      ? html`<${JsonText}
          label="Arguments as JSON"
          path=${[]}
          problems=${problems}
          text=${typed.json}
          rows=${8}
          onText=${(json) => change({ json })}
        />`
      : html`<${Place} model=${model} state=${typed.state} path=${[]} problems=${problems} top set=${(update) => change({ state: update(newest.current.state) })} />`}
    ${refusal && html`<p class="note warn" role="alert">The form cannot show this: ${refusal}. It is sent as it stands.</p>`}
    ${problems.length > 0 &&
    html`<div class="error" role="alert">
      Not sent: ${problems.map(({ path, message }) => `${pathText(path) || "arguments"}: ${message}`).join("; ")}
    </div>`}
    <div class="acts">
      <button type="submit" class="primary" disabled=${busy}>Run</button>
      ${asJson
        ? html`<button type="button" onClick=${toForm}>Edit as form</button>`
        : html`<button type="button" onClick=${toJson}>Edit as JSON</button>`}
      ${children}
      <span class="spring"></span>
      <span class="hint"><kbd>Ctrl</kbd> <kbd>Enter</kbd> runs</span>
    </div>
  </form>`;
}

function begin(model, text) {
  if (text !== null) {
    const state = shown(model, text);
    return typeof state === "string" ? { json: text } : { state };
  }
  return { state: startOf(model) };
}

const writeTyped = (model, typed) => (typed.json === undefined ? writeState(model, typed.state) : writeArguments(typed.json));

/** Returns the state that shows a JSON text, or why there is none. */
function shown(model, text) {
  let value;
  try {
    value = parseJson(text);
  } catch (error) {
    return error.message;
  }
  const state = stateOf(model, value);
  if (!state) return "it has values that the schema has no place for";
  const back = writeState(model, state);
  const same = !back.problems.length && canonical(parseJson(back.text)) === canonical(value);
  return same ? state : "something would be lost";
}

/** Returns a text that is the same for values that differ only in the order of their keys. */
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join()}]`;
  if (typeof value !== "object" || value === null || value.text !== undefined) return writeJson(value);
  return `{${Object.keys(value).sort().map((key) => JSON.stringify(key) + canonical(value[key])).join()}}`;
}

/** Moves the focus to the place of a problem. */
function focusOn(form, path) {
  const name = JSON.stringify(path);
  const places = [...form.querySelectorAll("[data-path]")];
  const exact = places.find((each) => each.dataset.path === name);
  (exact ?? places[0])?.focus();
}
