// Draws the places of a form: a field for each kind of model.
//
// `set` of a place takes a function from its old state to its new one: several keys may come between two frames.

import { startOf } from "./form_state.mjs";
import { html, useEffect, useRef, useState } from "./html.mjs";
import { writeJson } from "./json.mjs";
import { typeName } from "./schema_model.mjs";
import { shown as visible } from "./text.mjs";

let newestId = 0;

/** Draws one place of the arguments, with its label. */
function Field({ name, model, state, set, path, problems, required, onRemove, toggle }) {
  const id = useId();
  const simple = SIMPLE.has(model.kind);
  const on = state !== null;
  const label = html`<span class="cut any">${visible(name)}</span>${required && html`<span class="required" title="required"> *</span>`}
    <span class="type"> ${typeName(model)}</span>`;
  const head = html`<div class="inline">
    ${toggle && html`<input type="checkbox" checked=${on} aria-label=${`send ${name}`} data-send=${JSON.stringify(path)} onChange=${(event) => toggle(event.currentTarget.checked)} />`}
    ${simple && on ? html`<label for=${id}>${label}</label>` : html`<span class="label">${label}</span>`}
    ${onRemove && html`<button type="button" class="plain" aria-label=${`remove ${name}`} onClick=${onRemove}>Remove</button>`}
  </div>`;
  return html`<div class="field" role=${simple ? undefined : "group"} aria-label=${simple ? undefined : name}>
    ${head} ${model.description && html`<div class="hint any">${visible(model.description)}</div>`}
    ${on
      ? html`<${Place} ...${{ id, model, state, set, path, problems, name }} />`
      : html`<div class="hint">
          not sent${model.fallback !== undefined && html`; the default is <code>${shortJson(model.fallback)}</code>`}
        </div>`}
    ${model.hint && html`<div class="hint any">${visible(model.hint)}</div>`}
  </div>`;
}

const SIMPLE = new Set(["string", "number", "boolean", "enum", "json", "const", "null"]);

const shortJson = (value) => {
  const text = writeJson(value);
  return text.length > 80 ? text.slice(0, 79) + "…" : text;
};

/** Draws one place without its label. */
export function Place(props) {
  const Draw = PLACES[props.model.kind];
  const message = problemAt(props.problems, props.path);
  return html`<${Draw} ...${props} invalid=${message ? "true" : undefined} />
    ${message && SIMPLE.has(props.model.kind) && html`<div class="error">${message}</div>`}`;
}

const problemAt = (problems, path) => {
  const name = JSON.stringify(path);
  return problems.find((each) => JSON.stringify(each.path) === name)?.message;
};

function Text({ id, model, state, set, path, invalid }) {
  const more = { id, value: state.text, "data-path": JSON.stringify(path), "aria-invalid": invalid, autocomplete: "off", spellcheck: false, dir: "auto" };
  const onInput = ({ currentTarget: { value: text } }) => set(() => ({ text }));
  if (!model.lines || model.secret) return html`<input type=${model.secret ? "password" : "text"} ...${more} onInput=${onInput} />`;
  const rows = Math.min(12, Math.max(1, state.text.split("\n").length));
  return html`<textarea class="line" rows=${rows} ...${more} onInput=${onInput}></textarea>`;
}

function NumberText({ id, model, state, set, path, invalid }) {
  return html`<input
    type="text"
    inputmode=${model.integer ? "numeric" : "decimal"}
    id=${id}
    data-path=${JSON.stringify(path)}
    aria-invalid=${invalid}
    autocomplete="off"
    value=${state.text}
    onInput=${({ currentTarget: { value: text } }) => set(() => ({ text }))}
  />`;
}

function Check({ id, state, set, path }) {
  return html`<label class="inline">
    <input type="checkbox" id=${id} data-path=${JSON.stringify(path)} checked=${state.value} onChange=${({ currentTarget: { checked: value } }) => set(() => ({ value }))} />
    <code>${String(state.value)}</code>
  </label>`;
}

function Choice({ id, model, state, set, path, invalid }) {
  return html`<select id=${id} data-path=${JSON.stringify(path)} aria-invalid=${invalid} value=${state.at} onChange=${({ currentTarget: { value: at } }) => set(() => ({ at: Number(at) }))}>
    ${state.at < 0 && html`<option value="-1">choose …</option>`}
    ${model.values.map((value, at) => html`<option key=${at} value=${at}>${visible(typeof value === "string" && value ? value : writeJson(value))}</option>`)}
  </select>`;
}

const Fixed = ({ id, model }) => html`<code id=${id}>${visible(writeJson(model.kind === "null" ? null : model.value))}</code>`;

function JsonPlace({ id, model, state, set, path, problems, name }) {
  return html`${model.why && html`<div class="hint">As JSON: ${model.why}.</div>`}
    <${JsonText} id=${id} label=${name ?? "JSON"} path=${path} problems=${problems} text=${state.text} rows=${2} onText=${(text) => set(() => ({ text }))} />`;
}

/** Draws a field for JSON. */
export function JsonText({ id, label, path, problems, text, rows, onText }) {
  const lines = Math.min(24, Math.max(rows, text.split("\n").length));
  return html`<textarea
    id=${id}
    rows=${lines}
    class="code"
    aria-label=${label}
    placeholder="JSON"
    spellcheck=${false}
    autocomplete="off"
    data-path=${JSON.stringify(path)}
    aria-invalid=${problemAt(problems, path) ? "true" : undefined}
    value=${text}
    onInput=${(event) => onText(event.currentTarget.value)}
  ></textarea>`;
}

