package dev.toolbus;

import dev.toolbus.pb.*;
import io.grpc.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.BooleanSupplier;
import java.util.function.Consumer;

/** Connects one peer to the bus: attaches, reads, reconnects with backoff, leaves; in the order of docs/protocol.md. */
final class Peer {
    static final Duration FOREVER = Duration.ofDays(36_500);
    private static final double STEADY = 1; // seconds: a session that lived so long resets the backoff
    private static final int ATTACH_BYTES = 12 << 20; // of the tools in one request; those that do not fit follow by Register
    private static final long FAREWELL_MILLIS = 20; // for the connection to tell the bus that a stream is given up
    private static final Duration REGISTER = Duration.ofSeconds(300);
    private static final double EXPIRY_SECONDS = 7 * 86_400; // before a key expires: then a warning is logged
    static final int MAX_UNREAD = 1000; // items of a subscription that wait for their reader
    private static final Set<Status.Code> FINAL = Set.of(Status.Code.INVALID_ARGUMENT, Status.Code.FAILED_PRECONDITION,
            Status.Code.NOT_FOUND, Status.Code.PERMISSION_DENIED, Status.Code.ALREADY_EXISTS, Status.Code.UNIMPLEMENTED);
    private static final Set<String> PROOFS = Set.of("token", "certificate"); // of a credential
    private static final Set<Status.Code> LONG_PAUSES = Set.of(Status.Code.RESOURCE_EXHAUSTED, Status.Code.INTERNAL);

    /** Why an attempt at an address failed, and whether more is known than gRPC's text. */
    private record Failure(String text, boolean explained) {
        boolean isLike(String other) {
            return text.replaceAll("[0-9]", "").equals(other.replaceAll("[0-9]", ""));
        }
    }

    /** Names a tool among those of a source. */
    private record Key(String role, String name) {}

    final Options options;
    private final Tools tools;
    private final Runnable wake = this::changed;
    private final String source;
    private final Addresses addresses;
    private final Subscription subscription; // null for none
    private Map<String, String> credential = Map.of(); // of the newest connection
    private String unusable; // why the file of the credential could not be used; "" where it could, null before the first connection
    // What follows is under the lock of the peer.
    private final Map<Key, RefusedTool> refused = new LinkedHashMap<>();
    private final Map<Key, WaitingTool> waiting = new LinkedHashMap<>();
    private final Map<Key, String> noted = new HashMap<>(); // what was logged about these; of a refusal of all, under an empty name
    private final Deque<Object> unread = new ArrayDeque<>(); // what it subscribes to and its reader has not taken yet
    private final Map<ToolRef, ListedTool> catalog = new LinkedHashMap<>(); // all that a watch has brought
    private final Map<String, Failure> shown = new HashMap<>(); // why attempts at each address fail; empty while attached
    private long answered = -1; // the version of the tools for which the bus has answered last
    private Wire wire; // of the current stream
    private Link route; // where calls go; null without a session
    private long newest; // the number of the newest notification
    private String left; // why there will be no stream any more; null while there may be
    private BusException fatal; // why the bus refused tools that are to be offered all or none
    private boolean begun;
    private final CompletableFuture<Void> leaving = new CompletableFuture<>(); // done when it is to leave
    private boolean hurry; // calls in flight are not waited for
    private boolean closed; // calls of our own end now
    private boolean ended;
    private BusException problem; // with which it ended; null for none

    Peer(String source, Options options, Addresses addresses, Tools tools, Subscription subscription) {
        checkSource(source);
        this.source = source;
        this.options = options;
        this.addresses = addresses;
        this.tools = tools;
        this.subscription = subscription;
    }

    static void checkSource(String source) {
        if (!source.matches("[A-Za-z0-9_.:-]{1,128}")) {
            throw BusException.setup("the source is '" + source + "', it must be 1 to 128 of [A-Za-z0-9_.:-]");
        }
    }

    void log(String text) {
        options.warn(text);
    }

    private synchronized void changed() {
        notifyAll();
    }

    synchronized List<RefusedTool> refused() {
        return List.copyOf(refused.values());
    }

    synchronized List<WaitingTool> waiting() {
        return List.copyOf(waiting.values());
    }

    /** Returns the connection of the current session; null without one. */
    synchronized Wire wire() {
        return route == null ? null : wire;
    }

    /** Runs in the background, unless it runs already or has left. */
    synchronized void begin() {
        if (!begun) {
            begun = true;
            tools.watchers.add(wake);
            Options.daemon(this::live, "toolbus-" + source).start();
        }
    }

