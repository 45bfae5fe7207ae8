// Shows bus.

import { html } from "../html.mjs";

function View() {
  return html`<div class="empty">Nothing yet.</div>`;
}

export const page = { key: "b", name: "bus", title: "Bus", view: View };
