package dev.toolbus;

import java.net.InetAddress;
import java.net.UnknownHostException;
import java.util.*;
import java.util.concurrent.*;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Reads addresses of several buses: a list with commas, and names of DNS ({@code dns:}), which are looked up again and again. */
final class Addresses {
    static final long LOOK_UP_SECONDS = 5; // between two look-ups of a name, and for the answer to one
    private static final int MAX_BUSES = 64; // of one address
    private static final Pattern BUS = Pattern.compile("(?s)unix:.+|(?:m?tls:(?:[^\\s:/?#@,\\[\\]]+@)?)?"
            + "(?:\\[[0-9A-Fa-f:.]+(?:%[\\w.-]+)?]|[^\\s:/?#@,\\[\\]]+):(\\d{1,5})");
    private static final Pattern NAME = Pattern.compile("dns:((?:m?tls:)?+)([^\\s:/?#@,\\[\\]]+):(\\d{1,5})");

    /** A bus, or a name and the buses that DNS had for it last. */
    private record Entry(Matcher name, List<String> buses) {}

    private final List<Entry> entries = new ArrayList<>();
    private final int turn = ThreadLocalRandom.current().nextInt(MAX_BUSES); // where answers begin, so that hosts spread over the buses
    private volatile List<String> known; // those of the newest answers
    private CompletableFuture<List<String>> looking; // null before the first look-up
    private long looked; // when names were looked up last

    /** Throws what is wrong with an address. */
    Addresses(String text) {
        for (String part : text.split(",(?=\\s*(?:\\[|[^:/,]*:))", -1)) { // the path of a socket may have commas
            String each = part.strip();
            Matcher bus = BUS.matcher(each);
            Matcher name = NAME.matcher(each);
            if (name.matches() && isPort(name.group(3))) {
                entries.add(new Entry(name, new ArrayList<>()));
            } else if (bus.matches() && isPort(bus.group(1))) {
                entries.add(new Entry(null, List.of(each)));
            } else {
                throw BusException.setup("the address '" + each + (each.startsWith("dns:")
                        ? "' must be dns:NAME:PORT, dns:tls:NAME:PORT or dns:mtls:NAME:PORT"
                        : "' is not HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT"));
            }
        }
        if (entries.size() > MAX_BUSES) {
            throw BusException.setup("the address has " + entries.size() + " buses, it may have " + MAX_BUSES);
        }
        collect();
    }

    private static boolean isPort(String text) {
        return text == null || Integer.parseInt(text) > 0 && Integer.parseInt(text) < 65_536;
    }

    boolean hasNames() {
        return entries.stream().anyMatch(entry -> entry.name != null);
    }

    List<String> known() {
        return known;
    }

    private void collect() { // at one bus twice a peer would replace itself
        known = entries.stream().flatMap(entry -> entry.buses.stream()).distinct().limit(MAX_BUSES).toList();
    }

    /**
     * Returns the buses of now, which names that have no answer keep. Waits for DNS until something is over, at most 5 s;
     * throws why there is none.
     */
    List<String> now(CompletableFuture<?> over) throws InterruptedException {
        try {
            CompletableFuture.anyOf(lookUp(), over).get(LOOK_UP_SECONDS, TimeUnit.SECONDS);
        } catch (ExecutionException none) {
            throw (BusException) none.getCause();
        } catch (TimeoutException silent) {
            // Those of before.
        }
        if (known.isEmpty()) {
            throw BusException.lost("DNS has not answered");
        }
        return known;
    }

    private synchronized CompletableFuture<List<String>> lookUp() {
        if (!hasNames() || !known.isEmpty() && Link.seconds(looked) < LOOK_UP_SECONDS) {
            return CompletableFuture.completedFuture(known);
        }
        if (looking == null || looking.isDone()) { // never two at once: the system may wait long
            looking = CompletableFuture.supplyAsync(this::askForAll, task -> Options.daemon(task, "toolbus-dns").start());
        }
        return looking;
    }

    private List<String> askForAll() {
        String problem = "";
        for (Entry entry : entries) {
            try {
                if (entry.name != null) {
                    List<InetAddress> found = Arrays.asList(InetAddress.getAllByName(entry.name.group(2)));
                    Collections.rotate(found, -turn);
                    String prefix = entry.name.group(1);
                    String shown = prefix.isEmpty() ? "" : prefix + entry.name.group(2) + "@"; // the certificate is that of the name
                    entry.buses.clear();
                    for (InetAddress each : found) {
                        String host = each.getHostAddress();
                        entry.buses.add(shown + (host.contains(":") ? "[" + host + "]" : host) + ":" + entry.name.group(3));
                    }
                }
            } catch (UnknownHostException unknown) {
                problem = "DNS has no address for " + entry.name.group(2) + ": " + unknown.getMessage();
            }
        }
        collect();
        synchronized (this) {
            looked = System.nanoTime();
        }
        if (known.isEmpty()) {
            throw BusException.lost(problem);
        }
        return known;
    }
}