    /** Shuts down gracefully: the bus sends no new calls, those in flight are finished, then the peer ends. */
    synchronized void leave() {
        closeRoute("this peer has left the bus");
        leaving.complete(null);
        if (!begun) {
            begun = true;
            ended = true;
        }
        notifyAll();
    }

    /** Ends the calls of our own. */
    void close() {
        Link link;
        synchronized (this) {
            closed = true;
            link = route;
            leave();
        }
        if (link != null) {
            link.abandonAll();
        }
    }

    synchronized boolean hasEnded() {
        return ended;
    }

    /** Waits for the end, at most so long; then gives the stream up. Throws why the bus refused this peer. */
    void ended(Duration grace) throws InterruptedException {
        if (!until(grace, () -> ended)) {
            synchronized (this) {
                hurry = true;
                notifyAll();
            }
            until(FOREVER, () -> ended);
        }
        if (problem != null) {
            throw problem;
        }
    }

    /** Waits until the bus has answered for all tools as they are now. */
    boolean declared(Duration time) throws InterruptedException {
        return orEnd(until(time, () -> ended || answered == tools.version()));
    }

    /** Waits until a bus has accepted this peer; returns whether one did in time. */
    boolean connected(Duration time) throws InterruptedException {
        return orEnd(until(time, () -> ended || route != null));
    }

    /** Waits for the next item of a subscription, at most so long; returns null without one. */
    synchronized Object next(Duration time) throws InterruptedException {
        boolean found = until(time, () -> ended || !unread.isEmpty());
        if (unread.isEmpty()) {
            orEnd(found);
        }
        return unread.poll();
    }

    private synchronized boolean orEnd(boolean found) {
        if (ended) {
            throw problem == null ? BusException.lost(left == null ? "" : left) : problem;
        }
        return found;
    }

    private synchronized boolean until(Duration time, BooleanSupplier condition) throws InterruptedException {
        long end = System.nanoTime() + time.toNanos();
        while (!condition.getAsBoolean()) {
            long left = (end - System.nanoTime()) / 1_000_000;
            if (left <= 0) {
                return false;
            }
            wait(left);
        }
        return true;
    }

    /** Waits for a stream until a moment; returns null if there is none by then, and throws why there will be none. */
    synchronized Link route(long end) throws InterruptedException {
        until(Duration.ofNanos(Math.max(0, end - System.nanoTime())), () -> route != null || left != null);
        if (left != null) {
            throw BusException.lost(left);
        }
        return route;
    }

    synchronized boolean closed() {
        return closed;
    }

    private synchronized void closeRoute(String why) {
        if (left == null) {
            left = why;
        }
        route = null;
        notifyAll();
    }

    // -- the life of the connection ------------------------------------------------------------------------------------

    private void live() {
        BusException why = null;
        try {
            attempts();
        } catch (BusException refusal) {
            why = refusal;
            log(refusal.getMessage());
        } catch (InterruptedException | RuntimeException | Error fault) {
            why = BusException.lost("the client has a fault: " + fault);
            log(why.getMessage());
        }
        tools.watchers.remove(wake);
        synchronized (this) {
            if (why != null) {
                closeRoute("the bus refuses this peer: " + why.getMessage());
            }
            problem = why;
            ended = true;
            notifyAll();
        }
    }

    private void attempts() throws InterruptedException {
        int failures = 0; // attempts since the last steady session
        boolean keyEnded = false; // whether the session before ended because the bus no longer accepts its key
        for (int attempt = 0; !hasLeft(); attempt++) {
            Link link = new Link(options.maxInFlight, wake);
            String address = options.address;
            BusException end;
            int others = 0; // buses that are tried before a pause
            try {
                List<String> known = addresses.now(leaving);
                address = known.get(attempt % known.size());
                others = known.size() - 1 - attempt % known.size();
                end = hasLeft() ? BusException.lost("this peer has left") : serve(address, link);
            } catch (BusException none) {
                end = none;
            }
            synchronized (this) {
                if (fatal != null) {
                    throw fatal;
                }
            }
            boolean lived = link.attached != 0;
            boolean steady = lived && Link.seconds(link.attached) >= STEADY;
            boolean again = !lived || keyEnded && !steady;
            keyEnded = end.code() == Status.Code.UNAUTHENTICATED;
            if (end.kind() == BusException.Kind.SETUP) {
                throw end;
            }
            if (FINAL.contains(end.code()) || keyEnded && again) {
                throw refusal(address, end);
            }
            failures = steady ? 0 : failures;
            boolean slow = LONG_PAUSES.contains(end.code());
            long longest = slow ? 10_000 : 800;
            long upper = Math.min(longest, (slow ? 500L : 50L) << Math.min(failures, 10));
            if (!hasLeft()) {
                explain(address, end, longest, lived);
                if (!lived && others > 0) {
                    continue; // another bus may be there
                }
                until(Duration.ofMillis((long) (upper * ThreadLocalRandom.current().nextDouble())), leaving::isDone);
            }
            failures++;
        }
    }

