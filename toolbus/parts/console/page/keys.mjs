// Hands keys to the part of the page that asked last, and knows what each does, for the help.

import { html, signal, useEffect, useRef } from "./html.mjs";

const layers = []; // of the components that have keys, oldest first: {current: {keys, words}}
let afterG = null; // the timer during which the next letter is a page's; null: no `g` came
const G_TIME = 1500; // ms
const SCROLLING = new Set(["ArrowDown", "ArrowUp", "Home", "End"]);

export const helpIsOpen = signal(false);

/**
 * Gives keys to a component while it is drawn: `useKeys({r: run, "ArrowDown j": next}, "r runs the tool")`.
 * A function that returns false leaves the key to the component below. `words` is a text, or {key: text}.
 */
export function useKeys(keys, words = "") {
  const layer = useRef(null);
  layer.current = { keys: byKey(keys), words };
  useEffect(() => {
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
}

function byKey(keys) {
  return Object.fromEntries(Object.entries(keys).flatMap(([names, act]) => names.split(" ").map((name) => [name, act])));
}

/** Returns what the keys of this moment do: [keys, text] each. */
export function helpOfKeys() {
  return layers.flatMap(({ current: { keys, words } }) => {
    if (!words) return [];
    return typeof words === "string" ? [[Object.keys(keys).join(" "), words]] : Object.entries(words);
  });
}

/** Listens to the keyboard; `pages` are those that `g` and a letter show, `show(page)` does it. */
export function startKeys(pages, show) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.defaultPrevented) return;
    const target = event.target;
    if (document.querySelector("dialog[open]")) return; // it has its own
    if (isField(target)) {
      if (event.key === "Escape") target.blur();
      // Of a filter, the keys of the list work as well.
      else if (!("through" in target.dataset && ["ArrowDown", "ArrowUp", "Enter"].includes(event.key))) return;
      else if (event.key === "Enter" && target.value === "") return;
    }
    if (event.key === "Enter" && target.closest("a, button, summary")) return; // which it presses
    if (SCROLLING.has(event.key) && target.closest("pre, .log")) return; // which it scrolls
    if (afterG !== null) {
      clearTimeout(afterG);
      afterG = null;
      const page = pages().find(({ key }) => key === event.key);
      if (page) {
        event.preventDefault();
        show(page);
        return;
      }
    }
    if (isField(target) && event.key === "Escape") return;
    for (const layer of [...layers].reverse()) {
      const act = layer.current.keys[event.key];
      if (act && act(event) !== false) {
        event.preventDefault();
        return;
      }
    }
    if (event.key === "g") afterG = setTimeout(() => (afterG = null), G_TIME);
    else if (event.key === "?") helpIsOpen.value = true;
    else if (event.key === "/") focusFilter();
    else return;
    event.preventDefault();
  });
}

function isField(element) {
  return element.matches?.("input, textarea, select, [contenteditable]") ?? false;
}

function focusFilter() {
  const field = document.querySelector("main input[type=search]");
  field?.focus();
  field?.select();
}

/** Draws keys as keys. */
export function Keys({ of }) {
  return of.split(" ").map((key) => html`<kbd>${SHOWN[key] ?? key}</kbd> `);
}

const SHOWN = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc", " ": "Space" };
