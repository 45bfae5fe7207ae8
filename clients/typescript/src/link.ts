/**
 * Holds the state of one stream: its outbox, both tables of calls, its limits, its end.
 *
 * A new stream begins with a new link, so that nothing of an old one can reach it.
 */
import { create, toBinary, type DescField, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import { InvokeRequestSchema, type Attached, type InvokeResponse } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import type { ToolCall, ToolSchema } from "./gen/toolbus/v1/tool_pb.js";
import type { Ask, Calls } from "./calls.js";
import type { Run } from "./tools.js";
import type { Connection, Stream } from "./wire.js";

const MESSAGE_ITEMS = 128;
const MESSAGE_BYTES = 1024 * 1024;
const MARGIN = 1024; // bytes of a message that its one item must leave free
const HOLD_MS = 1; // that the results of calls of one message may wait for each other
const LEAVE_MS = 2000; // for the bus to end the stream after our drain, and again after our half-close
export const TICK_MS = 500; // between two looks at the clock; later by as much means a standstill

type Request = MessageInitShape<typeof InvokeRequestSchema>;
type Field = Exclude<keyof Request, `$${string}`>;
type Message<F extends Field> = NonNullable<Request[F]> extends readonly (infer Each)[] ? Each : NonNullable<Request[F]>;

interface Item {
  readonly field: DescField;
  /** Of its encoding. */
  readonly size: number;
  /** Null for a result that has only an id and an output: a buffer of its own would cost more than all the rest. */
  readonly bytes: Uint8Array | null;
  readonly callId: string;
  readonly output: string;
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
  private turn: NodeJS.Immediate | undefined; // wakes the writer after this turn of the loop
  private hold: NodeJS.Timeout | undefined; // while all items are results that wait for others

  put<F extends Field>(field: F, message: Message<F>): void {
    this.putBytes(field, encode(InvokeRequestSchema.field[field].message as DescMessage, message as MessageInitShape<DescMessage>));
  }

  /** Adds an encoded item; drops it if the stream is over. With `hold` it may wait a moment for others, which follow. */
  putBytes(field: Field, bytes: Uint8Array, callId = "", hold = false): void {
    this.add({ field: InvokeRequestSchema.field[field], size: bytes.length, bytes, callId, output: "" }, hold);
  }

  /** Adds a result that has only an output, of so many bytes; otherwise as `putBytes`. */
  putOutput(callId: string, output: string, outputBytes: number, hold: boolean): void {
    const size = fieldSize(Buffer.byteLength(callId)) + fieldSize(outputBytes);
    this.add({ field: InvokeRequestSchema.field.results, size, bytes: null, callId, output }, hold);
  }

  private add(item: Item, hold: boolean): void {
    if (this.closed) return;
    const empty = this.first === this.items.length;
    this.items.push(item);
    if (hold && (empty || this.hold)) {
      this.hold ??= setTimeout(() => this.wake(), HOLD_MS);
    } else if (this.turn === undefined) {
      this.stopHolding();
      this.turn = setImmediate(() => this.wake()); // what comes together goes together
    }
  }

  /** Lets the writer send what waits and then half-close. */
  close(): void {
    this.closed = true;
    this.wake();
  }

  /** Returns a message of the oldest items; null if none waits. */
  take(): Uint8Array | null {
    if (this.first === this.items.length || this.hold) return null;
    const singles = new Set<DescField>();
    let size = 0;
    let end = this.first;
    for (; end < this.items.length && end - this.first < MESSAGE_ITEMS; end += 1) {
      const { field, size: itemSize } = this.items[end] as Item;
      const more = fieldSize(itemSize);
      if (end > this.first && (size + more > MESSAGE_BYTES || singles.has(field))) break;
      if (field.fieldKind !== "list") singles.add(field); // a message has one of these
      size += more;
    }
    const message = Buffer.allocUnsafe(size);
    let at = 0;
    for (; this.first < end; this.first += 1) {
      const { field, size: itemSize, bytes, callId, output } = this.items[this.first] as Item;
      at = writeHead(message, at, field.number, itemSize);
      if (bytes === null) {
        at = writeText(message, writeText(message, at, 1, callId), 2, output);
      } else {
        message.set(bytes, at);
        at += itemSize;
      }
    }
    if (end === this.items.length) {
      this.items = [];
      this.first = 0;
    }
    return message;
  }

  /** Returns the ids of the calls that are in no message yet. */
  unwrittenCalls(): Set<string> {
    return new Set(this.items.slice(this.first).filter(({ field }) => field.name === "calls").map(({ callId }) => callId));
  }

  private wake(): void {
    this.turn = undefined;
    this.stopHolding();
    this.onReady();
  }

  private stopHolding(): void {
    clearTimeout(this.hold);
    this.hold = undefined;
  }
}

/** Returns how many bytes a field has whose value has so many. */
function fieldSize(length: number): number {
  let size = 2 + length;
  for (let rest = length; rest > 0x7f; rest >>>= 7) size += 1;
  return size;
}

/** Writes the tag and the length of a field; returns where they end. */
function writeHead(message: Buffer, start: number, number: number, length: number): number {
  let at = start;
  message[at++] = (number << 3) | 2;
  let rest = length;
  for (; rest > 0x7f; rest >>>= 7) message[at++] = (rest & 0x7f) | 0x80;
  message[at++] = rest;
  return at;
}

function writeText(message: Buffer, start: number, number: number, text: string): number {
  const bytes = Buffer.byteLength(text);
  const at = writeHead(message, start, number, bytes);
  return at + message.write(text, at, bytes === text.length ? "latin1" : "utf8"); // of ASCII, the first is much faster
}

/** One stream, from its attach to its end. */
export class Link {
  readonly outbox = new Outbox();
  readonly running = new Map<string, Run>(); // calls that we answer, by the bus's id
  readonly pending = new Map<string, Ask>(); // calls of our own that the bus has not answered, by our id
  readonly waiting = new Set<Ask>(); // nested calls that wait for room, oldest first
  readonly standstill = new Standstill(this.outbox);
  readonly stream: Stream;
  attached: Attached | null = null; // the bus's first answer; null before it
  attachedAt = 0; // the time of that answer
  heardAt = performance.now(); // the start of the stream, or the bus's last message
  declared = 0; // the version of the tools in the newest attach
  readonly unanswered: number[] = []; // those of the attaches that the bus has not answered
  pages: MessageInitShape<typeof ToolSchema>[][] = []; // tools of that attach that did not fit into it
  subscribed = 0; // how many feeds the newest attach subscribed to
  drainSent = false;
  drainReceived = false;
  argumentsBytes = 1024 * 1024;
  heartbeatMs = 10_000;
  private leaveTimer: NodeJS.Timeout | undefined; // half-closes, then cancels; undefined while calls are left
  private ids = 0;

  /** @param calls makes the calls of the handlers of this stream. */
  constructor(readonly connection: Connection, readonly calls: Calls, public callsInFlight: number, onMessage: (message: InvokeResponse) => void) {
    this.stream = connection.invoke(this.outbox, onMessage);
  }

  /** Takes the bus's first answer, and with it the limits; what is unset has its default. */
  open(attached: Attached): void {
    this.attached = attached;
    this.attachedAt = performance.now();
    const { callsInFlight, argumentsBytes, resultBytes, messageBytes } = attached.limits ?? {};
    this.callsInFlight = callsInFlight || this.callsInFlight;
    this.argumentsBytes = argumentsBytes || this.argumentsBytes;
    this.outbox.resultBytes = resultBytes || this.outbox.resultBytes;
    if (messageBytes) this.outbox.largestItem = messageBytes - MARGIN;
    this.heartbeatMs = attached.heartbeatSeconds * 1000 || this.heartbeatMs;
    this.standstill.echoes = attached.echoes;
  }

  /** Whether either side has sent a drain: then only nested calls are made. */
  get leaving(): boolean { return this.drainSent || this.drainReceived; }

  get hasRoom(): boolean { return this.pending.size < this.callsInFlight; }

  /** Returns an id that no call on this stream has had. */
  nextId(): string { return `c${++this.ids}`; }

  /** Returns how long the session has been live, in ms; below 0 if it never was. */
  liveMs(): number { return this.attached === null ? -1 : performance.now() - this.attachedAt; }

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
    if (this.running.size + this.pending.size + this.waiting.size + this.standstill.held.size > 0) {
      clearTimeout(this.leaveTimer);
      this.leaveTimer = undefined;
    } else if (this.drainReceived) {
      this.outbox.close();
    } else {
      this.leaveTimer ??= setTimeout(() => {
        this.outbox.close();
        this.leaveTimer = setTimeout(() => this.stream.giveUp("the bus does not end the stream"), LEAVE_MS);
      }, LEAVE_MS);
    }
  }

  /** Lets the outbox drop further items, after the end of the stream. */
  end(): void {
    this.outbox.close();
    clearTimeout(this.leaveTimer);
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
