// Draws a form that calls a tool, and what the call reports and gives.

import { invoke } from "./api.mjs";
import { askName } from "./dialogs.mjs";
import { ArgumentsForm } from "./form.mjs";
import { html, useEffect, useRef, useState } from "./html.mjs";
import { useKeys } from "./keys.mjs";
import { Failed, Panel } from "./parts.mjs";
import { readJson, ResultView } from "./result_view.mjs";
import { argumentsModel } from "./schema_model.mjs";
import { shown, shownLines } from "./text.mjs";

const MAX_CHUNKS = 65_536; // characters of output that is shown before the result

/** Draws the form of a tool, and what its last run gave. */
export function Try({ tool, query }) {
  const [drawn, setDrawn] = useState(tool); // the declaration that the form is of
  const [kept, setKept] = useState(query.args ?? null); // the arguments that the form begins with, as JSON; null: none
  const [user, setUser] = useState("");
  const [run, setRun] = useState(null); // {answer, seconds, error, progress, chunks, abort}; null: none yet
  const form = useRef(null);
  const current = useRef(0); // the number of the newest run
  const model = useModel(drawn);

  const start = async (args) => {
    if (tool.hints?.destructive === true) {
      const sure = await askName("Run", tool.name, "Its author says that it is destructive: it may delete or overwrite what it works on.");
      if (!sure) return;
    }
    const number = ++current.current;
    const abort = new AbortController();
    const began = performance.now();
    const set = (changes) => number === current.current && setRun((before) => ({ ...before, ...changes }));
    setRun({ abort, progress: null, chunks: "" });
    const onEvent = (kind, data) => {
      if (number !== current.current) return;
      if (kind === "progress") set({ progress: data });
      else setRun((before) => ({ ...before, chunks: (before.chunks + chunkText(data)).slice(-MAX_CHUNKS) }));
    };
    try {
      const more = { schema_hash: drawn.schema_hash, ...(user ? { context: { user_id: user } } : {}) };
      const answer = await invoke(tool.name, args, { onEvent, signal: abort.signal, ...more });
      set({ answer, seconds: (performance.now() - began) / 1000, abort: null });
    } catch (error) {
      set(error.name === "AbortError" ? { abort: null, cancelled: true } : { abort: null, error });
    }
  };
  const redraw = () => {
    setKept(form.current?.changed() ?? null); // what was typed is not typed again
    setDrawn(tool);
  };
  const cancel = () => {
    if (!run?.abort) return false;
    run.abort.abort();
  };
  useEffect(() => () => current.current++, []);
  useKeys({ r: () => form.current?.run(), x: cancel }, { r: "run the tool with what the form shows", x: "cancel the call that runs" });

  const busy = Boolean(run?.abort);
  return html`<${Panel} title="Try it">
      ${drawn.schema_hash !== tool.schema_hash &&
      html`<p class="note warn">
        The tool has changed since this form was drawn. <button type="button" onClick=${redraw}>Draw it again</button>
      </p>`}
      <${ArgumentsForm} key=${drawn.schema_hash} model=${model} text=${kept} api=${form} busy=${busy} onRun=${start}>
        ${busy && html`<button type="button" onClick=${cancel}>Cancel</button>`}
        <input type="text" class="user" aria-label="for the user" placeholder="for the user (none)" autocomplete="off" spellcheck=${false} value=${user} onInput=${(event) => setUser(event.currentTarget.value)} />
      <//>
    <//>
    ${run && html`<${Run} run=${run} />`}`;
}

/** Returns the model of a declaration, made once. */
function useModel(tool) {
  const made = useRef({ tool: null, model: null });
  if (made.current.tool !== tool.schema_hash) made.current = { tool: tool.schema_hash, model: argumentsModel(readJson(tool.parameters_json)) };
  return made.current.model;
}

function Run({ run }) {
  const { answer, seconds, error, progress, chunks, abort, cancelled } = run;
  return html`
    <p class="hush" role="status">${answer && (answer.is_error ? "The call failed." : "The result is here.")}</p>
    ${abort && html`<p class="note" role="status"><i class="dot busy"></i> It runs. <kbd>x</kbd> cancels it.</p>`}
    ${abort && progress && html`<${Progress} of=${progress} />`}
    ${cancelled && html`<p class="note warn" role="status">Cancelled. The tool may have done a part of its work.</p>`}
    <${Failed} error=${error} />
    ${chunks && !answer && html`<${Panel} title="Output until now"><pre class="text any">${shownLines(chunks)}</pre><//>`}
    ${answer && html`<${ResultView} key=${answer.call_id} answer=${answer} seconds=${seconds} />`}
  `;
}

function Progress({ of: { progress, total, message } }) {
  const share = Number(total) > 0 ? Math.min(1, Number(progress) / Number(total)) : null;
  return html`<p role="status">
    ${share !== null && html`<span class="bar"><span class="fill" style=${{ width: `${share * 100}%` }}></span></span>`}
    <span class="muted any">${shown(String(message || (share === null ? progress : `${Math.round(share * 100)} %`)))}</span>
  </p>`;
}

const chunkText = (data) => (data?.text?.text ?? data?.text ?? (typeof data === "string" ? data : JSON.stringify(data))) + "";
