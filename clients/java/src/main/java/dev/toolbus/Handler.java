package dev.toolbus;

/**
 * Answers the calls of a tool, each on a thread of its own, which is interrupted when the call is cancelled.
 *
 * @param <A> what it takes
 */
@FunctionalInterface
public interface Handler<A> {
    /**
     * Returns the output: anything that JSON can hold, a {@link Reply}, or a CompletionStage of either. What it throws
     * fails the call with its message.
     */
    Object handle(A arguments, ToolScope scope) throws Exception;
}
