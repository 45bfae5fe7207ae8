"""Schemas of tools and the arguments of calls: what is accepted, what is refused and in which words."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from toolbus.bus.catalog.schema import (
    ARGUMENT_DEPTH,
    MAX_CACHED_SCHEMAS,
    WIDE_INTEGERS,
    ArgumentChecker,
    SchemaFault,
    compile_schema,
    load_arguments,
)
from toolbus.tool import Limits

LIMITS = Limits()
WIDE = 2**64 + 1
SELF = {"properties": {"c": {"$ref": "#"}}}


def compiled(schema: Any, limits: Limits = LIMITS) -> ArgumentChecker:
    return compile_schema(schema if isinstance(schema, str) else json.dumps(schema), limits)


def fault_of(schema: Any, limits: Limits = LIMITS) -> str:
    with pytest.raises(SchemaFault) as caught:
        compiled(schema, limits)
    return str(caught.value)


def chain(length: int, link: Callable[[str], dict[str, Any]], end: dict[str, Any] | None = None) -> dict[str, Any]:
    """Definitions that each refer to the next one."""
    links = {str(i): link(f"#/$defs/{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(length): end or {"type": "object"}}}


def nested(depth: int, leaf: str = "{}") -> str:
    return '{"c":' * depth + leaf + "}" * depth


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Bounds the CPU time, since machines are shared; what it is there to catch takes many times as long."""
    started = time.process_time()
    yield
    assert time.process_time() - started < seconds


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
    "a URL in a definition that nobody uses": ({"$defs": {"a": {"$ref": "http://x/"}}}, ["#/$defs/a/$ref"]),
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


def test_an_explanation_names_path_value_and_rule() -> None:
    checker = compiled(
        {"properties": {"city": {"type": "string"}, "a b": {"items": {"maximum": 3}}}, "required": ["city"]}
    )
    assert checker.explain({"city": 5}) == 'arguments.city: 5 is not of type "string" (rule /properties/city/type)'
    assert checker.explain({}) == 'arguments: "city" is a required property (rule /required)'
    assert checker.explain({"city": "x", "a b": [1, 9]}).startswith('arguments["a b"][1]: 9 is greater than')


def test_an_explanation_shows_five_faults_and_counts_the_rest() -> None:
    sentence = compiled({"additionalProperties": {"type": "string"}}).explain({str(i): i for i in range(12)})
    assert sentence.count("is not of type") == 5
    assert sentence.endswith("; and 7 more")


def test_an_explanation_cuts_long_values_but_keeps_the_rule() -> None:
    sentence = compiled({"properties": {"a": {"pattern": "^x$"}}}).explain({"a": "y" * 100_000})
    assert len(sentence) < 300
    assert 'does not match "^x$" (rule /properties/a/pattern)' in sentence


def test_an_explanation_of_a_choice_names_the_closest_branch() -> None:
    branch = {"properties": {"v": {"type": "integer"}}, "type": "object"}
    sentence = compiled({"properties": {"a": {"anyOf": [{"type": "null"}, branch]}}}).explain({"a": {"v": "s"}})
    assert 'closest: arguments.a.v: "s" is not of type "integer"' in sentence


@pytest.mark.parametrize("arguments", [{"a": object()}, {"\ud800": 1}, {1: 2}])
@pytest.mark.parametrize("schema", [{"additionalProperties": {"type": "string"}}, {"additionalProperties": SELF}])
def test_what_json_cannot_hold_is_explained(schema: Any, arguments: Any) -> None:
    assert compiled(schema).explain(arguments).startswith("arguments: they are not JSON")


