/** Holds the tools of a plugin and answers their calls: each by its handler, and with exactly one result. */
import { createHash } from "node:crypto";

import type { MessageInitShape } from "@bufbuild/protobuf";

import { CallStage, ErrorCode, ToolProgressSchema, ToolResultSchema, ToolSchema, type Tool, type ToolAnnotations, type ToolCall } from "./gen/toolbus/v1/tool_pb.js";
import { encode, type Link } from "./link.js";
import { isStandard, schemaJson, validated, type Arguments, type Schema, type StandardSchema } from "./schema.js";
import { contentToWire, contextFromWire, failure, resultFromWire } from "./shapes.js";
import { argumentsJson, callError, parseJson, Result, SetupError, toJson, type Answer, type CallOptions, type Content, type Json, type Progress, type Question } from "./values.js";

const ERROR_CHARACTERS = 16_384; // of the text of an exception
const NAME = /^[A-Za-z0-9_.-]{1,64}$/;

type Declared =
  | "role" | "minLevel" | "validate" | "noRepair" | "noDefaults" | "displayName" | "noBackground" | "allowRepeat" | "directReply"
  | "councilEligible" | "inlineAvailable" | "validateOutput" | "alwaysBackground"; // prettier-ignore
type Hint = "readOnly" | "idempotent" | "destructive" | "openWorld";

/** What a tool declares beside its name; the page "Plugins" of the documentation explains each. */
export interface ToolOptions<S extends Schema = Schema> extends Readonly<Partial<Pick<Tool, Declared>>>, Readonly<Partial<Pick<ToolAnnotations, Hint>>> {
  /** When to use it; models read this. */
  readonly description: string;
  /** The arguments: JSON Schema, or a type of zod or another library; left out, any object. */
  readonly parameters?: S;
  /** Seconds that a call may take, 30 by default, at most 300. */
  readonly timeout?: number;
  /** A call ends after so many seconds without progress or result. */
  readonly idleTimeout?: number;
  readonly metadata?: Json;
  readonly outputSchema?: Schema;
  readonly needs?: readonly string[];
}

/** The function of a tool. Its return value is the output; a generator of texts sends each as a chunk. */
export type Handler<S extends Schema = Schema> = (args: Arguments<S>, scope: ToolScope) => unknown;

/** A return value of a handler: an output with parts beside it. */
export class Reply {
  constructor(readonly output: unknown, readonly content: readonly Content[] = [], readonly isError = false) {}
}

/** Ends a run of a handler with questions; the handler runs again with the answers. Let it pass in your `catch`. */
export class InputNeeded extends Error {
  constructor(readonly questions: { readonly [key: string]: Question }, readonly state: string) {
    super(`the function asks ${Object.keys(questions).join(", ")} and runs again with the answers`);
  }
}

/** A call that is being answered. */
export class Run {
  ended = false; // whether its result was made
  cancelReason: string | null = null; // why it was cancelled; null while it was not
  nested: AbortController | null = null; // cancels the calls that the handler made; null before the first
  private controller: AbortController | null = null; // made when the handler first looks at the signal: it costs more than a call

  /** @param together how many calls of its message have no result yet; one object for all of them. */
  constructor(readonly message: ToolCall, readonly link: Link, readonly together: { left: number }) {}

  get signal(): AbortSignal {
    this.controller ??= new AbortController();
    if (this.cancelReason !== null) this.controller.abort(new DOMException(this.cancelReason, "AbortError"));
    return this.controller.signal;
  }

  /** Tells the handler to stop; the first reason stays. */
  cancel(reason: string): void {
    this.cancelReason ??= reason || "cancelled";
    this.controller?.abort(new DOMException(this.cancelReason, "AbortError"));
  }
}

/** A call, as its handler sees it. */
export class ToolScope {
  private readonly made = performance.now();
  private unnamed = 0; // how many questions without a key this run has asked

