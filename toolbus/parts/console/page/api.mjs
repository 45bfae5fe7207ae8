// Asks the bus over the HTTP paths that every program has.
//
// Numbers of answers are JavaScript's, but for results of tools: those are shown as they came.

import { parseJson, writeJson } from "./json.mjs";

/** Says why a request or a call failed. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", stage = "", retry_safe = null, limit = null, call_id = "" } = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status, code, stage, retry_safe, limit, call_id });
  }
}

/** Hears of every answer 401; the app shows how to log in. */
export const unauthorized = { heard: () => {} };

/** Returns the value that a path gives. Throws ApiError. */
export const get = (path, options) => send("GET", path, undefined, options);

/** Sends a request, with a JSON body unless it is undefined, and returns the answer's value. Throws ApiError. */
export async function send(method, path, body, { signal } = {}) {
  const response = await request(method, path, body, { signal });
  return valueOf(await response.text());
}

/** Calls one of the bus's own tools and returns its output. Throws ApiError. */
export async function admin(name, args = {}, options) {
  const answer = await send("POST", `/api/bus/${encodeURIComponent(name)}`, args, options);
  return outputOf(answer);
}

/** Returns the output of an invoke's answer; throws what failed as ApiError. */
export function outputOf(answer) {
  if (answer?.is_error) {
    const error = answer.error ?? {};
    const message = error.message ?? (typeof answer.output === "string" ? answer.output : writeJson(answer.output));
    throw new ApiError(message, { status: 200, ...error, call_id: answer.call_id });
  }
  return answer?.output;
}

/**
 * Calls a tool and returns the whole answer, failed or not. `args` is JSON as text, which is sent as it stands.
 * `onEvent(kind, data)` hears "progress" and "chunk". Aborting `signal` cancels the call. Throws ApiError where there
 * is no answer.
 */
export async function invoke(name, args, { onEvent = () => {}, signal, ...more } = {}) {
  const body = { name, arguments: args, ...more };
  const response = await request("POST", "/api/tools/invoke", body, { signal, accept: "text/event-stream" });
  if (!(response.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
    return valueOf(await response.text(), parseJson);
  }
  try {
    for await (const { kind, data } of events(response.body)) {
      if (kind === "result") return valueOf(data, parseJson);
      onEvent(kind, valueOf(data));
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("the connection to the bus was lost during the call");
  }
  throw new ApiError("the connection to the bus ended before the result");
}

async function request(method, path, body, { signal, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : writeJson(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the bus does not answer");
  }
  if (response.ok) return response;
  if (response.status === 401) unauthorized.heard();
  throw new ApiError(problem(await response.text(), response), { status: response.status });
}

/** Returns the words of a refused request. */
function problem(text, response) {
  try {
    const { detail } = JSON.parse(text);
    if (typeof detail === "string") return detail;
    if (Array.isArray(detail)) return detail.map((each) => `${(each.loc ?? []).join(".")}: ${each.msg}`).join("; ");
  } catch {
    // Not JSON: the status says it.
  }
  return `the bus answered ${response.status} ${response.statusText}`.trim();
}

function valueOf(text, parse = JSON.parse) {
  try {
    return parse(text);
  } catch {
    throw new ApiError(`the bus did not answer with JSON: ${text.slice(0, 200)}`);
  }
}

const BREAK = 3; // characters of a blank line's beginning: \r\n\r

/** Yields the server-sent events of a body: {kind, data}. What is not wanted any more is not read. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = []; // of an event that is not complete: looking through all of it again takes seconds for a long one
  let end = ""; // what follows them: a blank line may begin there
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (end + value).split(/\r?\n\r?\n/);
      const rest = parts.pop();
      for (const part of parts) {
        const event = eventOf(pieces.join("") + part);
        pieces = [];
        if (event.data) yield event;
      }
      pieces.push(rest.slice(0, -BREAK));
      end = rest.slice(-BREAK);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return { kind, data: data.join("\n") };
}
