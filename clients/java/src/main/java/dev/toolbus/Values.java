package dev.toolbus;

import com.google.gson.*;
import com.google.gson.reflect.TypeToken;
import com.google.gson.stream.*;
import java.io.IOException;
import java.lang.reflect.*;
import java.util.*;

/** Turns values into JSON and back. Numbers keep their digits wherever a type can hold them. */
final class Values {
    private static final int SHOWN = 80; // characters of a value in a message
    private static final Gson GSON = new GsonBuilder().setStrictness(Strictness.STRICT).disableHtmlEscaping().serializeNulls()
            .setObjectToNumberStrategy(ToNumberPolicy.LAZILY_PARSED_NUMBER)
            .registerTypeAdapterFactory(new TypeAdapterFactory() {
                @Override
                @SuppressWarnings("unchecked")
                public <T> TypeAdapter<T> create(Gson gson, TypeToken<T> type) {
                    return (TypeAdapter<T>) adapterOf(gson, type, this);
                }
            }).create();

    private Values() {}

    static String json(Object value) {
        return value instanceof Json json ? sound(json.text()) : sound(GSON.toJson(value));
    }

    /** Returns arguments as JSON: null as an empty object, a text unchanged, since a model wrote it. */
    static String arguments(Object value) {
        return value == null ? "{}" : value instanceof CharSequence text ? sound(text.toString()) : json(value);
    }

    @SuppressWarnings("unchecked")
    static <T> T parse(String json, Class<T> type) {
        if (type == Json.class) {
            GSON.fromJson(json, JsonElement.class); // throws if it is none
            return (T) new Json(json);
        }
        return GSON.fromJson(json, type);
    }

    /** Returns an object from its JSON; an empty one for a text that is none. */
    static JsonObject object(String json) {
        try {
            JsonElement element = GSON.fromJson(json, JsonElement.class);
            return element instanceof JsonObject object ? object : new JsonObject();
        } catch (JsonParseException problem) {
            return new JsonObject();
        }
    }

    /** Returns an object within an object; an empty one where there is none. */
    static JsonObject object(JsonElement element, String name) {
        return element instanceof JsonObject whole && whole.get(name) instanceof JsonObject object ? object : new JsonObject();
    }

    /** Returns a text of an object; an empty one where there is none. */
    static String text(JsonElement element, String name) {
        JsonElement value = element instanceof JsonObject object ? object.get(name) : null;
        return value instanceof JsonPrimitive text ? text.getAsString() : "";
    }

    /** Returns a text that UTF-8 can hold: halves of surrogate pairs are escaped. */
    static String sound(String text) {
        if (text == null || isSound(text)) {
            return text == null ? "" : text;
        }
        StringBuilder sound = new StringBuilder();
        text.codePoints().forEach(point -> {
            if (point >= Character.MIN_SURROGATE && point <= Character.MAX_SURROGATE) {
                sound.append(String.format("\\u%04x", point));
            } else {
                sound.appendCodePoint(point);
            }
        });
        return sound.toString();
    }

    private static boolean isSound(String text) {
        for (int at = 0; at < text.length(); at++) {
            char letter = text.charAt(at);
            if (Character.isSurrogate(letter)) {
                if (Character.isLowSurrogate(letter) || at + 1 == text.length()
                        || !Character.isLowSurrogate(text.charAt(++at))) {
                    return false;
                }
            }
        }
        return true;
    }

    static String shown(String json) {
        return json.length() > SHOWN ? json.substring(0, SHOWN) : json;
    }

    /** Returns what a parser complains about, without the class of a cause. */
    static String why(RuntimeException problem) {
        Throwable cause = problem.getCause() == null ? problem : problem.getCause();
        String text = String.valueOf(cause.getMessage());
        int more = text.indexOf("\nSee ");
        return more < 0 ? text : text.substring(0, more);
    }

    private interface Reading<T> {
        T from(String text) throws ReflectiveOperationException;
    }

