/**
 * Connects one peer to the bus: attaches, reads, reconnects with backoff, leaves; in the order of docs/protocol.md.
 *
 * `tools.ts` answers the calls of the bus, `calls.ts` makes calls, `link.ts` holds the state of one stream.
 */
import { randomBytes } from "node:crypto";

import { Addresses, LOOK_UP_MS } from "./addresses.js";
import { Calls } from "./calls.js";
import { RegisterRequestSchema, RegisterResponseSchema, Subscription, type Attached, type Event, type InvokeResponse, type RefusedTool as WireRefused, type WaitingTool as WireWaiting } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import { Link, TICK_MS } from "./link.js";
import { changeFromWire, notificationFromWire, type CatalogChange, type ListedTool, type Notification } from "./shapes.js";
import { Tools } from "./tools.js";
import { PeerLost, RequestError, SetupError, ToolBusError } from "./values.js";
import { readCredential, renewed, whyUnanswered, type Connection, type Credential, type End, type Stream } from "./wire.js";

const ADDRESS = "127.0.0.1:48930";
const ATTACH_MS = 10_000; // for connecting, and for the answer to the attach
const MISSED_HEARTBEATS = 4; // after so many intervals without a message the bus counts as lost
const STEADY_MS = 1000; // a session that lived so long resets the backoff
const ATTACH_BYTES = 12 * 1024 * 1024; // of the tools in one request; those that do not fit follow by Register
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

/** Fields of the attach that only plugins have, and what the peer tells its owner. */
export interface PeerRole {
  readonly qualified?: boolean;
  readonly notices?: readonly string[];
  readonly allOrNone?: boolean;
  readonly onRefused?: (tool: RefusedTool) => void;
}

/** The options of a peer with what the environment and the credential state. */
export type Settings = PeerOptions & Required<Pick<PeerOptions, "address" | "credential" | "token" | "instance" | "log">>;

