/** A host over HTTP and server-sent events, for browsers, edge functions and programs without gRPC: needs only `fetch`. */
import { answered, retryPause } from "./again.js";
import { argumentsJson, callError, parseJson, PeerLost, RequestError, Result, SetupError, toJson, type CallOptions, type CatalogStep, type Content, type HttpNotification, type HttpTool } from "./values.js";

export * from "./values.js";

const CATALOG = "/api/tools/events";
const ADDRESS = "http://127.0.0.1:48911";
const DEFAULT_SECONDS = 30; // the time of a call that names none, for further attempts
const MAX_SECONDS = 300; // the longest of any call
const LIST_SECONDS = 10; // for everything else that has one answer
const SILENT_SECONDS = 60; // after so many without an event or a ping the bus counts as lost; it pings every 15
const SLACK_MS = 1000; // that the bus's answer may be late
const LATE_MS = 500; // a timer later than this shows that the program stood still, or is a page in the background

/** What a host over HTTP can state. */
export interface HttpHostOptions {
  /** The URL of the bus; "" for the origin of a page that the bus serves; `http://127.0.0.1:48911` by default. */
  readonly address?: string;
  /** The token of a credential, for a bus on another machine. */
  readonly token?: string;
  /** Another `fetch`. */
  readonly fetch?: typeof fetch;
}

/** What a call can state beside the tool and its arguments; as in the host over gRPC. */
export type HttpCallOptions = CallOptions;
/** One step of the catalog: with `full`, `added` is everything. */
export type HttpChange = CatalogStep<HttpTool>;

/** Calls tools over HTTP. It holds no connection, so there is nothing to close. */
export class Host {
  private readonly address: string;
  private readonly headers: { [name: string]: string };
  private readonly fetch: typeof fetch;

  /** @throws SetupError a token would be sent in plain text to another machine. */
  constructor(options: HttpHostOptions = {}) {
    this.address = (options.address ?? ADDRESS).replace(/\/$/, "");
    if (options.token && !/^(https:|http:\/\/(127\.0\.0\.1|localhost|\[::1\])(:|$)|$)/.test(this.address)) {
      throw new SetupError(`a token is not sent to ${this.address} in plain text: write https`);
    }
    this.headers = options.token ? { authorization: `Bearer ${options.token}` } : {};
    this.fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
  }

  /**
   * Calls a tool. A failed call is a value: a result with `error`. It is sent again where that is safe, in its time.
   *
   * @throws TypeError JSON cannot hold the arguments; RequestError the bus refuses the request; the reason of `signal`.
   */
  async call(name: string, args: unknown = {}, options: HttpCallOptions = {}): Promise<Result> {
    const { onInput, ...once } = options;
    if (onInput !== undefined) return answered((inputs) => this.call(name, args, { ...once, inputs }), onInput, options.inputs);
    const { signal, timeout, backgroundAfter } = once;
    const named = backgroundAfter || timeout;
    const end = performance.now() + (named || DEFAULT_SECONDS) * 1000;
    const wait = new Wait(Math.max(0, Math.min(named || MAX_SECONDS, MAX_SECONDS)), signal, SLACK_MS);
    try {
      for (let attempt = 0; ; attempt += 1) {
        const left = (end - performance.now()) / 1000;
        const result = await this.once(name, args, { ...once, timeout: timeout && attempt ? Math.max(0.001, Math.min(timeout, left)) : timeout }, wait);
        const pause = result.error && retryPause(result.error.code, result.error, attempt);
        if (pause === null || performance.now() + pause >= end) return result;
        await new Promise<void>((resolve) => {
          setTimeout(resolve, pause);
          wait.signal.addEventListener("abort", () => resolve());
        });
        signal?.throwIfAborted();
      }
    } finally {
      wait.end();
    }
  }

  /** Lists the tools that calls without a user can reach, within `timeout` seconds (10). @throws RequestError, PeerLost */
  async list(options: { names?: readonly string[]; role?: string; source?: string; timeout?: number; signal?: AbortSignal } = {}): Promise<HttpTool[]> {
    const { names, role, source, timeout = LIST_SECONDS, signal } = options;
    const fits = (tool: HttpTool) =>
      (!names?.length || names.includes(tool.name)) && (!role || tool.roles.includes(role)) && (!source || tool.source === source);
    for await (const { added } of this.events(CATALOG, "catalog", new Wait(timeout, signal))) return (added as unknown[]).map(toolOf).filter(fits);
    throw new PeerLost("UNAVAILABLE", `the bus at ${this.address} sent no list`);
  }

