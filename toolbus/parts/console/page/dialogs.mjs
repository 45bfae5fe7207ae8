// Speaks to the operator: short messages, and the question before a destructive act.

import { html, signal, useEffect, useRef, useState } from "./html.mjs";
import { route } from "./router.mjs";

const TOAST_SECONDS = { ok: 4, bad: 12 };
const MAX_TOASTS = 4;

const toasts = signal([]);
const question = signal(null); // {id, title, name, text, answer}; null: none is asked
let newest = 0; // id of a toast or a question

/** Shows a short message; `kind` is "ok" or "bad". */
export function toast(text, kind = "ok") {
  const id = ++newest;
  const close = () => (toasts.value = toasts.value.filter((each) => each.id !== id));
  toasts.value = [...toasts.value, { id, text: String(text), kind, close }].slice(-MAX_TOASTS);
  setTimeout(close, (TOAST_SECONDS[kind] ?? TOAST_SECONDS.ok) * 1000);
}

/** Asks for the name of what an act would harm to be typed. Returns a promise of whether it was. */
export function askName(title, name, text = "") {
  question.value?.answer(false);
  return new Promise((resolve) => {
    const answer = (yes) => {
      if (question.value === asked) question.value = null; // a closed dialog says so late, when the next may be open
      resolve(yes);
    };
    const asked = { id: ++newest, title, name, text, answer };
    question.value = asked;
  });
}

/** Draws what is to be said at the moment. */
export function Dialogs() {
  const asked = question.value;
  const { page, parts } = route.value;
  useEffect(() => () => question.value?.answer(false), [page, parts.join("\n")]); // it is of what was shown
  return html`<div class="toasts" role="status" aria-live="polite">
      ${toasts.value.map(
        ({ id, text, kind, close }) =>
          html`<div key=${id} class=${kind === "bad" ? "toast bad" : "toast ok"}>
            <span>${text}</span><button type="button" class="plain" aria-label="Close" onClick=${close}>×</button>
          </div>`,
      )}
    </div>
    ${asked && html`<${NameDialog} key=${asked.id} ...${asked} />`}`;
}

function NameDialog({ title, name, text, answer }) {
  const [typed, setTyped] = useState("");
  const field = useRef(null);
  return html`<${Dialog} title=${title} onClose=${() => answer(false)}>
    <form
      onSubmit=${(event) => {
        event.preventDefault();
        if (field.current.value === name) answer(true);
      }}
    >
      ${text && html`<p>${text}</p>`}
      <label class="field">
        <span>Type <code>${name}</code> to confirm</span>
        <input
          type="text"
          autocomplete="off"
          spellcheck="false"
          autofocus
          ref=${field}
          value=${typed}
          onInput=${(event) => setTyped(event.currentTarget.value)}
        />
      </label>
      <div class="acts">
        <button type="button" onClick=${() => answer(false)}>Back</button>
        <button type="submit" class="danger" disabled=${typed !== name}>${title}</button>
      </div>
    </form>
  <//>`;
}

/** Draws a modal dialog, which Escape closes. */
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose}>
    <h2>${title}</h2>
    ${children}
  </dialog>`;
}
