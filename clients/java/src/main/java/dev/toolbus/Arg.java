package dev.toolbus;

import java.lang.annotation.*;

/** What a model is told about an argument, which is a component of a record. */
@Retention(RetentionPolicy.RUNTIME)
@Target({ElementType.RECORD_COMPONENT, ElementType.FIELD})
public @interface Arg {
    /** Describes the argument. */
    String value() default "";

    /** The JSON that the bus fills in where the argument is left out. */
    String byDefault() default "";

    /** Whether it may be left out, and is null or 0 then; so may those with a default and those of type Optional. */
    boolean optional() default false;

    /** The least number that it may be. */
    double minimum() default Double.NEGATIVE_INFINITY;

    /** The largest number that it may be. */
    double maximum() default Double.POSITIVE_INFINITY;

    /** Further keywords of JSON Schema, as an object: {@code {"pattern": "^[a-z]+$"}}. */
    String schema() default "";
}
