package dev.toolbus;

import java.util.List;
import java.util.UUID;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.function.Consumer;

/** What plugins and hosts can state about their connection; what is left out has its default. */
public final class Options implements Cloneable {
    private static final String ADDRESS = "127.0.0.1:48930";
    static final ExecutorService CALLS = Executors.newCachedThreadPool(task -> daemon(task, "toolbus-call"));

    String address = "";
    String credential = "";
    String token = "";
    String instance = "";
    int maxInFlight;
    boolean qualified;
    List<String> notices = List.of();
    boolean allOrNone;
    Consumer<String> log = text -> System.err.println("toolbus: " + text);
    ExecutorService executor; // null for as many threads as are needed

    /** Makes options that are all left out. */
    public Options() {}

    /**
     * Where the bus is: {@code HOST:PORT}, {@code unix:PATH}, {@code tls:HOST:PORT}, {@code mtls:HOST:PORT}, {@code dns:}
     * before a name for every bus that DNS has for it, or several of them, separated by commas; by default TOOLBUS_ADDRESS,
     * then the credential's, then {@code 127.0.0.1:48930}. A plugin attaches to all, a host to one at a time.
     */
    public Options address(String address) {
        this.address = address;
        return this;
    }

    /** The file that proves who this peer is, to a bus on another machine; by default TOOLBUS_CREDENTIAL. */
    public Options credential(String path) {
        this.credential = path;
        return this;
    }

    /** Binds the source: while it is in use, only processes with the same token may use it; by default TOOLBUS_TOKEN. */
    public Options token(String token) {
        this.token = token;
        return this;
    }

    /** Names the process, so that its new connection replaces its old one; by default random. */
    public Options instance(String instance) {
        this.instance = instance;
        return this;
    }

    /** Calls at once; 256 by default. */
    public Options maxInFlight(int calls) {
        this.maxInFlight = calls;
        return this;
    }

    /** Lists the tools as {@code source:name}, so that they never collide with another plugin's. */
    public Options qualified(boolean qualified) {
        this.qualified = qualified;
        return this;
    }

    /** Texts for operators, which {@code toolbus list} shows. */
    public Options notices(String... notices) {
        this.notices = List.of(notices);
        return this;
    }

    /** Offers none of the tools if the bus refuses one of them. */
    public Options allOrNone(boolean allOrNone) {
        this.allOrNone = allOrNone;
        return this;
    }

    /** Takes warnings for the author; by default they go to standard error. */
    public Options log(Consumer<String> log) {
        this.log = log;
        return this;
    }

    /** Runs handlers, and calls that are started; by default as many threads as they need. */
    public Options executor(ExecutorService executor) {
        this.executor = executor;
        return this;
    }

    void warn(String text) {
        try {
            log.accept(text);
        } catch (RuntimeException fault) { // it would end the stream
            System.err.println("toolbus: " + text + " (the log failed: " + fault + ")");
        }
    }

    /** Returns what waits for calls that were started. */
    ExecutorService calls() {
        return executor == null ? CALLS : executor;
    }

    /** Returns a copy with what the environment and the credential state. */
    Options complete() {
        Options all = clone();
        all.credential = or(credential, "TOOLBUS_CREDENTIAL");
        all.address = or(address, "TOOLBUS_ADDRESS");
        all.token = or(token, "TOOLBUS_TOKEN");
        if (all.address.isEmpty()) {
            all.address = Wire.readCredential(all.credential).getOrDefault("address", ADDRESS);
        }
        if (maxInFlight < 0) {
            throw BusException.setup("maxInFlight is " + maxInFlight + ", it must be at least 1, or 0 for 256");
        }
        if (instance.isEmpty()) {
            all.instance = UUID.randomUUID().toString().replace("-", "");
        }
        return all;
    }

    @Override
    protected Options clone() {
        try {
            return (Options) super.clone();
        } catch (CloneNotSupportedException never) {
            throw new AssertionError(never);
        }
    }

    private static String or(String value, String name) {
        return value.isEmpty() ? System.getenv().getOrDefault(name, "") : value;
    }

    static Thread daemon(Runnable task, String name) {
        Thread thread = new Thread(task, name);
        thread.setDaemon(true);
        return thread;
    }
}
