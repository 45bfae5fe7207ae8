package dev.toolbus;

import com.google.gson.JsonObject;

/**
 * The answer of a person to {@link ToolScope#elicit}.
 *
 * @param action {@code accept}, {@code decline} or {@code cancel}
 * @param content the fields of the form that was filled in
 */
public record Answer(String action, JsonObject content) {
    /** Whether the person filled in the form. */
    public boolean accepted() {
        return action.equals("accept");
    }
}
