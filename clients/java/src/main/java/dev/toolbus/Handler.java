package dev.toolbus;

/**
 * Answers the calls of a tool, each on a thread of its own, which is interrupted when the call is cancelled.
 *
 * @param <A> what it takes
 */
@FunctionalInterface
public interface Handler<A> {
    /**
     * Returns the output: anything that JSON can hold, a {@link Reply}, the {@link Result} of another call, or a
     * CompletionStage of these. What it throws fails the call with its message.
     */
    Object handle(A arguments, ToolScope scope) throws Exception;
}
