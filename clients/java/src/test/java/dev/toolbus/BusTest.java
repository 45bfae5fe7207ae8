package dev.toolbus;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTimeoutPreemptively;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonObject;
import dev.toolbus.pb.CatalogChange;
import dev.toolbus.pb.ListRequest;
import dev.toolbus.pb.ListedTool;
import dev.toolbus.pb.Tool;
import java.io.BufferedReader;
import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.regex.MatchResult;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Plays plugins and hosts of this package on a bus: the program TOOLBUS, or {@code toolbus}. */
@Timeout(120)
class BusTest {
    private static final Path BUILD = Path.of("build").toAbsolutePath();
    private static final String JAVA = Path.of(System.getProperty("java.home"), "bin", "java").toString();

    private static final class Bus implements AutoCloseable {
        final Process process;
        final String address;

        Bus(String at) throws IOException {
            String program = System.getenv().getOrDefault("TOOLBUS", "toolbus");
            process = new ProcessBuilder(program, "serve", "--grpc", at, "--http", "off", "--ephemeral")
                    .redirectError(ProcessBuilder.Redirect.DISCARD).start();
            BufferedReader lines = process.inputReader();
            String line = lines.readLine();
            while (line != null && !line.startsWith("toolbus ready grpc=")) {
                line = lines.readLine();
            }
            if (line == null) {
                throw new IOException(program + " serve ended before it was ready");
            }
            address = line.substring("toolbus ready grpc=".length()).split(" ")[0];
        }

        Bus() throws IOException {
            this("127.0.0.1:0");
        }

        Options options() {
            return new Options().address(address);
        }

        Host host() {
            return new Host("test", options());
        }

        void stop() throws IOException, InterruptedException {
            assertEquals(0, new ProcessBuilder("kill", "-s", "STOP", "" + process.pid()).start().waitFor());
        }

        @Override
        public void close() throws InterruptedException {
            process.destroyForcibly().waitFor();
        }
    }

    private static void until(Callable<Boolean> condition) throws Exception {
        while (!condition.call()) {
            Thread.sleep(20);
        }
    }

    @Test
    void aCredentialThatIsAboutToBeCopiedIsUsedAsItWasBefore() throws Exception {
        Path file = Files.createTempFile("own", ".toolbus");
        Files.writeString(file, "name = \"chat\"");
        List<String> lines = Collections.synchronizedList(new ArrayList<>());
        try (Bus first = new Bus(); Bus second = new Bus(); Host host = new Host("test", new Options()
                .address(first.address + "," + second.address).credential(file.toString()).log(lines::add))) {
            host.list();
            Files.delete(file);
            first.close();
            until(() -> lines.stream().anyMatch(line -> line.contains(file.toString())));
            host.list();
            assertTrue(lines.stream().anyMatch(line -> line.endsWith("using the credential that was read before")), lines.toString());
        }
    }

    @Test
    void aServerThatEndsConnectionsWithoutTlsDoesNotRefuseACertificate() throws Exception {
        try (ServerSocket server = new ServerSocket(0, 9, InetAddress.getLoopbackAddress())) {
            CompletableFuture.runAsync(() -> {
                try {
                    while (true) {
                        server.accept().close();
                    }
                } catch (IOException ended) {
                    // the test is over
                }
            });
            String address = "mtls:127.0.0.1:" + server.getLocalPort();
            assertNull(Wire.whyUnanswered(address, "own.toolbus", Map.of("certificate", "x"), "Network closed for unknown reason"));
        }
    }

    private static Plugin offer(Plugin plugin, String name, String schema) {
        Tool tool = Tool.newBuilder().setName(name).setParametersJson(schema).build();
        return plugin.add(tool, Map.class, (arguments, scope) -> null);
    }

    record Ask(String city, @Arg(optional = true) Integer days) {}

