package dev.toolbus;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.annotations.SerializedName;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.LocalDate;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;

class ValuesTest {
    enum Colour {
        RED, @SerializedName("light-blue") LIGHT_BLUE
    }

    record Tree(String name, List<Tree> children) {}

    record Pair<A>(A first, Optional<A> second) {}

    record All(@Arg("how many") int count, @Arg(byDefault = "\"x\"", schema = "{\"pattern\": \"^.$\"}") String letter,
            @Arg(optional = true, minimum = 0.5, maximum = 7) Double share, Optional<LocalDate> day, Colour colour,
            Map<String, Long> counts, byte[] data, BigInteger big, Pair<Instant> pair, Json any, boolean[] flags,
            @SerializedName("class") char letters) {}

    private static void same(String json, String other) {
        assertEquals(Values.parse(json, JsonElement.class), Values.parse(other, JsonElement.class));
    }

    @Test
    void aSchemaSaysWhatARecordTakes() {
        JsonObject schema = Values.object(Schema.of(All.class));
        same("[\"count\",\"colour\",\"counts\",\"data\",\"big\",\"pair\",\"any\",\"flags\",\"class\"]",
                schema.get("required").toString());
        JsonObject properties = schema.getAsJsonObject("properties");
        Map<String, String> expected = new HashMap<>(Map.of("count", "{\"type\":\"integer\",\"description\":\"how many\"}", "letter",
                "{\"type\":\"string\",\"default\":\"x\",\"pattern\":\"^.$\"}", "share",
                "{\"type\":\"number\",\"minimum\":0.5,\"maximum\":7}", "day", "{\"type\":\"string\",\"format\":\"date\"}", "colour",
                "{\"type\":\"string\",\"enum\":[\"RED\",\"light-blue\"]}", "counts",
                "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"}}", "data",
                "{\"type\":\"string\",\"contentEncoding\":\"base64\"}", "big", "{\"type\":\"integer\"}", "any", "{}", "flags",
                "{\"type\":\"array\",\"items\":{\"type\":\"boolean\"}}"));
        expected.put("pair", "{\"type\":\"object\",\"properties\":{\"first\":{\"type\":\"string\",\"format\":\"date-time\"},"
                + "\"second\":{\"type\":\"string\",\"format\":\"date-time\"}},\"required\":[\"first\"]}");
        expected.forEach((name, each) -> same(each, properties.get(name).toString()));
        same("{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"children\":{\"type\":\"array\",\"items\":"
                + "{\"$ref\":\"#/$defs/Tree\"}}},\"required\":[\"name\",\"children\"],\"$defs\":{\"Tree\":{\"type\":\"object\","
                + "\"properties\":{\"name\":{\"type\":\"string\"},\"children\":{\"type\":\"array\",\"items\":"
                + "{\"$ref\":\"#/$defs/Tree\"}}},\"required\":[\"name\",\"children\"]}}}", Schema.of(Tree.class));
    }

    @Test
    void whatHasNoSchemaIsNamedWithTheWayOut() {
        record Wrong(List<Thread> threads) {}

        record Default(@Arg(byDefault = "x") String text) {}

        BusException problem = assertThrows(BusException.class, () -> Schema.of(Wrong.class));
        assertTrue(problem.getMessage().startsWith("Wrong.threads is a java.lang.Thread, whose schema"), problem.getMessage());
        problem = assertThrows(BusException.class, () -> Schema.of(Default.class));
        assertTrue(problem.getMessage().contains("Default.text: byDefault of @Arg is 'x', it must be JSON"), problem.getMessage());
    }

    @Test
    void valuesComeBackAsTheyWere() {
        All all = new All(1, "x", null, Optional.of(LocalDate.of(2027, 1, 2)), Colour.LIGHT_BLUE, Map.of("a", 1L << 60),
                new byte[] {1, -1}, BigInteger.TEN.pow(30), new Pair<>(Instant.EPOCH, Optional.empty()), new Json("{\"f\":1.10}"),
                new boolean[] {true}, 'c');
        String json = Values.json(all);
        same("{\"count\":1,\"letter\":\"x\",\"day\":\"2027-01-02\",\"colour\":\"light-blue\",\"counts\":{\"a\":1152921504606846976},"
                + "\"data\":\"Af8=\",\"big\":1000000000000000000000000000000,\"pair\":{\"first\":\"1970-01-01T00:00:00Z\"},"
                + "\"any\":{\"f\":1.10},\"flags\":[true],\"class\":\"c\"}", json);
        All back = Values.parse(json, All.class);
        assertEquals(json, Values.json(back));
        assertEquals(Optional.empty(), back.pair.second());
        assertEquals(Optional.empty(), Values.parse("{}", Pair.class).second());
    }

    @Test
    void textsPassUnchangedAndNumbersKeepTheirDigits() {
        String large = "{\"n\":123456789012345678901234567890,\"f\":1.10,\"z\":null,\"t\":\"<&'\\u2028\"}";
        assertEquals(large, Values.json(Values.parse(large, Json.class)));
        assertEquals(large, Values.json(Values.parse(large, Map.class)));
        assertEquals(large, Values.json(Values.parse(large, JsonObject.class)));
        assertEquals(new BigDecimal("1.10"), Values.parse("1.10", BigDecimal.class));
        assertEquals("{}", Values.arguments(null));
        assertEquals(" {\"a\" : 1}", Values.arguments(" {\"a\" : 1}"));
        assertThrows(IllegalArgumentException.class, () -> Values.json(Double.NaN));
        for (String wrong : List.of("{\"a\":1", "{a:1}", "{} {}", "NaN", "{\"a\":1}x")) {
            assertThrows(JsonParseException.class, () -> Values.parse(wrong, JsonObject.class), wrong);
        }
    }

    @Test
    void anAddressIsAListOfBusesAndNamesWhichNamesEachBusOnce() {
        Addresses several = new Addresses("a:1, unix:/run/x,y/bus ,[::1]:2,dns:mtls:bus.internal:48931, a:1");
        assertEquals(List.of("a:1", "unix:/run/x,y/bus", "[::1]:2"), several.known());
        assertTrue(several.hasNames());
        assertEquals(List.of("tls:bus@10.0.0.1:2"), new Addresses("tls:bus@10.0.0.1:2").known());
        for (String wrong : List.of("dns:bus.internal", "dns:tls:1", "dns:a:b", "dns:a:0", "a:1,dns:tcp:a:1")) {
            BusException problem = assertThrows(BusException.class, () -> new Addresses(wrong));
            assertTrue(problem.getMessage().contains("must be dns:NAME:PORT"), problem.getMessage());
        }
        for (String wrong : List.of("nowhere", "h:70000", "http://h:1", "[::1]", "tls:h", "a:1,,b:1", "", "unix:")) {
            BusException problem = assertThrows(BusException.class, () -> new Addresses(wrong));
            assertTrue(problem.getMessage().contains("is not HOST:PORT"), problem.getMessage());
        }
        String many = String.join(",", java.util.Collections.nCopies(65, "a:1"));
        assertTrue(assertThrows(BusException.class, () -> new Addresses(many)).getMessage().contains("may have 64"));
    }

    @Test
    void aTokenIsNotSentToAnotherMachineInPlainText() {
        for (String remote : List.of("h:1", "[2001:db8::1]:1", "10.0.0.1:1")) {
            BusException problem = assertThrows(BusException.class, () -> new Wire(remote, "own", Map.of("token", "t")));
            assertTrue(problem.getMessage().endsWith("in plain text: write tls:" + remote), problem.getMessage());
        }
        new Wire("[::1]:1", "own", Map.of("token", "t")).close();
    }

    @Test
    void halvesOfSurrogatePairsAreEscaped() {
        String json = Values.json("a\ud83e\udd50\ud800b");
        assertEquals("\"a🥐\\ud800b\"", json);
        assertEquals(json, new String(json.getBytes(StandardCharsets.UTF_8), StandardCharsets.UTF_8));
    }

    @Test
    void aCredentialIsReadInAllWaysInWhichTomlWritesTexts() {
        Map<String, String> values = Wire.texts("# of ann\naddress = \"tls:h:1\" # where\nname = 'a\\b'\n"
                + "expires = 2027-01-01T00:00:00Z\n\ntoken=\"t\\\"1\"\nca = \"\"\"\n-----BEGIN\nx=\"y\"\n-----END\n\"\"\"\nkey = '''k\n'''\n");
        assertEquals(Map.of("address", "tls:h:1", "name", "a\\b", "token", "t\"1", "ca", "-----BEGIN\nx=\"y\"\n-----END\n", "key",
                "k\n"), values);
        assertEquals(Map.of("a", "b"), Wire.texts("a = \"b\""));
    }
}