/** @throws SetupError the credential cannot be read. */
export function settingsOf(options: PeerOptions): Settings {
  const { TOOLBUS_ADDRESS, TOOLBUS_CREDENTIAL, TOOLBUS_TOKEN } = process.env;
  const credential = options.credential || TOOLBUS_CREDENTIAL || "";
  return {
    ...options,
    credential,
    address: options.address || TOOLBUS_ADDRESS || readCredential(credential).address || ADDRESS,
    token: options.token || TOOLBUS_TOKEN || "",
    instance: options.instance ?? randomBytes(16).toString("hex"),
    log: options.log ?? ((text) => console.error(`toolbus: ${text}`)),
  };
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
  connection: Connection | null = null; // null between two streams
  readonly log: (text: string) => void;
  readonly address: string;
  private readonly addresses: Addresses;
  private readonly identity: { source: string; instance: string; token: string };
  private link: Link | null = null; // the current stream; null between two
  private credential: Credential | null = null; // of the newest connection; null before the first
  private unusable = ""; // why the file of the credential could not be used; "" where it could
  private left = ""; // why this peer does not attach again; empty while it does
  private refusal: ToolBusError | null = null; // why `run` ended; null unless the bus refused this peer
  private giveUp: (reason: string) => void = () => undefined; // cancels the current stream
  private wake: () => void = () => undefined; // ends a pause
  private running: Promise<void> | null = null;
  private readonly changed = new Set<() => void>(); // those who wait for an answer of the bus, or for the end
  private declarations: number[] = []; // the versions of the tools in attaches that the bus has not answered
  private answered = -1; // the version of the tools for which the bus has answered last
  private readonly shownWaiting = new Set<string>(); // roles and names of the waiting tools that were logged
  private declaring = false; // whether another attach is about to be made
  private explained = false; // whether it was looked into why a bus that is there does not answer, or is not needed
  private fatal: ToolBusError | null = null; // why the bus refused tools that are to be offered all or none
  private readonly shown = new Map<string, Failure>(); // why the last attempt at each bus failed; empty while attached
  private readonly readers = new Map<Reader<any>, Feed>();
  private readonly subscribed = new Set<Feed>();
  private readonly catalog = new Map<string, ListedTool>(); // by source and name
  private revision = 0; // of the catalog here; 0 before the first list came
  private newest = 0n; // the number of the newest notification

  /** @throws SetupError the source or the address breaks a rule. */
  constructor(
    source: string,
    private readonly options: Settings,
    private readonly role: PeerRole = {},
    readonly tools = new Tools(options.log),
  ) {
    if (!/^[A-Za-z0-9_.:-]{1,128}$/.test(source)) {
      throw new SetupError(`the source is '${source}', it must be 1 to 128 of [A-Za-z0-9_.:-]`);
    }
    this.address = options.address;
    this.addresses = new Addresses(options.address);
    this.identity = { source, instance: options.instance, token: options.token };
    this.log = options.log;
    this.calls = new Calls(this.log);
  }

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
    this.wake();
    this.notifyChanged();
  }

  /** Waits for the end of `run`, at most so long; then gives the stream up. Never throws. */
  async ended(seconds: number): Promise<void> {
    const timer = setTimeout(() => this.giveUp("the calls in flight took too long"), seconds * 1000);
    await this.running?.catch(() => undefined);
    clearTimeout(timer);
  }

  /**
   * Waits until a condition holds.
   *
   * @throws RequestError the bus refused this peer; PeerLost this peer has left, or the time is over.
   */
  async until(condition: () => boolean, seconds = Infinity): Promise<void> {
    const end = performance.now() + seconds * 1000;
    while (!condition()) {
      if (this.refusal !== null) throw this.refusal;
      if (this.left) throw new PeerLost("UNAVAILABLE", this.left);
      const rest = end - performance.now();
      if (rest <= 0) throw new PeerLost("DEADLINE_EXCEEDED", `no bus answered at ${this.options.address} within ${seconds} s: ${[...this.shown.values()].map(({ text, why }) => why || text).join("; ") || "is it running?"}`);
      await new Promise<void>((resolve) => {
        const timer = rest === Infinity ? undefined : setTimeout(done, Math.min(rest, 2 ** 31 - 1));
        const { changed } = this;
        function done() {
          clearTimeout(timer);
          changed.delete(done);
          resolve();
        }
        changed.add(done);
      });
    }
  }

  /** Whether the bus has answered for all tools as they are now. */
  get declared(): boolean {
    return this.attached !== null && this.answered === this.tools.version;
  }

  /** Attaches again if the tools have changed; all changes of one turn of the loop go into one attach. */
  toolsChanged(): void {
    if (this.declaring || this.link?.attached == null) return;
    this.declaring = true;
    setImmediate(() => {
      this.declaring = false;
      const { link } = this;
      if (link?.attached != null && link.declared !== this.tools.version && !link.leaving) this.declare(link);
    });
  }

  /** Yields what the bus sends to a subscription from now on; the whole catalog first. */
  async *read<F extends Feed>(feed: F): AsyncGenerator<Feeds[F], void, undefined> {
    const reader = new Reader<Feeds[F]>();
    if (feed === "catalog" && this.revision) {
      reader.put({ revision: this.revision, full: true, added: [...this.catalog.values()], changed: [], removed: [] } as never);
    }
    this.readers.set(reader, feed);
    if (!this.subscribed.has(feed)) {
      this.subscribed.add(feed);
      if (this.link?.attached != null && !this.link.leaving) this.declare(this.link);
    }
    this.begin();
    try {
      while (true) {
        if (reader.items.length > 0) yield reader.items.shift() as Feeds[F];
        else if (this.refusal !== null) throw this.refusal;
        else if (this.left) return;
        else await reader.wait();
      }
    } finally {
      this.readers.delete(reader);
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
        const address = typeof buses === "string" ? this.address : (buses[attempt % buses.length] as string);
        const { end, lived } = typeof buses === "string" ? { end: { code: "UNAVAILABLE", text: buses }, lived: -1 } : await this.serve(address);
        if (this.fatal !== null) throw this.fatal;
        const again = lived < STEADY_MS && (lived < 0 || keyEnded);
        keyEnded = end.code === "UNAUTHENTICATED";
        if (FINAL.includes(end.code) || (keyEnded && again)) throw new RequestError(end.code, this.whyRefused(address, end));
        if (lived >= STEADY_MS) failures = 0;
        if (this.left) break;
        const [first, longest] = PAUSES[end.code] ?? OTHER_PAUSES;
        this.showFailure(address, end, longest);
        if (lived < 0 && typeof buses !== "string" && (attempt + 1) % buses.length !== 0) continue; // another bus may be there
        await this.pause(Math.random() * Math.min(longest, first * 2 ** Math.min(failures, 10)));
        failures += 1;
      }
    } catch (problem) {
      this.refusal = problem as ToolBusError;
      throw problem;
    } finally {
      this.left ||= "this peer has left the bus";
      this.calls.close(this.refusal === null ? this.left : `the bus refuses this peer: ${this.refusal.message}`);
      this.notifyChanged();
      for (const reader of this.readers.keys()) reader.wake();
    }
  }

  /** Returns the buses of now, or why there are none; looks up names unless this peer leaves meanwhile. */
  private async lookUp(): Promise<readonly string[] | string> {
    if (!this.addresses.hasNames) return this.addresses.known;
    const found = this.addresses.lookUp().catch((problem: PeerLost) => problem.details);
    const buses = await Promise.race([found, this.pause(LOOK_UP_MS)]);
    this.wake();
    return buses ?? `DNS does not answer within ${LOOK_UP_MS / 1000} s`;
  }

  /** Runs one stream from its attach to its end; returns its status, and how long the session was live, in ms. */
  private serve(address: string): Promise<{ end: End; lived: number }> {
    return new Promise((resolve, reject) => {
      let stream: Stream | null = null;
      const link = new Link((reason) => stream?.giveUp(reason), this.calls, this.options.maxInFlight || 256);
      try {
        const { connection, credential, why } = renewed(address, this.options.credential, this.credential);
        if (why && why !== this.unusable) this.log(why);
        this.connection = connection;
        this.credential = credential;
        this.unusable = why;
      } catch (problem) {
        return reject(problem as Error);
      }
      const connection = this.connection;
      const onEnd = (end: End) => {
        clearInterval(monitor);
        this.link = this.connection = this.attached = null;
        this.tools.lost(link);
        this.calls.lost(link, end.code === "OK" && link.drainReceived);
        link.end();
        connection.close();
        this.notifyChanged();
        resolve({ end, lived: link.liveMs() });
      };
      this.giveUp = (reason) => stream?.giveUp(reason);
      stream = connection.invoke(link.outbox, (message) => this.receive(message, link), onEnd);
      const monitor = setInterval(() => this.look(link, stream as Stream), TICK_MS);
      this.link = link;
      this.declare(link);
      if (this.left) link.drain("leaving");
    });
  }

  /** Gives up a stream on which the bus is silent. A time in which this process stood still does not count. */
  private look(link: Link, stream: Stream): void {
    if (link.standstill.look()) link.heardAt = performance.now();
    const silence = link.attached === null ? ATTACH_MS : MISSED_HEARTBEATS * link.heartbeatMs;
    if (performance.now() - link.heardAt > silence) stream.giveUp(`the bus has sent nothing for ${silence / 1000} s`);
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

  private pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** Logs why a bus that is there does not answer, if that can be found out. */
  private async explain(address: string, text: string): Promise<void> {
    this.explained = true;
    const { why, reached } = await whyUnanswered(address, this.options.credential);
    this.explained = reached;
    if (!why || this.attached !== null || this.left) return;
    this.log(why);
    this.shown.set(address, { text, why });
  }

  private declare(link: Link): void {
    const [tools = [], ...pages] = this.tools.pages(ATTACH_BYTES);
    link.pages = pages;
    link.declared = this.tools.version;
    link.subscribed = this.subscribed.size;
    this.declarations.push(link.declared);
    if (link.attached === null) this.declarations.splice(0, Infinity, link.declared);
    link.outbox.put("attach", {
      ...this.identity,
      protocolVersion: 1,
      tools,
      maxInFlight: this.options.maxInFlight ?? 0,
      subscribe: [...this.subscribed].map((feed) => SUBSCRIPTIONS[feed]),
      notificationsAfter: this.newest,
      qualified: this.role.qualified ?? false,
      notices: [...(this.role.notices ?? [])],
      allOrNone: this.role.allOrNone ?? false,
    });
  }

  /** Offers the tools that did not fit into the attach. */
  private async register(link: Link, sessionId: string, version: number, before: ReadonlyMap<string, RefusedTool>): Promise<void> {
    const { connection } = this;
    const allOrNone = this.role.allOrNone ?? false;
    try {
      for (const tools of link.pages) {
        const request = { sessionId, tools, allOrNone };
        const answer = await connection!.unary("Register", RegisterRequestSchema, request, RegisterResponseSchema, REGISTER_SECONDS);
        if (link !== this.link || link.declared !== version) return; // a later attach declares them again
        this.noteRefused(answer.refused, before);
        this.noteWaiting(answer.waiting, false);
      }
    } catch (problem) {
      if (link !== this.link) return;
      const { message } = problem as ToolBusError;
      this.log(`the bus refused tools that did not fit into one message: ${message}`);
      if (allOrNone && !(problem instanceof PeerLost)) this.fatal = problem as ToolBusError;
      return this.giveUp(message);
    }
    this.answered = version;
    this.notifyChanged();
  }

  private notifyChanged(): void {
    for (const done of [...this.changed]) done();
  }

  // -- messages of the bus -----------------------------------------------------------------------------------------------

  /** Handles the fields of a message, in the order of the protocol. */
  private receive(message: InvokeResponse, link: Link): void {
    if (link !== this.link) return;
    link.standstill.look();
    link.heardAt = performance.now();
    if (message.attached) this.onAttached(message.attached, link);
    for (const event of message.events) this.note(event, link);
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
    const before = new Map(this.refused);
    if (itself) {
      this.log(`the bus refused the tools: ${whole.error}`); // the attach itself: everything stays as it was
    } else {
      this.refused.clear();
      this.noteRefused(attached.refused, before);
      this.noteWaiting(attached.waiting, true);
    }
    const version = this.declarations.shift() ?? this.answered;
    if (this.declarations.length === 0 && link.pages.length > 0 && !itself) void this.register(link, attached.sessionId, version, before);
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
    if (link.subscribed !== this.subscribed.size && !link.leaving) this.declare(link);
    this.toolsChanged();
    this.notifyChanged();
  }

  /** Takes an event. Events for the author are logged as warnings; unknown kinds are ignored. */
  private note({ kind }: Event, link: Link): void {
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
      if (permission === "tools" && granted && !link.leaving) this.declare(link); // the bus withdrew the tools
    } else if (kind.case === "toolsReviewed") {
      const { registered, refused, waiting } = kind.value;
      const names = new Set([...registered, ...refused.map((tool) => tool.name), ...waiting.map((tool) => tool.name)]);
      const before = new Map(this.refused);
      for (const known of [this.refused, this.waiting]) {
        for (const [key, tool] of known) if (names.has(tool.name)) known.delete(key);
      }
      this.noteRefused(refused, before);
      this.noteWaiting(waiting, false);
    }
  }

  private passOn(feed: Feed, item: unknown): void {
    for (const [reader, read] of this.readers) if (read === feed) reader.put(item);
  }

  /** Stores which tools the bus refused; logs each reason once, not again after every reconnect. */
  private noteRefused(tools: readonly WireRefused[], before: ReadonlyMap<string, RefusedTool>): void {
    for (const { name, error, role = "" } of tools) {
      const key = `${role} ${name}`;
      const tool = { name, error, role };
      this.refused.set(key, tool);
      if (before.get(key)?.error === error) continue;
      this.log(`the bus does not offer the tool '${name}': ${error}`);
      this.role.onRefused?.(tool);
    }
  }

  /** Stores which tools wait for a role; logs each once. */
  private noteWaiting(tools: readonly WireWaiting[], all: boolean): void {
    const before = new Set(this.shownWaiting);
    if (all) this.waiting.clear();
    for (const { name, role } of tools) {
      const key = `${role} ${name}`;
      this.waiting.set(key, { name, role });
      this.shownWaiting.add(key);
      if (!before.has(key)) this.log(`the tool '${name}' waits for role '${role}', which the bus does not have`);
    }
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

/** Why an attempt at a bus failed: as it was logged, and what a look at the bus has found ("" before that). */
interface Failure {
  readonly text: string;
  readonly why: string;
}

/** The items of a subscription that its reader has not taken yet. */
class Reader<T> {
  readonly items: T[] = [];
  wake: () => void = () => undefined;

  put(item: T): void {
    this.items.push(item);
    this.wake();
  }

  wait(): Promise<void> {
    return new Promise((resolve) => (this.wake = resolve));
  }
}
