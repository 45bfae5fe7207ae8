package dev.toolbus;

import static dev.toolbus.pb.CallStage.*;
import static dev.toolbus.pb.ErrorCode.*;

import com.google.protobuf.CodedOutputStream;
import com.google.protobuf.MessageLite;
import dev.toolbus.pb.*;
import io.grpc.ClientCall;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.*;

/**
 * Holds the state of one stream: its outbox, both tables of calls, its limits, its end. A new stream begins with a new
 * link, so that nothing of an old one can reach it.
 */
final class Link {
    private static final int MESSAGE_ITEMS = 128;
    private static final int MESSAGE_BYTES = 1024 * 1024;
    private static final int MARGIN = 1024; // bytes of a message that its one item must leave free
    private static final long HOLD_MILLIS = 1; // that the results of calls of one message may wait for each other
    private static final double LEAVE = 2; // seconds for the bus to end the stream after our drain, and again after our half-close
    private static final double ATTACH = 10; // seconds for connecting, and for the answer to the attach
    private static final int MISSED_HEARTBEATS = 4; // after so many intervals without a message the bus counts as lost
    private static final long TICK_MILLIS = 500; // between two looks at the clock; later by as much means a standstill
    private static final long LEAVING_TICK_MILLIS = 50;
    private static final int ALL_SLOTS = 1 << 20; // more than calls can wait for: at the end, all go on

    /** What a call has in place of a result where the bus has not read it, or will not begin it. */
    static final ToolResult UNREAD = broken(CALL_STAGE_NOT_DISPATCHED);

    /** A call of our own that the bus has not answered. */
    static final class Pending extends CompletableFuture<ToolResult> {
        private final String id;
        private final ToolScope maker; // null for a call that is not part of another
        private final Consumer<ToolProgress> onProgress;
        private boolean accepted; // whether progress has shown that a plugin works on it
        private boolean givenUp;

        private Pending(String id, ToolScope maker, Consumer<ToolProgress> onProgress) {
            this.id = id;
            this.maker = maker;
            this.onProgress = onProgress;
        }
    }

    final Semaphore slots = new Semaphore(0); // of calls in flight; none before the bus has accepted us
    private final Runnable wake; // tells the peer that there is something to look at
    private ClientCall<InvokeRequest, InvokeResponse> stream;
    private final ArrayDeque<InvokeRequest.Builder> messages = new ArrayDeque<>(); // to write; the last one is filled
    private int items; // of the last one
    private int bytes; // of the last one
    private boolean scheduled; // whether a flush will come
    private boolean writing; // whether a thread writes now
    private boolean holding; // whether what waits, all of it results, waits for others
    private ScheduledFuture<?> release; // ends that; null before the first time
    private boolean halfClosed;
    private boolean closed; // whether further items are dropped
    private final Map<String, ToolScope> running = new HashMap<>(); // by the bus's id
    private final Map<String, Pending> pending = new HashMap<>(); // by our id
    private final AtomicLong ids = new AtomicLong();
    private volatile Limits limits; // those of the bus, or the defaults
    private boolean drainReceived;
    private boolean drainSent;
    private long idleSince; // since when a leaving peer owes nothing; 0 otherwise
    private double heartbeat = 10; // seconds
    private long heard = System.nanoTime(); // the start of the stream, or the bus's last message
    // After a standstill of this process, the bus may have ended the calls that are read next: they are held until the bus
    // has echoed a heartbeat, which it does after everything that it has sent before.
    private final List<ToolCall> held = new ArrayList<>();
    private boolean waits;
    private boolean echoes;
    private long sequence; // of our newest heartbeat
    private long due = System.nanoTime() + 2 * TICK_MILLIS * 1_000_000; // when the clock is looked at next, at the latest
    private long wallDue = System.currentTimeMillis() + 2 * TICK_MILLIS; // the same by the clock that runs on in a suspended machine
    volatile long attached; // when the bus accepted us; 0 before
    // Of the peer, under its lock:
    long version; // the version of the tools in the newest attach
    List<List<Tool>> pages = List.of(); // tools of that attach that did not fit into it
    final ArrayDeque<Long> declared = new ArrayDeque<>(); // the versions in attaches that the bus has not answered
    volatile BusException end; // how the stream ended, or why this side gives it up

    Link(int maxInFlight, Runnable wake) {
        this.wake = wake;
        limits = Limits.newBuilder().setMessageBytes(16 << 20).setCallsInFlight(maxInFlight == 0 ? 256 : maxInFlight)
                .setArgumentsBytes(1 << 20).setResultBytes(4 << 20).build();
    }

    void stream(ClientCall<InvokeRequest, InvokeResponse> stream) {
        synchronized (this) {
            this.stream = stream;
            stream.request(2); // messages: the next one comes while one is handled
        }
        flush();
    }