  constructor(private readonly run: Run, private readonly log: (text: string) => void) {}

  /** The name of the tool. */
  get tool(): string { return this.run.message.name; }
  get callId(): string { return this.run.message.callId; }
  /** The arguments as they came, for numbers with more digits than JavaScript has. */
  get argumentsJson(): string { return this.run.message.argumentsJson || "{}"; }
  /** The user and the conversation, as the host states them. */
  get context(): ReturnType<typeof contextFromWire> { return contextFromWire(this.run.message.context); }
  get traceparent(): string { return this.run.message.traceparent; }
  /** Aborts when the call is cancelled, or its connection breaks: then nobody waits for the result. */
  get signal(): AbortSignal { return this.run.signal; }
  get isCancelled(): boolean { return this.run.cancelReason !== null; }

  /** Returns the seconds until the deadline, never below 0; Infinity without one. */
  timeLeft(): number {
    const seconds = this.run.message.timeoutSeconds;
    return seconds ? Math.max(0, seconds - (performance.now() - this.made) / 1000) : Infinity;
  }

  /** Reports progress to the caller, and resets the idle timeout. Progress that the bus cannot carry is left out. */
  progress(progress = 0, more: Partial<Omit<Progress, "progress">> = {}): void {
    if (this.run.ended) return;
    const { total, message = "", chunk = "", content = [] } = more;
    const { outbox } = this.run.link;
    const item = { callId: this.callId, progress, total, message, outputChunk: chunk, content: content.map(contentToWire) };
    const bytes = encode(ToolProgressSchema, item);
    let fault = "";
    if (bytes.length > Math.min(outbox.resultBytes, outbox.largestItem)) fault = `has ${bytes.length} bytes, at most ${outbox.resultBytes}`;
    else if (!message.isWellFormed() || !chunk.isWellFormed()) fault = "holds half of a surrogate pair";
    if (fault) this.log(`progress of tool ${this.tool} is left out: it ${fault}`);
    else outbox.putBytes("progress", bytes);
  }

  /** Sends the next piece of the output. The result must still have the whole output. */
  chunk(text: string): void { this.progress(0, { chunk: text }); }

  /** Calls another tool as part of this call: same context, no longer than this call, cancelled with it. */
  async call(name: string, args: unknown = {}, options: Pick<CallOptions, "timeout" | "role" | "schemaHash"> = {}): Promise<Result> {
    const { run, callId, traceparent } = this;
    const { timeout: timeoutSeconds, role, schemaHash } = options;
    const { tracestate } = run.message;
    run.nested ??= new AbortController();
    if (run.ended) run.nested.abort();
    const { signal } = run.nested;
    try {
      const fields = { name, argumentsJson: argumentsJson(args), parentCallId: callId, schemaHash, traceparent, tracestate, timeoutSeconds, role };
      return resultFromWire(await run.link.calls.call(fields, { parent: run.link, signal }));
    } catch (problem) {
      if (!signal.aborted) throw problem;
      return new Result({ error: callError("CANCELLED", "UNKNOWN", "the call that made this one has ended") });
    }
  }

  /** The kinds of questions that the caller can answer, such as `elicitation.form`. */
  get accepts(): readonly string[] { return this.run.message.accepts; }
  /** The answers that came with this call, by key. */
  get inputResponses(): { [key: string]: any } {
    return objectOf(this.run.message.inputResponsesJson);
  }
  /** The state that this tool returned with its questions, as the caller sent it back: do not trust it. */
  get requestState(): string { return this.run.message.requestState; }

