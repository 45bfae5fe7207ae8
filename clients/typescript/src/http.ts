/** A host over HTTP and server-sent events, for browsers, edge functions and programs without gRPC: needs only `fetch`. */
import { answered, type Inputs, type OnInput } from "./questions.js";
import { argumentsJson, callError, parseJson, PeerLost, RequestError, Result, SetupError, toJson, type CallContext, type CallError, type Content, type Progress } from "./values.js";

export type { AskedQuestion, Inputs, OnInput } from "./questions.js";
export * from "./values.js";

const ADDRESS = "http://127.0.0.1:48911";
const FIRST_PAUSE_MS = 10; // before a refused call is sent again: the upper end, which doubles
const MAX_PAUSE_MS = 1000;
const DEFAULT_SECONDS = 30; // the time of a call that names none

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
export interface HttpCallOptions {
  readonly timeout?: number;
  readonly role?: string;
  readonly context?: CallContext;
  readonly schemaHash?: string;
  readonly backgroundAfter?: number;
  readonly onProgress?: (progress: Progress) => void;
  readonly onInput?: OnInput;
  readonly inputs?: Inputs;
  readonly signal?: AbortSignal;
}

/** A tool as the bus lists it over HTTP. */
export interface HttpTool {
  readonly name: string;
  readonly description: string;
  readonly parameters: { [keyword: string]: any };
  readonly source: string;
  readonly roles: readonly string[];
  readonly schemaHash: string;
}

/** One step of the catalog: with `full`, `added` is everything. */
export interface HttpChange {
  readonly revision: number;
  readonly full: boolean;
  readonly added: readonly HttpTool[];
  readonly changed: readonly HttpTool[];
  readonly removed: readonly { readonly name: string; readonly source: string }[];
}