  /** Yields the whole catalog, then its changes, until the connection ends or `signal` aborts. @throws RequestError, PeerLost */
  async *watch(options: { signal?: AbortSignal | undefined } = {}): AsyncGenerator<HttpChange, void, undefined> {
    for await (const data of this.events(CATALOG, "catalog", Wait.ofStream(options.signal))) {
      yield { ...data, added: data.added.map(toolOf), changed: data.changed.map(toolOf) };
    }
  }

  /** Yields the notifications of plugins to a user, or to all. @throws RequestError, PeerLost */
  async *notifications(options: { user?: string; since?: number; signal?: AbortSignal } = {}): AsyncGenerator<HttpNotification, void, undefined> {
    const query = queryOf({ user_id: options.user, since: options.since });
    for await (const { number, source, user_id, text, data, time_seconds } of this.events(`/api/notifications?${query}`, "notification", Wait.ofStream(options.signal))) {
      yield { number, source, user: user_id, text, data, timeSeconds: time_seconds };
    }
  }

  /**
   * Returns the tools in the format of a provider's API: `tools` goes into a request, `names` maps the name that the
   * model writes to the tool to call. @throws RequestError, PeerLost
   */
  async export(dialect: string, options: { role?: string; userId?: string; level?: number; names?: readonly string[]; timeout?: number } = {}): Promise<any> {
    const { role, userId, level, names, timeout = LIST_SECONDS } = options;
    const query = queryOf({ dialect, role, user_id: userId, level, names: names?.join(",") });
    const wait = new Wait(timeout);
    try {
      return parseJson(await wait.for((await this.request(`/api/tools/export?${query}`, {}, wait)).text()));
    } finally {
      wait.end();
    }
  }

  private async once(name: string, args: unknown, options: HttpCallOptions, wait: Wait): Promise<Result> {
    const { timeout, role, context, schemaHash, backgroundAfter, onProgress, inputs } = options;
    let accepted = false; // whether progress has shown that a plugin works on it
    const body = toJson({
      name,
      arguments: argumentsJson(args),
      role,
      timeout_seconds: timeout,
      schema_hash: schemaHash,
      background_after_seconds: backgroundAfter,
      context: context && { user_id: context.userId, attributes: context.attributes, member: context.member, messages: context.messages, traceparent: context.traceparent },
      accepts: inputs && (inputs.accepts ?? ["elicitation.form"]),
      input_responses: inputs?.answers,
      request_state: inputs?.state || undefined,
    });
    const headers = { "content-type": "application/json", ...(onProgress ? { accept: "text/event-stream" } : {}) };
    try {
      const response = await this.request("/api/tools/invoke", { method: "POST", body, headers }, wait);
      if (!onProgress) return resultOf(parseJson(await wait.for(response.text())));
      for await (const { event, data } of events(response, wait)) {
        if (event === "result") return resultOf(data);
        accepted = true;
        const { progress = 0, total = 0, message = "", text = "" } = data;
        onProgress({ progress, total, message, chunk: text, content: [] });
      }
      throw new PeerLost("UNAVAILABLE", "the response ended without a result");
    } catch (problem) {
      if (!(problem instanceof PeerLost)) throw problem;
      const limit = problem.code === "DEADLINE_EXCEEDED" ? { name: "timeout_seconds", value: wait.seconds } : null;
      return new Result({ error: callError(problem.code, accepted ? "ACCEPTED" : "UNKNOWN", problem.details, { limit }) });
    }
  }

  /** Yields the data of the events of a kind. */
  private async *events(path: string, kind: string, wait: Wait): AsyncGenerator<any, void, undefined> {
    try {
      const response = await this.request(path, { headers: { accept: "text/event-stream" } }, wait);
      for await (const { event, data } of events(response, wait)) if (event === kind) yield data;
    } finally {
      wait.end();
    }
  }

  /** @throws RequestError the bus refuses; PeerLost there is no bus, it hangs, or the connection broke. */
  private async request(path: string, init: RequestInit, wait: Wait): Promise<Response> {
    const headers = { ...this.headers, ...(init.headers as object) };
    const response = await wait.for(this.fetch(this.address + path, { ...init, headers, signal: wait.signal }), `no bus at ${this.address || "this origin"}`);
    if (response.ok) return response;
    throw new RequestError(`HTTP ${response.status}`, (await wait.for(response.text())).slice(0, 1000));
  }
}

