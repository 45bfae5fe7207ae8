/** Lists tools and calls them, usually for a language model. */
import { setTimeout as sleep } from "node:timers/promises";

import { answered } from "./again.js";
import type { CallFields } from "./calls.js";
import { ListRequestSchema, ListResponseSchema } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import type { ToolProgress } from "./gen/toolbus/v1/tool_pb.js";
import { guarded, Peer, settingsOf, type PeerOptions, type RefusedTool, type Settings } from "./peer.js";
import { Plugin, type Generation, type Message } from "./plugin.js";
import { contextToWire, listedFromWire, progressFromWire, resultFromWire, type CatalogChange, type ListedTool, type Notification } from "./shapes.js";
import type { ToolScope } from "./tools.js";
import { argumentsJson, PeerLost, SetupError, toJson, type CallContext, type CallOptions, type Result } from "./values.js";

const LIST_SECONDS = 10;
const RETRY_MS = 50; // between two attempts at a listing
const CLOSE_SECONDS = 5;
const MAX_MESSAGES = 256;

/** What a host can state. */
export interface HostOptions extends PeerOptions {
  /** Names this host in records of calls; "host" by default. */
  readonly source?: string;
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
  get connected(): boolean { return this.peer.attached !== null; }

  /** Whom the bus takes this host for; "" on its own machine, and while it is not connected. */
  get identity(): string { return this.peer.attached?.identity ?? ""; }

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
    const fields: CallFields = {
      name,
      argumentsJson: argumentsJson(args),
      timeoutSeconds: timeout,
      backgroundAfterSeconds: backgroundAfter,
      role,
      schemaHash,
      context: context || inputs ? contextToWire(context ?? {}) : undefined,
      accepts: inputs && [...(inputs.accepts ?? ["elicitation.form"])],
      inputResponsesJson: inputs?.answers && toJson(inputs.answers),
      requestState: inputs?.state,
    };
    this.peer.begin();
    const failed = (text: string) => this.peer.log(`onProgress of ${name} failed: ${text}`);
    const take = onProgress && guarded((item: ToolProgress) => onProgress(progressFromWire(item)), failed);
    return resultFromWire(await this.peer.calls.call(fields, { onProgress: take, signal }));
  }

  /** Calls several tools at once; returns the results in the order of the calls. */
  callMany(calls: readonly (readonly [name: string, args: unknown])[], options: CallOptions = {}): Promise<Result[]> {
    return Promise.all(calls.map(([name, args]) => this.call(name, args, options)));
  }

  /** Lists the tools that this host can call. @throws RequestError no such role; PeerLost no bus answered in time. */
  async list(options: ListOptions = {}): Promise<Listing> {
    const end = performance.now() + (options.timeout ?? LIST_SECONDS) * 1000;
    this.peer.begin();
    for (;;) {
      const left = (end - performance.now()) / 1000;
      await this.peer.until(() => this.connected, Math.max(0, left));
      try {
        return await this.listed(options, end);
      } catch (problem) {
        const isLost = problem instanceof PeerLost && problem.code === "UNAVAILABLE"; // perhaps the end of the stream comes next
        if (!isLost || performance.now() + RETRY_MS > end) throw problem;
        await sleep(RETRY_MS);
      }
    }
  }

  private async listed({ role, names = [], source, includeOffline, includeRefused, ifRevision, context }: ListOptions, end: number): Promise<Listing> {
    const request = { role, names: [...names], source, includeOffline, includeRefused, ifRevision: BigInt(ifRevision ?? 0), context: context && contextToWire(context) };
    const listing = Object.assign([] as ListedTool[], { revision: 0, unchanged: false, refused: [], notices: [] }) as Listing;
    const connection = this.peer.connection!;
    for (let pageToken = "", first = true; first || pageToken; first = false) {
      const seconds = Math.max(0.001, (end - performance.now()) / 1000);
      const page = await connection.unary("List", ListRequestSchema, { ...request, pageToken }, ListResponseSchema, seconds);
      listing.push(...page.tools.map(listedFromWire));
      listing.revision = Number(page.revision);
      if (first) {
        listing.refused = page.refused.map((each) => ({ name: each.name, error: each.error, source: each.source, role: each.role ?? "" }));
        listing.notices = page.notices.map(({ source: owner, text }) => ({ source: owner, text }));
      }
      pageToken = page.nextPageToken;
    }
    listing.unchanged = ifRevision !== undefined && ifRevision === listing.revision;
    return listing;
  }

  /** Yields the whole catalog, then its changes; after a reconnect the whole catalog again. @throws RequestError */
  watch(): AsyncGenerator<CatalogChange, void, undefined> { return this.peer.read("catalog"); }

  /** Yields the notifications of plugins to users; after a reconnect also those that it missed. @throws RequestError */
  notifications(): AsyncGenerator<Notification, void, undefined> { return this.peer.read("notifications"); }

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
    while (this.peer.calls.size > 0 && performance.now() < end) await sleep(10);
    await this.close();
  }

  /** Disconnects; calls in flight end in CANCELLED. */
  async close(): Promise<void> {
    await this.lender?.close(0);
    this.peer.calls.cancelAll("this host has left the bus");
    this.peer.leave("closed");
    await this.peer.ended(CLOSE_SECONDS);
  }

  async [Symbol.asyncDispose](): Promise<void> { await this.close(); }
}

function requestSchema(maxTokens: number): { [keyword: string]: unknown } {
  const text = { type: "string" };
  const message = { type: "object", properties: { role: { enum: ["system", "user", "assistant"] }, content: text }, required: ["role", "content"] };
  const properties = {
    messages: { type: "array", items: message, minItems: 1, maxItems: MAX_MESSAGES },
    mode: { enum: ["quiet", "raw"] },
    max_tokens: { type: "integer", minimum: 1, maximum: maxTokens },
    temperature: { type: "number", minimum: 0, maximum: 2 },
    stop: { type: "array", items: text, maxItems: 16 },
    model: text,
  };
  return { type: "object", properties, required: ["messages"], additionalProperties: false };
}
