package dev.toolbus;

import java.util.Collection;
import java.util.Queue;
import java.util.concurrent.*;
import java.util.function.Consumer;

/**
 * Runs the handlers of calls that came in one message, one after the other on one thread while they are quick, since waking
 * a thread for each costs more than the call. Where one waits for something, other threads take those behind it.
 */
final class Handlers implements Runnable {
    static final ExecutorService THREADS = Executors.newCachedThreadPool(task -> Options.daemon(task, "toolbus-handler"));
    private static final long LOOK_MILLIS = 1; // until it is seen that nobody begins what waits

    private final Queue<ToolScope> waiting;
    private final Executor threads;
    private final Consumer<ToolScope> handler;
    private volatile int begun; // rises when one is begun

    private Handlers(Collection<ToolScope> scopes, Executor threads, Consumer<ToolScope> handler) {
        waiting = new ConcurrentLinkedQueue<>(scopes);
        this.threads = threads;
        this.handler = handler;
    }

    /** Begins to run a handler for each scope. */
    static void begin(Collection<ToolScope> scopes, Executor threads, Consumer<ToolScope> handler) {
        Handlers batch = new Handlers(scopes, threads, handler);
        threads.execute(batch);
        if (scopes.size() > 1) {
            batch.lookLater(1);
        }
    }

    @Override
    public void run() {
        for (ToolScope scope = waiting.poll(); scope != null; scope = waiting.poll()) {
            begun++;
            if (scope.enter()) {
                try {
                    handler.accept(scope);
                } finally {
                    scope.leave();
                }
            }
        }
    }

    private void lookLater(int running) {
        int seen = begun;
        Wire.STREAMS.schedule(() -> look(seen, running), LOOK_MILLIS, TimeUnit.MILLISECONDS);
    }

    /** Has more threads take what waits, always more, while all that run it wait for something. */
    private void look(int seen, int running) {
        int more = begun == seen ? Math.min(3 * running, waiting.size()) : 0;
        try {
            for (int thread = 0; thread < more; thread++) {
                threads.execute(this);
            }
        } catch (OutOfMemoryError full) {
            // The threads that are there take the rest.
        }
        if (!waiting.isEmpty()) {
            lookLater(running + more);
        }
    }
}
