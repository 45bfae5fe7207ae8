"""Schemas of tools and the arguments of calls: what is accepted, what is refused and in which words."""

from __future__ import annotations

import contextlib
import gc
import http.server
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus.catalog.deep_schemas import chain
from tests.bus.catalog.schema_cases import JSON, LIMITS, at_most, compiled
from tests.support.examples import examples
from tests.support.processes import UNMEASURED, environment
from tests.support.waiting import HANG_SECONDS
from toolbus.bus.catalog.schema import (
    MAX_CACHED_SCHEMAS,
    Graph,
    SchemaFault,
    compile_output_schema,
    compile_schema,
    load_arguments,
)
from toolbus.protocol.tool import Limits


def fault_of(schema: Any, limits: Limits = LIMITS) -> str:
    with pytest.raises(SchemaFault) as caught:
        compiled(schema, limits)
    return str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{size}": {"pattern": r"^[\p{L}\p{N}]" + f"{{{size}}}"} for size in range(900, 1000)}},
        {"properties": {"a": {"pattern": r"^((\p{L}{10}){10}){100}$"}}},
        {"properties": {"a": {"pattern": r"^\P{Lu}{2,9000}"}}},
        {"properties": {"a": {"pattern": r"[^a-c]{99999}"}}},
        {"patternProperties": {r"^\p{L}{1000}$": {}}},
        {"$defs": {"x": {"properties": {"a": {"pattern": r"(.{200}){200}"}}}}, "$ref": "#/$defs/x"},
    ],
)
def test_patterns_that_take_long_to_compile_are_refused_before_they_are_compiled(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_patterns: list[str] = []

    def compile_pattern(pattern: str) -> tuple[bool, str]:
        compiled_patterns.append(pattern)
        return False, ""

    monkeypatch.setattr("toolbus.bus.catalog.schema._engine_for", compile_pattern)
    assert "beyond the limit pattern_cost = 150000 (a class such as \\p{L} counts as 500" in fault_of(schema)
    assert len(compiled_patterns) <= 1


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\p{L}{1,200}$",
        r"^[\p{L}\p{M}' -]{1,100}$",
        r"^[^\x00-\x1f]{1,4000}$",
        r"^\w{1,10000}$",
        r"^(\p{L}+ ?){1,50}$",
        "é" * 500,
    ],
)
def test_patterns_that_people_write_are_compiled(pattern: str) -> None:
    checker = compiled({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert not checker.warnings
    assert not checker.is_valid({"a": ""})


ACCEPTED: dict[str, tuple[Any, str, str]] = {
    "no rule at all": ({}, '{"a":1}', ""),
    "a reference in the document": (
        {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
        '{"a":1}',
        '{"a":"x"}',
    ),
    "an anchor": (
        {"properties": {"a": {"$ref": "#n"}}, "$defs": {"x": {"$anchor": "n", "type": "integer"}}},
        '{"a":1}',
        '{"a":"x"}',
    ),
    "an embedded resource by its relative name": (
        {
            "$id": "https://example.com/root.json",
            "properties": {"a": {"$ref": "part.json"}},
            "$defs": {"x": {"$id": "part.json", "type": "integer"}},
        },
        '{"a":1}',
        '{"a":"x"}',
    ),
    "an escaped pointer": (
        {"properties": {"a": {"$ref": "#/$defs/x~1y%20z"}}, "$defs": {"x/y z": {"type": "integer"}}},
        '{"a":1}',
        '{"a":"x"}',
    ),
    "a pointer into an unknown keyword": (
        {"properties": {"a": {"$ref": "#/parts/0"}}, "parts": [{"type": "integer"}]},
        '{"a":1}',
        '{"a":"x"}',
    ),
    "a tree": (
        {"type": "object", "properties": {"kids": {"items": {"$ref": "#"}}}, "additionalProperties": False},
        '{"kids":[{"kids":[{}]}]}',
        '{"kids":[{"kids":[{"x":1}]}]}',
    ),
    "a dynamic reference": (
        {"$dynamicAnchor": "node", "type": "object", "additionalProperties": {"$dynamicRef": "#node"}},
        '{"a":{"b":{}}}',
        '{"a":{"b":1}}',
    ),
    "a property that is called $ref": ({"properties": {"$ref": {"type": "integer"}}}, '{"$ref":1}', '{"$ref":"x"}'),
    "a reference inside data": ({"properties": {"a": {"const": {"$ref": "http://x"}}}}, "{}", '{"a":1}'),
    "draft 07, siblings of $ref ignored": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"n": {"type": "integer"}},
            "properties": {"a": {"$ref": "#/definitions/n", "type": "string"}},
        },
        '{"a":1}',
        '{"a":"x"}',
    ),
    "draft 04": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "properties": {"a": {"maximum": 5, "exclusiveMaximum": True}},
        },
        '{"a":4}',
        '{"a":5}',
    ),
    "format as an annotation": ({"properties": {"a": {"format": "email"}}}, '{"a":"nobody"}', ""),
    "format as an annotation in draft 07": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"format": "email"}}},
        '{"a":"nobody"}',
        "",
    ),
    "huge bounds": ({"properties": {"a": {"minLength": 2**62, "maximum": 10**300}}}, '{"a":1}', '{"a":"x"}'),
    "look-around": ({"properties": {"a": {"pattern": "^(?!no).+$"}}}, '{"a":"yes"}', '{"a":"no"}'),
    "a list of several types": ({"type": ["object", "null"]}, "{}", "[]"),
}