    private static TypeAdapter<?> adapterOf(Gson gson, TypeToken<?> type, TypeAdapterFactory factory) {
        Class<?> raw = type.getRawType();
        if (raw == Json.class) {
            TypeAdapter<JsonElement> tree = gson.getAdapter(JsonElement.class);
            return adapter(in -> new Json(tree.read(in).toString()),
                    (out, json) -> tree.write(out, gson.fromJson(json.text(), JsonElement.class)));
        }
        if (raw == byte[].class) {
            return text(Base64.getDecoder()::decode, Base64.getEncoder()::encodeToString);
        }
        if (raw.getName().startsWith("java.time.") && !raw.isEnum()) {
            return text(text -> {
                Method parse = raw.getMethod("parse", CharSequence.class);
                return parse.invoke(null, text);
            }, Object::toString);
        }
        if (raw == Optional.class) {
            Type of = type.getType() instanceof ParameterizedType kind ? kind.getActualTypeArguments()[0] : Object.class;
            TypeAdapter<Object> inner = adapterFor(gson, of);
            return new TypeAdapter<Optional<Object>>() {
                @Override
                public Optional<Object> read(JsonReader in) throws IOException {
                    return Optional.ofNullable(inner.read(in));
                }

                @Override
                public void write(JsonWriter out, Optional<Object> value) throws IOException {
                    inner.write(out, value == null ? null : value.orElse(null));
                }
            };
        }
        return raw.isRecord() ? recordAdapter(gson, type, factory) : null;
    }

    /** Returns an adapter that leaves out components that are null, and fills in empty Optionals. */
    @SuppressWarnings("unchecked")
    private static TypeAdapter<?> recordAdapter(Gson gson, TypeToken<?> type, TypeAdapterFactory factory) {
        TypeAdapter<Object> usual = (TypeAdapter<Object>) gson.getDelegateAdapter(factory, type);
        TypeAdapter<JsonElement> tree = gson.getAdapter(JsonElement.class);
        Map<String, Class<?>> components = Schema.components(type.getRawType());
        return adapter(in -> {
            JsonElement element = tree.read(in);
            if (element instanceof JsonObject object) {
                components.forEach((name, kind) -> fit(object, name, kind));
            }
            return usual.fromJsonTree(element);
        }, (out, value) -> {
            JsonElement element = usual.toJsonTree(value);
            if (element instanceof JsonObject object) {
                List.copyOf(object.keySet()).stream().filter(name -> object.get(name).isJsonNull()).forEach(object::remove);
            }
            tree.write(out, element);
        });
    }

    /** Fills in what is left out and Optional; refuses a text for a number and the like, which Gson would convert. */
    private static void fit(JsonObject object, String name, Class<?> type) {
        JsonElement value = object.get(name);
        if (value == null && type == Optional.class) {
            object.add(name, JsonNull.INSTANCE);
        } else if (value instanceof JsonPrimitive primitive) {
            boolean fits = type == String.class ? primitive.isString()
                    : type == boolean.class || type == Boolean.class ? primitive.isBoolean()
                    : type == char.class || Schema.kindOf(type) == null || primitive.isNumber();
            if (!fits) {
                throw new JsonParseException(name + " is " + shown(value.toString()) + ", it must be a "
                        + type.getSimpleName());
            }
        }
    }

    @SuppressWarnings("unchecked")
    private static TypeAdapter<Object> adapterFor(Gson gson, Type type) {
        return (TypeAdapter<Object>) gson.getAdapter(TypeToken.get(type));
    }

    private static <T> TypeAdapter<T> text(Reading<T> reading, java.util.function.Function<T, String> writing) {
        return adapter(in -> {
            String text = in.nextString();
            try {
                return reading.from(text);
            } catch (ReflectiveOperationException | IllegalArgumentException problem) {
                Throwable cause = problem.getCause() == null ? problem : problem.getCause();
                throw new JsonParseException("'" + shown(text) + "': " + cause.getMessage());
            }
        }, (out, value) -> out.value(writing.apply(value)));
    }

    private interface Reader<T> {
        T read(JsonReader in) throws IOException;
    }

    private interface Writer<T> {
        void write(JsonWriter out, T value) throws IOException;
    }

    private static <T> TypeAdapter<T> adapter(Reader<T> reader, Writer<T> writer) {
        return new TypeAdapter<T>() {
            @Override
            public T read(JsonReader in) throws IOException {
                if (in.peek() == JsonToken.NULL) {
                    in.nextNull();
                    return null;
                }
                return reader.read(in);
            }

            @Override
            public void write(JsonWriter out, T value) throws IOException {
                if (value == null) {
                    out.nullValue();
                } else {
                    writer.write(out, value);
                }
            }
        };
    }
}
