package dev.toolbus;

import java.time.Duration;

/**
 * What the bus sends to a subscription, on a stream of its own, until it is closed.
 *
 * <p>Of 1,000 items that were not read, the oldest notifications are left out and counted in {@code lost} of the next one,
 * and changes become one with the whole catalog ({@code full}).
 *
 * @param <T> what comes: a CatalogChange, or a Notification
 */
public final class Watch<T> implements AutoCloseable {
    private final Peer peer;

    Watch(Peer peer) {
        this.peer = peer;
    }

    /** Waits for the next item; throws the error of a bus that refuses this host. */
    public T next() throws InterruptedException {
        return next(Peer.FOREVER);
    }

    /** Waits for the next item, at most so long; returns null if none has come by then. */
    @SuppressWarnings("unchecked")
    public T next(Duration time) throws InterruptedException {
        return (T) peer.next(time);
    }

    /** Ends the subscription. */
    @Override
    public void close() {
        peer.leave();
    }
}