  /**
   * Asks the person behind the caller, by a form or, with `url`, by a page to open.
   *
   * It ends this run, and the function runs again from its beginning with the answer: ask before you change anything.
   * Check the `action` of the answer: a person may decline.
   *
   * @param schema JSON Schema of the form; the properties alone are enough. Without it the question is whether to go on.
   * @param options `key` names the question, needed only if its text differs from run to run.
   */
  elicit(message: string, schema?: { [name: string]: Json }, options: { url?: string; key?: string } = {}): Answer {
    const { url } = options;
    const form = typeof schema?.properties === "object" ? schema : { properties: schema ?? {} };
    const params: { [name: string]: Json } = url ? { mode: "url", message, url } : { mode: "form", message, requestedSchema: { type: "object", properties: {}, ...form } };
    const digest = () => createHash("sha256").update(toJson(params)).digest("hex").slice(0, 8);
    const key = options.key ?? `${++this.unnamed}-${digest()}`;
    if (url) params.elicitationId = key;
    return this.ask({ [key]: { method: "elicitation/create", params } })[key];
  }

  /** Asks several questions of any kind at once, and returns the answers by key; otherwise as `elicit`. */
  ask(questions: { readonly [key: string]: Question }): { [key: string]: any } {
    const known = { ...(objectOf(this.requestState).answers as object), ...this.inputResponses };
    const missing = Object.entries(questions).filter(([key, question]) => !answers(question, known[key]));
    if (missing.length === 0) return Object.fromEntries(Object.keys(questions).map((key) => [key, known[key]]));
    for (const [key] of missing) delete known[key];
    const state = Object.keys(known).length > 0 ? toJson({ answers: known }) : "";
    throw new InputNeeded(Object.fromEntries(missing), state);
  }
}

/** The tools that a plugin offers, and their calls from all its buses. */
export class Tools {
  /** Rises with every change of the tools. */
  version = 0;
  private readonly tools = new Map<string, { declaration: ToolInit; schema: Schema | undefined; handler: Handler }>();

  constructor(private readonly log: (text: string) => void) {}

  /** @throws SetupError a rule is broken. */
  add(name: string, options: ToolOptions, handler: Handler, replace: boolean): void {
    if (!NAME.test(name)) throw new SetupError(`tool name '${name}' breaks the rule [A-Za-z0-9_.-]{1,64}: rename the tool`);
    if (!replace && this.tools.has(name)) throw new SetupError(`there already is a tool '${name}': pass replace: true, or rename one`);
    for (const [label, seconds] of [["timeout", options.timeout], ["idleTimeout", options.idleTimeout]] as const) {
      if (seconds !== undefined && !(seconds > 0 && seconds <= 300)) {
        throw new SetupError(`tool '${name}': ${label} is ${seconds} s, it must be above 0 and at most 300`);
      }
    }
    const { parameters, timeout, idleTimeout, metadata, outputSchema, needs, readOnly, idempotent, destructive, openWorld, ...same } = options;
    const hints = Object.entries({ readOnly, idempotent, destructive, openWorld }).filter(([, value]) => value !== undefined);
    const declaration = {
      ...same,
      name,
      parametersJson: schemaJson(parameters, "input", name),
      timeoutSeconds: timeout,
      idleTimeoutSeconds: idleTimeout,
      metadataJson: metadata === undefined ? "" : toJson(metadata),
      outputSchemaJson: outputSchema && schemaJson(outputSchema, "output", name),
      needs: [...(needs ?? [])],
      annotations: hints.length > 0 ? Object.fromEntries(hints) : undefined,
    };
    this.tools.set(name, { declaration, schema: parameters, handler });
    this.version += 1;
  }

  /** Withdraws a tool; its calls in flight are finished. Returns whether it existed. */
  remove(name: string): boolean {
    const existed = this.tools.delete(name);
    if (existed) this.version += 1;
    return existed;
  }

  /** What requests declare, each at most so many bytes. */
  pages(bytes: number): ToolInit[][] {
    const pages: ToolInit[][] = [];
    let room = 0;
    for (const { declaration } of this.tools.values()) {
      const size = encode(ToolSchema, declaration).length;
      room -= size;
      if (pages.length === 0 || room < 0) {
        pages.push([]);
        room = bytes - size;
      }
      pages[pages.length - 1]!.push(declaration);
    }
    return pages;
  }

