// Shows sources.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "s", name: "sources", title: "Sources", view: View };
