package dev.toolbus;

import com.google.protobuf.MessageLite;
import dev.toolbus.pb.*;
import io.grpc.*;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.Epoll;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.unix.DomainSocketAddress;
import io.grpc.netty.shaded.io.netty.handler.ssl.util.InsecureTrustManagerFactory;
import io.grpc.protobuf.lite.ProtoLiteUtils;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.io.*;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFileAttributeView;
import java.security.GeneralSecurityException;
import java.security.cert.X509Certificate;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLSocket;

/**
 * One connection, by the credential as it is now. Addresses are HOST:PORT and unix:PATH without TLS, tls:HOST:PORT and
 * mtls:HOST:PORT with it; tls:NAME@HOST:PORT where the certificate has another name.
 */
final class Wire {
    /** Runs what comes from all connections, and what goes there: a handler that blocks its thread delays no heartbeat. */
    static final ScheduledThreadPoolExecutor STREAMS = new ScheduledThreadPoolExecutor(1, task -> Options.daemon(task, "toolbus"));

    static final MethodDescriptor<InvokeRequest, InvokeResponse> INVOKE = method(
            MethodDescriptor.MethodType.BIDI_STREAMING, "Invoke", InvokeRequest.getDefaultInstance(),
            InvokeResponse.getDefaultInstance());
    static final MethodDescriptor<ListRequest, ListResponse> LIST = method(MethodDescriptor.MethodType.UNARY, "List",
            ListRequest.getDefaultInstance(), ListResponse.getDefaultInstance());
    static final MethodDescriptor<RegisterRequest, RegisterResponse> REGISTER = method(MethodDescriptor.MethodType.UNARY,
            "Register", RegisterRequest.getDefaultInstance(), RegisterResponse.getDefaultInstance());

    private static final int LOOK_MILLIS = 1000; // for each step, at a server that does not answer as a bus
    private static final Set<String> CERTIFICATE = Set.of("key", "certificate");
    private static final int WINDOW = 4 * 1024 * 1024; // bytes that may be under way
    private static final Pattern TEXT = Pattern.compile( // of a TOML file: in one line, or between three quotes
            "(?m)^[ \\t]*([A-Za-z0-9_-]+)[ \\t]*=[ \\t]*(?:\"\"\"\\r?\\n?([\\s\\S]*?)\"\"\"|'''\\r?\\n?([\\s\\S]*?)'''"
                    + "|'([^'\\n]*)'|(\"(?:[^\"\\\\\\n]|\\\\.)*\"))");

    /** Made when a socket is first used. */
    private static final class Sockets {
        static final EventLoopGroup LOOP = new EpollEventLoopGroup(1,
                (ThreadFactory) task -> Options.daemon(task, "toolbus-sockets"));
    }

    private final ManagedChannel connection;
    private final Channel channel; // the connection, on which every RPC carries the token

    static {
        STREAMS.setRemoveOnCancelPolicy(true);
    }

    /** Prepares a connection by the values of a credential, which the first call makes. */
    Wire(String address, String credential, Map<String, String> values) {
        boolean secure = address.matches("(?s)m?tls:.*");
        String target = secure ? address.substring(address.indexOf(':') + 1) : address;
        String token = values.getOrDefault("token", "");
        Metadata headers = new Metadata();
        if (!token.isEmpty()) {
            if (!secure && !address.matches("(?s)(unix|127\\.0\\.0\\.1|localhost|\\[::1]):.*")) {
                throw BusException.setup("a token is not sent to " + address + " in plain text: write tls:" + address);
            }
            if (!token.matches("[!-~]+")) {
                throw BusException.setup("the token of " + credential + " is not printable ASCII: copy it again");
            }
            headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
        }
        if (address.startsWith("mtls:") && !values.keySet().containsAll(CERTIFICATE)) {
            throw BusException.setup("the bus at " + address + " asks for a client certificate, and " + noCertificate(credential));
        }
        NettyChannelBuilder builder;
        if (!secure && target.startsWith("unix:")) {
            if (!Epoll.isAvailable()) {
                throw BusException.setup("sockets such as " + target + " need Linux on x86-64 or ARM-64 here: use a port");
            }
            builder = NettyChannelBuilder.forAddress(new DomainSocketAddress(target.substring(5))).usePlaintext()
                    .channelType(EpollDomainSocketChannel.class).eventLoopGroup(Sockets.LOOP).overrideAuthority("localhost")
                    .withOption(ChannelOption.SO_KEEPALIVE, null); // of which sockets of files know nothing
        } else {
            InetSocketAddress at = hostAndPort(target);
            var trust = secure ? trust(values, credential) : InsecureChannelCredentials.create();
            builder = NettyChannelBuilder.forAddress(at.getHostString(), at.getPort(), trust);
            if (target.contains("@")) {
                builder.overrideAuthority(target.substring(0, target.indexOf('@')));
            }
        }
        connection = builder.executor(STREAMS).flowControlWindow(WINDOW).maxInboundMessageSize(Integer.MAX_VALUE)
                .keepAliveTime(30, TimeUnit.SECONDS).keepAliveTimeout(10, TimeUnit.SECONDS).disableRetry().build();
        channel = ClientInterceptors.intercept(connection, MetadataUtils.newAttachHeadersInterceptor(headers));
    }

