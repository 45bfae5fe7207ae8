"""Arguments that break a schema: only plain slips are repaired, and every repair is recorded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from toolbus.bus.catalog.argument_repair import MAX_REPAIRS, original_of, read_object, repair, repairs_of
from toolbus.bus.catalog.schema import ArgumentChecker, compile_schema, load_arguments
from toolbus.bus.catalog.schema_defaults import MAX_FILLED
from toolbus.protocol.tool import Limits

ROOM = 10_000
DRAFT_07 = "http://json-schema.org/draft-07/schema#"


def checker_of(schema: Any) -> ArgumentChecker:
    return compile_schema(json.dumps(schema), Limits())


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def repaired(schema: Any, text: str, room: int = ROOM) -> tuple[str, list[str]] | None:
    """Returns what the plugin gets, and what was done; None where the call is refused."""
    checker = checker_of(schema)
    arguments = load_arguments(text)
    if checker.passes(arguments):
        return text, []
    done = repair(checker, text, arguments, room)
    return None if done is None else (str(done), [str(each) for each in repairs_of(done)])


INTEGER, NUMBER, BOOLEAN = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
NESTED = of(n=INTEGER)

# A schema, arguments → what arrives, and what the record says.
REPAIRED: dict[str, tuple[Any, str, str, list[str]]] = {
    "an integer": (of(a=INTEGER), '{"a":"5"}', '{"a":5}', ["a: string to integer"]),
    "a negative one": (of(a=INTEGER), '{"a":"-5"}', '{"a":-5}', ["a: string to integer"]),
    "a wide one, exactly": (
        of(a=INTEGER),
        f'{{"a":"{2**70}","b":{2**71}}}',
        f'{{"a":{2**70},"b":{2**71}}}',
        ["a: string to integer"],
    ),
    "a number": (of(a=NUMBER), '{"a":"5.5"}', '{"a":5.5}', ["a: string to number"]),
    "an integer for a number": (of(a=NUMBER), '{"a":"5"}', '{"a":5}', ["a: string to integer"]),
    "a boolean": (of(a=BOOLEAN), '{"a":"false"}', '{"a":false}', ["a: string to boolean"]),
    "null for an optional argument": (
        of(a=INTEGER, b=BOOLEAN),
        '{"a":null,"b":true}',
        '{"b":true}',
        ["a: null to absent"],
    ),
    "null where values are listed": (of(a={"enum": ["x"]}), '{"a":null}', "{}", ["a: null to absent"]),
    "null further down": (of(a=NESTED), '{"a":{"n":null}}', '{"a":{}}', ["a.n: null to absent"]),
    "null becomes the default": (
        of(a={"type": "integer", "default": 3}),
        '{"a":null}',
        '{"a":3}',
        ["a: null to absent", "a: absent to integer"],
    ),
    "text of an object": (of(a=NESTED), '{"a":"{\\"n\\": 1}"}', '{"a":{"n":1}}', ["a: string to object"]),
    "text of an array": (of(a={"type": "array"}), '{"a":" [1] "}', '{"a":[1]}', ["a: string to array"]),
    "text in text": (
        of(a=NESTED),
        '{"a":"{\\"n\\": \\"1\\"}"}',
        '{"a":{"n":1}}',
        ["a: string to object", "a.n: string to integer"],
    ),
    "items": (of(a={"items": INTEGER}), '{"a":["1",2]}', '{"a":[1,2]}', ["a[0]: string to integer"]),
    "one of several types": (of(a={"type": ["integer", "null"]}), '{"a":"5"}', '{"a":5}', ["a: string to integer"]),
    "one of several schemas": (of(a=NULLABLE), '{"a":"5"}', '{"a":5}', ["a: string to integer"]),
    "below one of several schemas": (
        of(a={"anyOf": [NESTED, {"type": "null"}]}),
        '{"a":{"n":"5"}}',
        '{"a":{"n":5}}',
        ["a.n: string to integer"],
    ),
    "behind a reference": (
        {**of(a={"$ref": "#/$defs/n"}), "$defs": {"n": NESTED}},
        '{"a":{"n":"5"}}',
        '{"a":{"n":5}}',
        ["a.n: string to integer"],
    ),
    "an odd name": (of(**{"a b": INTEGER}), '{"a b":"5"}', '{"a b":5}', ['["a b"]: string to integer']),
    "one of listed numbers": (of(a={"enum": [1, 2, "x"]}), '{"a":"2"}', '{"a":2}', ["a: string to integer"]),
    "an object around a listed value": (
        {**of(a={"$ref": "#/$defs/unit"}), "$defs": {"unit": {"type": "string", "enum": ["C", "K"]}}},
        '{"a":{"unit":"K"}}',
        '{"a":"K"}',
        ["a: object to string"],
    ),
    "an object around a listed value that may be null": (
        {**of(a={"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}), "$defs": {"unit": {"enum": ["C", "K"]}}},
        '{"a":{"unit":"K"}}',
        '{"a":"K"}',
        ["a: object to string"],
    ),
    "an object around the one value": (of(a={"const": 2}), '{"a":{"a":2}}', '{"a":2}', ["a: object to integer"]),
    "the one value": (of(a={"const": True}), '{"a":"true"}', '{"a":true}', ["a: string to boolean"]),
    "a default": (of(a={"default": "x"}, b={}), ' {"b": 1.50} ', '{"b": 1.50,"a":"x"}', ["a: absent to string"]),
    "a default for nothing": (of(a={"default": [1]}), "", '{"a":[1]}', ["a: absent to array"]),
    "a default further down": (
        of(a=of(b={"default": 1})),
        '{"a":{},"w":123456789012345678901234567890}',
        '{"a":{"b":1},"w":123456789012345678901234567890}',
        ["a.b: absent to integer"],
    ),
    "a default of each item": (
        of(a={"items": of(b={"default": 1})}),
        '{"a":[{}]}',
        '{"a":[{"b":1}]}',
        ["a[0].b: absent to integer"],
    ),
    "a default behind a reference": (
        {**of(a={"$ref": "#/$defs/n"}), "$defs": {"n": {**of(b={"default": 1}), "default": {}}}},
        "{}",
        '{"a":{}}',
        ["a: absent to object"],
    ),
    "a default of a required argument": (
        {**of(a={"type": "integer", "default": 1}), "required": ["a"]},
        "{}",
        '{"a":1}',
        ["a: absent to integer"],
    ),
}


@pytest.mark.parametrize(("schema", "given", "arrives", "repairs"), REPAIRED.values(), ids=REPAIRED.keys())
def test_a_plain_slip_is_repaired_and_recorded(schema: Any, given: str, arrives: str, repairs: list[str]) -> None:
    assert repaired(schema, given) == (arrives, repairs)


UNREPAIRED: dict[str, tuple[Any, str]] = {
    "an object around another value": (of(a={"type": "string", "enum": ["C", "K"]}), '{"a":{"a":"F"}}'),
    "an object around a listed value under another name": (of(a={"enum": ["C", "K"]}), '{"a":{"not":"K"}}'),
    "an object with more than a listed value": (of(a={"enum": ["C", "K"]}), '{"a":{"a":"K","b":1}}'),
    "an object around what is almost a listed value": (of(a={"enum": [1]}), '{"a":{"a":true}}'),
    "all arguments together in place of a listed value": ({"type": "object", "const": {"a": 1}}, '{"b":{"a":1}}'),
    "an object that another branch of a choice may take": (
        of(a={"anyOf": [{"enum": ["all", "none"]}, of(except_={"type": "array"})]}),
        '{"a":{"except_":"all"}}',
    ),
    "a fraction for an integer": (of(a=INTEGER), '{"a":"5.0"}'),
    "an exponent for an integer": (of(a=INTEGER), '{"a":"1e3"}'),
    "blanks around a number": (of(a=INTEGER), '{"a":" 5 "}'),
    "a plus": (of(a=INTEGER), '{"a":"+5"}'),
    "leading zeros": (of(a=INTEGER), '{"a":"05"}'),
    "other digits": (of(a=INTEGER), '{"a":"٥"}'),
    "nothing": (of(a=INTEGER), '{"a":""}'),
    "NaN": (of(a=NUMBER), '{"a":"NaN"}'),
    "infinity": (of(a=NUMBER), '{"a":"1e999"}'),
    "another word for true": (of(a=BOOLEAN), '{"a":"yes"}'),
    "capitals": (of(a=BOOLEAN), '{"a":"True"}'),
    "a number for a boolean": (of(a=BOOLEAN), '{"a":1}'),
    "a number for a text": (of(a={"type": "string"}), '{"a":5}'),
    "a float for an integer": (of(a=INTEGER), '{"a":5.5}'),
    "null for a required argument": ({**of(a=INTEGER), "required": ["a"]}, '{"a":null}'),
    "null in an array": (of(a={"items": INTEGER}), '{"a":[null]}'),
    "a text for an array of one": (of(a={"type": "array"}), '{"a":"x"}'),
    "broken JSON": (of(a={"type": "object"}), '{"a":"{n: 1}"}'),
    "text of the wrong kind": (of(a={"type": "object"}), '{"a":"[1]"}'),
    "out of bounds": (of(a={"type": "integer", "maximum": 3}), '{"a":"5"}'),
    "not one of listed numbers": (of(a={"enum": [1, 2]}), '{"a":"3"}'),
    "one of two faults": (of(a=INTEGER, b={"type": "string"}), '{"a":"5","b":5}'),
    "two ways": (of(a={"anyOf": [of(n=INTEGER, m=BOOLEAN), of(n=BOOLEAN, m=INTEGER)]}), '{"a":{"n":"1","m":"1"}}'),
    "too many": (of(a={"items": INTEGER}), json.dumps({"a": ["1"] * (MAX_REPAIRS + 1)})),
    "too deep": (of(a={"type": "array"}), json.dumps({"a": "[" * 200 + "]" * 200})),
}


@pytest.mark.parametrize(("schema", "given"), UNREPAIRED.values(), ids=UNREPAIRED.keys())
def test_nothing_is_guessed(schema: Any, given: str) -> None:
    assert repaired(schema, given) is None


VALID: dict[str, tuple[Any, str]] = {
    "a text of digits": (of(a={"type": "string"}), '{"a":"5"}'),
    "null that is allowed": (of(a=NULLABLE), '{"a":null}'),
    "text that is one of several types": (of(a={"type": ["string", "integer"]}), '{"a":"5"}'),
    "a default that does not fit": (of(a={"type": "integer", "default": "3"}), "{}"),
    "null as a default of a text": (of(a={"type": "string", "default": None}), "{}"),
    "a default in a branch": (of(a={"anyOf": [of(b={"default": 1}), {}]}), '{"a":{}}'),
    "a default in a default": (of(a={"default": {}, **of(b={"default": 1})}), '{"a":{"b":2}}'),
    "a default that breaks another rule": ({**of(a={"default": 1}), "maxProperties": 1}, '{"b":1}'),
}


@pytest.mark.parametrize(("schema", "given"), VALID.values(), ids=VALID.keys())
def test_arguments_that_fit_arrive_as_they_were_written(schema: Any, given: str) -> None:
    assert repaired(schema, given) == (given, [])


def test_a_default_that_does_not_fit_is_a_warning() -> None:
    (warning,) = checker_of(of(a={"type": "integer", "default": "3"})).warnings
    assert warning.startswith('schema at #/properties/a/default: "3" does not fit')
    assert checker_of(of(a={"type": "string", "default": None})).warnings == ()


def test_defaults_that_would_make_arguments_too_large_are_not_filled_in() -> None:
    schema = of(a={"items": of(b={"default": "x" * 1_000})}, c={"default": "y" * 1_000})
    text = json.dumps({"a": [{}] * 10_000})
    began = time.process_time()
    assert repaired(schema, text) == (text, [])
    assert repaired(of(c={"default": "y" * 1_000}), "{}", room=900) == ("{}", [])
    assert time.process_time() - began < 1.0


def test_a_schema_without_defaults_has_none_to_look_for() -> None:
    schema = {**of(a=INTEGER, b={"$ref": "#/$defs/n"}), "$defs": {"n": of(c={"$ref": "#/$defs/n"})}}
    checker = checker_of(schema)
    assert checker.defaults is None
    assert checker.passes == checker.is_valid


def test_a_recursive_schema_has_the_defaults_of_every_level() -> None:
    schema = {"$defs": {"n": of(v={"default": 0}, child={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}
    assert repaired(schema, '{"child":{"child":{}}}') == (
        '{"child":{"child":{"v":0},"v":0},"v":0}',
        ["v: absent to integer", "child.v: absent to integer", "child.child.v: absent to integer"],
    )


def test_the_text_of_repaired_arguments_remembers_how_they_came() -> None:
    checker = checker_of(of(a=INTEGER))
    done = repair(checker, '{"a":"5"}', {"a": "5"}, ROOM)
    assert done is not None
    assert (done, original_of(done)) == ('{"a":5}', '{"a":"5"}')
    assert (original_of("{}"), repairs_of("{}")) == ("{}", ())


def test_only_an_object_is_read_as_one() -> None:
    assert read_object(' {"a": 1}\n') == {"a": 1}
    assert [read_object(text) for text in ("[1]", "5", "", "{", "null")] == [None] * 5


SCALARS = st.sampled_from(["5", "5.0", "true", "{}", "[]", '{"a":"1"}', "x", "", 5, 1.5, True, None])
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=2) | st.dictionaries(st.sampled_from("ab"), part))
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": TYPES | st.lists(TYPES, min_size=1, unique=True), "default": SCALARS}),
    lambda part: st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "properties": st.dictionaries(st.sampled_from("ab"), part),
            "required": st.just(["a"]),
            "items": part,
            "anyOf": st.lists(part, min_size=1, max_size=2),
            "allOf": st.lists(part, min_size=1, max_size=2),
            "oneOf": st.lists(part, min_size=1, max_size=2),
            "default": VALUES,
            "maxProperties": st.just(1),
        },
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("ab"), SCHEMAS), st.dictionaries(st.sampled_from("abc"), VALUES))
@settings(max_examples=examples(75))
def test_what_arrives_fits_and_what_fits_is_only_completed(properties: Any, arguments: Any) -> None:
    schema, text = of(**properties), json.dumps(arguments)
    checker = checker_of(schema)
    done = repaired(schema, text)
    if checker.is_valid(arguments):
        assert done is not None
        assert all(": absent to " in each for each in done[1])
    if done is not None:
        assert checker.is_valid(json.loads(done[0]))


ROWS = {"type": "array", "items": {"type": "object", "properties": {"a": {"default": 1}}}}


@pytest.mark.parametrize(("rows", "filled"), [(MAX_FILLED, MAX_FILLED), (MAX_FILLED + 1, 0)])
def test_more_defaults_than_a_call_may_have_are_not_filled_in(rows: int, filled: int) -> None:
    done = repaired(of(rows=ROWS), json.dumps({"rows": [{}] * rows}))
    assert done is not None
    assert len(done[1]) == filled


def test_repaired_arguments_stay_within_their_limit_whatever_is_written_anew() -> None:
    rows = json.dumps({"rows": [{}] * 10})
    assert repaired(of(rows=ROWS), rows, room=59) == (rows, [])  # "a":1 and a comma, ten times
    text = '{"numbers":[' + ",".join(["1e15"] * 50) + '],"n":"5"}'  # written again, each has 18 characters
    assert repaired(of(numbers={"type": "array"}, n={"type": "integer"}), text, room=100) is None