    @Test
    void failuresAndWrongArgumentsEndTheirCallAndSayWhy() throws Exception {
        try (Bus bus = new Bus(); Plugin plugin = new Plugin("test", bus.options()); Host host = bus.host()) {
            plugin.tool("fail", "", Map.class, (arguments, scope) -> {
                throw new IllegalStateException("no luck");
            });
            plugin.tool("error", "", Map.class, (arguments, scope) -> {
                throw new StackOverflowError();
            });
            plugin.tool("named", "", Map.class, (arguments, scope) -> {
                throw new CallException("no_city", "there is none");
            });
            plugin.tool("typed", "", Ask.class, (ask, scope) -> ask);
            plugin.tool("echo", "", Json.class, (given, scope) -> given);
            plugin.tool("later", "", Map.class, (given, scope) -> CompletableFuture.supplyAsync(() -> new Reply(List.of(1),
                    Content.text("one"))));
            plugin.tool("later_fail", "", Map.class, (given, scope) -> CompletableFuture.supplyAsync(() -> {
                throw new IllegalStateException("no luck later");
            }));
            plugin.tool("passes_on", "", Json.class, (given, scope) -> scope.call("later", null).join());
            plugin.tool("fails_on", "", Json.class, (given, scope) -> scope.call("named", null).join());
            plugin.tool("nothing", "", Map.class, (given, scope) -> Double.NaN);
            plugin.ready();
            CallException error = host.call("fail", null).join().error();
            assertEquals(List.of("TOOL", "no luck"), List.of(error.code(), error.getMessage()));
            assertEquals("StackOverflowError", host.call("error", null).join().error().getMessage());
            error = assertThrows(CallException.class, () -> host.call("named", null).join().output(Map.class));
            assertEquals(List.of("no_city", "there is none", "ACCEPTED"),
                    List.of(error.reason(), error.getMessage(), error.stage()));
            error = host.call("typed", Map.of("city", 1)).join().error();
            assertEquals(List.of("INVALID_ARGUMENTS", "NOT_DISPATCHED"), List.of(error.code(), error.stage()));
            assertEquals(new Ask("Oslo", 3), host.call("typed", "{\"city\": \"Oslo\", \"days\": 3}").join().output(Ask.class));
            assertEquals("{\"city\":\"Oslo\"}", host.call("typed", new Ask("Oslo", null)).join().text());
            String large = "{\"n\":123456789012345678901234567890,\"f\":1.10}";
            assertEquals(large, host.call("echo", large).join().json());
            assertEquals("INVALID_ARGUMENTS", host.call("echo", List.of(1)).join().error().code());
            assertEquals("INVALID_ARGUMENTS", host.call("echo", Map.of("n", Double.NaN)).join().error().code());
            assertEquals("[1]\none", host.call("later", null).join().text());
            assertEquals("[1]\none", host.call("passes_on", null).join().text());
            assertEquals("no_city", host.call("fails_on", null).join().error().reason());
            assertEquals("no luck later", host.call("later_fail", null).join().error().getMessage());
            assertTrue(host.call("nothing", null).join().error().getMessage().startsWith("JSON cannot hold the output"));
            ListRequest request = ListRequest.newBuilder().addNames("typed").build();
            ListedTool listed = host.list(request).getTools(0);
            assertEquals("[\"city\"]", Values.object(listed.getTool().getParametersJson()).get("required").toString());
            assertEquals(List.of(), listed.getWarningsList());
            assertThrows(BusException.class, () -> offer(plugin, "a b", ""));
            assertThrows(BusException.class, () -> plugin.tool("text", "", String.class, (text, scope) -> text));
            host.close();
            assertEquals("CANCELLED", host.call("echo", null).join().error().code());
        }
    }