    private static InetSocketAddress hostAndPort(String target) {
        int end = target.lastIndexOf(':');
        String host = target.substring(target.indexOf('@') + 1, end).replaceAll("[\\[\\]]", "");
        return InetSocketAddress.createUnresolved(host, Integer.parseInt(target.substring(end + 1)));
    }

    private static ChannelCredentials trust(Map<String, String> values, String credential) {
        try {
            TlsChannelCredentials.Builder trust = TlsChannelCredentials.newBuilder();
            if (values.containsKey("ca")) {
                trust.trustManager(stream(values.get("ca")));
            }
            if (values.keySet().containsAll(CERTIFICATE)) {
                trust.keyManager(stream(values.get("certificate")), stream(values.get("key")));
            }
            return trust.build();
        } catch (IOException | IllegalArgumentException problem) {
            throw BusException.setup("the credential " + credential + " cannot be used: " + problem.getMessage());
        }
    }

    private static String noCertificate(String path) {
        return path.isEmpty() ? "there is no credential: name its file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)"
                : "the credential " + path + " has none: write one with toolbus keys add NAME -o FILE, and mtls: before the address";
    }

    /**
     * Returns why a server that is there does not answer, and how to fix it; null where gRPC's text says as much. That does
     * not say that it spoke without TLS, or that the connection ended because of a client's certificate.
     */
    static String whyUnanswered(String address, String path, Map<String, String> values, String text) {
        String target = address.substring(address.matches("m?tls:.*") ? address.indexOf(':') + 1 : 0);
        boolean closed = text.matches("(?s).*([Cc]losed|reset|[Bb]roken pipe|unknown reason|ertificate|CERTIFICATE|frame).*");
        if (target.equals(address)) {
            return !closed || address.startsWith("unix:") || names(target) == null ? null : "the server at " + address
                    + " speaks TLS: write tls:" + address + " or mtls:" + address + ", and name a credential in TOOLBUS_CREDENTIAL";
        }
        String server = "the certificate of the server at " + address;
        String renewal = "write it anew on the machine of the bus with toolbus keys renew " + values.getOrDefault("name", "NAME")
                + ", and copy it here";
        if (text.startsWith("not an SSL/TLS record")) {
            return "the server at " + address + " does not speak TLS: use the port of a listener with TLS, or write " + target
                    + " for a bus of this machine";
        } else if (text.matches("Not(After|Before): .*")) {
            return server + " has expired or is not valid yet: check the clock of this machine, or renew it there with toolbus keys init";
        } else if (text.matches("No (subject alternative|name matching).*")) {
            return server + " is for " + names(target) + ": use one of these names in the address, or add this one there with"
                    + " toolbus keys init --name";
        } else if (text.contains("certification path")) {
            return server + " is not signed by " + (values.containsKey("ca") ? "the ca of the credential " + path
                    + ": check the address, or " + renewal
                    : "an authority that is trusted here: check the address, or name a credential in TOOLBUS_CREDENTIAL");
        } else if (closed && (text.contains("ertificate") || text.contains("CERTIFICATE") || names(target) != null)) {
            return "the bus at " + address + (values.containsKey("certificate") ? " does not accept the certificate of the credential "
                    + path + ", which has expired or is for another bus: " + renewal
                    : " asks for a client certificate, and " + noCertificate(path));
        }
        return null;
    }