/** What a plugin tells a user outside a call. */
export interface HttpNotification {
  readonly number: number;
  readonly source: string;
  readonly user: string;
  readonly text: string;
  readonly data: any;
  readonly timeSeconds: number;
}

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
    const seconds = once.backgroundAfter ?? once.timeout ?? DEFAULT_SECONDS;
    const end = performance.now() + seconds * 1000;
    for (let attempt = 0; ; attempt += 1) {
      const left = (end - performance.now()) / 1000;
      const time = attempt > 0 && once.timeout !== undefined ? { timeout: Math.max(0.001, Math.min(once.timeout, left)) } : {};
      const result = await this.once(name, args, { ...once, ...time });
      const { error } = result;
      if (!error?.retrySafe || (error.code !== "UNAVAILABLE" && error.code !== "OVERLOADED")) return result;
      const longest = Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS * 2 ** Math.min(attempt, 10));
      const pause = Math.max(Math.random() * longest, error.retryAfterSeconds * 1000);
      if (performance.now() + pause >= end) return result;
      await new Promise((resolve) => setTimeout(resolve, pause));
      once.signal?.throwIfAborted();
    }
  }

  /** Lists the tools that calls without a user can reach. @throws RequestError, PeerLost */
  async list(options: { names?: readonly string[]; role?: string; source?: string; signal?: AbortSignal } = {}): Promise<HttpTool[]> {
    const { names, role, source, signal } = options;
    const fits = (tool: HttpTool) =>
      (!names?.length || names.includes(tool.name)) && (!role || tool.roles.includes(role)) && (!source || tool.source === source);
    for await (const change of this.changes(signal)) return change.added.filter(fits);
    throw new PeerLost("UNAVAILABLE", `the bus at ${this.address} sent no list`);
  }

  /** Yields the whole catalog, then its changes, until the connection ends or `signal` aborts. @throws RequestError, PeerLost */
  watch(options: { signal?: AbortSignal } = {}): AsyncGenerator<HttpChange, void, undefined> {
    return this.changes(options.signal);
  }

  /** Yields the notifications of plugins to a user, or to all. @throws RequestError, PeerLost */
  async *notifications(options: { user?: string; since?: number; signal?: AbortSignal } = {}): AsyncGenerator<HttpNotification, void, undefined> {
    const query = new URLSearchParams();
    if (options.user !== undefined) query.set("user_id", options.user);
    if (options.since !== undefined) query.set("since", String(options.since));
    const response = await this.request(`/api/notifications?${query}`, streaming(options.signal));
    for await (const { event, data } of events(response)) {
      if (event !== "notification") continue;
      const { number, source, user_id, text, data: more, time_seconds } = data;
      yield { number, source, user: user_id, text, data: more, timeSeconds: time_seconds };
    }
  }

  /**
   * Returns the tools in the format of a provider's API: `tools` goes into a request, `names` maps the name that the
   * model writes to the tool to call. @throws RequestError, PeerLost
   */
  async export(dialect: string, options: { role?: string; userId?: string; level?: number; names?: readonly string[] } = {}): Promise<any> {
    const { role, userId, level, names } = options;
    const given = Object.entries({ dialect, role, user_id: userId, level, names: names?.join(",") }).filter(([, value]) => value !== undefined);
    const query = new URLSearchParams(given.map(([key, value]) => [key, String(value)]));
    return parseJson(await (await this.request(`/api/tools/export?${query}`, {})).text());
  }

  private async once(name: string, args: unknown, options: HttpCallOptions): Promise<Result> {
    const { timeout, role, context, schemaHash, backgroundAfter, onProgress, inputs, signal } = options;
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
    let sent = false; // whether the bus may have read the call
    try {
      const response = await this.request("/api/tools/invoke", { method: "POST", body, headers, ...(signal ? { signal } : {}) });
      sent = true;
      if (!onProgress) return resultOf(parseJson(await response.text()));
      for await (const { event, data } of events(response)) {
        if (event === "result") return resultOf(data);
        const { progress = 0, total = 0, message = "", text = "" } = data;
        onProgress({ progress, total, message, chunk: text, content: [] });
      }
      throw new PeerLost("UNAVAILABLE", "the response ended without a result");
    } catch (problem) {
      if (!(problem instanceof PeerLost) && !(sent && problem instanceof TypeError)) throw problem;
      return new Result({ error: callError("UNAVAILABLE", "UNKNOWN", problem.message) });
    }
  }

  private async *changes(signal?: AbortSignal): AsyncGenerator<HttpChange, void, undefined> {
    const response = await this.request("/api/tools/events", streaming(signal));
    for await (const { event, data } of events(response)) {
      if (event !== "catalog") continue;
      yield { ...data, added: data.added.map(toolOf), changed: data.changed.map(toolOf) };
    }
  }

  /** @throws RequestError the bus refuses; PeerLost there is no bus, or the connection broke. */
  private async request(path: string, init: RequestInit): Promise<Response> {
    let response: Response;
    try {
      response = await this.fetch(this.address + path, { ...init, headers: { ...this.headers, ...(init.headers as object) } });
    } catch (problem) {
      if (init.signal?.aborted) throw init.signal.reason;
      throw new PeerLost("UNAVAILABLE", `no bus at ${this.address || "this origin"}: ${String(problem)}`);
    }
    if (response.ok) return response;
    throw new RequestError(`HTTP ${response.status}`, (await response.text()).slice(0, 1000));
  }
}

function streaming(signal: AbortSignal | undefined): RequestInit {
  return { headers: { accept: "text/event-stream" }, ...(signal ? { signal } : {}) };
}

/** Yields the server-sent events of a response; leaving the loop closes the connection. */
async function* events(response: Response): AsyncGenerator<{ event: string; data: any }, void, undefined> {
  const reader = response.body!.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array<ArrayBuffer>>).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const field = (name: string) =>
          block.split(/\r?\n/).filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).replace(/^ /, "")).join("\n"); // prettier-ignore
        const data = field("data");
        if (data) yield { event: field("event"), data: parseJson(data) };
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function toolOf(tool: any): HttpTool {
  const { name, description, parameters, source, roles, schema_hash } = tool;
  return { name, description, parameters: parameters ?? {}, source, roles: roles ?? [], schemaHash: schema_hash ?? "" };
}

function resultOf(body: any): Result {
  return new Result({
    callId: body.call_id,
    outputJson: toJson(body.output),
    isError: body.is_error,
    error: body.error ? errorOf(body.error) : null,
    content: (body.content as any[]).map(contentOf),
    inputRequestsJson: body.input_requests ? toJson(body.input_requests) : "",
    requestState: body.request_state ?? "",
  });
}

function errorOf({ code, stage, message, retry_safe, limit, retry_after_seconds, reason }: any): CallError {
  return callError(code, stage, message, { retrySafe: retry_safe, limit, retryAfterSeconds: retry_after_seconds, reason });
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
