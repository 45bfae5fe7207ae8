package dev.toolbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.toolbus.pb.*;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Plays what a bus sends to a peer that is not connected. */
@Timeout(60)
class PeerTest {
    private final List<String> lines = new ArrayList<>();
    private final Peer peer = new Peer("x", new Options().log(lines::add), new Addresses("127.0.0.1:1"), new Tools(),
            Subscription.SUBSCRIPTION_CATALOG);

    private static Link link() {
        return new Link(0, () -> { });
    }

    private static ListedTool listed(String name) {
        return ListedTool.newBuilder().setTool(Tool.newBuilder().setName(name)).setSource("x").build();
    }

    private void note(CatalogChange.Builder change) {
        peer.note(Event.newBuilder().setCatalog(change).build(), link());
    }

    @Test
    void aReaderThatIsFarBehindGetsTheWholeCatalog() throws InterruptedException {
        note(CatalogChange.newBuilder().setFull(true).addAdded(listed("stays")));
        ToolRef gone = ToolRef.newBuilder().setName("comes_and_goes").setSource("x").build();
        for (int number = 1; number <= Peer.MAX_UNREAD + 1; number++) {
            CatalogChange.Builder change = CatalogChange.newBuilder().setRevision(number);
            note(number % 2 == 0 ? change.addRemoved(gone) : change.addAdded(listed("comes_and_goes")));
        }
        assertEquals(CatalogChange.newBuilder().setFull(true).setRevision(Peer.MAX_UNREAD).addAdded(listed("stays")).build(),
                peer.next(Duration.ZERO));
        CatalogChange next = (CatalogChange) peer.next(Duration.ZERO);
        assertEquals(List.of(listed("comes_and_goes")), next.getAddedList());
        assertEquals(null, peer.next(Duration.ZERO));
    }

    @Test
    void aReaderThatIsFarBehindGetsTheNewestNotifications() throws InterruptedException {
        for (int number = 1; number <= Peer.MAX_UNREAD + 2; number++) {
            peer.note(Event.newBuilder().setNotification(Notification.newBuilder().setNumber(number)).build(), link());
        }
        assertEquals(Notification.newBuilder().setNumber(3).setLost(2).build(), peer.next(Duration.ZERO));
        for (int number = 4; number <= Peer.MAX_UNREAD + 2; number++) {
            assertEquals(Notification.newBuilder().setNumber(number).build(), peer.next(Duration.ZERO));
        }
        assertEquals(null, peer.next(Duration.ZERO));
    }

    private static Attached answer(int refused, String... errors) {
        Attached.Builder answer = Attached.newBuilder().setRefusedTotal(refused);
        for (String error : errors) {
            answer.addRefused(RefusedTool.newBuilder().setName("bad").setError(error));
        }
        return answer.build();
    }

    @Test
    void aRefusalIsLoggedOnceUntilItChanges() {
        Attached first = answer(1, "first");
        Attached other = answer(1, "other");
        Attached none = answer(0);
        Attached all = answer(0, "no tools");
        Attached waits = Attached.newBuilder().addWaiting(WaitingTool.newBuilder().setName("worker").setRole("workers")).build();
        for (Attached answer : List.of(first, first, other, none, other, all, all, waits, waits, none, waits)) {
            peer.attached(answer, link());
        }
        List<String> ends = List.of("first", "other", "other", "no tools", "have", "have");
        assertEquals(ends.size(), lines.size(), lines::toString);
        for (int at = 0; at < ends.size(); at++) {
            assertTrue(lines.get(at).endsWith(ends.get(at)), lines::toString);
        }
    }
}