  /** Starts the handlers of calls that came in one message, and does not wait for them. */
  begin(calls: readonly ToolCall[], link: Link): void {
    if (link.standstill.holding) {
      for (const message of calls) link.standstill.held.set(message.callId, message);
      return;
    }
    const together = { left: calls.length };
    for (const message of calls) {
      const run = new Run(message, link, together);
      link.running.set(message.callId, run);
      this.run(run);
    }
  }

  /** Tells a handler to stop, and answers its call: a handler cannot be ended from outside. An unknown id is ignored. */
  cancel(callId: string, reason: string, link: Link): void {
    const run = link.running.get(callId);
    if (run !== undefined) {
      run.cancel(reason);
      this.answer(run, failure(ErrorCode.CANCELLED, CallStage.ACCEPTED, "the call was cancelled"));
    } else if (link.standstill.held.delete(callId)) {
      const result = failure(ErrorCode.CANCELLED, CallStage.NOT_DISPATCHED, "the call was cancelled before it began");
      link.outbox.put("results", { ...result, callId });
    }
  }

  /** Tells the handlers of a stream that is over to stop: nobody waits for their results. */
  lost(link: Link): void {
    link.standstill.held.clear();
    for (const run of link.running.values()) {
      run.ended = true;
      run.cancel("the connection to the bus broke");
    }
    link.running.clear();
  }

  private run(run: Run): void {
    const { message } = run;
    const failed = (problem: unknown) => this.answer(run, failureOf(problem));
    try {
      const result = this.resultOf(message, new ToolScope(run, this.log));
      // What a handler returns at once is answered at once: promises cost more than a quick call.
      if (result instanceof Promise) result.then((each) => this.answer(run, each), failed);
      else this.answer(run, result);
    } catch (problem) {
      failed(problem);
    }
  }

  private resultOf(message: ToolCall, scope: ToolScope): ResultInit | Promise<ResultInit> {
    const tool = this.tools.get(message.name);
    if (tool === undefined) {
      const text = `this plugin has no tool '${message.name}'; it has: ${[...this.tools.keys()].join(", ")}`;
      return failure(ErrorCode.NOT_FOUND, CallStage.NOT_DISPATCHED, text);
    }
    const args = objectOf(message.argumentsJson || "{}", null);
    if (args === null) {
      const text = `the arguments must be the JSON text of an object, they are ${message.argumentsJson.slice(0, 80)}`;
      return failure(ErrorCode.INVALID_ARGUMENTS, CallStage.NOT_DISPATCHED, text);
    }
    if (tool.schema !== undefined && isStandard(tool.schema)) return checkedResult(tool.schema, tool.handler, args, scope);
    const output = tool.handler(args, scope);
    return isLater(output) ? laterResult(output, scope) : resultWith(output);
  }

  /** Sends the result of a call, once; it may wait a moment for the other results of its message. */
  private answer(run: Run, result: ResultInit): void {
    if (run.ended) return;
    run.ended = true;
    run.together.left -= 1;
    run.nested?.abort();
    const { link, message: { callId } } = run;
    const hold = run.together.left > 0;
    link.running.delete(callId);
    try {
      putResult(result, callId, link, hold);
    } catch (problem) {
      putResult(failureOf(problem), callId, link, hold); // such as an image whose data are no bytes
    }
    link.whenIdle();
  }
}

type ToolInit = MessageInitShape<typeof ToolSchema>;
type ResultInit = MessageInitShape<typeof ToolResultSchema>;

async function checkedResult(schema: StandardSchema, handler: Handler, args: object, scope: ToolScope): Promise<ResultInit> {
  const checked = await validated(schema, args);
  if ("fault" in checked) return failure(ErrorCode.INVALID_ARGUMENTS, CallStage.NOT_DISPATCHED, checked.fault);
  return laterResult(handler(checked.value as never, scope), scope);
}