def hostile() -> dict[str, tuple[Any, str, bool]]:
    back = {"type": "object", "properties": {"c": {"$ref": "#/$defs/0"}}}
    two = {"type": "object", "anyOf": [SELF, {"minProperties": 0, **SELF}]}
    uneval = chain(6, lambda to: {"anyOf": [{"$ref": to}], "unevaluatedProperties": False}, back)
    lists: Callable[[dict[str, Any]], dict[str, Any]] = lambda items: {"properties": {"a": {"items": items}}}  # noqa: E731
    return {
        "nested quantifiers": (
            {"properties": {"a": {"pattern": "^(a+)+$"}}},
            json.dumps({"a": "a" * 900_000 + "b"}),
            False,
        ),
        "nested quantifiers with look-around": (
            {"properties": {"a": {"pattern": "(?=a)(a+)+$"}}},
            json.dumps({"a": "a" * 7000 + "b"}),
            False,
        ),
        "back-references": (lists({"pattern": r"(a*)*\1c"}), json.dumps({"a": ["a" * 20] * 700}), False),
        "many states": ({"properties": {"a": {"pattern": "a[ab]{500}c"}}}, json.dumps({"a": "abb" * 300_000}), False),
        "many texts": (lists({"pattern": "a[ab]{50}c"}), json.dumps({"a": ["abb" * 100] * 3000}), False),
        "two ways down, deep": (two, nested(ARGUMENT_DEPTH - 2, "1"), False),
        "two ways down": (two, nested(18, "1"), False),
        "two ways down in all of them": ({"allOf": [SELF, {"minProperties": 0, **SELF}]}, nested(120), True),
        "doubled in place, then back": (
            chain(10, lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]}, back),
            nested(120, "1"),
            False,
        ),
        "unevaluated, then back": (uneval, nested(120), True),
        "4,000 schemas for each item": (
            lists({"allOf": [{"minimum": -i} for i in range(4000)]}),
            json.dumps({"a": [1] * 100_000}),
            False,
        ),
        "2,000 objects to compare": (
            lists({"enum": [{"a": i} for i in range(2000)]}),
            json.dumps({"a": [{"a": 1999}] * 5000}),
            False,
        ),
        "100,000 faults": (lists({"type": "string"}), json.dumps({"a": [1] * 100_000}), False),
        "100,000 faults in a choice": (lists({"anyOf": [{"type": "string"}]}), json.dumps({"a": [1] * 100_000}), False),
        "a fault in every quote of a long text": (
            {"properties": {"a": {"allOf": [{"maxLength": i} for i in range(3000)]}}},
            json.dumps({"a": "x" * 500_000}),
            False,
        ),
        "wide unique integers": (
            {"properties": {"a": {"uniqueItems": True}}},
            json.dumps({"a": [WIDE + i for i in range(WIDE_INTEGERS)]}),
            True,
        ),
        "tiny divisors": (lists({"multipleOf": 1e-300}), json.dumps({"a": [1e300] * 1000}), True),
    }


HOSTILE = hostile()