    private synchronized boolean hasLeft() {
        return left != null;
    }

    /** Returns the refusal of a bus with its address and what to do. */
    private BusException refusal(String address, BusException end) {
        String key = options.credential.isEmpty() ? "no credential: name its file in TOOLBUS_CREDENTIAL"
                : "the credential " + options.credential;
        String why = switch (end.code()) {
            case UNIMPLEMENTED -> "it is not a toolbus, check the address: " + end.text;
            case UNAUTHENTICATED -> end.text + " (" + key + ")";
            default -> end.text;
        };
        return new BusException(end.kind(), end.code(), "the bus at " + address + " refuses " + source + ": " + why);
    }

    /** Logs why an attempt failed: each reason once, whatever times and ports it names. */
    private void explain(String address, BusException end, long longest, boolean lived) {
        String again = "trying again, at least every " + longest / 1000.0 + " s";
        String text = "not attached to " + address + " (" + end.getMessage() + "): " + again;
        boolean broke = end.code() == Status.Code.UNAVAILABLE;
        synchronized (this) {
            Failure before = shown.get(address);
            if (before != null && (broke && before.explained || before.isLike(text))) {
                return;
            }
        }
        String why = broke && !lived ? Wire.whyUnanswered(address, options.credential, credential, end.text) : null;
        synchronized (this) {
            shown.put(address, new Failure(text, why != null));
        }
        log(why == null ? text : why + "; " + again);
    }

    /**
     * Returns a connection by the credential as its file has it now; while that cannot be used, as where it is about to be
     * copied, by the one before.
     */
    private Wire connect(String address) {
        try {
            Map<String, String> values = Wire.readCredential(options.credential);
            if (Collections.disjoint(values.keySet(), PROOFS) && !Collections.disjoint(credential.keySet(), PROOFS)) {
                throw BusException.setup("the credential " + options.credential + " has neither token nor certificate");
            }
            Wire made = new Wire(address, options.credential, values);
            credential = values;
            unusable = "";
            return made;
        } catch (BusException problem) {
            if (unusable == null) {
                throw problem;
            }
            Wire made = new Wire(address, options.credential, credential);
            String why = problem.getMessage() + "; using the credential that was read before";
            if (!why.equals(unusable)) {
                log(why);
            }
            unusable = why;
            return made;
        }
    }

    /** Runs one stream from its attach to its end; returns how it ended. */
    private BusException serve(String address, Link link) throws InterruptedException {
        Wire made = connect(address);
        synchronized (this) {
            wire = made;
            declare(link);
        }
        link.stream(made.open(listener(link)));
        while (true) {
            String lost = link.look();
            synchronized (this) {
                if (lost != null || hurry) {
                    end(link, BusException.lost(lost == null ? "the calls in flight took too long" : lost));
                }
                if (link.end != null) {
                    break;
                }
                declareAgain(link);
                if (leaving.isDone()) {
                    link.drain("leaving");
                }
                wait(link.tickMillis());
            }
        }
        BusException end = link.end;
        link.giveUpStream(end.text);
        boolean ok = end.code() == Status.Code.OK;
        if (end.kind() == BusException.Kind.LOST && !ok) {
            Thread.sleep(FAREWELL_MILLIS);
        }
        synchronized (this) {
            wire = null;
            route = null;
        }
        made.close();
        link.end(ok && link.drained());
        return end;
    }

    /** Notes how a stream ends: what comes first counts. */
    private synchronized void end(Link link, BusException why) {
        link.end = link.end == null ? why : link.end;
        notifyAll();
    }

    private ClientCall.Listener<InvokeResponse> listener(Link link) {
        return new ClientCall.Listener<>() {
            @Override
            public void onReady() {
                link.flush();
            }

            @Override
            public void onMessage(InvokeResponse message) {
                if (link.end == null) {
                    receive(message, link);
                    link.readOn();
                }
            }

            @Override
            public void onClose(Status status, Metadata trailers) {
                end(link, status.isOk() ? new BusException(BusException.Kind.LOST, Status.Code.OK, "the stream ended")
                        : BusException.of(status));
            }
        };
    }

