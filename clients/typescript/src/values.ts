/** Defines what crosses a call, the same over gRPC and HTTP: JSON, parts of content, results, errors. Imports nothing. */

/** A value that JSON can hold; integers beyond 2^53 are bigints. */
export type Json = null | boolean | number | bigint | string | Json[] | { [key: string]: Json };

/** What happened to a call that failed; docs/protocol.md, "Errors of calls", says what to do about each. */
export type Code =
  | "TOOL" | "NOT_FOUND" | "INVALID_ARGUMENTS" | "PERMISSION_DENIED" | "CATALOG_STALE" | "OVERLOADED" | "UNAVAILABLE"
  | "DEADLINE_EXCEEDED" | "CANCELLED" | "RESULT_TOO_LARGE" | "SECRET_BLOCKED" | "REPEATED" | "INTERNAL"
  | (string & {}); // prettier-ignore

/** How far a call had got when it failed. */
export type Stage = "NOT_DISPATCHED" | "DISPATCHED" | "ACCEPTED" | "UNKNOWN" | (string & {});

/** Why a call failed. */
export interface CallError {
  readonly code: Code;
  readonly stage: Stage;
  readonly message: string;
  /** Whether the same call can be sent again without running the tool twice. */
  readonly retrySafe: boolean;
  /** The limit that was hit; null if none was. */
  readonly limit: { readonly name: string; readonly value: number } | null;
  /** When to send the call again, in seconds; 0 if the bus does not say. */
  readonly retryAfterSeconds: number;
  /** The tool's own name for the failure. */
  readonly reason: string;
}

/** The root of this package's errors. */
export class ToolBusError extends Error {
  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}

/** A mistake of the program: a value that breaks a rule. The text names the value, the rule and the fix. */
export class SetupError extends ToolBusError {}

/** The bus refuses this peer or this request, and another attempt would not change that; the text is the bus's. */
export class RequestError extends ToolBusError {
  constructor(readonly code: string, readonly details: string) { super(`${code}: ${details}`); }
}

/** No bus answered, or the connection broke. */
export class PeerLost extends RequestError {}

/** A failed call, thrown by `Result.unwrap`. */
export class CallFailed extends ToolBusError {
  constructor(readonly error: CallError) { super(error.message || error.code); }
}

/** A part of a result beside its output, made by `text`, `image`, `audio`, `link` and `resource`. */
export type Content = (
  | { readonly type: "text"; readonly text: string }
  | { readonly type: "image" | "audio"; readonly data: Uint8Array; readonly mimeType: string }
  | { readonly type: "link"; readonly uri: string; readonly name: string; readonly description: string; readonly mimeType: string }
  | { readonly type: "resource"; readonly uri: string; readonly mimeType: string; readonly body: string | Uint8Array }
) & { readonly annotations?: Json };

/** Returns a part that holds plain text. */
export const text = (words: string): Content => ({ type: "text", text: words });
/** Returns a part that holds a picture, from its encoded bytes (not base64). */
export const image = (data: Uint8Array, mimeType = "image/png"): Content => ({ type: "image", data, mimeType });
/** Returns a part that holds a sound, from its encoded bytes (not base64). */
export const audio = (data: Uint8Array, mimeType = "audio/wav"): Content => ({ type: "audio", data, mimeType });
/** Returns a part that is a link to a resource. */
export const link = (uri: string, name = uri, description = "", mimeType = ""): Content =>
  ({ type: "link", uri, name, description, mimeType }); // prettier-ignore
/** Returns a part that holds a file or another resource with its address: text, or bytes (not base64). */
export const resource = (uri: string, body: string | Uint8Array, mimeType = ""): Content =>
  ({ type: "resource", uri, body, mimeType }); // prettier-ignore

/** How much of a call is done. */
export interface Progress {
  readonly progress: number;
  /** The whole amount, in the same unit; 0 means unknown. */
  readonly total: number;
  readonly message: string;
  /** The next piece of an output that comes bit by bit. */
  readonly chunk: string;
  readonly content: readonly Content[];
}

