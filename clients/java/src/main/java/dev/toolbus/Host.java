package dev.toolbus;

import dev.toolbus.pb.*;
import io.grpc.Status;
import java.time.Duration;
import java.util.List;

/**
 * Lists tools and calls them, usually for a language model. It connects when it is first used, and reconnects until it is
 * closed. Any thread may use it.
 */
public final class Host implements AutoCloseable {
    private static final Duration LIST = Duration.ofSeconds(10); // for a listing, waiting for a connection included
    private static final Duration CLOSE = Duration.ofSeconds(5);

    private final String source;
    private final Options options;
    private final Peer peer;

    /** Makes a host that finds its bus by the environment. */
    public Host() {
        this("host", new Options());
    }

    /** Makes a host; its source names it in records of calls. Throws a {@link BusException} that names a mistake. */
    public Host(String source, Options options) {
        this.source = source;
        this.options = options.complete();
        peer = new Peer(source, this.options, new Addresses(this.options.address), new Tools(), null);
    }

    /** Waits until a bus has accepted this host; throws the error of a bus that refuses it. */
    public Host ready() throws InterruptedException {
        peer.begin();
        peer.connected(Peer.FOREVER);
        return this;
    }

    /**
     * Calls a tool: {@link Call#join} gives its {@link Result}, also that of a failure. Arguments are a record, a Map, a
     * JsonObject, null for none, or the JSON text that a model wrote, which is passed on unchanged.
     *
     * <p>Without a connection it waits for one, and it is sent again where that is safe, both within its timeout.
     */
    public Call call(String name, Object arguments) {
        peer.begin();
        return new Call(peer, name, arguments, null);
    }

    /** Lists the tools that this host can call. */
    public List<ListedTool> list() throws InterruptedException {
        return list(ListRequest.getDefaultInstance()).getToolsList();
    }

    /** Lists tools as a request says. The pages are joined. Throws a {@link BusException} if no bus answers within 10 s. */
    public ListResponse list(ListRequest request) throws InterruptedException {
        peer.begin();
        long end = System.nanoTime() + LIST.toNanos();
        ListResponse.Builder all = null;
        ListRequest.Builder next = request.toBuilder();
        while (true) {
            Duration left = Duration.ofNanos(Math.max(1, end - System.nanoTime()));
            if (!peer.connected(left)) {
                throw new BusException(BusException.Kind.LOST, Status.Code.DEADLINE_EXCEEDED, "no bus answered at "
                        + options.address + " within " + LIST.toSeconds() + " s");
            }
            Wire wire = peer.wire();
            if (wire == null) {
                continue;
            }
            ListResponse page = wire.ask(Wire.LIST, next.build(), left);
            if (all == null) {
                all = page.toBuilder();
            } else {
                all.addAllTools(page.getToolsList()).setNextPageToken(page.getNextPageToken());
            }
            if (page.getNextPageToken().isEmpty()) {
                return all.build();
            }
            next.setPageToken(page.getNextPageToken());
        }
    }

    /** Gives the whole catalog ({@code full}), then its changes; after a reconnect the whole catalog again. */
    public Watch<CatalogChange> watch() {
        return follow(Subscription.SUBSCRIPTION_CATALOG);
    }

    /** Gives the notifications of plugins to users; after a reconnect also those that it missed. */
    public Watch<Notification> notifications() {
        return follow(Subscription.SUBSCRIPTION_NOTIFICATIONS);
    }

    private <T> Watch<T> follow(Subscription subscription) {
        Options own = options.clone().instance("").complete();
        Peer follower = new Peer(source, own, new Addresses(own.address), new Tools(), subscription);
        follower.begin();
        return new Watch<>(follower);
    }

    /** Disconnects; calls in flight end in CANCELLED. */
    @Override
    public void close() throws InterruptedException {
        peer.close();
        try {
            peer.ended(CLOSE);
        } catch (BusException known) {
            // Calls have it.
        }
    }
}
