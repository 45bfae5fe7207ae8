// Shows tasks.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "k", name: "tasks", title: "Tasks", view: View };
