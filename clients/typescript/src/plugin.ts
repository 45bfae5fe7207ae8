/** Offers tools: a program makes a `Plugin`, adds its tools, and runs it. */
import { setTimeout as sleep } from "node:timers/promises";

import { Addresses, LOOK_UP_MS } from "./addresses.js";
import { Peer, settingsOf, type PeerOptions, type RefusedTool, type Settings, type WaitingTool } from "./peer.js";
import { resultFromWire } from "./shapes.js";
import type { Schema } from "./schema.js";
import { Tools, type Handler, type ToolOptions, type ToolScope } from "./tools.js";
import { argumentsJson, PeerLost, type Result } from "./values.js";

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

/** Offers tools under a source, at every bus of its address. It connects by `run` or `start`, and reconnects until it is closed. */
export class Plugin {
  private readonly settings: Settings;
  private readonly tools: Tools;
  private readonly addresses: Addresses;
  private readonly leaving = new AbortController();
  private peers: readonly Peer[] = []; // one for each bus
  private begun = false;
  private changed: () => void = () => undefined; // there are other peers
  private change = new Promise<void>((resolve) => (this.changed = resolve));

  /** @throws SetupError the source or the credential breaks a rule. */
  constructor(readonly source: string, private readonly options: PluginOptions = {}) {
    this.settings = settingsOf(options);
    this.tools = new Tools(this.settings.log);
    this.addresses = new Addresses(this.settings.address);
    this.attach(this.addresses.known);
  }

  /** Has a peer for each bus, and lets those for others leave. */
  private attach(buses: readonly string[]): void {
    if (this.leaving.signal.aborted) return;
    const before = this.peers;
    const made = (address: string) => new Peer(this.source, { ...this.settings, address }, this.options, this.tools);
    const peers = buses.map((address) => before.find((peer) => peer.address === address) ?? made(address));
    if (peers.length === before.length && peers.every((peer) => before.includes(peer))) return;
    this.peers = peers;
    if (this.begun) for (const peer of peers) peer.begin();
    for (const peer of before) if (!peers.includes(peer)) peer.leave("DNS does not name this bus any more");
    this.changed();
    this.change = new Promise((resolve) => (this.changed = resolve));
  }

  /** Attaches to the buses that DNS has for names, as long as the plugin lives. */
  private async follow(): Promise<void> {
    const { signal } = this.leaving;
    for (let shown = ""; !signal.aborted; ) {
      try {
        this.attach(await this.addresses.lookUp());
      } catch (problem) {
        const { message } = problem as Error;
        if (message !== shown) this.settings.log(message);
        shown = message;
      }
      await sleep(LOOK_UP_MS, undefined, { signal }).catch(() => undefined);
    }
  }

  /** The tools that the bus refused, each with its reason. */
  get refused(): readonly RefusedTool[] {
    return this.peers.flatMap((peer) => [...peer.refused.values()]);
  }

  /** The tools that wait for a role. */
  get waiting(): readonly WaitingTool[] {
    return this.peers.flatMap((peer) => [...peer.waiting.values()]);
  }

  /**
   * Offers a tool, also while connected; `replace` takes the place of the one of that name.
   *
   * @throws SetupError a rule is broken; the text names the value, the rule and how to fix it.
   */
  tool<const S extends Schema>(name: string, options: ToolOptions<S> & { readonly replace?: boolean }, handler: Handler<S>): void {
    const { replace, ...declared } = options;
    this.tools.add(name, declared, handler as Handler, replace ?? false);
    for (const peer of this.peers) peer.toolsChanged();
  }

  /** Withdraws a tool; its calls in flight are finished. Returns whether it existed. */
  removeTool(name: string): boolean {
    const existed = this.tools.remove(name);
    for (const peer of this.peers) peer.toolsChanged();
    return existed;
  }

  /**
   * Connects and serves until SIGINT or SIGTERM, or until each bus has sent this plugin away; then finishes its calls.
   *
   * @throws RequestError a bus refuses this plugin; the text is the bus's.
   */
  async run(): Promise<void> {
    const stop = () => void this.close(GRACE_SECONDS, "stopped");
    process.on("SIGINT", stop).on("SIGTERM", stop);
    try {
      if (this.peers.length !== 1 || this.addresses.hasNames) this.start(); // logs the refusal of one while others serve
      for (let peers: readonly Peer[] | null = null; peers !== this.peers; ) {
        peers = this.peers;
        const ended = Promise.allSettled(peers.map((peer) => peer.run()));
        const ends = await Promise.race(peers.length > 0 || this.leaving.signal.aborted ? [ended, this.change] : [this.change]);
        for (const end of ends ?? []) if (end.status === "rejected" && peers === this.peers) throw end.reason;
      }
    } finally {
      process.off("SIGINT", stop).off("SIGTERM", stop);
    }
  }

  /** Connects in the background. */
  start(): void {
    if (!this.begun && this.addresses.hasNames) void this.follow();
    this.begun = true;
    for (const peer of this.peers) peer.begin();
  }

  /** Connects, and waits until a bus has answered for all tools. @throws RequestError, PeerLost */
  async ready(): Promise<void> {
    this.start();
    let peers: readonly Peer[];
    do {
      peers = this.peers;
      const answers = peers.map((peer) => peer.until(() => peer.declared));
      const any = Promise.any(answers).catch(() => answers[0]); // each is refused
      await Promise.race(peers.length > 0 || this.leaving.signal.aborted ? [any, this.change] : [this.change]);
    } while (peers !== this.peers);
    if (peers.length === 0) throw new PeerLost("UNAVAILABLE", "this peer has left the bus");
  }

  /** Leaves gracefully: withdraws the tools, finishes the calls in flight within a time, disconnects. */
  async close(graceSeconds = GRACE_SECONDS, reason = "closed"): Promise<void> {
    this.leaving.abort();
    if (this.peers.length === 0) this.changed();
    for (const peer of this.peers) peer.leave(reason);
    await Promise.all(this.peers.map((peer) => peer.ended(graceSeconds)));
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

  /** Calls any tool of the first bus that is connected, outside of a call; in a handler use `scope.call`. A failure is a value. */
  async call(name: string, args: unknown = {}, options: { timeout?: number; signal?: AbortSignal } = {}): Promise<Result> {
    const time = options.timeout === undefined ? {} : { timeoutSeconds: options.timeout };
    const route = options.signal === undefined ? {} : { signal: options.signal };
    const peer = this.peers.find((each) => each.attached) ?? this.peers[0];
    if (peer === undefined) throw new PeerLost("UNAVAILABLE", "DNS has not answered yet: wait for ready()");
    return resultFromWire(await peer.calls.call({ name, argumentsJson: argumentsJson(args), ...time }, route));
  }
}
