// Filters a list by words; what was typed is in the address.

import { html } from "./html.mjs";
import { refine, route } from "./router.mjs";

/** Draws the page's filter: `/` leads to it. `name` is its key in the query of the route. */
export function Filter({ name = "q", label = "Filter", count = null }) {
  const text = route.value.query[name] ?? "";
  return html`<div class="filter" role="search">
    <input
      type="search"
      aria-label=${label}
      placeholder="${label}  /"
      autocomplete="off"
      spellcheck="false"
      data-through
      value=${text}
      onInput=${(event) => refine({ [name]: event.currentTarget.value })}
    />
    ${count !== null && html`<span class="muted num" role="status">${count}</span>`}
  </div>`;
}

/** Returns the items whose text has every word of the filter. `text(item)` must be in lower case. */
export function filtered(items, words, text) {
  const needles = (words ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (!needles.length) return items;
  return items.filter((item) => {
    const hay = text(item);
    return needles.every((needle) => hay.includes(needle));
  });
}