    @Test
    void aCancelledCallStopsItsHandlerAndWhatThatCalls() throws Exception {
        List<String> stopped = Collections.synchronizedList(new ArrayList<>());
        try (Bus bus = new Bus(); Plugin plugin = new Plugin("test", bus.options()); Host host = bus.host()) {
            plugin.tool("outer", "", Map.class, (arguments, scope) -> {
                try {
                    return scope.call("inner", null).join();
                } finally {
                    stopped.add("outer");
                }
            });
            plugin.tool("inner", "", Map.class, (arguments, scope) -> {
                scope.progress(0, 0, "begun");
                try {
                    Thread.sleep(Long.MAX_VALUE);
                } finally {
                    stopped.add("inner");
                }
                return null;
            });
            plugin.tool("asynchronous", "", Map.class, (arguments, scope) -> {
                CompletableFuture<Object> never = new CompletableFuture<>();
                scope.onOver(() -> stopped.add("asynchronous"));
                scope.progress(0, 0, "begun");
                return never;
            });
            plugin.ready();
            for (String name : List.of("outer", "asynchronous")) {
                CompletableFuture<Result> call = host.call(name, null).start();
                assertThrows(java.util.concurrent.TimeoutException.class, () -> call.get(300, TimeUnit.MILLISECONDS));
                call.cancel(true);
            }
            until(() -> stopped.size() == 3);
            Thread thread = Thread.currentThread();
            CompletableFuture.delayedExecutor(100, TimeUnit.MILLISECONDS).execute(thread::interrupt);
            assertThrows(CancellationException.class, () -> host.call("inner", null).join());
            assertTrue(Thread.interrupted());
            until(() -> stopped.size() == 4);
            CompletableFuture<Result> last = host.call("inner", null).start();
            Thread.sleep(100);
            host.close();
            assertEquals("CANCELLED", last.get().error().code());
        }
    }

    @Test
    void withSeveralAddressesAPluginIsAtEachBusAndAHostGoesOnAtTheNext(@TempDir Path folder) throws Exception {
        Files.setPosixFilePermissions(folder, PosixFilePermissions.fromString("rwx------"));
        try (Bus first = new Bus(); Bus second = new Bus("unix:" + folder.resolve("bus"))) {
            Options both = new Options().address(first.address + ", " + second.address).log(text -> { });
            try (Plugin plugin = new Plugin("test", both); Host host = new Host("test", both)) {
                plugin.tool("hello", "", Map.class, (arguments, scope) -> "hello").ready();
                for (Bus bus : List.of(first, second)) {
                    try (Host each = bus.host()) {
                        until(() -> !each.list().isEmpty());
                    }
                }
                try (Host other = second.host(); Watch<CatalogChange> watch = other.watch()) {
                    assertTrue(watch.next().getFull());
                    assertEquals("hello", host.call("hello", null).join().text());
                    first.close();
                    until(() -> host.call("hello", null).join().text().equals("hello")); // one may break with the bus
                    offer(plugin, "later", "");
                    assertEquals("later", watch.next().getAdded(0).getTool().getName());
                    assertNull(watch.next(Duration.ofMillis(50)));
                }
            }
        }
    }

    @Test
    void eachBusThatDoesNotAnswerIsLoggedOnceAndNotAtEachAttempt() throws Exception {
        List<String> lines = new java.util.concurrent.CopyOnWriteArrayList<>();
        Options options = new Options().address("127.0.0.1:1,127.0.0.1:2").log(lines::add);
        try (Host host = new Host("test", options)) {
            assertEquals("NOT_DISPATCHED", host.call("any", null).timeout(Duration.ofSeconds(3)).join().error().stage());
        }
        assertEquals(2, lines.size(), lines::toString);
    }

    private static List<Object> outcome(Call call) {
        CallException error = assertTimeoutPreemptively(Duration.ofSeconds(7), () -> call.timeout(Duration.ofSeconds(1)).join().error());
        return List.of(error.code(), error.stage(), error.retrySafe());
    }

    @Test
    void atABusThatHangsEveryWaitEndsInTimeAndACallSaysWhetherItMayHaveRun() throws Exception {
        try (Bus bus = new Bus(); Plugin plugin = new Plugin("test", bus.options()); Host host = bus.host(); Host late = bus.host();
                Watch<CatalogChange> watch = host.watch()) {
            plugin.tool("hello", "", Map.class, (arguments, scope) -> "hello").ready();
            host.ready();
            assertTrue(watch.next().getFull());
            bus.stop();
            assertEquals(List.of("DEADLINE_EXCEEDED", "UNKNOWN", false), outcome(host.call("hello", null)));
            assertEquals(List.of("UNAVAILABLE", "NOT_DISPATCHED", true), outcome(late.call("hello", null)));
            assertTimeoutPreemptively(Duration.ofSeconds(15), () -> assertThrows(BusException.class, host::list));
            for (AutoCloseable each : List.of(host, late, plugin, watch)) {
                assertTimeoutPreemptively(Duration.ofSeconds(10), each::close);
            }
        }
    }

