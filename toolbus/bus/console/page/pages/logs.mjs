// Shows logs.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "l", name: "logs", title: "Logs", view: View };
