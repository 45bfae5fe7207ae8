package dev.toolbus;

/**
 * A JSON text that is passed on as it is: an argument of a handler, an output, or arguments of a call.
 *
 * @param text the JSON
 */
public record Json(String text) {
    @Override
    public String toString() {
        return text;
    }
}
