package dev.toolbus;

import com.google.gson.*;
import dev.toolbus.pb.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicInteger;

/** A call, as its handler sees it. The handler's thread is interrupted when the call is cancelled. */
public final class ToolScope {
    final Link link;
    final AtomicInteger together; // how many calls of its message have no result yet
    final CompletableFuture<Void> over = new CompletableFuture<>();
    final Set<Link.Pending> children = new HashSet<>(); // the calls that it has made; under the lock of the link
    private final ToolCall message;
    private final Peer peer;
    private final long began = System.nanoTime();
    private final AtomicInteger asked = new AtomicInteger(); // how many questions without a key this run has asked
    private Thread thread; // of the handler; null before and after it

    ToolScope(ToolCall message, Link link, Peer peer, AtomicInteger together) {
        this.message = message;
        this.link = link;
        this.peer = peer;
        this.together = together;
    }

    String id() {
        return message.getCallId();
    }

    /** Begins the handler on this thread; returns false where the call is over already. */
    synchronized boolean enter() {
        thread = over.isDone() ? null : Thread.currentThread();
        return thread != null;
    }

    synchronized void leave() {
        thread = null;
        Thread.interrupted(); // was meant for this handler
    }

    synchronized void stop() {
        if (thread != null) {
            thread.interrupt();
        }
    }

    /** Returns the call as it came: its name, arguments, role, context, trace and what its caller accepts. */
    public ToolCall message() {
        return message;
    }

    /** Returns the user and the conversation, as the host states them. */
    public CallContext context() {
        return message.getContext();
    }

    /** Whether the call is over: a handler that computes without waiting, or has threads of its own, stops then. */
    public boolean isCancelled() {
        return over.isDone();
    }

    /** Runs something once the call is over, answered or cancelled: it must be quick. */
    public void onOver(Runnable then) {
        over.thenRun(then);
    }

    /** Returns the time until the deadline; empty without one. */
    public Optional<Duration> timeLeft() {
        double left = message.getTimeoutSeconds() - Link.seconds(began);
        return message.getTimeoutSeconds() <= 0 ? Optional.empty() : Optional.of(Duration.ofNanos((long) (Math.max(0, left) * 1e9)));
    }

    /** Reports how much is done, of a total (0: unknown), and resets the idle timeout. */
    public void progress(double progress, double total, String message) {
        report(ToolProgress.newBuilder().setProgress(progress).setTotal(total).setMessage(Values.sound(message)).build());
    }

    /** Sends the next piece of the output. The result must still have the whole output. */
    public void chunk(String text) {
        report(ToolProgress.newBuilder().setOutputChunk(Values.sound(text)).build());
    }

    /** Reports progress with any of its fields. What the bus cannot carry is left out. */
    public void report(ToolProgress progress) {
        String problem = link.report(progress.toBuilder().setCallId(id()).build());
        if (problem != null) {
            peer.log("tool " + message.getName() + ": " + problem);
        }
    }

    /** Calls another tool as part of this call: with its context, no longer than it, and cancelled with it. */
    public Call call(String name, Object arguments) {
        return new Call(peer, name, arguments, this).with(nested -> nested.setParentCallId(id())
                .setTraceparent(message.getTraceparent()).setTracestate(message.getTracestate()));
    }

    /**
     * Asks the person behind the caller by a form: a Map or JsonObject that is JSON Schema, or its properties
     * alone.
     *
     * <p>It ends this run by an exception that you must not catch, and the handler runs again from its beginning with the
     * answer. So ask before you change anything, and check the action of the answer: a person may decline.
     */
    public Answer elicit(String message, Object schema) {
        JsonObject form = Values.object(Values.json(schema));
        if (!(form.get("properties") instanceof JsonObject)) {
            form = Values.object(Values.json(Map.of("type", "object", "properties", form)));
        }
        JsonObject params = new JsonObject();
        params.addProperty("mode", "form");
        params.addProperty("message", message);
        params.add("requestedSchema", form);
        // Two runs of a handler that ask the same have the same key, also in two processes.
        String key = asked.incrementAndGet() + "-" + Integer.toHexString(sorted(params).toString().hashCode());
        JsonObject answer = ask(Map.of(key, Map.of("method", "elicitation/create", "params", params))).getAsJsonObject(key);
        return new Answer(answer.get("action").getAsString(), Values.object(answer, "content"));
    }

    /** Returns JSON whose objects have their members by name: those of a Map come in another order in each process. */
    private static JsonElement sorted(JsonElement json) {
        if (json instanceof JsonArray array) {
            JsonArray all = new JsonArray();
            array.forEach(each -> all.add(sorted(each)));
            return all;
        } else if (json instanceof JsonObject object) {
            JsonObject all = new JsonObject();
            new TreeMap<>(object.asMap()).forEach((name, each) -> all.add(name, sorted(each)));
            return all;
        }
        return json;
    }

    /** Asks several questions of any kind at once, a Map or JsonObject by key, and returns the answers by key; else as {@link #elicit}. */
    public JsonObject ask(Object questions) {
        JsonObject known = Values.object(Values.object(message.getRequestState()), "answers");
        Values.object(message.getInputResponsesJson()).entrySet().forEach(entry -> known.add(entry.getKey(), entry.getValue()));
        JsonObject open = Values.object(Values.json(questions));
        open.entrySet().removeIf(question -> answers(question.getValue(), known.get(question.getKey())));
        if (open.isEmpty()) {
            return known;
        }
        open.keySet().forEach(known::remove);
        throw new Tools.Stop(ToolResult.newBuilder().setInputRequestsJson(open.toString())
                .setRequestState(known.isEmpty() ? "" : Values.json(Map.of("answers", known))).build());
    }

    /** Tells whether an answer fits its question: callers can send anything. */
    private static boolean answers(JsonElement question, JsonElement answer) {
        if (!(answer instanceof JsonObject given) || !Values.text(question, "method").equals("elicitation/create")) {
            return answer instanceof JsonObject;
        }
        String action = Values.text(given, "action");
        if (!action.equals("accept")) {
            return action.equals("decline") || action.equals("cancel");
        }
        JsonElement required = Values.object(Values.object(question, "params"), "requestedSchema").get("required");
        Set<String> filled = Values.object(given, "content").keySet();
        return !(required instanceof JsonArray names) || names.asList().stream().allMatch(name -> filled.contains(name.getAsString()));
    }
}
