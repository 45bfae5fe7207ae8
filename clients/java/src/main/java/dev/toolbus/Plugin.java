package dev.toolbus;

import dev.toolbus.pb.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import sun.misc.Signal;
import sun.misc.SignalHandler;

/** Offers tools under a source, at every bus of its address. It reconnects until it is closed. */
public final class Plugin implements AutoCloseable {
    private static final Duration GRACE = Duration.ofSeconds(30); // for calls in flight, when a plugin leaves
    private static final Duration LOOK = Duration.ofMillis(100); // while any of several buses is waited for

    private final Tools tools = new Tools();
    private final String source;
    private final Options options;
    private final Addresses addresses;
    private final CompletableFuture<Void> stopped = new CompletableFuture<>(); // done when this plugin is to leave
    private final Map<String, Peer> peers = new LinkedHashMap<>(); // by address; under the lock of the plugin, as is what follows
    private boolean begun;

    /** Makes a plugin that finds its bus by the environment. */
    public Plugin(String source) {
        this(source, new Options());
    }

    /** Makes a plugin; throws a {@link BusException} that names a mistake in its source or options. */
    public Plugin(String source, Options options) {
        this.source = source;
        this.options = options.complete();
        addresses = new Addresses(this.options.address);
        Peer.checkSource(source);
        attach(addresses.known());
    }

    /** Has a peer for each bus; those for others leave, unless they are connected. */
    private synchronized void attach(List<String> buses) {
        if (stopped.isDone()) {
            return;
        }
        peers.entrySet().removeIf(each -> {
            boolean gone = !buses.contains(each.getKey()) && each.getValue().wire() == null;
            if (gone) {
                each.getValue().leave();
            }
            return gone;
        });
        for (String bus : buses) {
            Peer peer = peers.computeIfAbsent(bus, address -> new Peer(source, options, new Addresses(address), tools, null));
            if (begun) {
                peer.begin();
            }
        }
    }

    /** Attaches to the buses that DNS has for names, until this plugin leaves. */
    private void follow() {
        String shown = ""; // the newest failure, as it was logged
        try {
            do {
                try {
                    attach(addresses.now(stopped));
                } catch (BusException problem) {
                    if (!problem.text.equals(shown)) {
                        options.warn(problem.text);
                    }
                    shown = problem.text;
                }
            } while (!isStopped(Duration.ofSeconds(Addresses.LOOK_UP_SECONDS)));
        } catch (InterruptedException never) {
            // Nobody has this thread.
        }
    }

    /** Waits until this plugin is to leave, at most so long; returns whether it is. */
    private boolean isStopped(Duration time) throws InterruptedException {
        try {
            stopped.get(time.toMillis(), TimeUnit.MILLISECONDS);
        } catch (TimeoutException | ExecutionException notYet) {
            return false;
        }
        return true;
    }

    private synchronized List<Peer> peers() {
        return List.copyOf(peers.values());
    }

    /**
     * Offers a tool that needs a name and a description only, also while connected. Its schema is that of the type that its
     * handler takes: a record, or Map, JsonObject or {@link Json} for any object. What the handler throws fails the call.
     */
    public <A> Plugin tool(String name, String description, Class<A> type, Handler<A> handler) {
        return add(Tool.newBuilder().setName(name).setDescription(description).build(), type, handler);
    }

    /** Offers a tool with all fields that it can have; its {@code parameters_json} is used in place of the type's schema. */
    public <A> Plugin add(Tool tool, Class<A> type, Handler<A> handler) {
        tools.add(tool, type, handler);
        return this;
    }

    /** Returns the JSON Schema of a type, for {@code output_schema_json}. */
    public static String schemaOf(Class<?> type) {
        return Schema.of(type);
    }

    /** Withdraws a tool; its calls in flight are finished. Returns whether it existed. */
    public boolean removeTool(String name) {
        return tools.remove(name);
    }

    /** Returns the tools that a bus refused, each with its reason. */
    public List<RefusedTool> refused() {
        return peers().stream().flatMap(peer -> peer.refused().stream()).toList();
    }

    /** Returns the tools that wait for a role. */
    public List<WaitingTool> waiting() {
        return peers().stream().flatMap(peer -> peer.waiting().stream()).toList();
    }

    /** Connects in the background, on threads that do not keep the program alive. */
    public synchronized Plugin start() {
        if (!begun && addresses.hasNames()) {
            Options.daemon(this::follow, "toolbus-" + source).start();
        }
        begun = true;
        peers.values().forEach(Peer::begin);
        return this;
    }

    /** Connects, and waits until a bus has answered for all tools; throws the error of a bus if each refuses this plugin. */
    public Plugin ready() throws InterruptedException {
        start();
        while (true) {
            List<Peer> now = peers();
            BusException refusal = null;
            int refusals = 0;
            for (Peer peer : now) {
                try {
                    if (peer.declared(LOOK.dividedBy(now.size()))) {
                        return this;
                    }
                } catch (BusException ended) {
                    refusal = ended;
                    refusals++;
                }
            }
            if (refusals > 0 && refusals == now.size()) {
                throw refusal;
            }
            if (now.isEmpty() && isStopped(LOOK)) {
                throw BusException.lost("this plugin has left the bus");
            }
        }
    }

    /**
     * Connects and serves until SIGINT or SIGTERM comes, {@link #close} is called, or each bus has sent this plugin away;
     * then finishes its calls. Throws the error of a bus that refuses it.
     */
    public void run() throws InterruptedException {
        List<Runnable> signals = List.of(onSignal("TERM"), onSignal("INT")); // one may come as soon as a bus lists the tools
        try {
            start();
            List<Peer> now = peers();
            while (!isStopped(LOOK) && (now.isEmpty() || !now.stream().allMatch(Peer::hasEnded))) {
                now = peers();
            }
            leave();
        } finally {
            signals.forEach(Runnable::run);
        }
    }

    /** Leaves gracefully: withdraws the tools, finishes the calls in flight for at most 30 s, disconnects. */
    @Override
    public void close() throws InterruptedException {
        try {
            leave();
        } catch (BusException known) {
            // `run` or `ready` throws it.
        }
    }

    /** Leaves all buses at once; throws the first refusal when all have ended. */
    private void leave() throws InterruptedException {
        synchronized (this) {
            stopped.complete(null);
        }
        List<Peer> all = peers();
        all.forEach(Peer::leave);
        long end = System.nanoTime() + GRACE.toNanos();
        BusException refusal = null;
        for (Peer peer : all) {
            try {
                peer.ended(Duration.ofNanos(Math.max(0, end - System.nanoTime())));
            } catch (BusException problem) {
                refusal = refusal == null ? problem : refusal;
            }
        }
        if (refusal != null) {
            throw refusal;
        }
    }

    /**
     * Calls any tool of the bus, the first one of the address that is connected, outside of a call; in a handler use
     * {@code scope.call}.
     */
    public Call call(String name, Object arguments) {
        start();
        List<Peer> now = peers();
        if (now.isEmpty()) {
            throw BusException.lost("DNS has not answered yet: wait for ready()");
        }
        Peer peer = now.stream().filter(each -> each.wire() != null).findFirst().orElse(now.get(0));
        return new Call(peer, name, arguments, null);
    }

    /** Has a signal stop this plugin; returns what undoes that. */
    private Runnable onSignal(String name) {
        try {
            Signal signal = new Signal(name);
            SignalHandler before = Signal.handle(signal, any -> stopped.complete(null));
            return () -> Signal.handle(signal, before);
        } catch (IllegalArgumentException unavailable) {
            return () -> { }; // the virtual machine takes it
        }
    }
}
