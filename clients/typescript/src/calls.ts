/**
 * Makes the calls of this peer, its own and the nested ones of its handlers: each ends in exactly one result.
 *
 * A call waits here for a stream and for room on it, and is sent again where that is safe, until its deadline. Once it is
 * with the bus, the bus measures its time; a second later it ends here, in case the bus hangs.
 */
import type { MessageInitShape } from "@bufbuild/protobuf";

import { retryPause } from "./again.js";
import { ErrorCode, CallStage, ToolCallSchema, type ToolProgress, type ToolResult } from "./gen/toolbus/v1/tool_pb.js";
import { encode, type Link } from "./link.js";
import { failure } from "./shapes.js";
import { SetupError } from "./values.js";

const DEFAULT_MS = 30_000; // the time of a call that names none
const MAX_MS = 300_000; // the longest of any call
const SLACK_MS = 1000; // that the bus's answer may be late
const LATE_MS = 500; // a timer later than this shows that the process stood still
const PROMPT_MS = 5; // a call that is sent within this time states the caller's own timeout
const MAX_TIMER_MS = 2 ** 31 - 1; // of Node

/** The fields of a call that its maker states. */
export type CallFields = MessageInitShape<typeof ToolCallSchema> & { name: string; argumentsJson: string };

/** Where a call goes, and what its maker wants to hear. */
export interface Route {
  /** The stream of the call that this one is part of. */
  readonly parent?: Link;
  /** Never throws. */
  readonly onProgress?: ((progress: ToolProgress) => void) | undefined;
  /** Gives up the call. */
  readonly signal?: AbortSignal | undefined;
}

/** A call of this peer until it has its result. */
export class Ask {
  readonly started = performance.now();
  readonly deadline: number; // until when it waits for a stream, for room, and between attempts
  readonly lastMoment: number; // when it ends even if the bus has not answered
  id = ""; // of the newest attempt
  sentOn: Link | null = null; // the stream on which it is; null while it waits
  accepted = false; // whether progress has shown that a plugin works on it
  refusal: ToolResult | null = null; // the newest of the bus; null before the first
  attempts = 0;
  over = false; // whether its maker has its result, or has given it up
  private timer: NodeJS.Timeout | undefined; // for its deadline, then for its last moment, or for a pause

  constructor(readonly fields: CallFields, readonly route: Route, private readonly resolve: (result: ToolResult) => void) {
    const named = ((fields.backgroundAfterSeconds || fields.timeoutSeconds) ?? 0) * 1000;
    this.deadline = this.started + (named || DEFAULT_MS);
    this.lastMoment = this.started + Math.min(named || MAX_MS, MAX_MS) + SLACK_MS;
  }

  after(ms: number, next: () => void): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(next, Math.min(Math.max(0, ms), MAX_TIMER_MS));
  }

  /** Has its timer do nothing any more. */
  finish(): void {
    this.over = true;
    clearTimeout(this.timer);
  }

  end(result: ToolResult): void {
    if (this.over) return;
    this.finish();
    this.resolve(result);
  }

  fail(code: ErrorCode, stage: CallStage, text: string, more: Parameters<typeof failure>[3] = {}): void {
    this.end(failure(code, this.accepted ? CallStage.ACCEPTED : stage, text, more));
  }
}

/** All calls of one peer, on whatever stream it has. */
export class Calls {
  /** Why calls are not sent any more; empty while they are. */
  closed = "";
  private link: Link | null = null; // the stream that takes calls; null without one
  private waiting = new Set<Ask>(); // for a stream or for room, oldest first; nested ones wait at their link
  private unfinished = new Set<Ask>();

  /** How many calls have no result yet. */
  get size(): number { return this.unfinished.size; }