    @Test
    void toolsThatDoNotFitIntoOneMessageAreOfferedTooAndARefusalEndsAPluginThatOffersAllOrNone() throws Exception {
        try (Bus bus = new Bus(); Plugin plugin = new Plugin("many", bus.options()); Host host = bus.host()) {
            String schema = "{\"type\":\"object\",\"description\":\"" + "x".repeat(200_000) + "\"}";
            for (int number = 0; number < 70; number++) {
                offer(plugin, "tool_" + number, schema);
            }
            plugin.ready();
            assertEquals(70, host.list().size());
            List<String> logged = Collections.synchronizedList(new ArrayList<>());
            try (Plugin picky = new Plugin("picky", bus.options().allOrNone(true).log(logged::add))) {
                offer(offer(picky, "good", ""), "bad", "{\"type\":\"nothing\"}");
                BusException problem = assertThrows(BusException.class, picky::run);
                assertEquals(BusException.Kind.REFUSED, problem.kind());
                assertTrue(problem.getMessage().contains("bad") && logged.get(0).contains("bad"), problem.getMessage());
            }
            BusException unknown = assertThrows(BusException.class, () -> new Plugin("a source", bus.options()));
            assertTrue(unknown.getMessage().contains("'a source', it must be"), unknown.getMessage());
            for (String wrong : List.of("nowhere", "h:70000", "http://h:1", "[::1]", "tls:h")) {
                BusException bad = assertThrows(BusException.class, () -> new Host("test", new Options().address(wrong)));
                assertTrue(bad.getMessage().contains("'" + wrong + "' is not HOST:PORT"), bad.getMessage());
            }
        }
    }

    @Test
    void byANameOfDnsAPluginAndAHostFindEachBusThatHasItAndComeBackToIt() throws Exception {
        List<String> logged = Collections.synchronizedList(new ArrayList<>());
        try (Bus bus = new Bus()) {
            String port = bus.address.substring(bus.address.lastIndexOf(':') + 1);
            Options options = new Options().address("dns:no-bus.invalid:1, dns:localhost:" + port).log(logged::add);
            try (Plugin plugin = new Plugin("test", options); Host host = new Host("test", options)) {
                plugin.tool("hello", "", Map.class, (arguments, scope) -> "hello").ready();
                assertEquals("hello", host.call("hello", null).join().text());
                assertNull(plugin.call("hello", null).join().error());
                bus.close();
                try (Bus again = new Bus("127.0.0.1:" + port); Host direct = again.host()) {
                    until(() -> host.call("hello", null).join().text().equals("hello"));
                    plugin.close();
                    assertEquals(List.of(), direct.list());
                }
            }
        }
        Options nowhere = new Options().address("dns:no-bus.invalid:1").log(logged::add);
        try (Host lost = new Host("test", nowhere); Plugin plugin = new Plugin("test", nowhere)) {
            CallException error = lost.call("hello", null).timeout(Duration.ofMillis(300)).join().error();
            assertEquals("UNAVAILABLE", error.code());
            until(() -> logged.stream().anyMatch(line -> line.contains("DNS has no address for no-bus.invalid")));
            CompletableFuture.delayedExecutor(100, TimeUnit.MILLISECONDS).execute(() -> assertDoesNotThrow(plugin::close));
            plugin.run(); // ends with the close, before DNS has answered
            assertThrows(BusException.class, plugin::ready);
        }
    }