    private synchronized void declare(Link link) {
        link.version = tools.version();
        link.pages = new ArrayList<>(tools.pages(ATTACH_BYTES));
        link.declared.add(link.version);
        Attach.Builder attach = Attach.newBuilder().setProtocolVersion(1).setSource(source).setInstance(options.instance)
                .addAllTools(link.pages.remove(0)).setMaxInFlight(options.maxInFlight).setQualified(options.qualified)
                .setToken(options.token).addAllNotices(options.notices).setAllOrNone(options.allOrNone)
                .setNotificationsAfter(newest);
        if (subscription != null) {
            attach.addSubscribe(subscription);
        }
        link.put(attach.build(), InvokeRequest.Builder::setAttach);
    }

    /** Declares the tools by a later attach, if they have changed since the last one. */
    private synchronized void declareAgain(Link link) {
        if (link.attached != 0 && link.version != tools.version() && !link.leaving()) {
            declare(link);
        }
    }

    /** Offers the tools that did not fit into the attach. */
    private void register(Wire made, Link link, String session, List<List<Tool>> pages, long version) {
        for (List<Tool> page : pages) {
            RegisterRequest request = RegisterRequest.newBuilder().setSessionId(session).addAllTools(page)
                    .setAllOrNone(options.allOrNone).build();
            try {
                RegisterResponse answer = made.ask(Wire.REGISTER, request, REGISTER);
                synchronized (this) {
                    if (link.version != version) {
                        return; // a later attach declares them again
                    }
                    note(answer.getRefusedList(), answer.getWaitingList());
                }
            } catch (BusException | InterruptedException refusal) {
                log("the bus refused tools that did not fit into one message: " + refusal.getMessage());
                synchronized (this) {
                    if (options.allOrNone && refusal instanceof BusException bus && bus.kind() == BusException.Kind.REFUSED) {
                        fatal = bus;
                    }
                }
                end(link, BusException.lost("this peer gives the stream up"));
                return;
            }
        }
        answered(version);
    }

    /** Notes that the bus has answered for all tools of a version. */
    private synchronized void answered(long version) {
        answered = version;
        forget();
        notifyAll();
    }

    // -- messages of the bus -----------------------------------------------------------------------------------------------

    /** Handles the fields of a message, in the order of the protocol. */
    private void receive(InvokeResponse message, Link link) {
        link.hear();
        if (message.hasAttached()) {
            attached(message.getAttached(), link);
        }
        message.getEventsList().forEach(event -> note(event, link));
        tools.begin(message.getCallsList(), link, this);
        message.getProgressList().forEach(progress -> {
            Consumer<ToolProgress> told = link.progressed(progress);
            try {
                if (told != null) {
                    told.accept(progress);
                }
            } catch (RuntimeException fault) {
                log("onProgress failed: " + fault);
            }
        });
        message.getResultsList().forEach(link::answered);
        message.getCancelsList().forEach(cancel -> link.cancel(cancel.getCallId()));
        if (message.hasHeartbeat()) {
            Heartbeat heartbeat = message.getHeartbeat();
            if (heartbeat.getFromPeer()) {
                tools.begin(link.echoed(heartbeat.getSequence()), link, this);
            } else {
                link.put(heartbeat, InvokeRequest.Builder::setHeartbeat);
            }
        }
        if (message.hasDrain()) {
            drained(message.getDrain().getReason(), link);
        }
        link.whenIdle();
    }

    /** Takes the answer to an attach; the first one opens the session. */
    synchronized void attached(Attached answer, Link link) {
        boolean whole = answer.getRefusedTotal() == 0 && answer.getRefusedCount() > 0; // the attach itself is refused
        if (whole) {
            logOnce(new Key("", ""), "the bus refused the tools: " + answer.getRefused(0).getError()); // everything stays as it was
        } else {
            refused.clear();
            waiting.clear();
            note(answer.getRefusedList(), answer.getWaitingList());
        }
        long version = link.declared.isEmpty() ? link.version : link.declared.remove();
        if (link.declared.isEmpty() && !link.pages.isEmpty() && !whole) {
            List<List<Tool>> pages = link.pages;
            link.pages = List.of();
            Wire made = wire;
            Options.CALLS.execute(() -> register(made, link, answer.getSessionId(), pages, version));
        } else if (whole) {
            answered = version;
        } else {
            answered(version);
        }
        if (link.attached == 0) {
            link.open(answer);
            shown.clear();
            if (answer.getExpiresSeconds() > 0 && answer.getExpiresSeconds() < EXPIRY_SECONDS) {
                log(String.format("the key of %s expires in %.1f hours: renew it", answer.getIdentity(),
                        answer.getExpiresSeconds() / 3600));
            }
            if (!link.leaving() && left == null) {
                route = link;
            }
        }
        declareAgain(link);
        notifyAll();
    }