@pytest.mark.parametrize(("schema", "text", "valid"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_arguments_are_checked_against_a_hostile_schema_in_bounded_time(
    schema: Any, text: str, valid: bool
) -> None:
    with at_most(2.5):
        checker = compiled(schema)
    arguments = load_arguments(text)
    with at_most(2.5):
        assert checker.is_valid(arguments) is valid
    with at_most(2.5):
        sentence = checker.explain(arguments)
    assert (sentence == "") is valid
    assert len(sentence) < 3000


def test_a_pattern_that_backtracks_too_often_is_refused_with_an_explanation() -> None:
    checker = compiled({"properties": {"a": {"pattern": r"(a*)*\1c"}}})
    arguments = {"a": "a" * 30 + "b"}
    assert not checker.is_valid(arguments)
    assert "backtracking" in checker.explain(arguments)


def test_an_ordinary_schema_is_checked_by_the_validator_itself() -> None:
    schema = {
        "type": "object",
        "properties": {"to": {"type": "string", "pattern": "^[a-z]{1,32}$"}, "tags": {"items": {"type": "string"}}},
    }
    assert type(compiled(schema).is_valid).__name__ == "builtin_function_or_method"


def test_deep_schemas_and_arguments_do_not_overflow_a_small_stack() -> None:
    """A stack that overflows in native code ends the process, so this needs one of its own."""
    script = textwrap.dedent("""
        import json, threading
        from tests.bus.catalog.test_schema import *

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
                    checker = compile_schema(case, LIMITS)
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
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


@pytest.mark.parametrize(
    ("rule", "fits", "breaks"),
    [
        ({"const": WIDE}, WIDE, WIDE + 1),
        ({"enum": [WIDE, 2**70]}, 2**70, 2**70 + 1),
        ({"maximum": WIDE}, WIDE, WIDE + 1),
        ({"exclusiveMinimum": -WIDE}, -WIDE + 1, -WIDE),
        ({"multipleOf": 2}, 2**64, WIDE),
        ({"type": "integer", "maximum": 10**40}, 10**40, 10**40 + 1),
        ({"maximum": 2**63}, 2**63, 2**63 + 1),
        ({"minimum": -(2**63)}, -(2**63), -(2**63) - 1),
    ],
)
def test_checks_of_wide_integers_are_exact(rule: dict[str, Any], fits: int, breaks: int) -> None:
    checker = compiled({"properties": {"n": rule}})
    assert checker.is_valid(load_arguments(f'{{"n":{fits}}}'))
    arguments = load_arguments(f'{{"n":{breaks}}}')
    assert not checker.is_valid(arguments)
    assert str(breaks) in checker.explain(arguments)


def test_empty_arguments_are_an_empty_object() -> None:
    assert load_arguments("") == {}


@pytest.mark.parametrize(
    "text", ["[" + "9" * 308 + "]", "[-9223372036854775809]", "18446744073709551617", "[ 1, 18446744073709551617 ]"]
)
def test_wide_integers_are_read_exactly_wherever_they_stand(text: str) -> None:
    assert repr(load_arguments(text)) == repr(json.loads(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":', ["not JSON", "column"]),
        (" ", ["not JSON"]),
        ('{"a":NaN}', ["not JSON", "column"]),
        ('{"a":-Infinity}', ["not JSON"]),
        ('{"a":1e999}', ["not JSON", "infinity"]),
        ('{"a":"\\ud800"}', ["not JSON"]),
        ("{'a':1}", ["not JSON"]),
        ("[" * 129 + "]" * 129, ["more than 128 levels"]),
        ("[" * 5000 + "]" * 5000, ["not JSON"]),
        ('{"a":' + "1" * 310 + "}", ["not JSON", "send it as a string"]),
        (json.dumps([WIDE] * (WIDE_INTEGERS + 1)), ["more than 256 integers", "strings"]),
    ],
)
def test_unreadable_arguments_are_explained(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load_arguments(text)
    assert [word for word in words if word not in str(caught.value)] == []


def test_arguments_as_deep_as_allowed_and_wide_ones_are_read() -> None:
    assert load_arguments("[" * 128 + "]" * 128)
    assert len(load_arguments("[" + ",".join(["{}"] * 5000) + "]")) == 5000
    assert load_arguments('{"a":"' + "[" * 5000 + '"}')


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 1]), st.booleans())
@settings(max_examples=examples(75))
def test_arguments_are_read_as_the_standard_library_reads_them(
    value: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert load_arguments(text) == json.loads(text) == value
    assert repr(load_arguments(text)).replace("-0", "0") == repr(value).replace("-0", "0")


@given(st.text(max_size=60) | st.text('0123456789-+.eE[]{},:" \\u', max_size=60))
@settings(max_examples=examples(125))
def test_any_text_is_read_or_refused_as_the_standard_library_would(text: str) -> None:
    def constant(_: str) -> None:
        raise ValueError

    try:
        ours = load_arguments(text)
    except ValueError:
        return  # it is stricter: no lone surrogates, no infinities
    if text:
        theirs = json.loads(text, parse_constant=constant)
        assert ours == theirs or (isinstance(ours, float) and math.isclose(ours, theirs))


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
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=25,
)


@given(st.dictionaries(KEYWORDS, SCHEMAS, max_size=5) | SCHEMAS | JSON, JSON)
@settings(max_examples=examples(150))
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


@pytest.mark.parametrize(
    "rules",
    [
        '{"maximum":18446744073709551616}',
        '{"const":18446744073709551616}',
        '{"enum":[18446744073709551616]}',
        '{"multipleOf":18446744073709551616}',
        '{"max\\u0069mum":18446744073709551616}',
    ],
)
def test_a_checker_reads_wide_integers_exactly_where_their_value_matters(rules: str) -> None:
    checker = compile_schema(f'{{"type":"object","properties":{{"n":{rules}}}}}', LIMITS)
    assert checker.is_valid(checker.load('{"n":18446744073709551616}'))
    assert not checker.is_valid(checker.load('{"n":18446744073709551617}'))


@pytest.mark.parametrize(
    "text", ["", "{", '{"n":NaN}', "[" * 200 + "]" * 200, '{"n":18446744073709551617}', '{"a":[1]}']
)
def test_a_checker_without_such_rules_reads_what_every_other_reads(text: str) -> None:
    checker = compile_schema('{"type":"object"}', LIMITS)
    try:
        exact = load_arguments(text)
    except ValueError as problem:
        with pytest.raises(ValueError, match=re.escape(str(problem))):
            checker.load(text)
    else:
        assert checker.load(text) == pytest.approx(exact) if "n" in text else checker.load(text) == exact


def test_flat_arguments_are_read_once_however_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> Never:
        raise AssertionError("the text was read again")

    monkeypatch.setattr("toolbus.bus.catalog.schema._no_digit_in", again)
    monkeypatch.setattr("toolbus.bus.catalog.schema.is_deeper", again)
    long = {"text": "[{" * 5_000, "flag": True, "none": None, "number": 2**63}
    assert load_arguments(json.dumps(long)) == long
    for value in ({"text": "[{" * 5_000, "list": []}, {"text": "[{" * 5_000, "float": 1e300}):
        with pytest.raises(AssertionError):
            load_arguments(json.dumps(value))
