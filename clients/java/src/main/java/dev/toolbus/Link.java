package dev.toolbus;

import com.google.protobuf.CodedOutputStream;
import com.google.protobuf.MessageLite;
import dev.toolbus.pb.Attach;
import dev.toolbus.pb.Attached;
import dev.toolbus.pb.CallStage;
import dev.toolbus.pb.ContentBlock;
import dev.toolbus.pb.Drain;
import dev.toolbus.pb.ErrorCode;
import dev.toolbus.pb.Heartbeat;
import dev.toolbus.pb.InvokeRequest;
import dev.toolbus.pb.InvokeResponse;
import dev.toolbus.pb.Limits;
import dev.toolbus.pb.Tool;
import dev.toolbus.pb.ToolCall;
import dev.toolbus.pb.ToolCancel;
import dev.toolbus.pb.ToolProgress;
import dev.toolbus.pb.ToolResult;
import io.grpc.ClientCall;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Consumer;
import java.util.function.Supplier;

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

    /** How a call of our own ended on this stream: with its result, with the stream, or with what made it. */
    record Outcome(ToolResult result, boolean over, boolean unread, boolean accepted) {}

    /** A call of our own that the bus has not answered. */
    static final class Pending {
        final String id;
        final CompletableFuture<Outcome> outcome = new CompletableFuture<>();
        private final Consumer<ToolProgress> onProgress;
        private boolean accepted; // whether progress has shown that a plugin works on it
        private boolean givenUp;

        private Pending(String id, Consumer<ToolProgress> onProgress) {
            this.id = id;
            this.onProgress = onProgress;
        }
    }

    /** A call that we answer. */
    private static final class Run {
        final CompletableFuture<Void> over;
        final AtomicInteger together; // how many calls of its message have no result yet
        final List<String> children = new ArrayList<>(); // the calls of our own that it has made
        Future<?> task;

        Run(CompletableFuture<Void> over, AtomicInteger together) {
            this.over = over;
            this.together = together;
        }
    }

    final Semaphore slots = new Semaphore(0); // of calls in flight; none before the bus has accepted us
    private final Runnable wake; // tells the peer that there is something to look at
    private ClientCall<InvokeRequest, InvokeResponse> stream;
    private final ArrayDeque<MessageLite> items = new ArrayDeque<>();
    private boolean scheduled; // whether a flush will come
    private boolean holding; // whether the items, all of them results, wait for others
    private ScheduledFuture<?> release; // ends that; null before the first time
    private boolean halfClosed;
    private boolean closed; // whether further items are dropped
    private final Map<String, Run> running = new HashMap<>(); // by the bus's id
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

    synchronized void stream(ClientCall<InvokeRequest, InvokeResponse> stream) {
        this.stream = stream;
        stream.request(2); // messages: the next one comes while one is handled
        schedule();
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
        Limits given = answer.getLimits();
        Limits.Builder all = limits.toBuilder();
        if (given.getMessageBytes() != 0) {
            all.setMessageBytes(given.getMessageBytes());
        }
        if (given.getCallsInFlight() != 0) {
            all.setCallsInFlight(given.getCallsInFlight());
        }
        if (given.getArgumentsBytes() != 0) {
            all.setArgumentsBytes(given.getArgumentsBytes());
        }
        if (given.getResultBytes() != 0) {
            all.setResultBytes(given.getResultBytes());
        }
        limits = all.build();
        heartbeat = answer.getHeartbeatSeconds() > 0 ? answer.getHeartbeatSeconds() : heartbeat;
        echoes = answer.getEchoes();
        slots.release(limits.getCallsInFlight());
    }

    synchronized boolean leaving() {
        return drainSent || drainReceived;
    }

    synchronized boolean drained() {
        return drainReceived;
    }

    // -- the outbox --------------------------------------------------------------------------------------------------

    synchronized void put(MessageLite item) {
        add(item, false);
    }

    /** Adds an item; drops it if the stream is over. With {@code hold} it may wait a moment for others, which follow. */
    private void add(MessageLite item, boolean hold) {
        if (closed) {
            return;
        }
        boolean first = items.isEmpty();
        items.add(item);
        if (hold && (first || holding)) {
            if (!holding) {
                holding = true;
                release = Wire.STREAMS.schedule(this::release, HOLD_MILLIS, TimeUnit.MILLISECONDS);
            }
        } else {
            if (holding) {
                holding = false;
                release.cancel(false); // it would come in the middle of the next hold
            }
            schedule();
        }
    }

    private void schedule() {
        if (!scheduled) {
            scheduled = true;
            Wire.STREAMS.execute(this::flush);
        }
    }

    private void release() {
        synchronized (this) {
            holding = false;
        }
        flush();
    }

    /** Writes what waits, as far as the stream takes it; on the thread of streams alone. */
    void flush() {
        while (true) {
            InvokeRequest message;
            synchronized (this) {
                scheduled = false;
                if (stream == null || halfClosed || end != null || holding) {
                    return;
                }
                if (items.isEmpty()) {
                    if (closed) {
                        halfClosed = true;
                        stream.halfClose();
                    }
                    return;
                }
                if (!stream.isReady()) {
                    return; // it says when it is
                }
                message = take();
            }
            stream.sendMessage(message);
        }
    }

    private InvokeRequest take() {
        InvokeRequest.Builder message = InvokeRequest.newBuilder();
        int bytes = 0;
        for (int count = 0; count < MESSAGE_ITEMS && !items.isEmpty(); count++) {
            MessageLite item = items.peek();
            int size = item.getSerializedSize();
            bytes += size + 1 + CodedOutputStream.computeUInt32SizeNoTag(size);
            if (count > 0 && bytes > MESSAGE_BYTES || !join(message, item)) {
                break;
            }
            items.remove();
        }
        return message.build();
    }

    /** Puts an item into a message; returns whether it did, since it can have only one of some. */
    private static boolean join(InvokeRequest.Builder message, MessageLite item) {
        if (item instanceof ToolResult result) {
            message.addResults(result);
        } else if (item instanceof ToolCall call) {
            message.addCalls(call);
        } else if (item instanceof ToolProgress progress) {
            message.addProgress(progress);
        } else if (item instanceof ToolCancel cancel) {
            message.addCancels(cancel);
        } else if (item instanceof Attach attach && !message.hasAttach()) {
            message.setAttach(attach);
        } else if (item instanceof Heartbeat heartbeat && !message.hasHeartbeat()) {
            message.setHeartbeat(heartbeat);
        } else if (item instanceof Drain drain && !message.hasDrain()) {
            message.setDrain(drain);
        } else {
            return false;
        }
        return true;
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

    /** Starts the task of a call; returns whether it did. */
    synchronized void start(String id, CompletableFuture<Void> over, AtomicInteger together, Supplier<Future<?>> begin) {
        if (!closed) {
            Run run = new Run(over, together);
            running.put(id, run);
            run.task = begin.get();
        }
    }

    /** Sends progress of a call, unless the call is over; returns why the bus cannot carry it, or null. */
    String report(ToolProgress progress) {
        long limit = Math.min(largestItem(), limits.getResultBytes());
        if (progress.getSerializedSize() > limit) {
            return "progress is left out: it has " + progress.getSerializedSize() + " bytes, at most " + limit;
        }
        synchronized (this) {
            if (running.containsKey(progress.getCallId())) {
                add(progress, false);
            }
        }
        return null;
    }

    /** Sends the result of a call, once; it may wait a moment for the other results of its message. */
    void answer(String id, ToolResult result) {
        ToolResult message = checked(result.toBuilder().setCallId(id).build()); // not under the lock: it may be large
        Run run;
        synchronized (this) {
            run = running.remove(id);
            if (run == null) {
                return;
            }
            run.children.forEach(this::abandon);
            boolean last = run.together.decrementAndGet() == 0;
            add(message, !last);
            settle();
        }
        run.over.complete(null); // may run code of the handler: not under the lock
    }

    /** Stops a call and answers it. An unknown id is ignored. */
    void cancel(String id) {
        Run run;
        synchronized (this) {
            run = running.get(id);
            if (run == null && held.removeIf(call -> call.getCallId().equals(id))) {
                ToolResult result = new CallException(ErrorCode.ERROR_CODE_CANCELLED, CallStage.CALL_STAGE_NOT_DISPATCHED,
                        "the call was cancelled before it began").result();
                add(result.toBuilder().setCallId(id).build(), false);
            }
        }
        if (run != null) {
            answer(id, new CallException(ErrorCode.ERROR_CODE_CANCELLED, CallStage.CALL_STAGE_ACCEPTED,
                    "the call was cancelled").result());
            stop(run);
        }
    }

    private static void stop(Run run) {
        if (run.task != null) {
            run.task.cancel(true);
        }
    }

    /** Returns the result, or a failure in place of one that breaks a limit and so would end the stream. */
    private ToolResult checked(ToolResult result) {
        if (result.getSerializedSize() <= Math.min(limits.getResultBytes(), largestItem())) {
            return result;
        }
        long bytes = bytesOf(result.getOutputJson()) + bytesOf(result.getInputRequestsJson()) + bytesOf(result.getRequestState());
        for (ContentBlock part : result.getContentList()) {
            bytes += part.getSerializedSize();
        }
        long limit = limits.getResultBytes();
        if (bytes <= limit && result.getSerializedSize() <= largestItem()) {
            return result;
        }
        return new CallException(ErrorCode.ERROR_CODE_RESULT_TOO_LARGE, CallStage.CALL_STAGE_ACCEPTED, "the result has " + bytes
                + " bytes, more than the limit result_bytes = " + limit + ": ask for less").limit("result_bytes", limit)
                .result().toBuilder().setCallId(result.getCallId()).build();
    }

    /** Returns how long a text is in UTF-8. */
    private static int bytesOf(String text) {
        int size = CodedOutputStream.computeStringSizeNoTag(text); // with the length of its length
        int prefix = 1;
        while (CodedOutputStream.computeUInt32SizeNoTag(size - prefix) > prefix) {
            prefix++;
        }
        return size - prefix;
    }

    private int largestItem() {
        return limits.getMessageBytes() - MARGIN;
    }

    // -- calls of our own ----------------------------------------------------------------------------------------------

    /** Sends a call, which has a slot; throws why it would break a limit of the bus. */
    Pending send(ToolCall.Builder call, Consumer<ToolProgress> onProgress) {
        ToolCall message = call.setCallId("c" + ids.incrementAndGet()).build();
        check("arguments_bytes", bytesOf(message.getArgumentsJson()), limits.getArgumentsBytes());
        check("message_bytes", message.getSerializedSize(), largestItem());
        Pending made = new Pending(message.getCallId(), onProgress);
        synchronized (this) {
            Run maker = running.get(message.getParentCallId());
            if (!message.getParentCallId().isEmpty() && maker == null) {
                slots.release();
                throw new CallException(ErrorCode.ERROR_CODE_CANCELLED, CallStage.CALL_STAGE_NOT_DISPATCHED,
                        "the call that made this one has ended");
            }
            if (closed) {
                made.outcome.complete(new Outcome(null, false, true, false));
                return made;
            }
            pending.put(made.id, made);
            if (maker != null) {
                maker.children.add(made.id);
            }
            add(message, false);
        }
        return made;
    }

    private void check(String name, int bytes, int limit) {
        if (bytes > limit) {
            slots.release();
            throw new CallException(ErrorCode.ERROR_CODE_INVALID_ARGUMENTS, CallStage.CALL_STAGE_NOT_DISPATCHED, "the call has "
                    + bytes + " bytes, more than the limit " + name + " = " + limit + ": send less").limit(name, limit);
        }
    }

    /**
     * Cancels a call whose maker has given it up; returns whether a plugin works on it. It counts as in flight until the
     * bus has answered.
     */
    synchronized boolean giveUp(String id, String reason) {
        Pending made = pending.get(id);
        if (made == null) {
            return false;
        }
        if (!made.givenUp) {
            made.givenUp = true;
            add(ToolCancel.newBuilder().setCallId(id).setReason(reason).build(), false);
        }
        return made.accepted;
    }

    private void abandon(String id) {
        Pending made = pending.get(id);
        if (made != null) {
            giveUp(id, "cancelled");
            made.outcome.complete(new Outcome(null, true, false, made.accepted));
        }
    }

    /** Gives up all calls of our own. */
    synchronized void abandonAll() {
        List.copyOf(pending.keySet()).forEach(this::abandon);
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
    synchronized void answered(ToolResult result) {
        Pending made = pending.remove(result.getCallId());
        if (made != null) {
            slots.release();
            made.outcome.complete(new Outcome(result, false, false, true));
        }
    }

    // -- standstills, silence and the end ------------------------------------------------------------------------------

    /** Looks at the clocks and at what is due; returns why the stream is to be given up, or null. */
    synchronized String look(boolean attached) {
        lookAtClocks();
        double silence = attached ? MISSED_HEARTBEATS * heartbeat : ATTACH;
        if (seconds(heard) > silence) {
            return "the bus has sent nothing for " + silence + " s";
        }
        double idle = idleSince == 0 ? 0 : seconds(idleSince);
        if (idle > LEAVE) {
            close();
        }
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
                add(Heartbeat.newBuilder().setSequence(++sequence).setFromPeer(true).build(), false);
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
            add(Drain.newBuilder().setReason(reason).build(), false);
            drainSent = true;
            settle();
        }
    }

    /**
     * Takes the next step towards the end of the stream; called after each message and each end of a call.
     *
     * <p>After our own drain the bus ends the stream: it may have sent a call before it read the drain.
     */
    synchronized void settle() {
        boolean idle = running.isEmpty() && pending.isEmpty() && held.isEmpty();
        if (!drainSent && !drainReceived || !idle) {
            idleSince = 0;
        } else if (drainReceived) {
            close();
        } else if (idleSince == 0) {
            idleSince = System.nanoTime();
            Wire.STREAMS.execute(wake); // without the lock of this link, which comes after the peer's
        }
    }

    /** Has what waits written, and then a half-close. */
    private void close() {
        closed = true;
        holding = false;
        schedule();
    }

    /** Ends everything, after the end of the stream: handlers are stopped, since nobody waits for their results. */
    synchronized void end(boolean allRead) {
        closed = true;
        held.clear();
        for (Run run : running.values()) {
            run.children.forEach(this::abandon);
            Wire.STREAMS.execute(() -> run.over.complete(null)); // may run code of the handler: not under the lock
            stop(run);
        }
        running.clear();
        List<String> unwritten = new ArrayList<>();
        items.forEach(item -> {
            if (item instanceof ToolCall call) {
                unwritten.add(call.getCallId());
            }
        });
        items.clear();
        pending.values().forEach(made -> made.outcome.complete(
                new Outcome(null, false, allRead || unwritten.contains(made.id), made.accepted)));
        pending.clear();
        slots.release(ALL_SLOTS);
    }

    static double seconds(long since) {
        return (System.nanoTime() - since) / 1e9;
    }
}