/** A question of a tool, as the Model Context Protocol has it: `elicitation/create`, `sampling/createMessage` … */
export interface Question {
  readonly method: string;
  readonly params?: { readonly [name: string]: Json };
}

/** The answer of a person to `elicitation/create`. */
export interface Answer {
  readonly action: "accept" | "decline" | "cancel";
  /** The fields of the form that was filled in. */
  readonly content?: { readonly [name: string]: Json };
}

/** Who a call is for: a host states it, a model cannot. */
export interface CallContext {
  readonly userId?: string;
  readonly attributes?: { readonly [name: string]: string };
  readonly member?: Json;
  readonly messages?: readonly { readonly role: string; readonly content: string; readonly name?: string }[];
  readonly traceparent?: string;
  readonly unplanned?: boolean;
}

/** The kinds of questions that a call accepts, and the answers to those of the call before. */
export interface Inputs {
  /** Of `elicitation.form` (the default), `elicitation.url`, `sampling`, `roots`. */
  readonly accepts?: readonly string[];
  readonly answers?: { readonly [key: string]: Json | Answer };
  readonly state?: string;
}

/** A question, with what a form needs beside its method and parameters. */
export interface AskedQuestion extends Question {
  readonly key: string;
  readonly message: string;
  /** JSON Schema of the form; {} without one. */
  readonly schema: { readonly [keyword: string]: any };
  readonly url: string;
}

/** Returns an answer, the fields of a form (accepted), or null (no choice was made). */
export type OnInput = (question: AskedQuestion) => unknown;

/** What a call can state beside the tool and its arguments. */
export interface CallOptions {
  /** Seconds; by default the tool's own. More than 300 counts as 300. */
  readonly timeout?: number;
  /** Considers only the tools of this role. */
  readonly role?: string;
  /** The user and the conversation, for the tool; a model cannot set it. */
  readonly context?: CallContext;
  /** Of the declaration that the caller knows; the call is refused once the tool has changed. */
  readonly schemaHash?: string;
  /** Seconds after which the call becomes a task; the result then has its `task_id`. */
  readonly backgroundAfter?: number;
  readonly onProgress?: (progress: Progress) => void;
  /** Answers the questions of a tool; the call is made again with the answers, 10 times at most. */
  readonly onInput?: OnInput;
  /** The kinds of questions that this call accepts, and its answers; by default forms if there is `onInput`. */
  readonly inputs?: Inputs;
  /** Gives up the call, down to the plugin; the promise then rejects with its reason. */
  readonly signal?: AbortSignal;
}

/** A tool, as a bus lists it over HTTP. */
export interface HttpTool {
  readonly name: string;
  readonly description: string;
  /** The JSON Schema of the arguments. */
  readonly parameters: { [keyword: string]: any };
  readonly source: string;
  readonly roles: readonly string[];
  readonly schemaHash: string;
}

/** One step of the catalog: with `full`, `added` is everything. */
export interface CatalogStep<Tool> {
  readonly revision: number;
  readonly full: boolean;
  readonly added: readonly Tool[];
  readonly changed: readonly Tool[];
  readonly removed: readonly { readonly name: string; readonly source: string }[];
}

/** What a plugin tells a user outside a call. */
export interface HttpNotification {
  readonly number: number;
  readonly source: string;
  /** "" for all users. */
  readonly user: string;
  readonly text: string;
  readonly data: any;
  readonly timeSeconds: number;
}

/** What a program knows of a result when it makes one. */
export type ResultFields = Partial<Pick<Result, "callId" | "outputJson" | "isError" | "error" | "content" | "inputRequestsJson" | "requestState">>;

/** How a call ended. A failure is a value: check `error`, or call `unwrap`. */
export class Result {
  readonly callId: string;
  /** What the tool returned, as JSON text. */
  readonly outputJson: string;
  /** Whether a model should read this as a failure. */
  readonly isError: boolean;
  /** Set where the call failed, by the tool (code TOOL) or on its way (any other code). */
  readonly error: CallError | null;
  /** Parts beside the output. */
  readonly content: readonly Content[];
  /** The questions of a tool that cannot go on without answers, as JSON text; "" where it is done. */
  readonly inputRequestsJson: string;
  /** Goes back to the tool with the answers. */
  readonly requestState: string;

