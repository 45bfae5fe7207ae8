from __future__ import annotations

import json
import math
import re
from typing import Any, Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus.catalog.schema_cases import JSON, LIMITS, WIDE, compiled
from tests.support.examples import examples
from toolbus.bus.catalog.schema import (
    WIDE_INTEGERS,
    compile_schema,
    load_arguments,
)


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
