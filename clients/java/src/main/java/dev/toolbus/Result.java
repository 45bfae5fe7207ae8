package dev.toolbus;

import com.google.gson.JsonElement;
import com.google.gson.JsonParseException;
import dev.toolbus.pb.*;
import java.util.ArrayList;
import java.util.List;

/** What became of a call: its output, the error of one that failed, or questions that the tool has first. */
public final class Result {
    private final ToolResult message;

    Result(ToolResult message) {
        this.message = message;
    }

    /** Returns why the call failed; null for one that did not. */
    public CallException error() {
        if (message.hasError()) {
            return new CallException(message.getError());
        }
        return message.getIsError()
                ? new CallException(ErrorCode.ERROR_CODE_TOOL, CallStage.CALL_STAGE_ACCEPTED, text()) : null;
    }

    /** Whether the tool has questions before it can go on: then the result is neither a success nor a failure. */
    public boolean asks() {
        return !message.getIsError() && !message.hasError() && !message.getInputRequestsJson().isEmpty();
    }

    /**
     * Returns the output as a type: a record, Map, JsonElement, Json … Throws the error of a call that failed, that asks
     * first, or whose output is of another type.
     */
    public <T> T output(Class<T> type) {
        CallException error = error();
        if (error != null) {
            throw error;
        }
        if (asks()) {
            throw new CallException("needs_input", text());
        }
        try {
            return Values.parse(json(), type);
        } catch (JsonParseException problem) {
            throw new CallException("output", "the output " + Values.shown(json()) + ": " + Values.why(problem));
        }
    }

    /** Returns the output as the JSON that the tool wrote. */
    public String json() {
        return message.getOutputJson().isEmpty() ? "null" : message.getOutputJson();
    }

    /** Returns pictures, files and the like. */
    public List<ContentBlock> content() {
        return message.getContentList();
    }

    /** Returns all fields of the result. */
    public ToolResult message() {
        return message;
    }

    /** Returns the text for a model: the error, then the output (a text without quotes), then the content. */
    public String text() {
        if (asks()) {
            return "the tool asks first: " + message.getInputRequestsJson();
        }
        List<String> parts = new ArrayList<>();
        if (message.hasError()) {
            parts.add(new CallException(message.getError()).getMessage());
        } else if (message.getIsError()) {
            parts.add("the tool failed");
        }
        String output = message.getOutputJson();
        if (output.startsWith("\"")) {
            output = Values.parse(output, JsonElement.class).getAsString();
        }
        List<String> shown = new ArrayList<>(List.of(output));
        content().forEach(part -> shown.add(Content.show(part)));
        for (String part : shown) {
            if (!part.isEmpty() && !part.equals("null") && !parts.contains(part)) {
                parts.add(part);
            }
        }
        return parts.isEmpty() ? "null" : String.join("\n", parts);
    }
}