@pytest.mark.parametrize(("schema", "good", "bad"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_valid_schema_accepts_what_fits_and_explains_what_does_not(schema: Any, good: str, bad: str) -> None:
    checker = compiled(schema)
    assert checker.is_valid(load_arguments(good))
    assert checker.explain(load_arguments(good)) == ""
    if bad:
        assert not checker.is_valid(load_arguments(bad))
        assert checker.explain(load_arguments(bad)).startswith("arguments")


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "no JSON": ("{", ["at #", "not JSON", "line 1"]),
    "NaN": ('{"const":NaN}', ["not JSON"]),
    "a number beyond a double": ('{"maximum":1e400}', ["not JSON", "infinity"]),
    "an array": ("[]", ["it is []", "must be a JSON object"]),
    "a boolean": ("true", ["must be a JSON object"]),
    "a wrong type": ({"type": "objekt"}, ["#/type", '"objekt"']),
    "no object": ({"type": "string"}, ["accepts no JSON object", '"type": "object"']),
    "no object in any branch": ({"anyOf": [{"type": "string"}, {"const": 1}]}, ["accepts no JSON object"]),
    "no object behind a reference": ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1]}}}, ["accepts no JSON object"]),
    "itself": ({"$ref": "#"}, ["at #:", "without end"]),
    "itself twice": ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, ["without end"]),
    "a circle in place": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"if": {"$ref": "#/$defs/a"}}}},
        ["#/$defs/a", "without end"],
    ),
    "a broken key pattern": ({"patternProperties": {"[": {}}}, ["#/patternProperties", "pattern"]),
    "a huge pattern": ({"pattern": "(a{1000}){1000}"}, ["#/pattern", "shorten"]),
    "exponential references": (
        chain(30, lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]}),
        ["schema_nodes = 10000", "shared"],
    ),
    "exponential properties": (
        chain(30, lambda to: {"properties": {"a": {"$ref": to}, "b": {"$ref": to}}}),
        ["schema_nodes = 10000"],
    ),
    "exponential and recursive": (
        chain(12, lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]}, {"properties": {"c": {"$ref": "#/$defs/0"}}}),
        ["schema_nodes = 10000"],
    ),
    "a long chain in place": (chain(33, lambda to: {"$ref": to}), ["more than 32", "merge"]),
    "a long chain of unevaluated": (
        chain(2000, lambda to: {"anyOf": [{"$ref": to}], "unevaluatedProperties": False}),
        ["schema"],
    ),
    "depth": ('{"properties":{"a":' * 40 + "{}" + "}}" * 40, ["schema_depth = 64", "$defs"]),
    "extreme depth": ('{"not":' * 20_000 + "{}" + "}" * 20_000, ["#"]),
    "size": ({"description": "x" * 300_000}, ["300019 bytes", "schema_bytes = 262144", "shorten"]),
    "an integer of too many digits": ('{"maximum":' + "9" * 5000 + "}", ["not JSON", "infinity"]),
}


