package dev.toolbus;

import static dev.toolbus.pb.CallStage.*;
import static dev.toolbus.pb.ErrorCode.*;

import com.google.gson.JsonObject;
import dev.toolbus.pb.*;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.*;
import java.util.function.Consumer;
import java.util.function.Function;

/**
 * A call that is about to be made: {@link #join} makes it and waits, {@link #start} makes it in the background. It ends in
 * exactly one {@link Result}, also where it fails.
 *
 * <p>It waits for a stream and for room on it, and is sent again where that is safe, until its deadline. Once it is with the
 * bus, the bus measures its time; a second later it ends here, in case the bus hangs.
 */
public final class Call {
    private static final double DEFAULT = 30; // seconds of a call that names none
    private static final double MAX = 300; // seconds: the longest of any call
    private static final double SLACK = 1; // seconds that the bus's answer may be late
    private static final double LATE = 0.5; // seconds: a timer later than this shows that the process stood still
    private static final double PROMPT = 0.005; // a call that is sent within this time states the caller's own timeout
    private static final long FIRST_PAUSE_MILLIS = 10; // before a refused call is sent again: the upper end, which doubles
    private static final long MAX_PAUSE_MILLIS = 1000;
    private static final long LOOK_MILLIS = 100; // while there is no room: whether the stream is still the one for calls
    private static final int ROUNDS = 10; // of questions of one call
    private static final Set<ErrorCode> BUSY = Set.of(ERROR_CODE_UNAVAILABLE, ERROR_CODE_OVERLOADED);

    private final Peer peer;
    private final ToolScope parent; // null where it is not part of another call
    private final ToolCall.Builder call = ToolCall.newBuilder();
    private CallException fault;
    private Consumer<ToolProgress> onProgress;
    private Function<AskedQuestion, ?> onInput;

    Call(Peer peer, String name, Object arguments, ToolScope parent) {
        this.peer = peer;
        this.parent = parent;
        call.setName(name);
        try {
            call.setArgumentsJson(Values.arguments(arguments));
        } catch (RuntimeException | StackOverflowError problem) {
            fault = new CallException(ERROR_CODE_INVALID_ARGUMENTS, CALL_STAGE_NOT_DISPATCHED,
                    "JSON cannot hold the arguments: " + problem.getMessage());
        }
    }

    /** Sets fields of the call for which there is no method here. */
    public Call with(Consumer<ToolCall.Builder> set) {
        set.accept(call);
        return this;
    }

    /** States how long to wait, in place of the tool's own timeout. More than 300 s count as 300. */
    public Call timeout(Duration time) {
        call.setTimeoutSeconds(seconds(time));
        return this;
    }

    /** Makes the call a task after so long: the result then has its {@code task_id}. */
    public Call backgroundAfter(Duration time) {
        call.setBackgroundAfterSeconds(seconds(time));
        return this;
    }

    private static double seconds(Duration time) {
        return Math.max(1e-9, time.getSeconds() + time.getNano() / 1e9);
    }

    /** Considers only the tools of a role. */
    public Call role(String role) {
        call.setRole(role);
        return this;
    }

    /** States the user and the conversation, for the tool; a model cannot set them. Only calls of a host have them. */
    public Call context(CallContext context) {
        call.setContext(context);
        return this;
    }

    /** Names the declaration that the caller knows: the call is refused once the tool has changed. */
    public Call schemaHash(String hash) {
        call.setSchemaHash(hash);
        return this;
    }

    /** Takes progress, chunks and content that come before the result. It is called between two messages: be quick. */
    public Call onProgress(Consumer<ToolProgress> onProgress) {
        this.onProgress = onProgress;
        return this;
    }

    /**
     * Answers the questions of the tool, and makes the call again with the answers, 10 times at most. An answer is the
     * fields of the form as a Map or a record, or a whole answer with its {@code action}; null says that no choice was made.
     */
    public Call onInput(Function<AskedQuestion, ?> onInput) {
        this.onInput = onInput;
        call.setContext(call.getContext()).addAccepts("elicitation.form");
        return this;
    }

    /** Makes the call and waits for its result. To interrupt the thread gives the call up, down to its handler. */
    public Result join() {
        try {
            return make();
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            throw new CancellationException("the call was given up: its thread was interrupted");
        }
    }

    /** Makes the call in the background. To cancel the future gives the call up, down to its handler. */
    public CompletableFuture<Result> start() {
        CompletableFuture<Result> future = new CompletableFuture<>();
        Future<?> task = peer.options.calls().submit(() -> {
            try {
                future.complete(make());
            } catch (InterruptedException interrupted) {
                future.cancel(false);
            } catch (Throwable problem) {
                future.completeExceptionally(problem);
            }
        });
        future.whenComplete((result, problem) -> {
            if (problem != null) {
                task.cancel(true);
            }
        });
        return future;
    }

    private Result make() throws InterruptedException {
        ToolCall.Builder next = call.clone();
        for (int round = 0; round < ROUNDS; round++) {
            Result result;
            try {
                result = new Result(attempts(next));
            } catch (CallException problem) {
                result = new Result(problem.result());
            }
            if (onInput == null || !result.asks()) {
                return result;
            }
            JsonObject answers = new JsonObject();
            Values.object(result.message().getInputRequestsJson()).entrySet().forEach(entry -> {
                String method = Values.text(entry.getValue(), "method");
                Object answer = onInput.apply(new AskedQuestion(entry.getKey(), method, Values.object(entry.getValue(), "params")));
                JsonObject fields = Values.object(answer == null ? "{\"action\": \"cancel\"}" : Values.json(answer));
                if (method.equals("elicitation/create") && !fields.has("action")) {
                    JsonObject whole = Values.object("{\"action\": \"accept\"}");
                    whole.add("content", fields);
                    fields = whole;
                }
                answers.add(entry.getKey(), fields);
            });
            next.setInputResponsesJson(answers.toString()).setRequestState(result.message().getRequestState());
        }
        return new Result(new CallException("needs_input", "the tool has asked " + ROUNDS
                + " times, which is the limit of this client").result());
    }