/** Ends a request when the signal of the program aborts, and in `PeerLost` when the bus gives no answer in time. */
class Wait {
  private readonly controller = new AbortController();
  private readonly onAbort = (): void => this.controller.abort(this.outer?.reason);
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** @param isStream whether the time is that of each answer, not of all. */
  constructor(readonly seconds: number, private readonly outer?: AbortSignal, slackMs = 0, private readonly isStream = false) {
    outer?.addEventListener("abort", this.onAbort);
    if (outer?.aborted) this.onAbort();
    if (!isStream) this.begin(seconds * 1000 + slackMs, true);
  }

  static ofStream(outer?: AbortSignal): Wait { return new Wait(SILENT_SECONDS, outer, 0, true); }

  get signal(): AbortSignal { return this.controller.signal; }

  /** Waits for an answer. @throws PeerLost there is none */
  async for<T>(answer: Promise<T>, why = "the connection to the bus broke"): Promise<T> {
    if (this.isStream) this.begin(this.seconds * 1000, true);
    try {
      return await answer;
    } catch (problem) {
      this.signal.throwIfAborted();
      throw new PeerLost("UNAVAILABLE", `${why}: ${String(problem)}`);
    } finally {
      if (this.isStream) clearTimeout(this.timer);
    }
  }

  end(): void {
    clearTimeout(this.timer);
    this.outer?.removeEventListener("abort", this.onAbort);
  }

  private begin(ms: number, isFirst: boolean): void {
    const due = performance.now() + ms;
    this.timer = setTimeout(() => {
      if (isFirst && performance.now() - due > LATE_MS) return this.begin(SLACK_MS, false); // read first what has come
      this.controller.abort(new PeerLost("DEADLINE_EXCEEDED", `the bus gave no answer within ${this.seconds} s: it hangs`));
    }, Math.min(ms, 2 ** 31 - 1));
  }
}

function queryOf(values: { [key: string]: unknown }): URLSearchParams {
  return new URLSearchParams(Object.entries(values).flatMap(([key, value]) => (value === undefined ? [] : [[key, String(value)]])));
}

/** Yields the server-sent events of a response; leaving the loop closes the connection. */
async function* events(response: Response, wait: Wait): AsyncGenerator<{ event: string; data: any }, void, undefined> {
  const reader = response.body!.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array<ArrayBuffer>>).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await wait.for(reader.read());
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const lines = block.split(/\r?\n/); // not by a pattern with `m`: JSON may hold U+2028, which ends its lines
        const field = (name: string) =>
          lines.flatMap((line) => (line.startsWith(`${name}:`) ? [line.slice(name.length + 1).replace(/^ /, "")] : [])).join("\n");
        const data = field("data");
        if (data) yield { event: field("event"), data: parseJson(data) };
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function toolOf({ name, description, parameters, source, roles, schema_hash }: any): HttpTool {
  return { name, description, parameters: parameters ?? {}, source, roles: roles ?? [], schemaHash: schema_hash ?? "" };
}

function resultOf({ call_id, output, is_error, error, content, input_requests, request_state }: any): Result {
  return new Result({
    callId: call_id,
    outputJson: toJson(output),
    isError: is_error,
    error: error && callError(error.code, error.stage, error.message, { retrySafe: error.retry_safe, limit: error.limit, retryAfterSeconds: error.retry_after_seconds, reason: error.reason }),
    content: (content as any[]).map(contentOf),
    inputRequestsJson: input_requests ? toJson(input_requests) : "",
    requestState: request_state,
  });
}

/** Reads a part of content, as protobuf's JSON mapping writes it: defaults are left out, bytes are base64. */
function contentOf({ annotations_json, ...kinds }: any): Content {
  const annotations = annotations_json ? { annotations: parseJson(annotations_json) } : {};
  const [kind = "text", value = {}] = Object.entries<any>(kinds)[0] ?? [];
  const { data = "", mime_type: mimeType = "", uri = "", name = "", description = "", text } = value;
  const bytes = () => Uint8Array.from(atob(data as string), (each) => each.charCodeAt(0));
  if (kind === "image" || kind === "audio") return { type: kind, data: bytes(), mimeType, ...annotations };
  if (kind === "resource_link") return { type: "link", uri, name, description, mimeType, ...annotations };
  if (kind === "resource") return { type: "resource", uri, mimeType, body: text ?? bytes(), ...annotations };
  return { type: "text", text: text ?? "", ...annotations };
}
