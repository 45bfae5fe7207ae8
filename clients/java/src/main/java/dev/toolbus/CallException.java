package dev.toolbus;

import dev.toolbus.pb.*;

/** A call that failed: what a handler throws to name the failure, and the error of a {@link Result}. */
public final class CallException extends RuntimeException {
    private static final long serialVersionUID = 1;
    private final transient CallError error;

    /** Makes what a handler throws to name the failure for programs (reason) and for models (message). */
    public CallException(String reason, String message) {
        this(new CallException(ErrorCode.ERROR_CODE_TOOL, CallStage.CALL_STAGE_ACCEPTED, message).error.toBuilder()
                .setReason(reason).build());
    }

    CallException(ErrorCode code, CallStage stage, String message) {
        this(CallError.newBuilder().setCode(code).setStage(stage).setMessage(Values.sound(message)).build());
    }

    CallException(CallError error) {
        super(error.getMessage().isEmpty() ? nameOf(error) : error.getMessage(), null, false, false);
        this.error = error;
    }

    CallException limit(String name, double value) {
        return new CallException(error.toBuilder().setLimit(Limit.newBuilder().setName(name).setValue(value)).build());
    }

    CallException retrySafe(boolean safe) {
        return new CallException(error.toBuilder().setRetrySafe(safe).build());
    }

    ToolResult result() {
        return ToolResult.newBuilder().setIsError(true).setError(error).build();
    }

    /** Returns the last words of a name, such as {@code ERROR_CODE_TOOL}; the number of one that this version does not know. */
    private static String nameOf(Enum<?> value, String prefix, int number) {
        return value.name().equals("UNRECOGNIZED") ? String.valueOf(number) : value.name().substring(prefix.length());
    }

    private static String nameOf(CallError error) {
        return nameOf(error.getCode(), "ERROR_CODE_", error.getCodeValue());
    }

    /** Returns the code, such as {@code TOOL}; of a code that this version does not know, the number. */
    public String code() {
        return nameOf(error);
    }

    /** Returns how far the call came, such as {@code NOT_DISPATCHED}. */
    public String stage() {
        return nameOf(error.getStage(), "CALL_STAGE_", error.getStageValue());
    }

    /** Whether the same call may be made again without running twice. */
    public boolean retrySafe() {
        return error.getRetrySafe();
    }

    /** Returns the failure's name for programs, as the tool states it; empty without one. */
    public String reason() {
        return error.getReason();
    }

    /** Returns all fields, with the limit that was broken and the seconds after which to try again. */
    public CallError error() {
        return error;
    }
}
