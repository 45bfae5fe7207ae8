package dev.toolbus;

import dev.toolbus.pb.ContentBlock;
import java.util.List;

/**
 * An output of a handler with parts beside it. Anything that JSON can hold is an output by itself.
 *
 * @param output what JSON can hold
 * @param content pictures, files and the like
 */
public record Reply(Object output, List<ContentBlock> content) {
    /** Makes a reply of an output and parts of content. */
    public Reply(Object output, ContentBlock... content) {
        this(output, List.of(content));
    }
}
