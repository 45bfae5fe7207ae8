/** Offers tools: a program makes a `Plugin`, adds its tools, and runs it. */
import { Peer, type PeerOptions, type RefusedTool, type WaitingTool } from "./peer.js";
import { resultFromWire } from "./shapes.js";
import type { Schema } from "./schema.js";
import type { Handler, ToolOptions, ToolScope } from "./tools.js";
import { argumentsJson, type Result } from "./values.js";

const GRACE_SECONDS = 30; // for calls in flight, when a plugin leaves

/** What a plugin can state. */
export interface PluginOptions extends PeerOptions {
  /** Lists the tools as `source:name`, so that they never collide with another plugin's. */
  readonly qualified?: boolean;
  /** Texts for operators, which `toolbus list` shows. */
  readonly notices?: readonly string[];
  /** Offers none of the tools if the bus refuses one of them. */
  readonly allOrNone?: boolean;
  /** Is called once for each reason why the bus refuses a tool. */
  readonly onRefused?: (tool: RefusedTool) => void;
}

/** A message of a conversation with a model. */
export interface Message {
  readonly role: "system" | "user" | "assistant";
  readonly content: string;
}

/** What a plugin may state when it asks the model of a host; what is left out is the host's own. */
export interface GenerateOptions {
  /** `quiet`: with the host's own instructions, the default; `raw`: these messages alone. */
  readonly mode?: "quiet" | "raw";
  readonly maxTokens?: number;
  readonly temperature?: number;
  readonly stop?: readonly string[];
  readonly model?: string;
  /** Seconds. */
  readonly timeout?: number;
  /** Of the call that this request is part of: it ends with that call, and counts for its user. */
  readonly scope?: ToolScope;
}

/** The answer of a lent model. */
export interface Generation {
  readonly text: string;
  readonly model: string;
  readonly stopReason: string;
  readonly usage: { readonly [name: string]: number };
}

/** Offers tools under a source. It connects by `run` or `start`, and reconnects until it is closed. */
export class Plugin {
  private readonly peer: Peer;

  /** @throws SetupError the source or the credential breaks a rule. */
  constructor(readonly source: string, options: PluginOptions = {}) {
    this.peer = new Peer(source, options, options);
  }

  /** The tools that the bus refused, each with its reason. */
  get refused(): readonly RefusedTool[] {
    return [...this.peer.refused.values()];
  }

  /** The tools that wait for a role. */
  get waiting(): readonly WaitingTool[] {
    return [...this.peer.waiting.values()];
  }

  /**
   * Offers a tool, also while connected; `replace` takes the place of the one of that name.
   *
   * @throws SetupError a rule is broken; the text names the value, the rule and how to fix it.
   */
  tool<const S extends Schema>(name: string, options: ToolOptions<S> & { readonly replace?: boolean }, handler: Handler<S>): void {
    const { replace, ...declared } = options;
    this.peer.tools.add(name, declared, handler as Handler, replace ?? false);
    this.peer.toolsChanged();
  }

  /** Withdraws a tool; its calls in flight are finished. Returns whether it existed. */
  removeTool(name: string): boolean {
    const existed = this.peer.tools.remove(name);
    this.peer.toolsChanged();
    return existed;
  }

  /**
   * Connects and serves until SIGINT or SIGTERM, or until the bus sends this plugin away; then finishes its calls.
   *
   * @throws RequestError the bus refuses this plugin; the text is the bus's.
   */
  async run(): Promise<void> {
    const stop = () => void this.close(GRACE_SECONDS, "stopped");
    process.on("SIGINT", stop).on("SIGTERM", stop);
    try {
      await this.peer.run();
    } finally {
      process.off("SIGINT", stop).off("SIGTERM", stop);
    }
  }

  /** Connects in the background. */
  start(): void {
    this.peer.begin();
  }

  /** Connects, and waits until the bus has answered for all tools. @throws RequestError, PeerLost */
  async ready(): Promise<void> {
    this.start();
    await this.peer.until(() => this.peer.declared);
  }

  /** Leaves gracefully: withdraws the tools, finishes the calls in flight within a time, disconnects. */
  async close(graceSeconds = GRACE_SECONDS, reason = "closed"): Promise<void> {
    this.peer.leave(reason);
    await this.peer.ended(graceSeconds);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /**
   * Notifies a user ("" for all) outside a call, with a text and any JSON for programs; returns how many hosts got it.
   *
   * @throws CallFailed
   */
  async notify(user: string, text: string, data: unknown = null): Promise<number> {
    const output = (await this.call("toolbus:notify", { user, text, data })).unwrap() as { hosts: number };
    return output.hosts;
  }

  /**
   * Asks the model that a host lends. The source needs the permission `generation`.
   *
   * @param messages a text, or messages, oldest first.
   * @throws CallFailed no host lends a model, the permission is missing, a limit was hit, or the model failed.
   */
  async generate(messages: string | readonly Message[], options: GenerateOptions = {}): Promise<Generation> {
    const { scope, timeout, maxTokens, ...same } = options;
    const request = {
      ...same,
      messages: typeof messages === "string" ? [{ role: "user", content: messages }] : messages,
      ...(maxTokens === undefined ? {} : { max_tokens: maxTokens }),
    };
    const time = timeout === undefined ? {} : { timeout };
    const result = await (scope ?? this).call("host:generate", request, time);
    const { text, model, stop_reason, usage } = result.unwrap() as { text: string; model: string; stop_reason: string; usage: Generation["usage"] };
    return { text, model, stopReason: stop_reason, usage };
  }

  /** Calls any tool of the bus, outside of a call; in a handler use `scope.call`. A failure is a value. */
  async call(name: string, args: unknown = {}, options: { timeout?: number; signal?: AbortSignal } = {}): Promise<Result> {
    const time = options.timeout === undefined ? {} : { timeoutSeconds: options.timeout };
    const route = options.signal === undefined ? {} : { signal: options.signal };
    return resultFromWire(await this.peer.calls.call({ name, argumentsJson: argumentsJson(args), ...time }, route));
  }
}