    synchronized void readOn() {
        stream.request(1);
    }

    /** Ends the stream from this side; without effect on one that the bus has ended. */
    synchronized void giveUpStream(String why) {
        stream.cancel(why, null);
    }

    /** Takes the bus's first answer, and with it the limits; what is unset has its default. */
    synchronized void open(Attached answer) {
        limits = limits.toBuilder().mergeFrom(answer.getLimits()).build();
        heartbeat = answer.getHeartbeatSeconds() > 0 ? answer.getHeartbeatSeconds() : heartbeat;
        echoes = answer.getEchoes();
        slots.release(limits.getCallsInFlight());
        attached = System.nanoTime();
    }

    synchronized boolean leaving() {
        return drainSent || drainReceived;
    }

    synchronized boolean drained() {
        return drainReceived;
    }

    // -- the outbox --------------------------------------------------------------------------------------------------

    /** Sends an item of which a message can have one. */
    <T extends MessageLite> void put(T item, BiFunction<InvokeRequest.Builder, T, ?> into) {
        synchronized (this) {
            items = MESSAGE_ITEMS; // so that it begins a message
            add(item, into, false);
        }
        flush();
    }

    /**
     * Adds an item to the newest message or another one; drops it if the stream is over. With {@code hold} it may wait a
     * moment for others, which follow. The caller flushes.
     */
    private <T extends MessageLite> void add(T item, BiFunction<InvokeRequest.Builder, T, ?> into, boolean hold) {
        if (closed) {
            return;
        }
        int size = item.getSerializedSize();
        size += 1 + CodedOutputStream.computeUInt32SizeNoTag(size);
        boolean first = messages.isEmpty();
        if (first || items == MESSAGE_ITEMS || bytes + size > MESSAGE_BYTES) {
            messages.add(InvokeRequest.newBuilder());
            items = 0;
            bytes = 0;
        }
        into.apply(messages.getLast(), item);
        items++;
        bytes += size;
        if (!hold || !first && !holding) {
            if (holding) {
                release.cancel(false); // it would come in the middle of the next hold
            }
            holding = false;
        } else if (!holding) {
            holding = true;
            release = Wire.STREAMS.schedule(this::release, HOLD_MILLIS, TimeUnit.MILLISECONDS);
        }
    }

    private void release() {
        synchronized (this) {
            holding = false;
        }
        flush();
    }

    /** Has what waits written, with what comes meanwhile. */
    private void flushSoon() {
        if (!scheduled) {
            scheduled = true;
            Wire.STREAMS.execute(this::flush);
        }
    }

    /** Writes what waits, as far as the stream takes it; without effect while another thread does. */
    void flush() {
        synchronized (this) {
            scheduled = false;
            if (writing) {
                return;
            }
            writing = true;
        }
        for (InvokeRequest message = next(); message != null; message = next()) {
            try {
                stream.sendMessage(message);
            } catch (IllegalStateException canceled) {
                return; // this side has given the stream up meanwhile
            }
        }
    }

    /** Returns what is to be written now; null for nothing. */
    private synchronized InvokeRequest next() {
        boolean open = stream != null && end == null && !halfClosed && !holding;
        if (open && closed && messages.isEmpty()) {
            halfClosed = true;
            stream.halfClose();
        }
        writing = open && !messages.isEmpty() && stream.isReady(); // else it says when it is
        return writing ? messages.remove().build() : null;
    }

    // -- calls that we answer ------------------------------------------------------------------------------------------

    /** Returns the calls of a message that begin now, not those that are held. */
    synchronized List<ToolCall> takeCalls(List<ToolCall> calls) {
        if (waits) {
            held.addAll(calls);
            return List.of();
        }
        return calls;
    }

    /** Notes a call that is about to be answered; returns whether it is to begin. */
    synchronized boolean start(ToolScope scope) {
        if (!closed) {
            running.put(scope.id(), scope);
        }
        return !closed;
    }

    /** Sends progress of a call, unless the call is over; returns why the bus cannot carry it, or null. */
    String report(ToolProgress progress) {
        long limit = Math.min(largestItem(), limits.getResultBytes());
        if (progress.getSerializedSize() > limit) {
            return "progress is left out: it has " + progress.getSerializedSize() + " bytes, at most " + limit;
        }
        synchronized (this) {
            if (running.containsKey(progress.getCallId())) {
                add(progress, InvokeRequest.Builder::addProgress, false);
                flushSoon();
            }
        }
        return null;
    }

