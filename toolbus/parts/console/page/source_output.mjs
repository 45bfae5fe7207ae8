// Draws what the plugin of a call wrote around it, or why that is not known.

import { admin } from "./api.mjs";
import { html, useEffect, useState } from "./html.mjs";
import { AFTER, around, newestLines, rowsOf, whyNone } from "./log_lines.mjs";
import { Failed, Panel } from "./parts.mjs";
import { link } from "./router.mjs";
import { connection, may, sources } from "./store.mjs";
import { clock, count, moment, shown } from "./text.mjs";

const MAX_LINES = 2000; // of one answer
const MAX_SHOWN = 30;
const MAX_PLACES = 3; // of replicas

/** Draws what the plugin of a call wrote at that moment. */
export function OutputNear({ call }) {
  const [read, setRead] = useState(null); // {rows, lines, older, error}; null: not yet
  const live = connection.value === "live";
  const { number, source, started, ended } = call;
  useEffect(() => {
    if (!live || !source || !may("logs")) return undefined;
    const asking = new AbortController();
    setRead(null);
    readNear(source, { started, ended }, asking.signal).then(setRead, (error) => error.name === "AbortError" || setRead({ error }));
    return () => asking.abort();
  }, [number, live]);
  if (!source || !may("logs")) return null;
  const { rows = [], lines = [], older = false, error = null } = read ?? {};
  const where = rows[0] && link("logs", [rows[0].source, rows[0].plugin]);
  return html`<${Panel} title="What it wrote then" aside=${where && html`<a href=${where}>all of its output</a>`}>
    <${Failed} error=${error} what="The output" />
    ${lines.length > 0 &&
    html`<pre class="text" tabindex="0">${lines.slice(-MAX_SHOWN).map(
      (line) => html`<span class=${line.at <= ended && line.at >= started ? "" : "muted"}><span class="muted" title=${moment(line.at, 3)}>${clock(line.at, 3)} </span>${line.text}${"\n"}</span>`,
    )}</pre>`}
    ${lines.length > MAX_SHOWN && html`<p class="inside muted">The newest ${MAX_SHOWN} of ${count(lines.length)} lines.</p>`}
    ${read && !error && !lines.length && html`<p class="inside muted">${noLines(source, rows, older)}</p>`}
  <//>`;
}

function noLines(source, rows, older) {
  if (!rows.length) return `${shown(source)} has no output here: ${whyNone(sources.value.get(source)?.kind)}.`;
  return older ? "Nothing of that moment is stored any more." : `Nothing, until ${AFTER} s after the call.`;
}

async function readNear(source, call, signal) {
  const { plugins } = await admin("plugin_logs", {}, { signal });
  const rows = rowsOf(source, plugins).slice(0, MAX_PLACES);
  const answers = await Promise.all(rows.map((row) => admin("plugin_logs", { plugin: row.plugin, source: row.source, lines: MAX_LINES }, { signal })));
  const all = answers.map(({ lines }) => lines);
  const lines = all.flatMap((each) => newestLines([], around(each, call), MAX_LINES)).sort((one, other) => one.at - other.at);
  return { rows, lines, older: all.some((each) => each.length > 0 && each[0].at > call.ended + AFTER) };
}