UNCHECKED: dict[str, tuple[Any, list[str]]] = {
    "a negative length": ({"properties": {"a/b": {"minLength": -1}}}, ["#/properties/a~1b/minLength", "-1"]),
    "a URL": ({"$ref": "http://example.com/x#/a"}, ["#/$ref", "http://example.com/x#/a", "leads out", "$defs"]),
    "a file": ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, ["#/properties/a/$ref", "leads out"]),
    "a relative file": ({"items": {"$ref": "other.json"}}, ["#/items/$ref", '"other.json" leads out']),
    "a relative name below an $id": (
        {"$id": "https://example.com/a/", "not": {"$ref": "b"}},
        ["#/not/$ref", '"b" leads out'],
    ),
    "a dynamic URL": ({"$dynamicRef": "https://example.com/#x"}, ["#/$dynamicRef", "leads out"]),
    "the meta-schema": ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, ["leads out"]),
    "a URL in a definition that is not used": ({"$defs": {"a": {"$ref": "http://x/"}}}, ["#/$defs/a/$ref"]),
    "a broken URI": ({"$ref": "http://[x"}, ["#/$ref", "not a URI"]),
    "an unknown draft": (
        {"$schema": "http://example.com/mine"},
        ["#/$schema", "example.com", "not fetched", "2020-12"],
    ),
    "two drafts": (
        {"$defs": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}},
        ["#/$defs/a/$schema", "one draft"],
    ),
    "a pointer to nothing": ({"$ref": "#/$defs/x"}, ["#/$ref", '"#/$defs/x"', "names no schema"]),
    "an anchor of nothing": ({"$ref": "#x"}, ["#/$ref", "names no schema"]),
    "a pointer to data": ({"$ref": "#/title", "title": "x"}, ["names no schema"]),
    "a broken pattern": ({"properties": {"a": {"pattern": "(a"}}}, ["#/properties/a/pattern", '"(a"', "pattern"]),
}


@pytest.mark.parametrize(("schema", "words"), UNCHECKED.values(), ids=UNCHECKED.keys())
def test_what_cannot_be_checked_is_left_out_with_a_warning_that_names_the_place(schema: Any, words: list[str]) -> None:
    checker = compiled(schema)
    warning = checker.warnings[0]
    assert len(checker.warnings) <= 2
    assert warning.startswith("schema at #")
    assert [word for word in words if word not in warning] == []
    assert len(warning) < 700
    assert checker.is_valid({"a": 1, "b": "x"}), checker.text
    assert compiled(checker.text).warnings == ()


