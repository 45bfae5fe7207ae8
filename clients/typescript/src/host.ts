/** Lists tools and calls them, usually for a language model. */
import type { CallFields } from "./calls.js";
import { ListRequestSchema, ListResponseSchema } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import { Peer, settingsOf, type PeerOptions, type RefusedTool, type Settings } from "./peer.js";
import { Plugin, type Generation, type Message } from "./plugin.js";
import { contextToWire, listedFromWire, progressFromWire, resultFromWire, type CatalogChange, type ListedTool, type Notification } from "./shapes.js";
import { answered, type Inputs, type OnInput } from "./questions.js";
import type { ToolScope } from "./tools.js";
import { argumentsJson, SetupError, toJson, type CallContext, type Progress, type Result } from "./values.js";

const LIST_SECONDS = 10;
const CLOSE_SECONDS = 5;
const MAX_MESSAGES = 256;

/** What a host can state. */
export interface HostOptions extends PeerOptions {
  /** Names this host in records of calls; "host" by default. */
  readonly source?: string;
}

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

/** What a listing can state. */
export interface ListOptions {
  readonly role?: string;
  readonly names?: readonly string[];
  readonly source?: string;
  /** Adds tools that no call can reach: their plugin is offline, or their role does not exist. */
  readonly includeOffline?: boolean;
  /** Adds the declarations that the bus refused, as `refused`. */
  readonly includeRefused?: boolean;
  /** The revision that the caller knows; the listing is empty and `unchanged` if it is still the newest. */
  readonly ifRevision?: number;
  readonly context?: CallContext;
  /** Seconds, waiting for a connection included; 10 by default. */
  readonly timeout?: number;
}

/** Tools, in the order in which their names were first registered. */
export interface Listing extends Array<ListedTool> {
  revision: number;
  unchanged: boolean;
  refused: readonly (RefusedTool & { readonly source: string })[];
  notices: readonly { readonly source: string; readonly text: string }[];
}

/** What a plugin asks of a lent model. */
export interface GenerationRequest {
  readonly messages: readonly Message[];
  readonly mode: "quiet" | "raw";
  readonly maxTokens: number;
  readonly temperature?: number;
  readonly stop: readonly string[];
  readonly model: string;
  readonly scope: ToolScope;
}

/** Calls tools. It connects when it is first used, reconnects until it is closed, and keeps the process alive until then. */
export class Host {
  readonly source: string;
  private readonly settings: Settings;
  private readonly peer: Peer;
  private lender: Plugin | null = null; // offers the model of this host; null unless it lends one

  /** @throws SetupError the source or the credential breaks a rule. */
  constructor(options: HostOptions = {}) {
    this.source = options.source ?? "host";
    this.settings = settingsOf(options);
    this.peer = new Peer(this.source, this.settings);
  }

  /** Whether a bus has accepted this host. */
  get connected(): boolean {
    return this.peer.attached !== null;
  }

  /** Whom the bus takes this host for; "" on its own machine, and while it is not connected. */
  get identity(): string {
    return this.peer.attached?.identity ?? "";
  }

  /** Waits until a bus has accepted this host. @throws RequestError, PeerLost */
  async ready(): Promise<void> {
    this.peer.begin();
    await this.peer.until(() => this.connected);
  }

  /**
   * Calls a tool. A failed call is a value: a result with `error`.
   *
   * Without a connection it waits for one, and it is sent again where that is safe, both within the timeout.
   *
   * @param args an object, or the JSON text that a model wrote, which is passed on unchanged.
   * @throws TypeError JSON cannot hold the arguments; SetupError a timeout is not above 0; the reason of `signal`.
   */
  async call(name: string, args: unknown = {}, options: CallOptions = {}): Promise<Result> {
    const { onInput, ...once } = options;
    if (onInput !== undefined) return answered((inputs) => this.call(name, args, { ...once, inputs }), onInput, options.inputs);
    const { timeout, role, context, schemaHash, backgroundAfter, onProgress, inputs, signal } = once;
    const fields: CallFields = { name, argumentsJson: argumentsJson(args) };
    if (timeout !== undefined) fields.timeoutSeconds = timeout;
    if (backgroundAfter !== undefined) fields.backgroundAfterSeconds = backgroundAfter;
    if (role !== undefined) fields.role = role;
    if (schemaHash !== undefined) fields.schemaHash = schemaHash;
    if (context !== undefined || inputs !== undefined) fields.context = contextToWire(context ?? {});
    if (inputs !== undefined) {
      fields.accepts = [...(inputs.accepts ?? ["elicitation.form"])];
      fields.inputResponsesJson = inputs.answers === undefined ? "" : toJson(inputs.answers);
      fields.requestState = inputs.state ?? "";
    }
    const route = {
      ...(onProgress === undefined ? {} : { onProgress: (item: Parameters<typeof progressFromWire>[0]) => onProgress(progressFromWire(item)) }),
      ...(signal === undefined ? {} : { signal }),
    };
    this.peer.begin();
    return resultFromWire(await this.peer.calls.call(fields, route));
  }