    /** Sends the result of a call, once; it may wait a moment for the other results of its message. */
    void answer(ToolScope scope, ToolResult result) {
        ToolResult message = checked(result.toBuilder().setCallId(scope.id()).build()); // not under the lock: it may be large
        synchronized (this) {
            if (!running.remove(scope.id(), scope)) {
                return;
            }
            scope.children.forEach(this::abandon);
            add(message, InvokeRequest.Builder::addResults, scope.together.decrementAndGet() > 0);
            settle();
        }
        flush();
        scope.over.complete(null); // may run code of the handler: not under the lock
    }

    /** Stops a call and answers it. An unknown id is ignored. */
    void cancel(String id) {
        ToolScope scope;
        synchronized (this) {
            scope = running.get(id);
            if (scope == null && held.removeIf(call -> call.getCallId().equals(id))) {
                ToolResult result = new CallException(ERROR_CODE_CANCELLED, CALL_STAGE_NOT_DISPATCHED,
                        "the call was cancelled before it began").result();
                add(result.toBuilder().setCallId(id).build(), InvokeRequest.Builder::addResults, false);
            }
        }
        if (scope == null) {
            flush();
        } else {
            answer(scope, new CallException(ERROR_CODE_CANCELLED, CALL_STAGE_ACCEPTED, "the call was cancelled").result());
            scope.stop();
        }
    }

    /** Returns the result, or a failure in place of one that breaks a limit and so would end the stream. */
    private ToolResult checked(ToolResult result) {
        long limit = limits.getResultBytes();
        if (result.getSerializedSize() <= Math.min(limit, largestItem())) {
            return result;
        }
        long size = bytesOf(result.getOutputJson()) + bytesOf(result.getInputRequestsJson()) + bytesOf(result.getRequestState())
                + result.getContentList().stream().mapToLong(ContentBlock::getSerializedSize).sum();
        if (size <= limit && result.getSerializedSize() <= largestItem()) {
            return result;
        }
        return new CallException(ERROR_CODE_RESULT_TOO_LARGE, CALL_STAGE_ACCEPTED, "the result has " + size
                + " bytes, more than the limit result_bytes = " + limit + ": ask for less").limit("result_bytes", limit)
                .result().toBuilder().setCallId(result.getCallId()).build();
    }

    /** Returns how long a text is in UTF-8. */
    private static int bytesOf(String text) {
        return com.google.protobuf.ByteString.copyFromUtf8(text).size();
    }

    private int largestItem() {
        return limits.getMessageBytes() - MARGIN;
    }

    // -- calls of our own ----------------------------------------------------------------------------------------------

    /** Sends a call, which has a slot; throws why it would break a limit of the bus. */
    Pending send(ToolCall.Builder call, ToolScope maker, Consumer<ToolProgress> onProgress) {
        Pending made = new Pending("c" + ids.incrementAndGet(), maker, onProgress);
        ToolCall message = call.setCallId(made.id).build();
        try {
            if (message.getSerializedSize() > Math.min(limits.getArgumentsBytes(), largestItem())) {
                check("arguments_bytes", bytesOf(message.getArgumentsJson()), limits.getArgumentsBytes());
                check("message_bytes", message.getSerializedSize(), largestItem());
            }
            synchronized (this) {
                if (maker != null && running.get(maker.id()) != maker) {
                    throw Call.over(maker, CALL_STAGE_NOT_DISPATCHED);
                }
                if (closed) {
                    made.complete(UNREAD);
                    return made;
                }
                pending.put(made.id, made);
                if (maker != null) {
                    maker.children.add(made);
                }
                add(message, InvokeRequest.Builder::addCalls, false);
                flushSoon();
            }
        } catch (CallException refusal) {
            slots.release();
            throw refusal;
        }
        return made;
    }

    private static void check(String name, int bytes, int limit) {
        if (bytes > limit) {
            throw new CallException(ERROR_CODE_INVALID_ARGUMENTS, CALL_STAGE_NOT_DISPATCHED, "the call has " + bytes
                    + " bytes, more than the limit " + name + " = " + limit + ": send less").limit(name, limit);
        }
    }

    /**
     * Cancels a call whose maker has given it up; returns whether a plugin works on it. It counts as in flight until the
     * bus has answered.
     */
    synchronized boolean giveUp(Pending made, String reason) {
        if (pending.get(made.id) == made && !made.givenUp) {
            made.givenUp = true;
            ToolCancel cancel = ToolCancel.newBuilder().setCallId(made.id).setReason(reason).build();
            add(cancel, InvokeRequest.Builder::addCancels, false);
            flushSoon();
        }
        return made.accepted;
    }

    /** Gives up a call with what made it: a call that has ended, or a host that leaves. */
    private void abandon(Pending made) {
        giveUp(made, "cancelled");
        made.complete(Call.over(made.maker, CALL_STAGE_UNKNOWN).result());
    }

    /** Gives up all calls of our own. */
    synchronized void abandonAll() {
        List.copyOf(pending.values()).forEach(this::abandon);
    }

