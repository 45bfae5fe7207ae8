// Shows permissions.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "p", name: "permissions", title: "Permissions", view: View };