    /** Takes an event. Events for the author are logged as warnings; unknown kinds are ignored. */
    void note(Event event, Link link) {
        switch (event.getKindCase()) {
            case CATALOG -> follow(event.getCatalog());
            case NOTIFICATION -> follow(event.getNotification());
            case TOOL_OVERWRITTEN -> log("the tool '" + event.getToolOverwritten().getName()
                    + "' is not offered any more: the source '" + event.getToolOverwritten().getBySource() + "' took its name");
            case TOOL_REMOVED -> log("the tool '" + event.getToolRemoved().getName()
                    + "' is not offered any more: another client withdrew it");
            case PERMISSION_DENIED -> log("the bus refused '" + event.getPermissionDenied().getOperation()
                    + "': the permission '" + event.getPermissionDenied().getPermission() + "' is missing");
            case PERMISSION_CHANGED -> {
                boolean granted = event.getPermissionChanged().getGranted();
                String permission = event.getPermissionChanged().getPermission();
                log("the permission '" + permission + "' was " + (granted ? "granted" : "revoked"));
                if (permission.equals("tools") && granted && !link.leaving()) {
                    declare(link); // the bus withdrew the tools
                }
            }
            case TOOLS_REVIEWED -> reviewed(event.getToolsReviewed());
            default -> { }
        }
    }

    /** Has a reader get a change of the catalog; one that is far behind gets the whole catalog in place of all changes. */
    private synchronized void follow(CatalogChange change) {
        if (change.getFull()) {
            catalog.clear();
        }
        change.getRemovedList().forEach(catalog::remove);
        for (List<ListedTool> tools : List.of(change.getAddedList(), change.getChangedList())) {
            tools.forEach(tool -> catalog.put(
                    ToolRef.newBuilder().setName(tool.getTool().getName()).setSource(tool.getSource()).build(), tool));
        }
        unread.add(change);
        if (unread.size() > MAX_UNREAD) {
            unread.clear();
            unread.add(CatalogChange.newBuilder().setRevision(change.getRevision()).setFull(true)
                    .addAllAdded(catalog.values()).build());
        }
        notifyAll();
    }

    /** Has a reader get a notification; one that is far behind loses the oldest, which the next one counts. */
    private synchronized void follow(Notification notification) {
        newest = Math.max(newest, notification.getNumber());
        unread.add(notification);
        if (unread.size() > MAX_UNREAD) {
            Notification oldest = (Notification) unread.remove();
            Notification next = (Notification) unread.remove();
            unread.addFirst(next.toBuilder().setLost(next.getLost() + oldest.getLost() + 1).build());
        }
        notifyAll();
    }

    private synchronized void reviewed(ToolsReviewed review) {
        Set<String> named = new HashSet<>(review.getRegisteredList());
        review.getRefusedList().forEach(tool -> named.add(tool.getName()));
        review.getWaitingList().forEach(tool -> named.add(tool.getName()));
        refused.keySet().removeIf(key -> named.contains(key.name));
        waiting.keySet().removeIf(key -> named.contains(key.name));
        note(review.getRefusedList(), review.getWaitingList());
        forget();
    }

    /** Stores which tools the bus refused, and which wait for a role. */
    private void note(List<RefusedTool> refusals, List<WaitingTool> waits) {
        for (RefusedTool tool : refusals) {
            Key key = new Key(tool.getRole(), tool.getName());
            logOnce(key, "the bus does not offer the tool '" + key.name + "': " + tool.getError());
            refused.put(key, tool);
        }
        for (WaitingTool tool : waits) {
            Key key = new Key(tool.getRole(), tool.getName());
            logOnce(key, "the tool '" + key.name + "' waits for role '" + key.role + "', which the bus does not have");
            waiting.put(key, tool);
        }
    }

    /** Logs what holds for a tool now, once until that changes: not again after every reconnect. */
    private void logOnce(Key key, String text) {
        if (!text.equals(noted.put(key, text))) {
            log(text);
        }
    }

    /** Forgets what was logged about tools that the bus offers now. */
    private void forget() {
        noted.keySet().removeIf(key -> !refused.containsKey(key) && !waiting.containsKey(key));
    }

    private void drained(String reason, Link link) {
        link.drainReceived();
        synchronized (this) {
            route = null; // new calls wait for the next stream
        }
        if (reason.equals("replaced") || reason.equals("requested")) {
            String text = "the bus ended this peer's session: " + reason;
            log(text);
            closeRoute(text);
        }
    }
}