    @Test
    void aPluginThatOneOfItsBusesRefusesGoesOnAtTheOthers() throws Exception {
        try (Bus first = new Bus(); Bus second = new Bus(); Host host = second.host();
                Plugin own = new Plugin("test", first.options().token("own"));
                Plugin plugin = new Plugin("test", new Options().address(first.address + "," + second.address).log(text -> {
                    throw new IllegalStateException("of a test"); // harms nothing
                }))) {
            own.ready();
            plugin.tool("hello", "", Map.class, (arguments, scope) -> "hello").ready();
            CompletableFuture<?> run = CompletableFuture.runAsync(() -> assertThrows(BusException.class, plugin::run));
            until(() -> host.call("hello", null).join().text().equals("hello"));
            assertFalse(run.isDone());
            plugin.close();
            run.get(); // with the refusal
        }
    }

    /** Snippets of a page: the file name in the first line, the code, and what stands below. */
    private static List<MatchResult> snippets(String page) throws IOException {
        Pattern snippet = Pattern.compile("```java\\n(// (\\w+\\.java)\\n[\\s\\S]*?)```(?:\\n\\n```text\\n([\\s\\S]*?)```)?");
        return snippet.matcher(Files.readString(Path.of(page))).results().toList();
    }

    private static ProcessBuilder program(Bus bus, String... command) {
        List<String> whole = new ArrayList<>(List.of(JAVA, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"));
        whole.addAll(List.of(command));
        ProcessBuilder builder = new ProcessBuilder(whole).redirectError(ProcessBuilder.Redirect.INHERIT);
        builder.environment().put("TOOLBUS_ADDRESS", bus.address);
        return builder;
    }

    @Test
    void theSnippetsOfThePagesRunWithTheOneJarAndPrintWhatStandsBelowThem(@TempDir Path folder) throws Exception {
        List<MatchResult> all = new ArrayList<>(snippets("README.md"));
        all.addAll(snippets("../../docs/start/java.md"));
        assertEquals(6, all.size());
        String jar = BUILD.resolve("toolbus.jar").toString();
        List<Process> plugins = new ArrayList<>();
        Map<String, Integer> limits = Map.of("Weather.java", 15, "Shouter.java", 15, "Caller.java", 10, "Listener.java", 10);
        try (Bus bus = new Bus(); Host host = bus.host()) {
            for (MatchResult each : all) {
                Path file = Files.writeString(folder.resolve(each.group(2)), each.group(1));
                String body = each.group(1).substring(each.group(1).indexOf("public class"));
                assertTrue(body.lines().count() <= limits.getOrDefault(each.group(2), 1000), each.group(2) + " has too many lines");
                if (each.group(3) == null) { // one after the other: a busy machine compiles few files at once in time
                    int before = host.list().size();
                    plugins.add(program(bus, "-cp", jar, file.toString()).start());
                    until(() -> host.list().size() > before);
                }
            }
            assertEquals(5, host.list().size());
            for (MatchResult each : all) {
                if (each.group(3) != null) {
                    Process run = program(bus, "-cp", jar, folder.resolve(each.group(2)).toString()).start();
                    assertEquals(each.group(3), new String(run.getInputStream().readAllBytes()), each.group(2));
                }
            }
            for (Process plugin : plugins) {
                plugin.destroy();
                assertEquals(0, plugin.waitFor());
            }
        }
    }

    /** It also keeps the classes of the program, so that it starts soon when the rules of the protocol are played. */
    @Test
    void theProgramOfTheRulesRunsFromItsJarsAndLeavesOnATerm() throws Exception {
        Path classes = BUILD.resolve("classes.jsa");
        Files.deleteIfExists(classes);
        try (Bus bus = new Bus(); Host host = bus.host()) {
            Process run = program(bus, "-Xlog:disable", "-XX:ArchiveClassesAtExit=" + classes, "-jar",
                    BUILD.resolve("toolbus-client-0.1.0-tests.jar").toString()).start();
            until(() -> host.list().size() == 17);
            Map<String, ?> call = Map.of("address", bus.address, "name", "ask", "form", Map.of("text", "yes"));
            JsonObject seen = host.call("host", call).join().output(JsonObject.class);
            assertEquals("yes", seen.getAsJsonObject("output").getAsJsonObject("first").getAsJsonObject("content").get("text")
                    .getAsString());
            run.destroy();
            assertEquals(0, run.waitFor());
            assertTrue(Files.exists(classes));
        }
    }
}
