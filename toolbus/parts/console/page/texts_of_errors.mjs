// Says that the texts of errors are not recorded, and has the bus record them for a while.

import { admin } from "./api.mjs";
import { toast } from "./dialogs.mjs";
import { html } from "./html.mjs";
import { Failed, useAct } from "./parts.mjs";
import { bus, may } from "./store.mjs";

const SECONDS = 600;

/** Draws a sentence with a button, where the bus records no texts of errors. */
export function TextsOfErrors() {
  const [run, busy, error] = useAct();
  if (bus.value.records_errors !== false) return null;
  const record = () => run(() => admin("record_errors", { seconds: SECONDS }), () => toast("The texts of errors are recorded for 10 minutes."));
  return html`<p class="note">
      What tools say of their errors is not recorded, as it may repeat arguments.
      ${may("*") ? html` <button type="button" class="small" disabled=${busy} onClick=${record}>Record for 10 minutes</button>` : html` <code>record_errors = "always"</code> in the bus's configuration records it.`}
    </p>
    <${Failed} error=${error} what="Not recorded" />`;
}
