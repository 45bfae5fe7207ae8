/**
 * Connects one peer to the bus: attaches, reads, reconnects with backoff, leaves; in the order of docs/protocol.md.
 *
 * `tools.ts` answers the calls of the bus, `calls.ts` makes calls, `link.ts` holds the state of one stream.
 */
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { Addresses, LOOK_UP_MS } from "./addresses.js";
import { Calls } from "./calls.js";
import { RegisterRequestSchema, RegisterResponseSchema, Subscription, type Attached, type Event, type InvokeResponse, type RefusedTool as WireRefused, type WaitingTool as WireWaiting } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import { Link, TICK_MS } from "./link.js";
import { changeFromWire, notificationFromWire, type CatalogChange, type ListedTool, type Notification } from "./shapes.js";
import { Tools } from "./tools.js";
import { PeerLost, RequestError, SetupError, ToolBusError } from "./values.js";
import { readCredential, renewed, whyUnanswered, type Connection, type Credential, type End } from "./wire.js";

const ADDRESS = "127.0.0.1:48930";
const ATTACH_MS = 10_000; // for connecting, and for the answer to the attach
const MISSED_HEARTBEATS = 4; // after so many intervals without a message the bus counts as lost
const STEADY_MS = 1000; // a session that lived so long resets the backoff
const ATTACH_BYTES = 12 * 1024 * 1024; // of the tools in one request; those that do not fit follow by Register
const MAX_UNREAD = 1000; // items of a subscription that wait for one reader
const REGISTER_SECONDS = 300;
const EXPIRY_SECONDS = 7 * 86_400; // before a key expires: then a warning is logged
// After these statuses another attempt would be refused too.
const FINAL = ["INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "PERMISSION_DENIED", "ALREADY_EXISTS", "UNIMPLEMENTED"];
// The upper end of the first pause before another attempt, and of the longest, in ms.
const PAUSES: { readonly [code: string]: readonly [number, number] } = { RESOURCE_EXHAUSTED: [500, 10_000], INTERNAL: [500, 10_000] };
const OTHER_PAUSES = [50, 800] as const;

/** What plugins and hosts can state about their connection. */
export interface PeerOptions {
  /**
   * `HOST:PORT`, `unix:PATH`, `tls:HOST:PORT`, `mtls:HOST:PORT`, `dns:` before a name for every bus that DNS has for it,
   * or several of them, separated by commas; by default TOOLBUS_ADDRESS, then the credential's. A plugin attaches to all, a
   * host to one at a time.
   */
  readonly address?: string;
  /** The file that proves who this peer is, to a bus on another machine; by default TOOLBUS_CREDENTIAL. */
  readonly credential?: string;
  /** Binds the source: while it is in use, only processes with the same token may use it; by default TOOLBUS_TOKEN. */
  readonly token?: string;
  /** Names the process, so that its new connection replaces its old one; by default random. */
  readonly instance?: string;
  /** Calls at once; 256 by default. */
  readonly maxInFlight?: number;
  /** Takes warnings for the author; by default they go to standard error. */
  readonly log?: (text: string) => void;
}

/** A tool that the bus does not offer. */
export interface RefusedTool {
  readonly name: string;
  readonly error: string;
  readonly role: string;
}

/** A tool that waits for a role which the bus does not have. */
export interface WaitingTool {
  readonly name: string;
  readonly role: string;
}

/** What plugins can state beside that. */
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

/** The options of a peer with what the environment and the credential state. */
export type Settings = PluginOptions & Required<Pick<PeerOptions, "address" | "credential" | "token" | "instance" | "log">>;

/** @throws SetupError the credential cannot be read. */
export function settingsOf(options: PluginOptions): Settings {
  const { TOOLBUS_ADDRESS, TOOLBUS_CREDENTIAL, TOOLBUS_TOKEN } = process.env;
  const credential = options.credential || TOOLBUS_CREDENTIAL || "";
  return {
    ...options,
    credential,
    address: options.address || TOOLBUS_ADDRESS || readCredential(credential).address || ADDRESS,
    token: options.token || TOOLBUS_TOKEN || "",
    instance: options.instance ?? randomBytes(16).toString("hex"),
    log: guarded(options.log ?? ((text) => console.error(`toolbus: ${text}`)), (text) => console.error(`toolbus: the log failed: ${text}`)),
  };
}

/** Returns a function of the program whose faults, also later ones, are handled here: neither reading nor the process ends. */
export function guarded<A extends unknown[]>(call: (...args: A) => unknown, failed: (text: string) => void): (...args: A) => void {
  const handle = (problem: unknown) => {
    let text: string = typeof problem;
    try {
      text = String(problem);
    } catch {} // it has none
    failed(text);
  };
  return (...args) => {
    try {
      const later = call(...args);
      if (later instanceof Promise) later.catch(handle);
    } catch (problem) {
      handle(problem);
    }
  };
}

/** Lets some wait for what others do next. */
export class Change {
  private wake: () => void = () => undefined;
  next = new Promise<void>((resolve) => (this.wake = resolve));

  notify(): void {
    const { wake } = this;
    this.next = new Promise((resolve) => (this.wake = resolve));
    wake();
  }
}

type Feeds = { catalog: CatalogChange; notifications: Notification };
type Feed = keyof Feeds;
const SUBSCRIPTIONS = { catalog: Subscription.CATALOG, notifications: Subscription.NOTIFICATIONS };

/** Holds one stream to a bus while `run` runs, to the next one of its address when that is gone: offers tools, answers and makes calls. */
export class Peer {
  readonly calls: Calls;
  readonly refused = new Map<string, RefusedTool>(); // by role and name
  readonly waiting = new Map<string, WaitingTool>();
  /** The first answer to the attach of the current stream; null without a session. */
  attached: Attached | null = null;
  readonly log: (text: string) => void;
  readonly address: string;
  private readonly addresses: Addresses;
  private readonly identity: { source: string; instance: string; token: string };
  private link: Link | null = null; // the current stream; null between two
  private credential: Credential | null = null; // of the newest connection; null before the first
  private unusable = ""; // why the file of the credential could not be used; "" where it could
  private left = ""; // why this peer does not attach again; empty while it does
  private refusal: ToolBusError | null = null; // why `run` ended; null unless the bus refused this peer
  private waking = new AbortController(); // ends a pause
  private running: Promise<void> | null = null;
  private readonly changed = new Change(); // an answer of the bus, an item of a subscription, or the end
  private answered = -1; // the version of the tools for which the bus has answered last
  private readonly noted = new Set<string>(); // what was logged about tools
  private declaring = false; // whether another attach is about to be made
  private explained = false; // whether it was looked into why a bus that is there does not answer, or is not needed
  private fatal: ToolBusError | null = null; // why the bus refused tools that are to be offered all or none
  /** Why the last attempt at each bus failed: as logged, and what a look at the bus has found; empty while attached. */
  private readonly shown = new Map<string, { text: string; why: string }>();
  private readonly readers = new Map<unknown[], Feed>(); // the items that each reader of a subscription has not taken yet
  private readonly subscribed = new Set<Feed>();
  private readonly catalog = new Map<string, ListedTool>(); // by source and name
  private revision = 0; // of the catalog here; 0 before the first list came
  private newest = 0n; // the number of the newest notification

  /** @throws SetupError the source or the address breaks a rule. */
  constructor(source: string, private readonly options: Settings, readonly tools = new Tools(options.log)) {
    if (!/^[A-Za-z0-9_.:-]{1,128}$/.test(source)) {
      throw new SetupError(`the source is '${source}', it must be 1 to 128 of [A-Za-z0-9_.:-]`);
    }
    this.address = options.address;
    this.addresses = new Addresses(options.address);
    this.identity = { source, instance: options.instance, token: options.token };
    this.log = options.log;
    this.calls = new Calls();
  }

  /** The connection to the current bus; undefined between two. */
  get connection(): Connection | undefined { return this.link?.connection; }

  /**
   * Attaches, serves and reconnects, until `leave` is called or the bus sends a drain that is final.
   *
   * @throws RequestError, SetupError the bus refused this peer, or its credential cannot be used.
   */
  run(): Promise<void> {
    this.running ??= this.live();
    return this.running;
  }

  /** Runs in the background, unless it runs already or has left; logs why the bus refused this peer. */
  begin(): void {
    if (!this.left && this.running === null) this.run().catch((problem: ToolBusError) => this.log(problem.message));
  }

  /** Shuts down gracefully: the bus sends no new calls, those in flight are finished, then `run` returns. */
  leave(reason: string): void {
    this.left ||= "this peer has left the bus";
    this.attached = null;
    this.calls.close("this peer is leaving the bus");
    this.link?.drain(reason);
    this.waking.abort();
    this.changed.notify();
  }

  /** Waits for the end of `run`, at most so long; then gives the stream up. Never throws. */
  async ended(seconds: number): Promise<void> {
    const timer = setTimeout(() => this.link?.stream.giveUp("the calls in flight took too long"), seconds * 1000);
    await this.running?.catch(() => undefined);
    clearTimeout(timer);
  }

  /**
   * Waits until a condition holds.
   *
   * @throws RequestError the bus refused this peer; PeerLost this peer has left, or the time is over.
   */
  async until(condition: () => boolean, seconds = Infinity): Promise<void> {
    let over = false;
    const end = () => {
      over = true;
      this.changed.notify();
    };
    const timer = seconds === Infinity ? undefined : setTimeout(end, Math.min(Math.max(0, seconds) * 1000, 2 ** 31 - 1));
    try {
      for (; !condition(); await this.changed.next) {
        if (this.refusal !== null) throw this.refusal;
        if (this.left) throw new PeerLost("UNAVAILABLE", this.left);
        if (!over) continue;
        const why = [...this.shown.values()].map((each) => each.why || each.text).join("; ") || "is it running?";
        throw new PeerLost("DEADLINE_EXCEEDED", `no bus answered at ${this.addresses.text} within ${Number(seconds.toPrecision(3))} s: ${why}`);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  /** Whether the bus has answered for all tools as they are now. */
  get declared(): boolean { return this.attached !== null && this.answered === this.tools.version; }

  /** Attaches again if the tools have changed; all changes of one turn of the loop go into one attach. */
  toolsChanged(): void {
    if (this.declaring || this.link?.attached == null) return;
    this.declaring = true;
    setImmediate(() => {
      this.declaring = false;
      if (this.link?.declared !== this.tools.version) this.declareAgain();
    });
  }

  /** Yields what the bus sends to a subscription from now on; the whole catalog first. */
  async *read<F extends Feed>(feed: F): AsyncGenerator<Feeds[F], void, undefined> {
    const items: Feeds[F][] = [];
    if (feed === "catalog" && this.revision) items.push(this.wholeCatalog() as never);
    this.readers.set(items, feed);
    if (!this.subscribed.has(feed)) {
      this.subscribed.add(feed);
      this.declareAgain();
    }
    this.begin();
    try {
      for (;;) {
        if (items.length > 0) yield items.shift()!;
        else if (this.refusal !== null) throw this.refusal;
        else if (this.left) return;
        else await this.changed.next;
      }
    } finally {
      this.readers.delete(items);
    }
  }

  // -- the life of the connection ----------------------------------------------------------------------------------------

  private async live(): Promise<void> {
    let failures = 0; // attempts since the last steady session
    let keyEnded = false; // whether the session before ended because the bus no longer accepts its key
    try {
      for (let attempt = 0; !this.left; attempt += 1) {
        const buses = await this.lookUp();
        if (this.left) break;
        const isKnown = typeof buses !== "string";
        const address = isKnown ? (buses[attempt % buses.length] as string) : this.address;
        const { end, lived } = isKnown ? await this.serve(address) : { end: { code: "UNAVAILABLE", text: buses }, lived: -1 };
        if (this.fatal !== null) throw this.fatal;
        const again = lived < STEADY_MS && (lived < 0 || keyEnded);
        keyEnded = end.code === "UNAUTHENTICATED";
        if (FINAL.includes(end.code) || (keyEnded && again)) throw new RequestError(end.code, this.whyRefused(address, end));
        if (lived >= STEADY_MS) failures = 0;
        if (this.left) break;
        const [first, longest] = PAUSES[end.code] ?? OTHER_PAUSES;
        this.showFailure(address, end, longest);
        if (lived < 0 && isKnown && (attempt + 1) % buses.length !== 0) continue; // another bus may be there
        await this.pause(Math.random() * Math.min(longest, first * 2 ** failures));
        failures += 1;
      }
    } catch (problem) {
      this.refusal = problem as ToolBusError;
      throw problem;
    } finally {
      this.left ||= "this peer has left the bus";
      this.calls.close(this.refusal === null ? this.left : `the bus refuses this peer: ${this.refusal.message}`);
      this.changed.notify();
    }
  }

  /** Returns the buses of now, or why there are none; looks up names unless this peer leaves meanwhile. */
  private async lookUp(): Promise<readonly string[] | string> {
    if (!this.addresses.hasNames) return this.addresses.known;
    const found = this.addresses.lookUp().catch((problem: PeerLost) => problem.details);
    const buses = await Promise.race([found, this.pause(LOOK_UP_MS)]);
    this.waking.abort();
    return buses ?? `DNS does not answer within ${LOOK_UP_MS / 1000} s`;
  }

  /** Runs one stream from its attach to its end; returns its status, and how long the session was live, in ms. */
  private async serve(address: string): Promise<{ end: End; lived: number }> {
    const { connection, credential, why } = renewed(address, this.options.credential, this.credential);
    if (why && why !== this.unusable) this.log(why);
    this.credential = credential;
    this.unusable = why;
    const link = new Link(connection, this.calls, this.options.maxInFlight || 256, (message) => this.receive(message, link));
    const monitor = setInterval(() => this.look(link), TICK_MS);
    this.link = link;
    this.declare(link);
    if (this.left) link.drain("leaving");
    const end = await link.stream.ended;
    clearInterval(monitor);
    this.link = this.attached = null;
    this.tools.lost(link);
    this.calls.lost(link, end.code === "OK" && link.drainReceived);
    link.end();
    connection.close();
    this.changed.notify();
    return { end, lived: link.liveMs() };
  }

  /** Gives up a stream on which the bus is silent. A time in which this process stood still does not count. */
  private look(link: Link): void {
    if (link.standstill.look()) link.heardAt = performance.now();
    const silence = link.attached === null ? ATTACH_MS : MISSED_HEARTBEATS * link.heartbeatMs;
    if (performance.now() - link.heardAt > silence) link.stream.giveUp(`the bus has sent nothing for ${silence / 1000} s`);
  }

  /** Logs why an attempt failed, once. */
  private showFailure(address: string, end: End, longest: number): void {
    const text = `not attached to ${address} (${end.code}: ${end.text}): trying again, at least every ${longest / 1000} s`;
    const alike = (other = "") => other.replace(/\d+/g, "") === text.replace(/\d+/g, ""); // but for times and ports
    const before = this.shown.get(address);
    if (!alike(before?.text) && !(before?.why && end.code === "UNAVAILABLE")) {
      this.log(text);
      this.shown.set(address, { text, why: "" });
    }
    if (end.code === "UNAVAILABLE" && !this.explained) void this.explain(address, text);
  }

  /** Returns the text of a bus that refuses this peer, with its address and what to do. */
  private whyRefused(address: string, { code, text }: End): string {
    const { credential } = this.options;
    const key = credential ? `the credential ${credential}` : "no credential: name its file in TOOLBUS_CREDENTIAL";
    const why = code === "UNIMPLEMENTED" ? `it is not a toolbus, check the address: ${text}` : code === "UNAUTHENTICATED" ? `${text} (${key})` : text;
    return `the bus at ${address} refuses ${this.identity.source}: ${why}`;
  }

  private async pause(ms: number): Promise<void> {
    this.waking = new AbortController();
    await sleep(ms, undefined, { signal: this.waking.signal }).catch(() => undefined);
  }

  /** Logs why a bus that is there does not answer, if that can be found out. */
  private async explain(address: string, text: string): Promise<void> {
    this.explained = true;
    const { why, reached } = await whyUnanswered(address, this.options.credential, this.credential ?? {});
    this.explained = reached;
    if (!why || this.attached !== null || this.left) return;
    this.log(why);
    this.shown.set(address, { text, why });
  }

  private declare(link: Link): void {
    const [tools = [], ...pages] = this.tools.pages(ATTACH_BYTES);
    const { maxInFlight, qualified, notices = [], allOrNone } = this.options;
    link.pages = pages;
    link.declared = this.tools.version;
    link.unanswered.push(link.declared);
    link.subscribed = this.subscribed.size;
    link.outbox.put("attach", {
      ...this.identity,
      protocolVersion: 1,
      tools,
      subscribe: [...this.subscribed].map((feed) => SUBSCRIPTIONS[feed]),
      notificationsAfter: this.newest,
      notices: [...notices],
      ...{ maxInFlight, qualified, allOrNone },
    });
  }

  /** Attaches again on the stream that there is. */
  private declareAgain(): void { if (this.link?.attached != null && !this.link.leaving) this.declare(this.link); }

  /** Offers the tools that did not fit into the attach. */
  private async register(link: Link, sessionId: string, version: number): Promise<void> {
    const { allOrNone } = this.options;
    try {
      for (const tools of link.pages) {
        const answer = await link.connection.unary("Register", RegisterRequestSchema, { sessionId, tools, allOrNone }, RegisterResponseSchema, REGISTER_SECONDS);
        if (link !== this.link || link.declared !== version) return; // a later attach declares them again
        this.noteTools(answer.refused, answer.waiting);
      }
    } catch (problem) {
      if (link !== this.link) return;
      const { message } = problem as ToolBusError;
      this.log(`the bus refused tools that did not fit into one message: ${message}`);
      if (allOrNone && !(problem instanceof PeerLost)) this.fatal = problem as ToolBusError;
      return link.stream.giveUp(message);
    }
    this.answered = version;
    this.changed.notify();
  }

  // -- messages of the bus -----------------------------------------------------------------------------------------------

  /** Handles the fields of a message, in the order of the protocol. */
  private receive(message: InvokeResponse, link: Link): void {
    if (link !== this.link) return;
    link.standstill.look();
    link.heardAt = performance.now();
    if (message.attached) this.onAttached(message.attached, link);
    for (const event of message.events) this.note(event);
    if (message.calls.length > 0) this.tools.begin(message.calls, link);
    if (message.progress.length > 0) this.calls.progress(message.progress, link);
    if (message.results.length > 0) this.calls.results(message.results, link);
    for (const cancel of message.cancels) this.tools.cancel(cancel.callId, cancel.reason, link);
    if (message.heartbeat?.fromPeer) this.tools.begin(link.standstill.echoed(message.heartbeat.sequence), link);
    else if (message.heartbeat) link.outbox.put("heartbeat", message.heartbeat);
    if (message.drain) this.drained(message.drain.reason, link);
    link.whenIdle();
  }

  /** Takes the answer to an attach; the first one opens the session. */
  private onAttached(attached: Attached, link: Link): void {
    const [whole] = attached.refused;
    const itself = whole !== undefined && attached.refusedTotal === 0;
    if (itself) {
      this.log(`the bus refused the tools: ${whole.error}`); // the attach itself: everything stays as it was
    } else {
      this.refused.clear();
      this.waiting.clear();
      this.noteTools(attached.refused, attached.waiting);
    }
    const version = link.unanswered.shift() ?? this.answered;
    if (link.unanswered.length === 0 && link.pages.length > 0 && !itself) void this.register(link, attached.sessionId, version);
    else this.answered = version;
    if (link.attached === null) {
      link.open(attached);
      this.shown.clear();
      this.explained = true;
      const { identity, expiresSeconds } = attached;
      if (expiresSeconds > 0 && expiresSeconds < EXPIRY_SECONDS) {
        this.log(`the key of ${identity} expires in ${(expiresSeconds / 3600).toFixed(1)} hours: renew it`);
      }
      if (!link.leaving) {
        this.attached = attached;
        this.calls.open(link);
      }
    }
    if (link.subscribed !== this.subscribed.size) this.declareAgain();
    this.toolsChanged();
    this.changed.notify();
  }

  /** Takes an event. Events for the author are logged as warnings; unknown kinds are ignored. */
  private note({ kind }: Event): void {
    if (kind.case === "catalog") {
      const change = changeFromWire(kind.value);
      if (change.full) this.catalog.clear();
      for (const { name, source } of change.removed) this.catalog.delete(`${source} ${name}`);
      for (const tool of [...change.added, ...change.changed]) this.catalog.set(`${tool.source} ${tool.name}`, tool);
      this.revision = change.revision;
      this.passOn("catalog", change);
    } else if (kind.case === "notification") {
      if (kind.value.number > this.newest) this.newest = kind.value.number;
      this.passOn("notifications", notificationFromWire(kind.value));
    } else if (kind.case === "toolOverwritten") {
      this.log(`the tool '${kind.value.name}' is not offered any more: the source '${kind.value.bySource}' took its name`);
    } else if (kind.case === "toolRemoved") {
      this.log(`the tool '${kind.value.name}' is not offered any more: another client withdrew it`);
    } else if (kind.case === "permissionDenied") {
      this.log(`the bus refused '${kind.value.operation}': the permission '${kind.value.permission}' is missing`);
    } else if (kind.case === "permissionChanged") {
      const { permission, granted } = kind.value;
      this.log(`the permission '${permission}' was ${granted ? "granted" : "revoked"}`);
      if (permission === "tools" && granted) this.declareAgain(); // the bus withdrew the tools
    } else if (kind.case === "toolsReviewed") {
      const { registered, refused, waiting } = kind.value;
      const names = new Set([...registered, ...[...refused, ...waiting].map((tool) => tool.name)]);
      for (const known of [this.refused, this.waiting]) {
        for (const [key, tool] of known) if (names.has(tool.name)) known.delete(key);
      }
      this.noteTools(refused, waiting);
    }
  }

  /** Hands an item to the readers of a subscription; those that are far behind get the whole catalog, or lose the oldest. */
  private passOn(feed: Feed, item: unknown): void {
    for (const [items, read] of this.readers) {
      if (read !== feed || items.push(item) <= MAX_UNREAD) continue;
      const [first, second] = items as Notification[];
      if (feed === "catalog") items.splice(0, Infinity, this.wholeCatalog());
      else items.splice(0, 2, { ...second!, lost: second!.lost + first!.lost + 1 });
    }
    this.changed.notify();
  }

  private wholeCatalog(): CatalogChange {
    return { revision: this.revision, full: true, added: [...this.catalog.values()], changed: [], removed: [] };
  }

  /** Stores which tools the bus refused, and which wait for a role; logs each reason once, not again after every reconnect. */
  private noteTools(refused: readonly WireRefused[], waiting: readonly WireWaiting[]): void {
    for (const { name, error, role = "" } of refused) {
      const tool = { name, error, role };
      this.refused.set(`${role} ${name}`, tool);
      if (!this.isNew(`the bus does not offer the tool '${name}': ${error}`, role)) continue;
      if (this.options.onRefused) guarded(this.options.onRefused, (fault) => this.log(`onRefused failed: ${fault}`))(tool);
    }
    for (const { name, role } of waiting) {
      this.waiting.set(`${role} ${name}`, { name, role });
      this.isNew(`the tool '${name}' waits for role '${role}', which the bus does not have`, role);
    }
  }

  /** Logs what is said about a tool of a role for the first time, and returns whether it is. */
  private isNew(text: string, role: string): boolean {
    const before = this.noted.size;
    if (this.noted.add(`${role} ${text}`).size > before) this.log(text);
    return this.noted.size > before;
  }

  private drained(reason: string, link: Link): void {
    link.drainReceived = true;
    this.attached = null;
    this.calls.pause(); // new calls wait for the next stream
    if (reason === "replaced" || reason === "requested") {
      this.log(`the bus ends this peer's session: ${reason}`);
      this.left ||= `the bus ended this peer's session: ${reason}`;
      this.calls.close(this.left);
    }
  }
}