  /** Calls several tools at once; returns the results in the order of the calls. */
  callMany(calls: readonly (readonly [name: string, args: unknown])[], options: CallOptions = {}): Promise<Result[]> {
    return Promise.all(calls.map(([name, args]) => this.call(name, args, options)));
  }

  /** Lists the tools that this host can call. @throws RequestError no such role; PeerLost no bus answered in time. */
  async list(options: ListOptions = {}): Promise<Listing> {
    const { role, names, source, includeOffline, includeRefused, ifRevision, context, timeout = LIST_SECONDS } = options;
    const end = performance.now() + timeout * 1000;
    this.peer.begin();
    await this.peer.until(() => this.connected, timeout);
    const connection = this.peer.connection!;
    const request = {
      ...(role === undefined ? {} : { role }),
      names: [...(names ?? [])],
      source: source ?? "",
      includeOffline: includeOffline ?? false,
      includeRefused: includeRefused ?? false,
      ifRevision: BigInt(ifRevision ?? 0),
      ...(context === undefined ? {} : { context: contextToWire(context) }),
    };
    const listing = Object.assign([] as ListedTool[], { revision: 0, unchanged: false, refused: [], notices: [] }) as Listing;
    for (let pageToken = "", first = true; first || pageToken; first = false) {
      const seconds = Math.max(0.001, (end - performance.now()) / 1000);
      const page = await connection.unary("List", ListRequestSchema, { ...request, pageToken }, ListResponseSchema, seconds);
      listing.push(...page.tools.map(listedFromWire));
      listing.revision = Number(page.revision);
      if (first) {
        listing.refused = page.refused.map(({ name, error, source: owner, role: of = "" }) => ({ name, error, source: owner, role: of }));
        listing.notices = page.notices.map(({ source: owner, text }) => ({ source: owner, text }));
      }
      pageToken = page.nextPageToken;
    }
    listing.unchanged = ifRevision !== undefined && ifRevision === listing.revision;
    return listing;
  }

  /** Yields the whole catalog, then its changes; after a reconnect the whole catalog again. @throws RequestError */
  watch(): AsyncGenerator<CatalogChange, void, undefined> {
    return this.peer.read("catalog");
  }

  /** Yields the notifications of plugins to users; after a reconnect also those that it missed. @throws RequestError */
  notifications(): AsyncGenerator<Notification, void, undefined> {
    return this.peer.read("notifications");
  }

  /**
   * Lends this host's model to plugins that have the permission `generation`, until the host is closed.
   *
   * @param generate its exception is the error of that request.
   * @param options `maxTokens` limits one answer (1024), `timeout` its seconds (60), `maxInFlight` requests at once (4).
   * @throws SetupError this host lends already.
   */
  lend(
    generate: (request: GenerationRequest) => Promise<string | (Pick<Generation, "text"> & Partial<Generation>)>,
    options: { maxTokens?: number; timeout?: number; maxInFlight?: number } = {},
  ): void {
    if (this.lender !== null) throw new SetupError("this host lends its model already: make a host for each model");
    const { maxTokens = 1024, timeout = 60, maxInFlight = 4 } = options;
    const { instance: _, ...settings } = this.settings; // that of the host
    this.lender = new Plugin("host", { ...settings, qualified: true, maxInFlight });
    const description = "Asks the language model of this host.";
    this.lender.tool("generate", { description, parameters: requestSchema(maxTokens), timeout }, async (args: any, scope) => {
      const { messages, mode = "quiet", max_tokens = maxTokens, temperature, stop = [], model = "" } = args;
      const answer = await generate({ messages, mode, maxTokens: max_tokens, temperature, stop, model, scope });
      const made = typeof answer === "string" ? { text: answer } : answer;
      return { text: made.text, model: made.model ?? "", stop_reason: made.stopReason ?? "", usage: made.usage ?? {} };
    });
    this.lender.start();
  }

  /** Waits for the calls in flight, at most `graceSeconds`, then closes. */
  async drain(graceSeconds = CLOSE_SECONDS): Promise<void> {
    const end = performance.now() + graceSeconds * 1000;
    while (this.peer.calls.size > 0 && performance.now() < end) await new Promise((resolve) => setTimeout(resolve, 10));
    await this.close();
  }

  /** Disconnects; calls in flight end in CANCELLED. */
  async close(): Promise<void> {
    await this.lender?.close(0);
    this.peer.calls.cancelAll("this host has left the bus");
    this.peer.leave("closed");
    await this.peer.ended(CLOSE_SECONDS);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

function requestSchema(maxTokens: number): { [keyword: string]: unknown } {
  const message = {
    type: "object",
    properties: { role: { enum: ["system", "user", "assistant"] }, content: { type: "string" } },
    required: ["role", "content"],
  };
  return {
    type: "object",
    properties: {
      messages: { type: "array", items: message, minItems: 1, maxItems: MAX_MESSAGES },
      mode: { enum: ["quiet", "raw"] },
      max_tokens: { type: "integer", minimum: 1, maximum: maxTokens },
      temperature: { type: "number", minimum: 0, maximum: 2 },
      stop: { type: "array", items: { type: "string" }, maxItems: 16 },
      model: { type: "string" },
    },
    required: ["messages"],
    additionalProperties: false,
  };
}