@pytest.mark.parametrize(("schema", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_an_invalid_schema_is_refused_quickly_with_the_place_and_how_to_fix_it(schema: Any, words: list[str]) -> None:
    with at_most(2.5):
        sentence = fault_of(schema)
    assert sentence.startswith("schema at #")
    assert [word for word in words if word not in sentence] == []
    assert len(sentence) < 700


def test_a_refused_schema_is_refused_again_and_an_equal_one_is_compiled_once() -> None:
    assert fault_of({"type": "strin"}) == fault_of({"type": "strin"})
    assert compiled({"type": "object", "title": "once"}) is compiled({"type": "object", "title": "once"})
    assert fault_of({"type": "object", "title": "once"}, Limits(schema_bytes=5)).count("schema_bytes = 5") == 1


def test_compiled_schemas_of_removed_tools_are_evicted_from_the_cache() -> None:
    texts = [
        f'{{"type":"object","properties":{{"evicted_{number}":{{}}}}}}' for number in range(MAX_CACHED_SCHEMAS + 1)
    ]
    oldest, *_, newest = [compile_schema(text, Limits()) for text in texts]
    assert compile_schema(texts[-1], Limits()) is newest
    assert compile_schema(texts[0], Limits()) is not oldest


def test_what_takes_much_memory_goes_with_its_tool_and_puts_nothing_out_of_the_cache() -> None:
    cheap = compiled({"properties": {"a": {"pattern": "^[a-z0-9-]{1,63}$"}}})
    dear = {"properties": {"a": {"pattern": "^\\p{L}{1,40}$"}}}
    long = json.dumps({"title": "of an output", "description": "x" * 5_000})
    for _ in range(MAX_CACHED_SCHEMAS + 1):
        assert compile_output_schema(long, LIMITS) is not compile_output_schema(long, LIMITS)
    assert compiled(dear) is not compiled(dear)
    assert compiled({"properties": {"a": {"pattern": "^[a-z0-9-]{1,63}$"}}}) is cheap


def test_no_reference_reaches_a_server_or_a_file(tmp_path: Path) -> None:
    hits: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type":"integer"}')

    local = tmp_path / "part.json"
    local.write_text('{"type":"integer"}')
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/part.json"
        try:
            for target in (
                url,
                url + "#/x",
                local.as_uri(),
                str(local),
                "part.json",
                f"//127.0.0.1:{server.server_port}/",
            ):
                for reference in ({"$ref": target}, {"$dynamicRef": target}, {"$schema": target}):
                    for schema in (reference, {"properties": {"a": reference}}, {"$defs": {"a": reference}}):
                        assert compiled(schema).warnings
                assert compiled({"$id": url, "properties": {"a": {"$ref": "other.json"}}}).warnings
                draft = "http://json-schema.org/draft-07/schema#"
                assert compiled({"$schema": draft, "properties": {"a": {"$ref": target}}}).warnings
            named = compiled(
                {"$id": url, "properties": {"a": {"$id": "b.json", "$ref": url + "#/$defs/n"}}, "$defs": {"n": {}}}
            )
            assert named.is_valid({"a": 1})
        finally:
            server.shutdown()
            thread.join(20)
    assert hits == []


def test_deep_schemas_and_arguments_do_not_overflow_a_small_stack() -> None:
    """A stack that overflows in native code ends the process, so this needs one of its own."""
    script = textwrap.dedent("""
        import json, threading
        from tests.bus.catalog.deep_schemas import SELF, chain, nested
        from toolbus.bus.catalog.schema import ARGUMENT_DEPTH, SchemaFault, compile_schema, load_arguments
        from toolbus.protocol.tool import Limits

        def chained(length, link, end=None):
            return json.dumps(chain(length, link, end), separators=(",", ":"))

        back = {"properties": {"c": {"$ref": "#/$defs/0"}}}
        cases = [
            chained(4000, lambda to: {"properties": {"c": {"$ref": to}}}),
            chained(30, lambda to: {"$ref": to}, back),
            chained(14, lambda to: {"anyOf": [{"$ref": to}]}, back),
            chained(5, lambda to: {"anyOf": [{"$ref": to}], "unevaluatedProperties": False}, back),
            '{"unevaluatedProperties":' * 63 + "{}" + "}" * 63,
            json.dumps(SELF),
        ]

        def run():
            for case in cases:
                try:
                    checker = compile_schema(case, Limits())
                except SchemaFault as fault:
                    assert False, fault
                for leaf in ("{}", "1", '{"x":[]}'):
                    arguments = load_arguments(nested(ARGUMENT_DEPTH - 3, leaf))
                    checker.is_valid(arguments), checker.explain(arguments)
                deep = {}
                for _ in range(10_000):
                    deep = {"c": deep}
                assert "nested more than 128" in checker.explain(deep)
            print("whole")

        threading.stack_size(1 << 20)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    """)
    root = Path(__file__).parents[3]
    variables = environment(UNMEASURED)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "$ref",
        "$defs",
        "definitions",
        "$id",
        "$anchor",
        "$schema",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "enum",
        "const",
        "pattern",
        "patternProperties",
        "additionalProperties",
        "unevaluatedProperties",
        "unevaluatedItems",
        "prefixItems",
        "contains",
        "minContains",
        "required",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
        "propertyNames",
        "maximum",
        "multipleOf",
        "minLength",
        "uniqueItems",
        "format",
        "contentSchema",
        "id",
        "$vocabulary",
        "a",
    ]
)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        [
            "object",
            "string",
            "#",
            "#/$defs/a",
            "#/properties/a",
            "#a",
            "a",
            "http://x/y",
            "file:///x",
            "(",
            "^a+$",
            "(?=a)",
            "",
        ]
    )
)


def test_compiling_leaves_no_graph_for_the_garbage_collector() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}}
    gc.collect()
    gc.disable()  # as while a bus starts
    try:
        compiled(schema)
        assert not [each for each in gc.get_objects() if isinstance(each, Graph)]
    finally:
        gc.enable()


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=25,
)


@given(st.dictionaries(KEYWORDS, SCHEMAS, max_size=5) | SCHEMAS | JSON, JSON)
@settings(max_examples=examples(75))
def test_any_json_as_a_schema_compiles_or_is_a_fault(schema: Any, arguments: Any) -> None:
    try:
        checker = compile_schema(json.dumps(schema), LIMITS)
    except SchemaFault:
        return
    arguments = load_arguments(json.dumps(arguments))
    assert (checker.explain(arguments) == "") is checker.is_valid(arguments)


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
@settings(max_examples=examples(50))
def test_any_text_as_a_schema_compiles_or_is_a_fault(text: str) -> None:
    with contextlib.suppress(SchemaFault):
        compile_schema(text, LIMITS)
