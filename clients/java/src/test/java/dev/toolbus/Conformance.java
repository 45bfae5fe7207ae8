package dev.toolbus;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import dev.toolbus.pb.CatalogChange;
import dev.toolbus.pb.ContentBlock;
import dev.toolbus.pb.ListRequest;
import dev.toolbus.pb.ListResponse;
import dev.toolbus.pb.ListedTool;
import dev.toolbus.pb.Tool;
import dev.toolbus.pb.ToolProgress;
import dev.toolbus.pb.ToolRef;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Offers the tools of a client under test, for {@code toolbus dev conformance}, with this package.
 *
 * <p>Exits with 0 after SIGTERM or a final drain of the bus, with 1 when the bus refused it.
 */
public final class Conformance {
    private static final Plugin PLUGIN = new Plugin("conformance");
    private static final Map<String, Host> HOSTS = new ConcurrentHashMap<>(); // by the address of their bus
    private static final List<Watch<CatalogChange>> WATCHES = Collections.synchronizedList(new ArrayList<>());
    private static final Map<Integer, CyclicBarrier> MEETINGS = new ConcurrentHashMap<>(); // by how many people meet

    /** A call that the tool {@code host} makes, or what else it does. */
    record Drive(String address, @Arg(optional = true) String name, @Arg(optional = true) Json arguments,
            @Arg(optional = true) Double timeout, @Arg(optional = true) Double cancel_after, @Arg(optional = true) JsonObject form,
            @Arg(optional = true) boolean list, @Arg(optional = true) Integer watch, @Arg(optional = true) boolean close) {}

    record Relay(String name, @Arg(optional = true) Json arguments) {}

    record Texts(List<String> texts) {}

    private Conformance() {}

    private static <A> void offer(String name, String description, Class<A> type, Handler<A> handler) {
        PLUGIN.add(Tool.newBuilder().setName(name).setDescription(description).setParametersJson("{\"type\":\"object\"}").build(),
                type, handler);
    }

    private static void offerEcho(String name) {
        PLUGIN.removeTool(name);
        offer(name, "Returns its arguments.", Json.class, (arguments, scope) -> arguments);
    }

    private static String mimeType(ContentBlock part) {
        return switch (part.getKindCase()) {
            case IMAGE -> part.getImage().getMimeType();
            case AUDIO -> part.getAudio().getMimeType();
            case RESOURCE -> part.getResource().getMimeType();
            default -> "text/plain";
        };
    }

    private static List<String> names(List<ListedTool> tools) {
        return tools.stream().map(listed -> listed.getTool().getName()).toList();
    }

    private static Object drive(Drive drive) throws Exception {
        Host host = HOSTS.computeIfAbsent(drive.address,
                address -> new Host("conformance-host", new Options().address(address)));
        if (drive.close) {
            HOSTS.remove(drive.address);
            host.close();
            return null;
        }
        if (drive.list) {
            ListResponse listing = host.list(ListRequest.getDefaultInstance());
            return Map.of("tools", names(listing.getToolsList()), "revision", listing.getRevision());
        }
        if (drive.watch != null) {
            Watch<CatalogChange> watch = host.watch();
            WATCHES.add(watch); // goes on: its stream is looked at until its host is closed
            List<Object> changes = new ArrayList<>();
            for (int count = 0; count < drive.watch; count++) {
                CatalogChange change = watch.next();
                changes.add(Map.of("full", change.getFull(), "added", names(change.getAddedList()), "changed",
                        names(change.getChangedList()), "removed",
                        change.getRemovedList().stream().map(ToolRef::getName).toList()));
            }
            return Map.of("changes", changes);
        }
        if (drive.name == null) {
            throw new CallException("usage", "nothing to do: give name, list, watch or close");
        }
        return called(host, drive);
    }

    /** Makes a call, and returns what an application saw of it. */
    private static Object called(Host host, Drive drive) throws Exception {
        long started = System.nanoTime();
        List<ToolProgress> items = Collections.synchronizedList(new ArrayList<>());
        Call call = host.call(drive.name, drive.arguments).onProgress(items::add);
        if (drive.timeout != null) {
            call.timeout(Duration.ofNanos((long) (drive.timeout * 1e9)));
        }
        if (drive.form != null) {
            call.onInput(question -> drive.form);
        }
        CompletableFuture<Result> future = call.start();
        Result result = null;
        try {
            result = drive.cancel_after == null ? future.get()
                    : future.get((long) (drive.cancel_after * 1e9), TimeUnit.NANOSECONDS);
        } catch (TimeoutException | CancellationException given) {
            future.cancel(true);
        }
        Map<String, Object> seen = new LinkedHashMap<>();
        seen.put("cancelled", result == null);
        seen.put("seconds", (System.nanoTime() - started) / 1e9);
        List<Object> progress = new ArrayList<>();
        List<String> chunks = new ArrayList<>();
        List<String> content = new ArrayList<>();
        for (ToolProgress item : List.copyOf(items)) {
            item.getContentList().forEach(part -> content.add(mimeType(part)));
            if (item.getOutputChunk().isEmpty()) {
                progress.add(List.of(item.getProgress(), item.getTotal(), item.getMessage()));
            } else {
                chunks.add(item.getOutputChunk());
            }
        }
        CallException error = result == null ? null : result.error();
        if (result != null) {
            result.content().forEach(part -> content.add(mimeType(part)));
        }
        seen.put("failed", error != null);
        seen.put("output", result == null || error != null || result.asks() ? null : new Json(result.json()));
        seen.put("code", error == null ? "" : error.code());
        seen.put("stage", error == null ? "" : error.stage());
        seen.put("retry_safe", error != null && error.retrySafe());
        seen.put("message", error == null ? "" : error.getMessage());
        seen.put("progress", progress);
        seen.put("chunks", chunks);
        seen.put("content", content);
        return seen;
    }