    /** Returns the names in the certificate of a server, to which nothing is sent; null where it shows none. */
    private static String names(String target) {
        try {
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(null, InsecureTrustManagerFactory.INSTANCE.getTrustManagers(), null); // nothing is sent there
            try (SSLSocket socket = (SSLSocket) context.getSocketFactory().createSocket()) {
                InetSocketAddress at = hostAndPort(target);
                socket.connect(new InetSocketAddress(at.getHostString(), at.getPort()), LOOK_MILLIS);
                socket.setSoTimeout(LOOK_MILLIS);
                socket.startHandshake();
                X509Certificate shown = (X509Certificate) socket.getSession().getPeerCertificates()[0];
                return shown.getSubjectAlternativeNames() == null ? "other names" : shown.getSubjectAlternativeNames().stream()
                        .map(name -> String.valueOf(name.get(1))).collect(Collectors.joining(", "));
            }
        } catch (IOException | GeneralSecurityException | RuntimeException problem) {
            return null;
        }
    }

    private static InputStream stream(String text) {
        return new ByteArrayInputStream(text.getBytes(StandardCharsets.UTF_8));
    }

    /** Opens the stream; what comes goes to the listener, on the thread of streams. */
    ClientCall<InvokeRequest, InvokeResponse> open(ClientCall.Listener<InvokeResponse> listener) {
        ClientCall<InvokeRequest, InvokeResponse> call = channel.newCall(INVOKE, CallOptions.DEFAULT);
        call.start(listener, new Metadata());
        return call;
    }

    /** Makes an RPC with one answer, and waits for it. */
    <Q, A> A ask(MethodDescriptor<Q, A> method, Q request, Duration time) throws InterruptedException {
        CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(time.toNanos(), TimeUnit.NANOSECONDS);
        Future<A> answer = ClientCalls.futureUnaryCall(channel.newCall(method, options), request);
        try {
            return answer.get();
        } catch (ExecutionException problem) {
            throw BusException.of(Status.fromThrowable(problem));
        } catch (InterruptedException interrupted) {
            answer.cancel(true);
            throw interrupted;
        }
    }

    void close() {
        connection.shutdownNow();
    }

    private static <Q extends MessageLite, A extends MessageLite> MethodDescriptor<Q, A> method(
            MethodDescriptor.MethodType type, String name, Q request, A answer) {
        return MethodDescriptor.newBuilder(ProtoLiteUtils.marshaller(request), ProtoLiteUtils.marshaller(answer)).setType(type)
                .setFullMethodName("toolbus.v1.ToolBusService/" + name).build();
    }

    /** Returns the texts of a credential file; none without a path. */
    static Map<String, String> readCredential(String path) {
        if (path.isEmpty()) {
            return Map.of();
        }
        try {
            var view = Files.getFileAttributeView(Path.of(path), PosixFileAttributeView.class);
            if (view != null && view.readAttributes().permissions().stream()
                    .anyMatch(permission -> !permission.name().startsWith("OWNER_"))) {
                throw BusException.setup("other users can read the credential " + path + ": chmod 600 " + path);
            }
            return texts(Files.readString(Path.of(path)));
        } catch (IOException problem) {
            throw BusException.setup("the credential " + path + " cannot be read: " + problem);
        }
    }

    /** Returns the texts of a TOML file as {@code toolbus keys add} writes it. */
    static Map<String, String> texts(String file) {
        Map<String, String> values = new HashMap<>();
        for (Matcher found = TEXT.matcher(file); found.find();) {
            String value = found.group(5) == null ? "" : Values.parse(found.group(5), String.class);
            for (int group = 2; group < 5; group++) {
                value = found.group(group) == null ? value : found.group(group);
            }
            values.put(found.group(1), value);
        }
        values.values().removeIf(String::isEmpty);
        return values;
    }
}