/** Waits for what a handler returns; a generator of texts sends each as a chunk. */
async function laterResult(later: unknown, scope: ToolScope): Promise<ResultInit> {
  const output = await later;
  if (typeof output !== "object" || output === null || !(Symbol.asyncIterator in output)) return resultWith(output);
  let whole = "";
  for await (const text of output as AsyncIterable<string>) {
    scope.chunk(text);
    whole += text ?? ""; // programs in JavaScript may yield nothing
  }
  return resultWith(whole);
}

function isLater(output: unknown): boolean {
  if ((typeof output !== "object" && typeof output !== "function") || output === null) return false;
  return "then" in output || Symbol.asyncIterator in output;
}

function resultWith(output: unknown): ResultInit {
  if (!(output instanceof Reply)) return { outputJson: toJson(output) };
  return { outputJson: toJson(output.output), content: output.content.map(contentToWire), isError: output.isError };
}

/** Sends a result, or a failure in place of one that breaks a limit and so would end the stream. */
function putResult(result: ResultInit, callId: string, { outbox }: Link, hold: boolean): void {
  const { resultBytes, largestItem } = outbox;
  const { outputJson = "", inputRequestsJson = "", requestState = "", content, error, isError } = result;
  const texts = outputJson + inputRequestsJson + requestState; // JSON ends in ASCII: no half meets another
  const isText = texts.isWellFormed();
  let payload = Buffer.byteLength(texts);
  if (content?.length) payload += encode(ToolResultSchema, { content }).length;
  if (isText && payload <= resultBytes && payload <= largestItem) {
    if (!inputRequestsJson && !content?.length && !error && !isError) return outbox.putOutput(callId, outputJson, payload, hold);
    return outbox.putBytes("results", encode(ToolResultSchema, { ...result, callId }), "", hold);
  }
  const failed = isText
    ? failure(ErrorCode.RESULT_TOO_LARGE, CallStage.ACCEPTED, `the result has ${payload} bytes, more than the limit result_bytes = ${resultBytes}: ask for less`, { limit: { name: "result_bytes", value: resultBytes } })
    : failure(ErrorCode.TOOL, CallStage.ACCEPTED, "the result holds half of a surrogate pair, which UTF-8 cannot carry");
  outbox.putBytes("results", encode(ToolResultSchema, { ...failed, callId }), "", hold);
}

function failureOf(problem: unknown): ResultInit {
  let kind: string = typeof problem;
  let text = "";
  try {
    if (problem instanceof InputNeeded) return { inputRequestsJson: toJson(problem.questions), requestState: problem.state };
    if (problem instanceof Error) kind = String(problem.name);
    text = String(problem instanceof Error ? problem.message : problem) || kind;
  } catch (fault) {
    text = `${kind}: ${(fault as Error).message}`; // in the handler's own exception, or in what it asks
  }
  return failure(ErrorCode.TOOL, CallStage.ACCEPTED, text.slice(0, ERROR_CHARACTERS), { reason: kind });
}

/** Tells whether an answer fits its question: callers can send anything. */
function answers(question: Question, answer: unknown): boolean {
  if (typeof answer !== "object" || answer === null) return false;
  if (question.method !== "elicitation/create") return true;
  const { action, content } = answer as { action?: unknown; content?: object };
  if (action !== "accept") return action === "decline" || action === "cancel";
  const required = (question.params?.requestedSchema as { required?: string[] } | undefined)?.required ?? [];
  return required.every((name) => name in (content ?? {}));
}

function objectOf<Other = Record<string, never>>(json: string, other: Other = {} as Other): { [key: string]: any } | Other {
  try {
    const value = json ? parseJson(json) : other;
    return typeof value === "object" && value !== null && !Array.isArray(value) ? value : other;
  } catch {
    return other;
  }
}