    private static int integer(JsonObject arguments, String name) {
        JsonElement value = arguments.get(name);
        if (value == null || !value.isJsonPrimitive()) {
            throw new IllegalArgumentException(name + " must be an integer");
        }
        return value.getAsInt();
    }

    private static JsonElement ask(ToolScope scope, String key) {
        Map<String, ?> schema = Map.of("type", "object", "properties", Map.of("text", Map.of("type", "string")));
        Map<String, ?> params = Map.of("mode", "form", "message", key + "?", "requestedSchema", schema);
        return scope.ask(Map.of(key, Map.of("method", "elicitation/create", "params", params))).get(key);
    }

    private static void offerAll() {
        offerEcho("echo");
        offer("fail", "Fails with `message`.", JsonObject.class, (arguments, scope) -> {
            throw new IllegalStateException(arguments.get("message").getAsString());
        });
        offer("slow", "Reports progress once, then works until it is cancelled.", Map.class, (arguments, scope) -> {
            try {
                scope.progress(0, 0, "");
                Thread.sleep(Long.MAX_VALUE);
                return null;
            } finally {
                System.err.println("slow stopped");
            }
        });
        offer("steps", "Reports `count` steps of progress, then returns the count.", JsonObject.class, (arguments, scope) -> {
            int count = integer(arguments, "count");
            for (int step = 1; step <= count; step++) {
                scope.progress(step, count, "step " + step);
            }
            return Map.of("count", count);
        });
        offer("meet", "Returns once `people` calls of it run at the same time.", JsonObject.class, (arguments, scope) -> {
            int people = integer(arguments, "people");
            MEETINGS.computeIfAbsent(people, CyclicBarrier::new).await();
            return Map.of("met", people);
        });
        offer("relay", "Calls the tool `name` with `arguments` through the bus and returns its output.", Relay.class,
                (relay, scope) -> scope.call(relay.name, relay.arguments).join().output(Json.class));
        offer("context", "Returns the context of its call.", Map.class, (arguments, scope) -> Map.of("user_id",
                scope.context().getUserId(), "attributes", scope.context().getAttributesMap()));
        offer("chunks", "Sends each of `texts` as a piece of the output, and returns them joined.", Texts.class,
                (arguments, scope) -> {
                    arguments.texts.forEach(scope::chunk);
                    return String.join("", arguments.texts);
                });
        offer("picture", "Returns a text and an image.", Map.class, (arguments, scope) -> new Reply("a picture",
                Content.image(new byte[] {(byte) 0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'}, "image/png")));
        offer("ask", "Asks two questions, one after the other, and returns both answers.", Map.class, (arguments, scope) -> {
            JsonElement first = ask(scope, "first");
            JsonElement second = ask(scope, "second");
            JsonArray accepts = new JsonArray();
            scope.message().getAcceptsList().forEach(accepts::add);
            return Map.of("first", first, "second", second, "accepts", accepts);
        });
        offer("big", "Returns a text of `bytes` letters.", JsonObject.class,
                (arguments, scope) -> "x".repeat(integer(arguments, "bytes")));
        offer("late_progress", "Reports progress after it has returned.", Map.class, (arguments, scope) -> {
            scope.onOver(() -> CompletableFuture.delayedExecutor(50, TimeUnit.MILLISECONDS)
                    .execute(() -> scope.progress(0, 0, "")));
            return null;
        });
        offer("offer", "Offers another tool `name` that returns its arguments.", JsonObject.class, (arguments, scope) -> {
            offerEcho(arguments.get("name").getAsString());
            return null;
        });
        offer("withdraw", "Withdraws the tool `name`.", JsonObject.class, (arguments, scope) -> {
            PLUGIN.removeTool(arguments.get("name").getAsString());
            return null;
        });
        offer("record", "Appends `text` as a line to `file`, works for `seconds`, and returns the text.", JsonObject.class,
                (arguments, scope) -> {
                    String text = arguments.get("text").getAsString();
                    Files.writeString(Path.of(arguments.get("file").getAsString()), text + "\n", StandardOpenOption.CREATE,
                            StandardOpenOption.APPEND);
                    Thread.sleep((long) (arguments.get("seconds").getAsDouble() * 1000));
                    return text;
                });
        offer("about", "Returns name, version, language and roles of this client.", Map.class, (arguments, scope) -> Map.of("name",
                "clients/java", "version", "0.1.0", "language", "java", "roles", List.of("plugin", "host", "remote")));
        offer("host", "Makes a call by a host of its own, lists, watches, or closes that host.", Drive.class,
                (arguments, scope) -> drive(arguments));
    }

    /** Runs the plugin. */
    public static void main(String[] arguments) throws Exception {
        offerAll();
        int code = 0;
        try {
            PLUGIN.run();
        } catch (BusException refused) {
            code = 1;
        }
        for (Host host : HOSTS.values()) {
            host.close();
        }
        System.exit(code);
    }
}
