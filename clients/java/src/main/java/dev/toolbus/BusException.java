package dev.toolbus;

import io.grpc.Status;

/** Why a plugin or a host cannot go on. A failed call is none of these, but a {@link Result} with an error. */
public final class BusException extends RuntimeException {
    /** What kind of problem it is. */
    public enum Kind {
        /** A mistake of the program: the text names the value, the rule and the fix. */
        SETUP,
        /** The bus refuses this peer or this request, and another attempt would not change that; the text is the bus's. */
        REFUSED,
        /** No bus answered, or the connection broke. */
        LOST
    }

    private static final long serialVersionUID = 1;
    private final Kind kind;
    private final Status.Code code;
    final String text;

    BusException(Kind kind, Status.Code code, String text) {
        super(kind == Kind.SETUP ? text : code + ": " + text);
        this.kind = kind;
        this.code = code;
        this.text = text;
    }

    static BusException setup(String text) {
        return new BusException(Kind.SETUP, Status.Code.INVALID_ARGUMENT, text);
    }

    static BusException lost(String text) {
        return new BusException(Kind.LOST, Status.Code.UNAVAILABLE, text);
    }

    /** Returns how an RPC ended. What gRPC makes of a broken connection counts as such, whichever code it chose. */
    static BusException of(Status status) {
        Throwable deepest = status.getCause();
        while (deepest != null && deepest.getCause() != null) {
            deepest = deepest.getCause();
        }
        if (deepest != null) {
            return lost(deepest.getMessage() == null ? deepest.toString() : deepest.getMessage());
        }
        String text = status.getDescription() == null ? "" : status.getDescription();
        return switch (status.getCode()) {
            case UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED -> new BusException(Kind.LOST, status.getCode(), text);
            default -> new BusException(Kind.REFUSED, status.getCode(), text);
        };
    }

    /** Returns what kind of problem it is. */
    public Kind kind() {
        return kind;
    }

    /** Returns the status of gRPC. */
    public Status.Code code() {
        return code;
    }
}
