package dev.toolbus;

import com.google.gson.JsonObject;

/**
 * A question of a tool to its caller.
 *
 * @param key names the question among those of its call
 * @param method {@code elicitation/create}, or another method of the Model Context Protocol
 * @param params what the method takes: for a form {@code message} and {@code requestedSchema}, for a page {@code url}
 */
public record AskedQuestion(String key, String method, JsonObject params) {
    /** Returns the text for the person who is asked. */
    public String message() {
        return Values.text(params, "message");
    }
}