    /** Sends the call until it has a result that is not sent again. */
    private ToolResult attempts(ToolCall.Builder whole) throws InterruptedException {
        if (fault != null) {
            throw fault;
        }
        long started = System.nanoTime();
        double named = whole.getBackgroundAfterSeconds() > 0 ? whole.getBackgroundAfterSeconds() : whole.getTimeoutSeconds();
        long deadline = started + nanos(named > 0 ? Math.min(named, MAX * 1000) : DEFAULT);
        double longest = named > 0 ? Math.min(named, MAX) : MAX;
        ToolResult refusal = null; // the newest of the bus
        for (int attempt = 0;; attempt++) {
            Link link;
            try {
                link = slot(deadline);
            } catch (BusException none) {
                if (refusal != null) {
                    return refusal;
                }
                boolean safe = parent == null && none.code() == io.grpc.Status.Code.DEADLINE_EXCEEDED;
                throw new CallException(ERROR_CODE_UNAVAILABLE, CALL_STAGE_NOT_DISPATCHED, none.text).retrySafe(safe);
            }
            ToolCall.Builder newest = whole.clone();
            double waited = Link.seconds(started);
            if (waited > PROMPT) {
                newest.setTimeoutSeconds(less(newest.getTimeoutSeconds(), waited));
                newest.setBackgroundAfterSeconds(less(newest.getBackgroundAfterSeconds(), waited));
            }
            Link.Pending sent = link.send(newest, parent, onProgress);
            if (peer.closed()) {
                link.abandonAll(); // it closed meanwhile
            }
            ToolResult result;
            try {
                result = outcome(sent, started + nanos(longest + SLACK));
            } catch (InterruptedException interrupted) {
                link.giveUp(sent, "cancelled");
                throw interrupted;
            }
            if (result == null) {
                CallStage stage = link.giveUp(sent, "timeout_seconds") ? CALL_STAGE_ACCEPTED : CALL_STAGE_UNKNOWN;
                throw new CallException(ERROR_CODE_DEADLINE_EXCEEDED, stage, "the bus gave no answer within " + longest
                        + " s: it hangs").limit("timeout_seconds", longest);
            }
            if (result == Link.UNREAD && parent == null) {
                continue;
            }
            CallError error = result.getError();
            if (error.getCode() == ERROR_CODE_NOT_FOUND && attempt > 0) {
                return refusal == null ? result : refusal; // the tool was offline, and is forgotten now
            }
            long upper = Math.min(MAX_PAUSE_MILLIS, FIRST_PAUSE_MILLIS << Math.min(attempt, 10));
            double hint = Math.min(MAX, error.getRetryAfterSeconds());
            long pause = nanos(Math.max(hint, upper / 1000.0 * ThreadLocalRandom.current().nextDouble()));
            if (!error.getRetrySafe() || !BUSY.contains(error.getCode()) || System.nanoTime() + pause >= deadline) {
                return result;
            }
            refusal = result;
            rest(pause);
        }
    }

    /** Waits for a stream, that of the parent of a nested call, and for room on it; throws why there is none. */
    private Link slot(long deadline) throws InterruptedException {
        while (true) {
            checkGoesOn(CALL_STAGE_NOT_DISPATCHED);
            Link link = parent == null ? peer.route(deadline) : parent.link;
            long left = deadline - System.nanoTime();
            if (link == null || left <= 0) {
                throw new BusException(BusException.Kind.LOST, io.grpc.Status.Code.DEADLINE_EXCEEDED, "no bus took the call in time");
            }
            if (link.slots.tryAcquire(Math.min(left, LOOK_MILLIS * 1_000_000), TimeUnit.NANOSECONDS)) {
                if (link.end == null) {
                    return link;
                }
                if (parent != null) {
                    throw BusException.lost("the connection to the bus broke");
                }
            }
        }
    }

    private void rest(long nanos) throws InterruptedException {
        long end = System.nanoTime() + nanos;
        for (long left = nanos; left > 0; left = end - System.nanoTime()) {
            TimeUnit.NANOSECONDS.sleep(Math.min(left, LOOK_MILLIS * 1_000_000));
            checkGoesOn(CALL_STAGE_UNKNOWN);
        }
    }

    /** Waits until a moment. Where the process stood still, the answer may wait in the socket: that is read first. */
    private static ToolResult outcome(Link.Pending sent, long moment) throws InterruptedException {
        long until = moment;
        while (true) {
            try {
                return sent.get(Math.max(0, until - System.nanoTime()), TimeUnit.NANOSECONDS);
            } catch (TimeoutException elapsed) {
                if (Link.seconds(until) < LATE) {
                    return null;
                }
                until = System.nanoTime() + nanos(SLACK);
            } catch (ExecutionException never) {
                throw new IllegalStateException(never);
            }
        }
    }

    private void checkGoesOn(CallStage stage) {
        if (parent == null ? peer.closed() : parent.isCancelled()) {
            throw over(parent, stage);
        }
    }

    /** Returns how a call ends with what made it: another call, or a host for null. */
    static CallException over(ToolScope parent, CallStage stage) {
        return new CallException(ERROR_CODE_CANCELLED, stage,
                parent == null ? "this host has left the bus" : "the call that made this one has ended");
    }

    private static double less(double seconds, double waited) {
        return seconds > 0 ? Math.max(0.001, seconds - waited) : seconds;
    }

    private static long nanos(double seconds) {
        return (long) (seconds * 1e9);
    }
}
