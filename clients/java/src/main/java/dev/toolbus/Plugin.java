package dev.toolbus;

import dev.toolbus.pb.RefusedTool;
import dev.toolbus.pb.Tool;
import dev.toolbus.pb.WaitingTool;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import sun.misc.Signal;
import sun.misc.SignalHandler;

/** Offers tools under a source, at every bus of its address. It reconnects until it is closed. */
public final class Plugin implements AutoCloseable {
    private static final Duration GRACE = Duration.ofSeconds(30); // for calls in flight, when a plugin leaves
    private static final Duration LOOK = Duration.ofMillis(200); // while the answer of any of several buses is waited for

    private final Tools tools = new Tools();
    private final List<Peer> peers = new ArrayList<>();
    private final CountDownLatch stopped = new CountDownLatch(1);

    /** Makes a plugin that finds its bus by the environment. */
    public Plugin(String source) {
        this(source, new Options());
    }

    /** Makes a plugin; throws a {@link BusException} that names a mistake in its source or options. */
    public Plugin(String source, Options options) {
        Options all = options.complete();
        for (String address : all.addresses()) {
            peers.add(new Peer(source, all, List.of(address), tools, null, null));
        }
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
        return peers.stream().flatMap(peer -> peer.refused().stream()).toList();
    }

    /** Returns the tools that wait for a role. */
    public List<WaitingTool> waiting() {
        return peers.stream().flatMap(peer -> peer.waiting().stream()).toList();
    }

    /** Connects in the background, on threads that do not keep the program alive. */
    public Plugin start() {
        peers.forEach(Peer::begin);
        return this;
    }

    /** Connects, and waits until a bus has answered for all tools; throws the error of a bus that refuses this plugin. */
    public Plugin ready() throws InterruptedException {
        start();
        while (true) {
            for (Peer peer : peers) {
                if (peer.declared(peers.size() == 1 ? Peer.FOREVER : LOOK)) {
                    return this;
                }
            }
        }
    }

    /**
     * Connects and serves until SIGINT or SIGTERM comes, {@link #close} is called, or the bus sends this plugin away; then
     * finishes its calls. Throws the error of a bus that refuses it.
     */
    public void run() throws InterruptedException {
        List<Runnable> signals = List.of(onSignal("TERM"), onSignal("INT")); // one may come as soon as a bus lists the tools
        try {
            start();
            Thread waiter = Options.daemon(() -> {
                try {
                    for (Peer peer : peers) {
                        peer.ended(Peer.FOREVER);
                    }
                    stopped.countDown();
                } catch (BusException refusal) {
                    stopped.countDown();
                } catch (InterruptedException over) {
                    // The plugin has stopped.
                }
            }, "toolbus-waiter");
            waiter.start();
            stopped.await();
            waiter.interrupt();
            leave();
        } finally {
            signals.forEach(Runnable::run);
        }
    }

    /** Leaves gracefully: withdraws the tools, finishes the calls in flight for at most 30 s, disconnects. */
    @Override
    public void close() throws InterruptedException {
        stopped.countDown();
        try {
            leave();
        } catch (BusException known) {
            // `run` or `ready` throws it.
        }
    }

    private void leave() throws InterruptedException {
        peers.forEach(Peer::leave);
        for (Peer peer : peers) {
            peer.ended(GRACE);
        }
    }

    /** Calls any tool of the bus, the first one of the address, outside of a call; in a handler use {@code scope.call}. */
    public Call call(String name, Object arguments) {
        start();
        return new Call(peers.get(0), name, arguments, null);
    }

    /** Has a signal stop this plugin; returns what undoes that. */
    private Runnable onSignal(String name) {
        try {
            Signal signal = new Signal(name);
            SignalHandler before = Signal.handle(signal, any -> stopped.countDown());
            return () -> Signal.handle(signal, before);
        } catch (IllegalArgumentException unavailable) {
            return () -> { }; // the virtual machine takes it
        }
    }
}
