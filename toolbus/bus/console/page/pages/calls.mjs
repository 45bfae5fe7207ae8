// Shows calls.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "c", name: "calls", title: "Calls", view: View };