function ObjectPlace({ model, state, set, path, problems, top }) {
  const [name, setName] = useState("");
  const field = useRef(null); // where the name of a further field is typed
  const focusNew = useFocusOfNew(field, ":scope > .field");
  const setField = (at, update) => set((old) => ({ ...old, fields: changed(old.fields, at, update) }));
  const setMore = (update) => set((old) => ({ ...old, more: update(old.more) }));
  const add = () => {
    const { value } = field.current;
    if (!value) return;
    focusNew();
    setMore((more) => [...more, { name: value, state: startOf(model.more()) }]);
    setName("");
  };
  const fields = model.properties.map(({ name: own, required, below }, at) => {
    const { on, state: inner } = state.fields[at];
    const started = (old) => old.state ?? startOf(below());
    return html`<${Field}
      key=${`own ${own}`}
      name=${own}
      model=${below()}
      required=${required}
      state=${on ? (inner ?? startOf(below())) : null}
      set=${(update) => setField(at, (old) => ({ on: true, state: update(started(old)) }))}
      toggle=${required ? null : (next) => setField(at, (old) => ({ on: next, state: started(old) }))}
      path=${[...path, own]}
      problems=${problems}
    />`;
  });
  const more = state.more.map(
    (each, at) => html`<${Field}
      key=${`more ${at}`}
      name=${each.name}
      model=${model.more()}
      state=${each.state}
      set=${(update) => setMore((more) => changed(more, at, (old) => ({ ...old, state: update(old.state) })))}
      onRemove=${() => setMore((more) => more.filter((_, index) => index !== at))}
      path=${[...path, each.name]}
      problems=${problems}
    />`,
  );
  const adder =
    model.more &&
    html`<div class="inline">
      <input
        type="text"
        aria-label="name of a further field"
        data-more=${JSON.stringify(path)}
        ref=${field}
        placeholder="name of a further field"
        autocomplete="off"
        spellcheck=${false}
        value=${name}
        onInput=${(event) => setName(event.currentTarget.value)}
        onKeyDown=${(event) => {
          if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
          event.preventDefault();
          add();
        }}
      />
      <button type="button" disabled=${!name} onClick=${add}>Add field</button>
      ${model.names.length > 0 && html`<span class="hint">its name matches ${visible(model.names.join(" or "))}</span>`}
    </div>`;
  const nothing = !top && !fields.length && !model.more && html`<div class="hint">no fields</div>`;
  if (top) return html`${!fields.length && html`<div class="hint">This tool names no arguments.</div>`}${fields}${more}${adder}`;
  return html`<div class="group">${fields}${more}${adder}${nothing}</div>`;
}

function ArrayPlace({ model, state, set, path, problems }) {
  const box = useRef(null);
  const focusNew = useFocusOfNew(box, ":scope > .item");
  const { items } = state;
  const add = () => {
    focusNew();
    set((old) => ({ items: [...old.items, startOf(model.below(old.items.length))] }));
  };
  return html`<div class="group" ref=${box}>
    ${items.map(
      (each, at) => html`<div class="item" key=${at}>
        <${Field} name=${`[${at}]`} model=${model.below(at)} state=${each} set=${(update) => set((old) => ({ items: changed(old.items, at, update) }))} path=${[...path, at]} problems=${problems} />
        <button type="button" class="plain" aria-label=${`remove item ${at}`} onClick=${() => set((old) => ({ items: old.items.filter((_, index) => index !== at) }))}>
          Remove
        </button>
      </div>`,
    )}
    ${items.length < model.most && html`<div class="inline"><button type="button" data-path=${JSON.stringify(path)} onClick=${add}>Add item</button></div>`}
  </div>`;
}

/** Returns a list in which one item is another. */
const changed = (list, at, update) => list.map((each, index) => (index === at ? update(each) : each));

/** Returns a function to call before something is added: the last of `parts` around an element gets the focus then. */
function useFocusOfNew(element, parts) {
  const isNew = useRef(false);
  useEffect(() => {
    if (!isNew.current) return;
    isNew.current = false;
    const all = element.current.closest(".group, form").querySelectorAll(parts);
    [...all].at(-1)?.querySelector("[data-path], [data-send], [data-more]")?.focus();
  });
  return () => (isNew.current = true);
}

function UnionPlace({ id, model, state, set, path, problems, name, top, invalid }) {
  const names = model.names();
  const inner = state.at < 0 ? null : model.options[state.at]();
  const choose = (at) => at >= 0 && set(() => ({ at, state: startOf(model.options[at]()) }));
  return html`<select
      id=${id}
      aria-label=${`kind of ${name ?? "arguments"}`}
      data-path=${JSON.stringify(path)}
      aria-invalid=${invalid}
      value=${state.at}
      onChange=${(event) => choose(Number(event.currentTarget.value))}
    >
      ${state.at < 0 && html`<option value="-1">choose …</option>`}
      ${names.map((each, at) => html`<option key=${at} value=${at}>${visible(each)}</option>`)}
    </select>
    ${inner &&
    inner.kind !== "null" &&
    html`${inner.description && html`<div class="hint any">${visible(inner.description)}</div>`}
      <${Place}
        key=${state.at}
        model=${inner}
        state=${state.state}
        set=${(update) => set((old) => ({ at: old.at, state: update(old.state) }))}
        path=${path}
        problems=${problems}
        name=${name}
        top=${top}
      />
      ${inner.hint && html`<div class="hint any">${visible(inner.hint)}</div>`}`}`;
}

const PLACES = {
  string: Text,
  number: NumberText,
  boolean: Check,
  enum: Choice,
  const: Fixed,
  null: Fixed,
  json: JsonPlace,
  object: ObjectPlace,
  array: ArrayPlace,
  union: UnionPlace,
};

function useId() {
  const id = useRef("");
  id.current ||= `place-${++newestId}`;
  return id.current;
}
