// Shows tools.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "t", name: "tools", title: "Tools", view: View };
