package dev.toolbus;

import com.google.gson.*;
import com.google.gson.annotations.SerializedName;
import java.lang.reflect.*;
import java.math.BigInteger;
import java.util.*;

/** Writes the JSON Schema of a type as its JSON is read and written. */
final class Schema {
    private static final Map<String, String> TIMES = Map.of("LocalDate", "date", "Instant", "date-time", "OffsetDateTime",
            "date-time", "Duration", "duration");
    private static final Set<Class<?>> INTEGERS = Set.of(byte.class, short.class, int.class, long.class, Byte.class,
            Short.class, Integer.class, Long.class, BigInteger.class);
    private static final Set<Class<?>> ANYTHING = Set.of(Object.class, Json.class, JsonElement.class);

    private final JsonObject definitions = new JsonObject();
    private final Map<Class<?>, String> names = new LinkedHashMap<>(); // of records that are being written

    private Schema() {}

    /** Returns the schema of a type as JSON. */
    static String of(Class<?> type) {
        Schema writer = new Schema();
        JsonObject schema = writer.schema(type, Map.of(), type.getSimpleName());
        if (writer.definitions.size() > 0) {
            schema.add("$defs", writer.definitions);
        }
        return schema.toString();
    }

    /** Returns the components of a record by their names in JSON. */
    static Map<String, Class<?>> components(Class<?> type) {
        Map<String, Class<?>> components = new LinkedHashMap<>();
        for (RecordComponent component : type.getRecordComponents()) {
            components.put(nameOf(type, component), component.getType());
        }
        return components;
    }

    /** Returns the type in JSON Schema of a boolean or a number; null for other types. */
    static String kindOf(Class<?> type) {
        if (type == boolean.class || type == Boolean.class) {
            return "boolean";
        } else if (INTEGERS.contains(type)) {
            return "integer";
        }
        return type == float.class || type == double.class || Number.class.isAssignableFrom(type) ? "number" : null;
    }

    private JsonObject schema(Type type, Map<TypeVariable<?>, Type> bound, String place) {
        if (type instanceof TypeVariable<?> variable) {
            return schema(bound.getOrDefault(variable, variable.getBounds()[0]), bound, place);
        }
        if (type instanceof WildcardType wildcard) {
            return schema(wildcard.getUpperBounds()[0], bound, place);
        }
        if (type instanceof GenericArrayType array) {
            return array(schema(array.getGenericComponentType(), bound, place));
        }
        Type[] given = type instanceof ParameterizedType kind ? kind.getActualTypeArguments() : new Type[0];
        Class<?> raw = (Class<?>) (type instanceof ParameterizedType kind ? kind.getRawType() : type);
        if (ANYTHING.contains(raw)) {
            return new JsonObject();
        } else if (raw == Optional.class) {
            return schema(at(given, 0), bound, place);
        } else if (kindOf(raw) != null) {
            return typed(kindOf(raw));
        } else if (raw == byte[].class) {
            return with(typed("string"), "contentEncoding", "base64");
        } else if (raw.isEnum()) {
            return enumeration(raw);
        } else if (raw.getName().startsWith("java.time.")) {
            String format = TIMES.get(raw.getSimpleName());
            return format == null ? typed("string") : with(typed("string"), "format", format);
        } else if (CharSequence.class.isAssignableFrom(raw) || raw == char.class || raw == Character.class
                || raw == java.util.UUID.class || raw == java.net.URI.class) {
            return typed("string");
        } else if (raw.isArray()) {
            return array(schema(raw.getComponentType(), bound, place));
        } else if (Collection.class.isAssignableFrom(raw)) {
            return array(schema(at(given, 0), bound, place));
        } else if (raw == JsonObject.class) {
            return typed("object");
        } else if (Map.class.isAssignableFrom(raw)) {
            JsonObject schema = typed("object");
            JsonObject values = schema(at(given, 1), bound, place);
            if (values.size() > 0) {
                schema.add("additionalProperties", values);
            }
            return schema;
        } else if (raw.isRecord()) {
            return object(raw, given, bound, place);
        }
        throw BusException.setup(place + " is a " + raw.getName() + ", whose schema cannot be told: use a record, a Map, a "
                + "Json, or set parameters_json");
    }

