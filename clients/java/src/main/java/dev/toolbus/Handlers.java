package dev.toolbus;

import java.util.ArrayDeque;
import java.util.List;
import java.util.concurrent.AbstractExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Runs handlers on as many threads as they need. Handlers that are quick share few threads, since waking one for each call
 * costs more than the call; where all threads wait for something, others are there within 2 ms.
 */
final class Handlers extends AbstractExecutorService {
    private static final int BUSY = Math.max(2, Runtime.getRuntime().availableProcessors()); // threads that can compute at once
    private static final long LOOK_MILLIS = 1; // until it is seen that nobody begins what waits
    private static final long STILL_NANOS = 200_000; // after a task was begun: now all threads may wait for something
    private static final long IDLE_MILLIS = 60_000; // after which a thread ends

    private final AtomicInteger names = new AtomicInteger();
    private final ArrayDeque<Runnable> waiting = new ArrayDeque<>();
    private int running; // threads that are not idle
    private int idle;
    private int woken; // of the idle ones, those that have not noticed yet
    private boolean looking; // whether a look will come
    private long begun; // how many tasks were begun
    private long seen; // the same at the last look
    private long begunAt; // when the newest one was

    @Override
    public synchronized void execute(Runnable task) {
        waiting.add(task);
        try {
            if (running < BUSY || woken == 0 && System.nanoTime() - begunAt > STILL_NANOS) {
                wake();
            }
        } catch (OutOfMemoryError full) {
            if (running == 0) {
                waiting.remove(task);
                throw full;
            } // else a thread that is there takes it
        }
        if (!looking) {
            looking = true;
            seen = begun;
            Wire.STREAMS.schedule(this::look, LOOK_MILLIS, TimeUnit.MILLISECONDS);
        }
    }

    /** Wakes threads for the tasks that nobody has begun, since all threads wait for something. */
    private synchronized void look() {
        try {
            for (int more = begun == seen ? waiting.size() : 0; more > 0; more--) {
                wake();
            }
        } catch (OutOfMemoryError full) {
            // the threads that are there take the rest
        }
        seen = begun;
        looking = !waiting.isEmpty();
        if (looking) {
            Wire.STREAMS.schedule(this::look, LOOK_MILLIS, TimeUnit.MILLISECONDS);
        }
    }

    private void wake() {
        if (woken < idle) {
            woken++;
            notify();
        } else {
            Options.daemon(this::work, "toolbus-handler-" + names.incrementAndGet()).start();
        }
        running++;
    }

    private void work() {
        for (Runnable task = next(); task != null; task = next()) {
            task.run(); // it hands its failure on
        }
    }

    /** Returns the next task; null if none has come for a while. */
    private synchronized Runnable next() {
        Thread.interrupted(); // was meant for the task before
        Runnable task = waiting.poll();
        long end = System.nanoTime() + IDLE_MILLIS * 1_000_000;
        while (task == null) {
            running--;
            idle++;
            boolean expired = false;
            while (woken == 0 && !expired) {
                try {
                    wait(IDLE_MILLIS);
                } catch (InterruptedException late) {
                    continue; // was meant for the task before
                }
                expired = System.nanoTime() - end >= 0;
            }
            idle--;
            if (woken == 0) {
                return null;
            }
            woken--;
            task = waiting.poll();
        }
        begun++;
        begunAt = System.nanoTime();
        return task;
    }

    @Override
    public void shutdown() {
        throw new UnsupportedOperationException("the threads of handlers are those of all plugins");
    }

    @Override
    public List<Runnable> shutdownNow() {
        throw new UnsupportedOperationException("the threads of handlers are those of all plugins");
    }

    @Override
    public boolean isShutdown() {
        return false;
    }

    @Override
    public boolean isTerminated() {
        return false;
    }

    @Override
    public boolean awaitTermination(long time, TimeUnit unit) {
        return false;
    }
}