  /**
   * Makes a call. A failure is a result with `error`.
   *
   * @throws the reason of `route.signal`, when it aborts; SetupError for a timeout that is not above 0.
   */
  async call(fields: CallFields, route: Route): Promise<ToolResult> {
    for (const seconds of [fields.timeoutSeconds, fields.backgroundAfterSeconds]) {
      if (seconds !== undefined && !(seconds > 0)) {
        throw new SetupError(`a call's time is ${seconds} s, it must be above 0: leave it out for the tool's own`);
      }
    }
    const { signal } = route;
    signal?.throwIfAborted();
    return new Promise((resolve, reject) => {
      const onAbort = () => {
        this.unfinished.delete(ask);
        this.giveUp(ask, "cancelled");
        reject(signal?.reason as Error);
      };
      const ask = new Ask(fields, route, (result) => {
        this.unfinished.delete(ask);
        signal?.removeEventListener("abort", onAbort);
        resolve(result);
      });
      this.unfinished.add(ask);
      signal?.addEventListener("abort", onAbort, { once: true });
      this.submit(ask);
    });
  }

  // -- for the peer ------------------------------------------------------------------------------------------------

  /** Takes a stream on which the bus has accepted this peer. */
  open(link: Link): void {
    this.link = link;
    this.sendWaiting(link);
  }

  /** Holds new calls from now on, except for nested ones: the stream drains. */
  pause(): void { this.link = null; }

  /** Ends the calls that were not sent, and those that are made later; the first reason stays. */
  close(reason: string): void {
    this.closed ||= reason;
    this.pause();
    for (const ask of this.waiting) this.refuse(ask);
    this.waiting.clear();
  }

  /** Cancels all calls that have no result yet; each ends in CANCELLED. */
  cancelAll(reason: string): void {
    for (const ask of this.unfinished) {
      ask.fail(ErrorCode.CANCELLED, ask.sentOn ? CallStage.DISPATCHED : CallStage.NOT_DISPATCHED, reason);
      this.giveUp(ask, reason);
    }
  }

  progress(items: readonly ToolProgress[], link: Link): void {
    for (const item of items) {
      const ask = link.pending.get(item.callId);
      if (ask === undefined || ask.over) continue;
      ask.accepted = true;
      ask.route.onProgress?.(item);
    }
  }

  results(results: readonly ToolResult[], link: Link): void {
    for (const result of results) {
      const ask = link.pending.get(result.callId);
      if (ask === undefined) continue;
      link.pending.delete(result.callId);
      this.take(ask, result);
    }
    this.sendWaiting(link);
  }

  /**
   * Handles the end of a stream: calls that the bus cannot have read are sent on the next one, the others fail.
   *
   * @param allRead whether the bus answered everything that it read, as it does before a graceful shutdown.
   */
  lost(link: Link, allRead: boolean): void {
    this.pause();
    const unwritten = link.outbox.unwrittenCalls();
    const again = [...link.pending].filter(([id, ask]) => !ask.over && ask.route.parent === undefined && (allRead || unwritten.has(id)));
    for (const [id, ask] of again) {
      ask.sentOn = null;
      link.pending.delete(id);
    }
    for (const [id, ask] of link.pending) broke(ask, allRead || unwritten.has(id));
    for (const ask of link.waiting) broke(ask, true);
    link.pending.clear();
    link.waiting.clear();
    const later = [...this.waiting];
    this.waiting.clear();
    for (const [, ask] of again) {
      if (performance.now() < ask.deadline) this.submit(ask);
      else this.refuse(ask);
    }
    for (const ask of later) this.waiting.add(ask);
  }

  /** Sends waiting calls while there is room, nested ones first. */
  sendWaiting(link: Link): void {
    for (const queue of [link.waiting, this.waiting]) {
      for (const ask of queue) {
        if (!link.hasRoom || (queue === this.waiting && link !== this.link)) return;
        queue.delete(ask);
        this.send(ask, link);
      }
    }
  }

  // -- one attempt -------------------------------------------------------------------------------------------------

  private submit(ask: Ask): void {
    const { parent } = ask.route;
    if (parent?.outbox.closed) return broke(ask, true);
    if (parent === undefined && this.closed) return this.refuse(ask);
    const link = parent ?? this.link;
    const queue = this.queueOf(ask);
    this.watch(ask, ask.deadline);
    if (link !== null && queue.size === 0 && link.hasRoom) this.send(ask, link);
    else queue.add(ask);
  }

  private queueOf({ route }: Ask): Set<Ask> { return route.parent?.waiting ?? this.waiting; }