    private JsonObject object(Class<?> raw, Type[] given, Map<TypeVariable<?>, Type> bound, String place) {
        String known = names.get(raw);
        if (known != null) {
            definitions.add(known, new JsonObject()); // filled in below, when the type is complete
            JsonObject reference = new JsonObject();
            return with(reference, "$ref", "#/$defs/" + known);
        }
        String name = raw.getSimpleName();
        while (definitions.has(name) || names.containsValue(name)) {
            name += "_";
        }
        names.put(raw, name);
        Map<TypeVariable<?>, Type> inner = new HashMap<>();
        for (int at = 0; at < given.length; at++) {
            Type type = given[at];
            inner.put(raw.getTypeParameters()[at], type instanceof TypeVariable<?> ? bound.getOrDefault(type, type) : type);
        }
        JsonObject properties = new JsonObject();
        JsonArray required = new JsonArray();
        for (RecordComponent component : raw.getRecordComponents()) {
            String property = nameOf(raw, component);
            JsonObject schema = schema(component.getGenericType(), inner, place + "." + component.getName());
            Arg arg = component.getAnnotation(Arg.class);
            boolean optional = component.getType() == Optional.class;
            if (arg != null) {
                annotate(schema, arg, place + "." + component.getName());
                optional = optional || arg.optional() || !arg.byDefault().isEmpty();
            }
            properties.add(property, schema);
            if (!optional) {
                required.add(property);
            }
        }
        JsonObject schema = typed("object");
        schema.add("properties", properties);
        if (!required.isEmpty()) {
            schema.add("required", required);
        }
        if (definitions.has(name)) {
            definitions.add(name, schema.deepCopy()); // it keeps its name: later components of this type refer to it
        } else {
            names.remove(raw);
        }
        return schema;
    }

    private static void annotate(JsonObject schema, Arg arg, String place) {
        if (!arg.value().isEmpty()) {
            schema.addProperty("description", arg.value());
        }
        for (Map.Entry<String, Double> bound : Map.of("minimum", arg.minimum(), "maximum", arg.maximum()).entrySet()) {
            double number = bound.getValue();
            if (Double.isFinite(number)) {
                schema.addProperty(bound.getKey(), number == Math.rint(number) && Math.abs(number) < 1e15
                        ? (Number) (long) number : (Number) number);
            }
        }
        if (!arg.byDefault().isEmpty()) {
            schema.add("default", keyword(arg.byDefault(), JsonElement.class, "byDefault", place));
        }
        if (!arg.schema().isEmpty()) {
            keyword(arg.schema(), JsonObject.class, "schema", place).entrySet()
                    .forEach(entry -> schema.add(entry.getKey(), entry.getValue()));
        }
    }

    private static <T> T keyword(String json, Class<T> type, String name, String place) {
        try {
            return Values.parse(json, type);
        } catch (com.google.gson.JsonParseException problem) {
            String kind = type == JsonObject.class ? "an object in JSON" : "JSON: a text needs quotes within its quotes";
            throw BusException.setup(place + ": " + name + " of @Arg is '" + json + "', it must be " + kind);
        }
    }

    private static JsonObject enumeration(Class<?> raw) {
        JsonArray values = new JsonArray();
        for (Field field : raw.getFields()) {
            if (field.isEnumConstant()) {
                values.add(renamed(field, field.getName()));
            }
        }
        JsonObject schema = typed("string");
        schema.add("enum", values);
        return schema;
    }

    private static String nameOf(Class<?> record, RecordComponent component) {
        try {
            return renamed(record.getDeclaredField(component.getName()), component.getName());
        } catch (NoSuchFieldException never) {
            return component.getName();
        }
    }

    private static String renamed(AnnotatedElement element, String name) {
        SerializedName other = element.getAnnotation(SerializedName.class);
        return other == null ? name : other.value();
    }

    private static Type at(Type[] given, int at) {
        return at < given.length ? given[at] : Object.class;
    }

    private static JsonObject typed(String name) {
        return with(new JsonObject(), "type", name);
    }

    private static JsonObject array(JsonObject items) {
        JsonObject schema = typed("array");
        schema.add("items", items);
        return schema;
    }

    private static JsonObject with(JsonObject schema, String name, String value) {
        schema.addProperty(name, value);
        return schema;
    }
}
