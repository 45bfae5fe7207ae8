// Shows errors.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "e", name: "errors", title: "Errors", view: View };
