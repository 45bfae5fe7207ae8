package dev.toolbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import dev.toolbus.pb.ToolCall;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class HandlersTest {
    private static List<ToolScope> scopes(int count) {
        List<ToolScope> scopes = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            scopes.add(new ToolScope(ToolCall.newBuilder().setCallId("b" + number).build(), null, null, null));
        }
        return scopes;
    }

    @Test
    void handlersThatWaitForThoseBehindThemLetThemBegin() throws Exception {
        for (int round = 0; round < 3; round++) {
            CountDownLatch all = new CountDownLatch(128);
            CountDownLatch ended = new CountDownLatch(128);
            Handlers.begin(scopes(128), Handlers.THREADS, scope -> {
                all.countDown();
                try {
                    all.await();
                } catch (InterruptedException never) {
                    throw new IllegalStateException(never);
                }
                ended.countDown();
            });
            ended.await();
        }
    }

    @Test
    void aQuestionHasTheSameKeyInWhateverOrderItsFormHasItsMembers() {
        Set<String> keys = new HashSet<>();
        for (List<String> names : List.of(List.of("type", "title"), List.of("title", "type"))) {
            Map<String, String> day = new LinkedHashMap<>();
            names.forEach(name -> day.put(name, "string"));
            Map<String, Object> form = Map.of("day", day, "rooms", List.of(day));
            var asked = assertThrows(Tools.Stop.class, () -> scopes(1).get(0).elicit("Which day?", form));
            keys.addAll(Values.object(asked.result.getInputRequestsJson()).keySet());
        }
        assertEquals(1, keys.size());
    }

    @Test
    void anInterruptOfOneHandlerDoesNotReachTheNextOneAndOneThatIsOverDoesNotBegin() throws Exception {
        for (int round = 0; round < 50; round++) {
            List<ToolScope> scopes = scopes(4);
            CountDownLatch begun = new CountDownLatch(1);
            BlockingQueue<String> seen = new LinkedBlockingQueue<>();
            scopes.get(1).over.complete(null);
            Handlers.begin(scopes, Handlers.THREADS, scope -> {
                if (scope == scopes.get(0)) {
                    begun.countDown();
                    try {
                        Thread.sleep(60_000);
                    } catch (InterruptedException stopped) {
                        Thread.currentThread().interrupt();
                    }
                } else {
                    seen.add(scope.id() + Thread.interrupted());
                }
            });
            begun.await();
            scopes.get(0).stop();
            assertEquals(List.of("b2false", "b3false"), List.of(seen.take(), seen.take()).stream().sorted().toList());
        }
    }
}
