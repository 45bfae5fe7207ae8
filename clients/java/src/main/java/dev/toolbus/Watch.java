package dev.toolbus;

import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.TimeUnit;

/**
 * What the bus sends to a subscription, on a stream of its own, until it is closed.
 *
 * @param <T> what comes: a CatalogChange, or a Notification
 */
public final class Watch<T> implements AutoCloseable {
    private static final long LOOK_MILLIS = 100; // at whether the session goes on
    private final Peer peer;
    private final BlockingQueue<Object> items;

    Watch(Peer peer, BlockingQueue<Object> items) {
        this.peer = peer;
        this.items = items;
    }

    /** Waits for the next item; throws the error of a bus that refuses this host. */
    public T next() throws InterruptedException {
        return next(Peer.FOREVER);
    }

    /** Waits for the next item, at most so long; returns null if none has come by then. */
    @SuppressWarnings("unchecked")
    public T next(Duration time) throws InterruptedException {
        long end = System.nanoTime() + time.toNanos();
        while (true) {
            long left = (end - System.nanoTime()) / 1_000_000;
            Object item = items.poll(Math.max(0, Math.min(left, LOOK_MILLIS)), TimeUnit.MILLISECONDS);
            if (item == null && left > 0) {
                peer.connected(Duration.ZERO); // throws if it has ended
            } else {
                return (T) item;
            }
        }
    }

    /** Ends the subscription. */
    @Override
    public void close() {
        peer.leave();
    }
}