  /** Sends a call, or refuses one that would end the stream or break a limit of the bus. */
  private send(ask: Ask, link: Link): void {
    const { fields } = ask;
    const waited = performance.now() - ask.started;
    const left = (seconds = 0) => (seconds && waited > PROMPT_MS ? Math.max(0.001, seconds - waited / 1000) : seconds);
    ask.id = link.nextId();
    const bytes = encode(ToolCallSchema, {
      ...fields,
      callId: ask.id,
      timeoutSeconds: left(fields.timeoutSeconds),
      backgroundAfterSeconds: left(fields.backgroundAfterSeconds),
    });
    for (const [name, size, value] of [
      ["arguments_bytes", Buffer.byteLength(fields.argumentsJson), link.argumentsBytes],
      ["message_bytes", bytes.length, link.outbox.largestItem],
    ] as const) {
      const text = `the call has ${size} bytes, more than the limit ${name} = ${value}: send less`;
      if (size > value) return ask.end(failure(ErrorCode.INVALID_ARGUMENTS, CallStage.NOT_DISPATCHED, text, { limit: { name, value } }));
    }
    if (!fields.argumentsJson.isWellFormed() || !fields.name.isWellFormed()) {
      const text = "the name or the arguments hold half of a surrogate pair, which UTF-8 cannot carry: send the whole character";
      return ask.end(failure(ErrorCode.INVALID_ARGUMENTS, CallStage.NOT_DISPATCHED, text));
    }
    link.pending.set(ask.id, ask);
    ask.sentOn = link;
    link.outbox.putBytes("calls", bytes, ask.id);
  }

  /** Takes the result of an attempt: the call is made again where that is safe and there is time. */
  private take(ask: Ask, result: ToolResult): void {
    const { error } = result;
    const pause = error && !ask.over ? retryPause(ErrorCode[error.code], error, ask.attempts) : null;
    if (pause === null || performance.now() + pause >= ask.deadline || this.closed) return ask.end(result);
    ask.attempts += 1;
    ask.refusal = result;
    ask.sentOn = null;
    ask.after(pause, () => this.submit(ask));
  }

  /** Ends a call for its maker, who has given it up. It counts as in flight until the bus has answered. */
  private giveUp(ask: Ask, reason: string): void {
    ask.finish();
    this.queueOf(ask).delete(ask);
    if (ask.sentOn?.pending.get(ask.id) === ask) ask.sentOn.outbox.put("cancels", { callId: ask.id, reason });
    ask.route.parent?.whenIdle();
  }

  private watch(ask: Ask, moment: number): void { ask.after(moment - performance.now(), () => this.expire(ask, moment)); }

  private expire(ask: Ask, moment: number): void {
    const now = performance.now();
    if (now - moment > LATE_MS) {
      this.watch(ask, now + SLACK_MS); // this process stood still: the result may wait in the socket, so read first
    } else if (ask.sentOn === null) {
      this.queueOf(ask).delete(ask);
      this.refuse(ask);
    } else if (now < ask.lastMoment - 1) {
      this.watch(ask, ask.lastMoment);
    } else {
      const value = (ask.lastMoment - SLACK_MS - ask.started) / 1000;
      const text = `the bus gave no answer within ${value} s: it hangs`;
      ask.fail(ErrorCode.DEADLINE_EXCEEDED, CallStage.UNKNOWN, text, { limit: { name: "timeout_seconds", value } });
      this.giveUp(ask, "timeout_seconds");
    }
  }

  /** Ends a call that was not sent: with the last refusal, or because there is no bus. */
  private refuse(ask: Ask): void {
    const retrySafe = !this.closed && ask.route.parent === undefined;
    const text = this.closed || "no bus took the call in time";
    ask.end(ask.refusal ?? failure(ErrorCode.UNAVAILABLE, CallStage.NOT_DISPATCHED, text, { retrySafe }));
  }
}

function broke(ask: Ask, unread: boolean): void {
  ask.fail(ErrorCode.UNAVAILABLE, unread ? CallStage.NOT_DISPATCHED : CallStage.UNKNOWN, "the connection to the bus broke");
}
