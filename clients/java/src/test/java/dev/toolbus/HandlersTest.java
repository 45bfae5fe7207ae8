package dev.toolbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class HandlersTest {
    private final Handlers handlers = new Handlers();

    @Test
    void handlersThatWaitForOthersLetThoseBeginAgainAndAgain() throws Exception {
        for (int round = 0; round < 3; round++) {
            CyclicBarrier all = new CyclicBarrier(40);
            List<Future<?>> tasks = new ArrayList<>();
            for (int task = 0; task < 40; task++) {
                tasks.add(handlers.submit(() -> all.await()));
            }
            for (Future<?> task : tasks) {
                task.get();
            }
        }
    }

    @Test
    void anInterruptOfOneHandlerDoesNotReachTheNextOneOnItsThread() throws Exception {
        for (int round = 0; round < 50; round++) {
            CountDownLatch begun = new CountDownLatch(1);
            Future<?> task = handlers.submit(() -> {
                begun.countDown();
                Thread.sleep(TimeUnit.MINUTES.toMillis(1));
                return null;
            });
            begun.await();
            task.cancel(true);
            List<Future<Boolean>> next = List.of(handlers.submit(Thread::interrupted), handlers.submit(Thread::interrupted));
            for (Future<Boolean> each : next) {
                assertFalse(each.get());
            }
        }
        assertEquals(3, handlers.<Integer>submit(() -> 3).get());
    }
}