  constructor(fields: ResultFields) {
    this.callId = fields.callId ?? "";
    this.outputJson = fields.outputJson || "null";
    this.error = fields.error ?? null;
    this.isError = fields.isError === true || this.error !== null;
    this.content = fields.content ?? [];
    this.inputRequestsJson = this.isError ? "" : fields.inputRequestsJson ?? "";
    this.requestState = fields.requestState ?? "";
  }

  /** The output, parsed anew at each access. @throws SyntaxError the plugin sent something that is not JSON. */
  get output(): any { return parseJson(this.outputJson); }

  /** Whether the tool has questions before it can go on: then the result is neither a success nor a failure. */
  get asks(): boolean { return this.inputRequestsJson !== ""; }

  /** The text for a model: the error, then the output (a text without quotes), then the content, line by line. */
  get text(): string {
    if (this.asks) return `the tool asks first: ${this.inputRequestsJson}`;
    const parts = this.isError ? [this.error?.message || this.error?.code || "the tool failed"] : [];
    const value = this.outputJson.startsWith('"') ? String(this.output) : this.outputJson;
    if (value !== "null" && !parts.includes(value)) parts.push(value);
    for (const part of this.content) {
      const shown = contentText(part);
      if (!parts.includes(shown)) parts.push(shown);
    }
    return parts.join("\n") || "null";
  }

  /** Returns the output. @throws CallFailed the call failed, or the tool asks something first. */
  unwrap(): any {
    if (!this.isError && !this.asks) return this.output;
    throw new CallFailed(this.error ?? callError("TOOL", "ACCEPTED", this.text, this.asks ? { reason: "needs_input" } : {}));
  }
}

/** Returns an error of a call. */
export function callError(code: Code, stage: Stage, message: string, more: Partial<CallError> = {}): CallError {
  return { code, stage, message, retrySafe: false, limit: null, retryAfterSeconds: 0, reason: "", ...more };
}

function contentText(part: Content): string {
  if (part.type === "text") return part.text;
  if (part.type === "link") return `[${part.name}: ${part.uri}]`;
  if (part.type !== "resource") return `[${part.type}: ${part.mimeType}, ${part.data.length} bytes]`;
  return typeof part.body === "string" ? part.body : `[resource: ${part.uri}, ${part.body.length} bytes]`;
}

// -- JSON: `JSON` of Node 20 cannot read or write integers beyond 2^53, so these pass through marked texts --------------

const MARK = `\u0001${Math.random()}:`;
const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g;
const MARKED = new RegExp(`"${JSON.stringify(MARK).slice(1, -1).replace(/[\\.]/g, "\\$&")}(-?\\d+)"`, "g");

/** Parses JSON text; integers beyond 2^53 become bigints. @throws SyntaxError */
export function parseJson(json: string): any {
  if (!/\d{16}/.test(json)) return JSON.parse(json);
  JSON.parse(json); // the marks must not make JSON of what is none
  const marked = json.replace(TOKEN, (token) =>
    /^-?\d{16,}$/.test(token) && !Number.isSafeInteger(Number(token)) ? `"${JSON.stringify(MARK).slice(1, -1)}${token}"` : token,
  );
  return JSON.parse(marked, (_, value: unknown) =>
    typeof value === "string" && value.startsWith(MARK) ? BigInt(value.slice(MARK.length)) : value,
  );
}

/** Returns JSON text; bigints are written as integers, undefined as null. @throws TypeError a value that JSON cannot hold. */
export function toJson(value: unknown): string {
  if (typeof value === "bigint") return String(value);
  try {
    return JSON.stringify(value) ?? "null";
  } catch (problem) {
    if (!(problem instanceof TypeError) || !/BigInt/i.test(problem.message)) throw problem;
  }
  const marked = JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? MARK + String(each) : each));
  return marked.replace(MARKED, "$1");
}

/** Returns arguments as JSON text; text is passed on as it is, so large numbers of a model survive. */
export function argumentsJson(value: unknown): string {
  return typeof value === "string" ? value : value === undefined || value === null ? "{}" : toJson(value);
}