    /** Takes progress of a call of ours; returns who is told, or null. */
    synchronized Consumer<ToolProgress> progressed(ToolProgress progress) {
        Pending made = pending.get(progress.getCallId());
        if (made == null) {
            return null;
        }
        made.accepted = true;
        return made.givenUp ? null : made.onProgress;
    }

    /** Takes the result of a call of ours. */
    void answered(ToolResult result) {
        Pending made;
        synchronized (this) {
            made = pending.remove(result.getCallId());
            if (made != null && made.maker != null) {
                made.maker.children.remove(made);
            }
        }
        if (made != null) {
            slots.release();
            made.complete(result);
        }
    }

    private static ToolResult broken(CallStage stage) {
        return new CallException(ERROR_CODE_UNAVAILABLE, stage, "the connection to the bus broke").result();
    }

    // -- standstills, silence and the end ------------------------------------------------------------------------------

    /** Looks at the clocks and at what is due; returns why the stream is to be given up, or null. */
    String look() {
        double idle;
        synchronized (this) {
            lookAtClocks();
            double silence = attached == 0 ? ATTACH : MISSED_HEARTBEATS * heartbeat;
            if (seconds(heard) > silence) {
                return "the bus has sent nothing for " + silence + " s";
            }
            idle = idleSince == 0 ? 0 : seconds(idleSince);
            closed = closed || idle > LEAVE;
        }
        flush();
        return idle > 2 * LEAVE ? "the bus does not end the stream" : null;
    }

    synchronized long tickMillis() {
        return idleSince == 0 ? TICK_MILLIS : LEAVING_TICK_MILLIS;
    }

    /** Notes that a message came. */
    synchronized void hear() {
        lookAtClocks();
        heard = System.nanoTime();
    }

    private void lookAtClocks() {
        long now = System.nanoTime();
        long wall = System.currentTimeMillis();
        if (now - due > 0 || wall > wallDue) {
            heard = now; // what came meanwhile waits in the socket
            if (echoes) {
                waits = true;
                put(Heartbeat.newBuilder().setSequence(++sequence).setFromPeer(true).build(), InvokeRequest.Builder::setHeartbeat);
            }
        }
        due = now + 2 * TICK_MILLIS * 1_000_000;
        wallDue = wall + 2 * TICK_MILLIS;
    }

    /** Takes the echo of a heartbeat of ours; returns the calls that may begin now. */
    synchronized List<ToolCall> echoed(long number) {
        if (number != sequence) {
            return List.of();
        }
        waits = false;
        List<ToolCall> calls = List.copyOf(held);
        held.clear();
        return calls;
    }

    synchronized void drainReceived() {
        drainReceived = true;
    }

    /** Sends the bus a drain, once. */
    synchronized void drain(String reason) {
        if (!drainSent) {
            put(Drain.newBuilder().setReason(reason).build(), InvokeRequest.Builder::setDrain);
            drainSent = true;
            whenIdle();
        }
    }

    /** Takes the next step towards the end of the stream; called after each message. */
    void whenIdle() {
        settle();
        flush();
    }

    /**
     * Takes the next step towards the end of the stream; the caller flushes.
     *
     * <p>After our own drain the bus ends the stream: it may have sent a call before it read the drain.
     */
    private synchronized void settle() {
        boolean idle = running.isEmpty() && pending.isEmpty() && held.isEmpty();
        if (!drainSent && !drainReceived || !idle) {
            idleSince = 0;
        } else if (drainReceived) {
            closed = true; // what waits is written, and then a half-close
            holding = false;
        } else if (idleSince == 0) {
            idleSince = System.nanoTime();
            Wire.STREAMS.execute(wake); // without the lock of this link, which comes after the peer's
        }
    }

    /** Ends everything, after the end of the stream: handlers are stopped, since nobody waits for their results. */
    void end(boolean allRead) {
        List<ToolScope> stopped;
        synchronized (this) {
            closed = true;
            held.clear();
            stopped = List.copyOf(running.values());
            stopped.forEach(scope -> scope.children.forEach(this::abandon));
            running.clear();
            Set<String> unwritten = new HashSet<>();
            messages.forEach(message -> message.getCallsList().forEach(call -> unwritten.add(call.getCallId())));
            messages.clear();
            pending.values().forEach(made -> made.complete(allRead || unwritten.contains(made.id) ? UNREAD
                    : broken(made.accepted ? CALL_STAGE_ACCEPTED : CALL_STAGE_UNKNOWN)));
            pending.clear();
            slots.release(ALL_SLOTS);
        }
        for (ToolScope scope : stopped) {
            scope.over.complete(null); // may run code of the handler: not under the lock
            scope.stop();
        }
    }

    static double seconds(long since) {
        return (System.nanoTime() - since) / 1e9;
    }
}
