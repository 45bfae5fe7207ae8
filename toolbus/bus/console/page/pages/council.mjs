// Shows council.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "o", name: "council", title: "Council", view: View };
