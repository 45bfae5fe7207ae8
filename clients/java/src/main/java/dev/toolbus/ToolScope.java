package dev.toolbus;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import dev.toolbus.pb.CallContext;
import dev.toolbus.pb.ToolCall;
import dev.toolbus.pb.ToolProgress;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicInteger;

/** A call, as its handler sees it. The handler's thread is interrupted when the call is cancelled. */
public final class ToolScope {
    /** Ends a run of a handler with questions; the handler runs again with the answers. */
    static final class InputNeeded extends RuntimeException {
        private static final long serialVersionUID = 1;
        final String questions;
        final String state;

        InputNeeded(String questions, String state) {
            super("the handler asks its caller, and runs again with the answers: do not catch this", null, false, false);
            this.questions = questions;
            this.state = state;
        }
    }

    final Link link;
    final CompletableFuture<Void> over = new CompletableFuture<>();
    private final ToolCall message;
    private final Peer peer;
    private final long began = System.nanoTime();
    private final AtomicInteger asked = new AtomicInteger(); // how many questions without a key this run has asked

    ToolScope(ToolCall message, Link link, Peer peer) {
        this.message = message;
        this.link = link;
        this.peer = peer;
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
        if (message.getTimeoutSeconds() <= 0) {
            return Optional.empty();
        }
        double left = message.getTimeoutSeconds() - Link.seconds(began);
        return Optional.of(Duration.ofNanos((long) (Math.max(0, left) * 1e9)));
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
        String problem = link.report(progress.toBuilder().setCallId(message.getCallId()).build());
        if (problem != null) {
            peer.log("tool " + message.getName() + ": " + problem);
        }
    }

    /** Calls another tool as part of this call: with its context, no longer than it, and cancelled with it. */
    public Call call(String name, Object arguments) {
        Call call = new Call(peer, name, arguments, this);
        return call.with(nested -> nested.setParentCallId(message.getCallId()).setTraceparent(message.getTraceparent())
                .setTracestate(message.getTracestate()));
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
            JsonObject whole = new JsonObject();
            whole.addProperty("type", "object");
            whole.add("properties", form);
            form = whole;
        }
        JsonObject params = new JsonObject();
        params.addProperty("mode", "form");
        params.addProperty("message", message);
        params.add("requestedSchema", form);
        // Two runs of a handler that ask the same have the same key.
        String key = asked.incrementAndGet() + "-" + Integer.toHexString(params.toString().hashCode());
        JsonObject question = new JsonObject();
        question.addProperty("method", "elicitation/create");
        question.add("params", params);
        JsonObject answer = ask(Map.of(key, question)).getAsJsonObject(key);
        JsonElement content = answer.get("content");
        return new Answer(answer.get("action").getAsString(), content instanceof JsonObject filled ? filled : new JsonObject());
    }

    /** Asks several questions of any kind at once, a Map or JsonObject by key, and returns the answers by key; else as {@link #elicit}. */
    public JsonObject ask(Object questions) {
        JsonObject known = Values.object(message.getRequestState()).get("answers") instanceof JsonObject before ? before
                : new JsonObject();
        Values.object(message.getInputResponsesJson()).entrySet().forEach(entry -> known.add(entry.getKey(), entry.getValue()));
        JsonObject open = new JsonObject();
        Values.object(Values.json(questions)).entrySet().forEach(entry -> {
            if (!answers(entry.getValue(), known.get(entry.getKey()))) {
                known.remove(entry.getKey());
                open.add(entry.getKey(), entry.getValue());
            }
        });
        if (open.size() == 0) {
            return known;
        }
        JsonObject state = new JsonObject();
        state.add("answers", known);
        throw new InputNeeded(open.toString(), known.size() == 0 ? "" : state.toString());
    }

    /** Tells whether an answer fits its question: callers can send anything. */
    private static boolean answers(JsonElement question, JsonElement answer) {
        if (!(answer instanceof JsonObject given)) {
            return false;
        }
        if (!Values.text(question, "method").equals("elicitation/create")) {
            return true;
        }
        String action = Values.text(given, "action");
        if (!action.equals("accept")) {
            return action.equals("decline") || action.equals("cancel");
        }
        JsonElement form = ((JsonObject) question).get("params") instanceof JsonObject params ? params.get("requestedSchema") : null;
        JsonElement required = form instanceof JsonObject schema ? schema.get("required") : null;
        JsonObject content = given.get("content") instanceof JsonObject filled ? filled : new JsonObject();
        for (JsonElement name : required instanceof JsonArray names ? names : new JsonArray()) {
            if (!content.has(name.getAsString())) {
                return false;
            }
        }
        return true;
    }
}
