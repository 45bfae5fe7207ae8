/** Offers tools: a program makes a `Plugin`, adds its tools, and runs it. */
import { setTimeout as sleep } from "node:timers/promises";

import { Addresses, LOOK_UP_MS } from "./addresses.js";
import { Change, Peer, settingsOf, type PluginOptions, type RefusedTool, type Settings, type WaitingTool } from "./peer.js";
import { resultFromWire } from "./shapes.js";
import type { Schema } from "./schema.js";
import { Tools, type Handler, type ToolOptions, type ToolScope } from "./tools.js";
import { argumentsJson, PeerLost, type CallOptions, type Result } from "./values.js";

const GRACE_SECONDS = 30; // for calls in flight, when a plugin leaves

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
  private readonly changed = new Change(); // there are other peers, or it leaves

  /** @throws SetupError the source or the credential breaks a rule. */
  constructor(readonly source: string, options: PluginOptions = {}) {
    this.settings = settingsOf(options);
    this.tools = new Tools(this.settings.log);
    this.addresses = new Addresses(this.settings.address);
    this.attach(this.addresses.known);
  }

  /** Has a peer for each bus, and lets those for others leave. */
  private attach(buses: readonly string[]): void {
    if (this.leaving.signal.aborted) return;
    const before = this.peers;
    const made = (address: string) => new Peer(this.source, { ...this.settings, address }, this.tools);
    const peers = buses.map((address) => before.find((peer) => peer.address === address) ?? made(address));
    if (peers.length === before.length && peers.every((peer) => before.includes(peer))) return;
    this.peers = peers;
    if (this.begun) for (const peer of peers) peer.begin();
    for (const peer of before) if (!peers.includes(peer)) peer.leave("DNS does not name this bus any more");
    this.changed.notify();
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

  /** Waits for what is asked of all peers, again whenever there are others. */
  private async ofAll<T>(ask: (peers: readonly Peer[]) => Promise<T>): Promise<T | undefined> {
    for (;;) {
      const { peers } = this;
      const isOver = peers.length > 0 || this.leaving.signal.aborted; // without a bus, names may still get some
      const answer = await Promise.race([this.changed.next, ...(isOver ? [ask(peers)] : [])]);
      if (peers === this.peers && isOver) return answer as T;
    }
  }

  /** The tools that the bus refused, each with its reason. */
  get refused(): readonly RefusedTool[] { return this.peers.flatMap((peer) => [...peer.refused.values()]); }

  /** The tools that wait for a role. */
  get waiting(): readonly WaitingTool[] { return this.peers.flatMap((peer) => [...peer.waiting.values()]); }

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
      const ends = await this.ofAll((peers) => Promise.allSettled(peers.map((peer) => peer.run())));
      for (const end of ends ?? []) if (end.status === "rejected") throw end.reason;
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
    await this.ofAll(async (peers) => {
      const answers = peers.map((peer) => peer.until(() => peer.declared));
      await Promise.any(answers).catch(() => answers[0]); // each is refused
    });
    if (this.peers.length === 0) throw new PeerLost("UNAVAILABLE", "this peer has left the bus");
  }

  /** Leaves gracefully: withdraws the tools, finishes the calls in flight within a time, disconnects. */
  async close(graceSeconds = GRACE_SECONDS, reason = "closed"): Promise<void> {
    this.leaving.abort();
    if (this.peers.length === 0) this.changed.notify();
    for (const peer of this.peers) peer.leave(reason);
    await Promise.all(this.peers.map((peer) => peer.ended(graceSeconds)));
  }

  async [Symbol.asyncDispose](): Promise<void> { await this.close(); }

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
    const { scope, timeout, maxTokens: max_tokens, ...same } = options;
    const asked = typeof messages === "string" ? [{ role: "user", content: messages }] : messages;
    const result = await (scope ?? this).call("host:generate", { ...same, messages: asked, max_tokens }, { timeout });
    const { text, model, stop_reason: stopReason, usage } = result.unwrap();
    return { text, model, stopReason, usage };
  }

  /** Calls any tool of the first bus that is connected, outside of a call; in a handler use `scope.call`. A failure is a value. */
  async call(name: string, args: unknown = {}, options: Pick<CallOptions, "timeout" | "signal"> = {}): Promise<Result> {
    const { timeout: timeoutSeconds, signal } = options;
    const peer = this.peers.find((each) => each.attached) ?? this.peers[0];
    if (peer === undefined) throw new PeerLost("UNAVAILABLE", "DNS has not answered yet: wait for ready()");
    return resultFromWire(await peer.calls.call({ name, argumentsJson: argumentsJson(args), timeoutSeconds }, { signal }));
  }
}
