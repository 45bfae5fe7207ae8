/**
 * Holds the state of one stream: its outbox, both tables of calls, its limits, its end.
 *
 * A new stream begins with a new link, so that nothing of an old one can reach it.
 */
import { create, toBinary, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import { AttachSchema, DrainSchema, HeartbeatSchema, type Attached } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import { ToolCallSchema, ToolCancelSchema, ToolProgressSchema, ToolResultSchema, type ToolCall, type ToolSchema } from "./gen/toolbus/v1/tool_pb.js";
import type { Ask, Calls } from "./calls.js";
import type { Run } from "./tools.js";

const MESSAGE_ITEMS = 128;
const MESSAGE_BYTES = 1024 * 1024;
const MARGIN = 1024; // bytes of a message that its one item must leave free
const HOLD_MS = 1; // that the results of calls of one message may wait for each other
const LEAVE_MS = 2000; // for the bus to end the stream after our drain, and again after our half-close
export const TICK_MS = 500; // between two looks at the clock; later by as much means a standstill

// The fields of InvokeRequest. One item of a field that is `single` is in a message, any number of the others.
const FIELDS = {
  attach: { number: 1, schema: AttachSchema, single: true },
  calls: { number: 2, schema: ToolCallSchema, single: false },
  results: { number: 3, schema: ToolResultSchema, single: false },
  progress: { number: 4, schema: ToolProgressSchema, single: false },
  cancels: { number: 5, schema: ToolCancelSchema, single: false },
  heartbeat: { number: 6, schema: HeartbeatSchema, single: true },
  drain: { number: 7, schema: DrainSchema, single: true },
} as const;
type Fields = typeof FIELDS;
type Field = keyof Fields;

interface Item {
  readonly field: Field;
  /** Of its encoding. */
  readonly size: number;
  /** Null for a result that has only an id and an output: those are written straight into their message. */
  readonly bytes: Uint8Array | null;
  readonly callId: string;
  readonly outputJson: string;
  readonly outputBytes: number;
}

/** Encodes a message of the protocol. */
export function encode<D extends DescMessage>(schema: D, message: MessageInitShape<D>): Uint8Array {
  return toBinary(schema, create(schema, message) as MessageShape<D>);
}

/** Collects items for a stream and makes messages of them: one queue, so that progress stays before its result. */
export class Outbox {
  /** Called when there is something to write, or the outbox is closed. */
  onReady: () => void = () => undefined;
  closed = false;
  /** The largest payload of a result that the bus takes. */
  resultBytes = 4 * 1024 * 1024;
  /** In bytes; a larger item would end the stream. */
  largestItem = 16 * 1024 * 1024 - MARGIN;
  private items: Item[] = [];
  private first = 0; // the index of the oldest item
  private waiting: NodeJS.Immediate | NodeJS.Timeout | null = null; // wakes the writer; null if it is awake
  private holding = false; // whether all items are results that wait for others

  /** Sets the limits that the bus states; 0 leaves the default. */
  limit(resultBytes: number, messageBytes: number): void {
    this.resultBytes = resultBytes || this.resultBytes;
    if (messageBytes) this.largestItem = messageBytes - MARGIN;
  }

  put<F extends Field>(field: F, message: MessageInitShape<Fields[F]["schema"]>): void {
    this.putBytes(field, encode(FIELDS[field].schema as DescMessage, message as MessageInitShape<DescMessage>));
  }

  /** Adds an encoded item; drops it if the stream is over. With `hold` it may wait a moment for others, which follow. */
  putBytes(field: Field, bytes: Uint8Array, callId = "", hold = false): void {
    this.add({ field, size: bytes.length, bytes, callId, outputJson: "", outputBytes: 0 }, hold);
  }

  /** Adds a result that has only an output, of so many bytes; otherwise as `putBytes`. */
  putOutput(callId: string, outputJson: string, outputBytes: number, hold: boolean): void {
    const idBytes = Buffer.byteLength(callId);
    const size = 1 + varintSize(idBytes) + idBytes + 1 + varintSize(outputBytes) + outputBytes;
    this.add({ field: "results", size, bytes: null, callId, outputJson, outputBytes }, hold);
  }

  private add(item: Item, hold: boolean): void {
    if (this.closed) return;
    const empty = this.first === this.items.length;
    this.items.push(item);
    if (hold && (empty || this.holding)) {
      this.waiting ??= setTimeout(() => this.wake(), HOLD_MS);
      this.holding = true;
    } else if (this.waiting === null || this.holding) {
      if (this.holding) clearTimeout(this.waiting as NodeJS.Timeout);
      this.holding = false;
      this.waiting = setImmediate(() => this.wake()); // once a turn of the loop: what comes together goes together
    }
  }

  /** Lets the writer send what waits and then half-close. */
  close(): void {
    this.closed = true;
    this.wake();
  }

  /** Returns a message of the oldest items; null if none waits. */
  take(): Uint8Array | null {
    if (this.first === this.items.length || (this.holding && !this.closed)) return null;
    const singles = new Set<Field>();
    let size = 0;
    let end = this.first;
    for (; end < this.items.length && end - this.first < MESSAGE_ITEMS; end += 1) {
      const item = this.items[end] as Item;
      const more = 1 + varintSize(item.size) + item.size;
      if (end > this.first && (size + more > MESSAGE_BYTES || singles.has(item.field))) break;
      if (FIELDS[item.field].single) singles.add(item.field);
      size += more;
    }
    const message = Buffer.allocUnsafe(size);
    let at = 0;
    for (; this.first < end; this.first += 1) {
      const item = this.items[this.first] as Item;
      at = writeHead(message, at, FIELDS[item.field].number, item.size);
      if (item.bytes === null) {
        const idBytes = Buffer.byteLength(item.callId);
        at = writeText(message, writeHead(message, at, 1, idBytes), item.callId, idBytes);
        at = writeText(message, writeHead(message, at, 2, item.outputBytes), item.outputJson, item.outputBytes);
      } else {
        message.set(item.bytes, at);
        at += item.size;
      }
    }
    if (this.first === this.items.length) {
      this.items = [];
      this.first = 0;
    }
    return message;
  }

  /** Returns the ids of the calls that are in no message yet. */
  unwrittenCalls(): Set<string> {
    return new Set(this.items.slice(this.first).filter((item) => item.field === "calls").map((item) => item.callId));
  }

  private wake(): void {
    if (this.holding) clearTimeout(this.waiting as NodeJS.Timeout);
    this.waiting = null;
    this.holding = false;
    this.onReady();
  }
}

function varintSize(value: number): number {
  let size = 1;
  for (let rest = value; rest > 0x7f; rest >>>= 7) size += 1;
  return size;
}

/** Writes the tag and the length of a field of length-delimited bytes; returns where they end. */
function writeHead(message: Buffer, start: number, number: number, length: number): number {
  let at = start;
  message[at++] = (number << 3) | 2;
  let rest = length;
  for (; rest > 0x7f; rest >>>= 7) message[at++] = (rest & 0x7f) | 0x80;
  message[at++] = rest;
  return at;
}

function writeText(message: Buffer, at: number, text: string, bytes: number): number {
  if (bytes === text.length) message.write(text, at, "latin1"); // ASCII: much faster
  else message.write(text, at, "utf8");
  return at + bytes;
}

/** One stream, from its attach to its end. */
export class Link {
  readonly outbox = new Outbox();
  readonly running = new Map<string, Run>(); // calls that we answer, by the bus's id
  readonly pending = new Map<string, Ask>(); // calls of our own that the bus has not answered, by our id
  readonly waiting = new Set<Ask>(); // nested calls that wait for room, oldest first
  readonly standstill = new Standstill(this.outbox);
  attached: Attached | null = null; // the bus's first answer; null before it
  attachedAt = 0; // the time of that answer
  heardAt = performance.now(); // the start of the stream, or the bus's last message
  declared = 0; // the version of the tools in the newest attach
  pages: MessageInitShape<typeof ToolSchema>[][] = []; // tools of that attach that did not fit into it
  subscribed = 0; // how many feeds the newest attach subscribed to
  drainSent = false;
  drainReceived = false;
  argumentsBytes = 1024 * 1024;
  heartbeatMs = 10_000;
  private leaveTimer: NodeJS.Timeout | null = null; // half-closes, then cancels; null while calls are left
  private ids = 0;

  /** @param giveUp cancels the stream, with a reason; `calls` makes the calls of its handlers. */
  constructor(private readonly giveUp: (reason: string) => void, readonly calls: Calls, public callsInFlight: number) {}

  /** Takes the bus's first answer, and with it the limits; what is unset has its default. */
  open(attached: Attached): void {
    this.attached = attached;
    this.attachedAt = performance.now();
    this.callsInFlight = attached.limits?.callsInFlight || this.callsInFlight;
    this.argumentsBytes = attached.limits?.argumentsBytes || this.argumentsBytes;
    this.outbox.limit(attached.limits?.resultBytes ?? 0, attached.limits?.messageBytes ?? 0);
    this.heartbeatMs = attached.heartbeatSeconds * 1000 || this.heartbeatMs;
    this.standstill.echoes = attached.echoes;
  }

  /** Whether either side has sent a drain: then only nested calls are made. */
  get leaving(): boolean {
    return this.drainSent || this.drainReceived;
  }

  /** Returns an id that no call on this stream has had. */
  nextId(): string {
    return `c${++this.ids}`;
  }

  /** Returns how long the session has been live, in ms; below 0 if it never was. */
  liveMs(): number {
    return this.attached === null ? -1 : performance.now() - this.attachedAt;
  }

  /** Sends the bus a drain, once. */
  drain(reason: string): void {
    if (this.drainSent) return;
    this.drainSent = true;
    this.outbox.put("drain", { reason });
    this.whenIdle();
  }

  /**
   * Takes the next step towards the end of the stream; called after each message and each end of a call.
   *
   * After our own drain the bus ends the stream: it may have sent a call before it read the drain.
   */
  whenIdle(): void {
    if (!this.leaving) return;
    const busy = this.running.size + this.pending.size + this.waiting.size + this.standstill.held.size > 0;
    if (busy) {
      if (this.leaveTimer !== null) clearTimeout(this.leaveTimer);
      this.leaveTimer = null;
    } else if (this.drainReceived) {
      this.outbox.close();
    } else {
      this.leaveTimer ??= setTimeout(() => {
        this.outbox.close();
        this.leaveTimer = setTimeout(() => this.giveUp("the bus does not end the stream"), LEAVE_MS);
      }, LEAVE_MS);
    }
  }

  /** Lets the outbox drop further items, after the end of the stream. */
  end(): void {
    this.outbox.close();
    if (this.leaveTimer !== null) clearTimeout(this.leaveTimer);
  }
}

/**
 * Notices that this process stood still (stopped, or its machine suspended), and then holds the calls that it reads.
 *
 * The bus may have ended them meanwhile. It echoes a heartbeat behind everything that it has sent before, so the
 * callers of calls that are not cancelled by then still wait.
 */
export class Standstill {
  readonly held = new Map<string, ToolCall>(); // calls that may have ended, by their ids
  echoes = false; // whether the bus echoes heartbeats of ours
  holding = false; // whether calls that arrive are held
  private sequence = 0n; // of our newest heartbeat
  private due = Infinity; // when `look` is called next, at the latest, by a clock that stops in a suspended machine
  private wallDue = Infinity; // the same by the clock of the wall, which does not stop there

  constructor(private readonly outbox: Outbox) {}

  /** Looks at the clocks, at least every `TICK_MS`; returns whether the process stood still since the last look. */
  look(): boolean {
    const late = performance.now() > this.due || Date.now() > this.wallDue;
    this.due = performance.now() + 2 * TICK_MS;
    this.wallDue = Date.now() + 2 * TICK_MS;
    if (late && this.echoes) {
      this.holding = true;
      this.sequence += 1n;
      this.outbox.put("heartbeat", { sequence: this.sequence, fromPeer: true });
    }
    return late;
  }

  /** Takes the echo of a heartbeat of ours; returns the calls that may begin now. */
  echoed(sequence: bigint): ToolCall[] {
    if (sequence !== this.sequence) return [];
    this.holding = false;
    const calls = [...this.held.values()];
    this.held.clear();
    return calls;
  }
}
