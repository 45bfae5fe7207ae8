package dev.toolbus;

import static dev.toolbus.pb.CallStage.*;
import static dev.toolbus.pb.ErrorCode.*;

import com.google.gson.JsonParseException;
import dev.toolbus.pb.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;

/** Holds the tools of a plugin and answers their calls: each by its handler, and with exactly one result. */
final class Tools {
    private static final int ERROR_CHARACTERS = 16_384; // of the text of a failure
    private static final double MAX_SECONDS = 300;

    private record Offered<A>(Tool tool, Class<A> type, Handler<A> handler) {
        Object run(String json, ToolScope scope) throws Exception {
            A arguments;
            try {
                arguments = Values.parse(json, type);
            } catch (JsonParseException | IllegalArgumentException problem) {
                throw new Stop(ERROR_CODE_INVALID_ARGUMENTS, "the arguments " + Values.shown(json)
                        + " are not what the tool takes: " + Values.why(problem));
            }
            return handler.handle(arguments, scope);
        }
    }

    /** Ends a handler with a result that is not of its own: its questions, after whose answers it runs again, or why it did not run. */
    static final class Stop extends RuntimeException {
        private static final long serialVersionUID = 1;
        final transient ToolResult result;

        Stop(ToolResult result) {
            super("the handler asks its caller, and runs again with the answers: do not catch this", null, false, false);
            this.result = result;
        }

        Stop(ErrorCode code, String text) {
            this(new CallException(code, CALL_STAGE_NOT_DISPATCHED, text).result());
        }
    }

    private final Map<String, Offered<?>> offered = new LinkedHashMap<>();
    final Set<Runnable> watchers = new CopyOnWriteArraySet<>(); // of the peers that run: what tells each of a change
    private long version; // rises with every change

    synchronized long version() {
        return version;
    }

    <A> void add(Tool tool, Class<A> type, Handler<A> handler) {
        String place = "tool '" + tool.getName() + "': ";
        if (!tool.getName().matches("[A-Za-z0-9_.-]{1,64}")) {
            throw BusException.setup(place + "its name breaks the rule [A-Za-z0-9_.-]{1,64}: rename it");
        }
        checkSeconds(place + "timeout_seconds", tool.getTimeoutSeconds());
        checkSeconds(place + "idle_timeout_seconds", tool.getIdleTimeoutSeconds());
        Tool whole = tool;
        if (tool.getParametersJson().isEmpty()) {
            String schema = Schema.of(type);
            if (!schema.equals("{}") && !schema.startsWith("{\"type\":\"object\"")) {
                throw BusException.setup(place + "it takes a " + type.getSimpleName() + ", and arguments are an object: take a "
                        + "record, a Map or a Json");
            }
            whole = tool.toBuilder().setParametersJson(schema.equals("{}") ? "{\"type\":\"object\"}" : schema).build();
        }
        synchronized (this) {
            if (offered.containsKey(tool.getName())) {
                throw BusException.setup(place + "there is one already: rename one, or removeTool the other first");
            }
            offered.put(tool.getName(), new Offered<>(whole, type, handler));
            version++;
        }
        watchers.forEach(Runnable::run);
    }

    private static void checkSeconds(String place, double seconds) {
        if (!(seconds >= 0 && seconds <= MAX_SECONDS)) {
            throw BusException.setup(place + " is " + seconds + ", it must be at most 300, or 0 for none of its own");
        }
    }

    boolean remove(String name) {
        synchronized (this) {
            if (offered.remove(name) == null) {
                return false;
            }
            version++;
        }
        watchers.forEach(Runnable::run);
        return true;
    }

    /** Returns what requests declare, each at most so many bytes. */
    synchronized List<List<Tool>> pages(int bytes) {
        List<List<Tool>> pages = new ArrayList<>(List.of(new ArrayList<>()));
        int used = 0;
        for (Offered<?> each : offered.values()) {
            int size = each.tool.getSerializedSize() + 8;
            used += size;
            if (used > bytes && !pages.get(pages.size() - 1).isEmpty()) {
                pages.add(new ArrayList<>());
                used = size;
            }
            pages.get(pages.size() - 1).add(each.tool);
        }
        return pages;
    }

    /** Starts the handlers of calls that came in one message, and does not wait for them. */
    void begin(List<ToolCall> came, Link link, Peer peer) {
        List<ToolCall> calls = link.takeCalls(came);
        AtomicInteger together = new AtomicInteger(calls.size());
        List<ToolScope> scopes = calls.stream().map(call -> new ToolScope(call, link, peer, together)).filter(link::start).toList();
        boolean ours = peer.options.executor == null;
        for (List<ToolScope> batch : ours && !scopes.isEmpty() ? List.of(scopes) : scopes.stream().map(List::of).toList()) {
            try {
                Handlers.begin(batch, ours ? Handlers.THREADS : peer.options.executor, this::run);
            } catch (RejectedExecutionException | OutOfMemoryError problem) {
                batch.forEach(scope -> link.answer(scope, failure(problem)));
            }
        }
    }

    private void run(ToolScope scope) {
        try {
            Object output = reply(scope);
            if (output instanceof CompletionStage<?> stage) {
                CompletableFuture<?> future = stage.toCompletableFuture();
                scope.onOver(() -> future.cancel(true));
                future.whenComplete((value, problem) -> scope.link.answer(scope, problem == null ? result(value) : failure(problem)));
            } else {
                scope.link.answer(scope, result(output));
            }
        } catch (Throwable problem) {
            scope.link.answer(scope, failure(problem));
        }
    }

    private Object reply(ToolScope scope) throws Exception {
        ToolCall call = scope.message();
        String json = call.getArgumentsJson().isEmpty() ? "{}" : call.getArgumentsJson();
        Offered<?> each;
        synchronized (this) {
            each = offered.get(call.getName());
        }
        if (each == null) {
            throw new Stop(ERROR_CODE_NOT_FOUND, "this plugin has no tool '" + call.getName() + "'");
        }
        if (!json.stripLeading().startsWith("{")) {
            throw new Stop(ERROR_CODE_INVALID_ARGUMENTS, "the arguments must be a JSON object, they are " + Values.shown(json));
        }
        return each.run(json, scope);
    }

    private static ToolResult result(Object output) {
        try {
            Reply reply = output instanceof Result nested ? new Reply(nested.output(Json.class), nested.content())
                    : output instanceof Reply whole ? whole : new Reply(output);
            return ToolResult.newBuilder().setOutputJson(Values.json(reply.output())).addAllContent(reply.content()).build();
        } catch (CallException problem) {
            return failure(problem);
        } catch (RuntimeException | StackOverflowError problem) {
            return failure(new CallException("output", "JSON cannot hold the output: " + problem.getMessage()));
        }
    }

    /** Returns the result of a handler that failed or asked. */
    private static ToolResult failure(Throwable thrown) {
        Throwable problem = thrown;
        while ((problem instanceof CompletionException || problem instanceof ExecutionException) && problem.getCause() != null) {
            problem = problem.getCause();
        }
        if (problem instanceof Stop stop) {
            return stop.result;
        }
        String reason = problem instanceof CallException named ? named.reason() : "";
        String message = problem.getMessage();
        String text = message == null || message.isEmpty() ? problem.getClass().getSimpleName() : message;
        return new CallException(reason, text.substring(0, Math.min(text.length(), ERROR_CHARACTERS))).result();
    }
}
