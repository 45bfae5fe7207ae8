// Shows background tasks: those of everyone where one may, and what each reported and gave to those that it belongs to.

import { admin, get, send } from "../api.mjs";
import { filtered } from "../filter.mjs";
import { html, useEffect, useState } from "../html.mjs";
import { useKeys } from "../keys.mjs";
import { ListPage } from "../list_page.mjs";
import { Ago, Cut, DetailHead, Facts, Failed, Nothing, Panel, useAct, useAnswer } from "../parts.mjs";
import { Output } from "../result_view.mjs";
import { go, link, refine } from "../router.mjs";
import { count, duration, moment, plural, shown } from "../text.mjs";

const REFRESH = 2000; // ms
const LIMIT = 500;
const STATUSES = [
  ["", "All"],
  ["running", "Running"],
  ["completed", "Completed"],
  ["failed", "Failed"],
];
const KINDS = { running: "busy", completed: "ok", failed: "bad" };

function View({ parts, query }) {
  const [{ tasks = null, count: total = 0 } = {}, error, read] = useAnswer(() => admin("all_tasks", { limit: LIMIT }), REFRESH);
  const [id] = parts;
  const status = query.status ?? "";
  const wanted = (tasks ?? []).filter((task) => !status || task.status === status);
  const items = filtered(wanted, query.q, (task) => [task.tool, ownerOf(task), task.status, task.task_id].join("\n").toLowerCase());
  const task = tasks?.find((each) => each.task_id === id);
  return html`<${ListPage}
    title="Tasks"
    one="task"
    aside=${html`<div class="chips" role="group" aria-label="Which tasks">
        ${STATUSES.map(([name, label]) => html`<button type="button" aria-pressed=${status === name} onClick=${() => refine({ status: name })}>${label}</button>`)}
      </div>
      ${total > LIMIT && html`<span class="muted">the newest ${count(LIMIT)} of ${count(total)}</span>`}`}
    error=${error}
    known=${tasks !== null}
    columns="cols-tasks"
    heads=${html`<span>Tool</span><span>State</span><span class="opt">Owner</span><span class="opt">Task</span><span class="num">Took</span>`}
    items=${items}
    id=${(each) => each.task_id}
    row=${rowOf}
    selected=${id}
    onOpen=${(each) => go("tasks", [each.task_id], query)}
    narrowed=${tasks?.length}
    none=${html`<${Nothing} title="No tasks">A call with <code>background_after_seconds</code> becomes a task when it takes longer.<//>`}
    detail=${id && html`<${Detail} key=${id} id=${id} task=${task} known=${tasks !== null} query=${query} onChange=${read} />`}
  />`;
}

/** Returns whose a task is, in words. */
function ownerOf({ user, source, identity }) {
  return user !== undefined ? user : identity !== undefined ? `identity ${identity}` : source !== undefined ? `program ${source}` : "";
}

function State({ status }) {
  return html`<span class=${"chip " + (KINDS[status] ?? "")}>${status === "running" && html`<i class="dot busy"></i>`}${shown(status)}</span>`;
}

function rowOf(task) {
  return html`
    <${Cut} text=${task.tool} />
    <${State} status=${task.status} />
    <${Cut} kind="sub opt" text=${ownerOf(task) || "–"} />
    <${Cut} kind="sub opt mono" text=${task.task_id.replace("task_", "")} />
    <span class="num">${duration(task.seconds)}</span>
  `;
}

/** Draws a task. What it reported and gave is the owner's: asked for with the owner's user, as hosts do. */
function Detail({ id, task, known, query, onChange }) {
  const [answer, setAnswer] = useState(null);
  const [cancel, busy, error] = useAct();
  const user = task?.user;
  const path = `/api/tasks/${encodeURIComponent(id)}` + (user ? `?user_id=${encodeURIComponent(user)}` : "");
  const readable = task !== undefined && (user !== undefined || task.source === "http");
  useEffect(() => {
    if (!readable) return;
    const asking = new AbortController();
    get(path, { signal: asking.signal }).then(setAnswer, (error) => error.name === "AbortError" || setAnswer(null));
    return () => asking.abort();
  }, [path, readable, task?.status, task?.status === "running" && Math.floor(task.seconds / 2)]);
  const running = task?.status === "running";
  const stop = () => cancel(() => send("DELETE", path), onChange);
  useKeys({ x: () => (running && readable ? void stop() : false) }, running && readable ? { x: "cancel the task" } : "");
  const head = html`<${DetailHead} back="tasks" title="Tasks" query=${query} name=${task?.tool ?? id}>${task && html`<${State} status=${task.status} />`}<//>`;
  if (!task) return html`${head}<div class="body">${known && html`<${Nothing} title="This task is not known">The bus keeps the results of tasks for a day.<//>`}</div>`;
  const { progress, result, started, ended } = answer ?? {};
  return html`${head}
    <div class="body">
      ${answer?.error && html`<${Panel} title="Why it failed" kind="alert"><p class="error any">${shown(answer.error)}</p><//>`}
      <${Panel} title="The task" aside=${running && readable && html`<button type="button" class="danger small" disabled=${busy} onClick=${stop}>Cancel</button>`}>
        <${Failed} error=${error} what="It was not cancelled" />
        <${Facts} of=${[
          ["Tool", html`<a href=${link("calls", [], { tool: task.tool })} title="Calls of this tool">${shown(task.tool)}</a>`],
          ["Owner", ownerOf(task) || "a program without a user"],
          ["Took", duration(task.seconds)],
          ["Started", started && html`${moment(started)} <span class="muted"><${Ago} at=${started} /></span>`],
          ["Ended", ended && moment(ended)],
          ["Id", html`<code>${task.task_id}</code>`],
        ]} />
        ${progress && html`<div class="inside"><${Progress} of=${progress} /></div>`}
        ${!readable && html`<p class="note">Progress and result are shown to its owner only.</p>`}
      <//>
      ${result !== undefined && result !== null && html`<${Panel} title="Result"><${Output} value=${result.output ?? result} /><//>`}
    </div>`;
}

function Progress({ of: { done, total, message } }) {
  const part = total > 0 ? Math.min(1, Math.max(0, done / total)) : 0;
  return html`
    ${total > 0 && html`<div class="bar" role="progressbar" aria-valuenow=${Math.round(part * 100)} aria-valuemin="0" aria-valuemax="100" aria-label="Progress"><div class="fill" style=${{ width: part * 100 + "%" }}></div></div>`}
    <p class="any">${shown(message || (total > 0 ? `${count(done)} of ${count(total)}` : plural(done, "step")))}</p>
  `;
}

export const page = { key: "k", name: "tasks", title: "Tasks", verb: "calls", view: View };
