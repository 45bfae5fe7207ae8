"""Whole numbers that a model writes as fractions: they are integers where the schema asks for them, nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolbus.bus.catalog.argument_repair import MAX_REPAIRS, original_of, repairs_of, with_whole_numbers
from toolbus.bus.catalog.schema import compile_schema, load_arguments
from toolbus.protocol.tool import Limits

INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
BOUNDED = {"type": "integer", "minimum": 1, "maximum": 3}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


REFERENCE = {**of(a={"$ref": "#/$defs/n"}), "$defs": {"n": of(k=BOUNDED)}}
MANY = json.dumps({"a": [1.0] * (MAX_REPAIRS + 1)})

# A schema, arguments that fit → what arrives.
WRITTEN: list[tuple[Any, str, str]] = [
    (of(a=INTEGER), '{"a": 3.0}', '{"a":3}'),
    (of(a=INTEGER), '{"a": -3.0}', '{"a":-3}'),
    (of(a=INTEGER, b=NUMBER), '{"a":3.0,"b":4.0,"c":5.0}', '{"a":3,"b":4.0,"c":5.0}'),
    (of(a=BOUNDED), '{"a":3.0}', '{"a":3}'),
    (of(a={"anyOf": [INTEGER, {"type": "null"}]}), '{"a":3.0}', '{"a":3}'),
    (of(a={"anyOf": [INTEGER, {"type": "string"}]}), '{"a":3.0}', '{"a":3}'),
    (of(a={"type": ["integer", "null"]}), '{"a":3.0}', '{"a":3}'),
    (of(a={"items": INTEGER}), '{"a":[3.0,4]}', '{"a":[3,4]}'),
    ({"type": "object", "additionalProperties": INTEGER}, '{"x":3.0}', '{"x":3}'),
    (REFERENCE, '{"a":{"k":3.0}}', '{"a":{"k":3}}'),
    (of(a={"type": "integer", "enum": [1, 2]}), '{"a":2.0}', '{"a":2}'),
]
LEFT: list[tuple[Any, str]] = [
    (of(a=INTEGER, b={"type": "string"}), '{"a":3,"b":"version 2.0"}'),
    (of(a={"type": ["integer", "number"]}), '{"a":3.0}'),
    (of(a={"anyOf": [INTEGER, NUMBER]}), '{"a":3.0}'),
    (of(a={"type": "number", "multipleOf": 1}, b=INTEGER), '{"a":3.0}'),
    (of(a=NUMBER), '{"a":3.0}'),
    (of(a=INTEGER), '{"a":1e300,"b":1.0}'),  # as an integer it would have 301 digits
    (of(a={"items": INTEGER}), MANY),
]


@pytest.mark.parametrize(("schema", "given", "arrives"), WRITTEN, ids=[given for _, given, _ in WRITTEN])
def test_a_whole_number_is_an_integer_where_one_is_asked(schema: Any, given: str, arrives: str) -> None:
    checker = compile_schema(json.dumps(schema), Limits())
    with pytest.raises(ValueError):
        checker.load(given)  # so it does not pass as it is
    assert checker.passes(load_arguments(given))
    done = with_whole_numbers(checker, given, 100)
    assert (str(done), original_of(done)) == (arrives, given)
    assert {(each.before, each.after) for each in repairs_of(done)} == {("number", "integer")}


@pytest.mark.parametrize(("schema", "given"), LEFT, ids=[given[:30] for _, given in LEFT])
def test_every_other_number_stays_as_it_is_written(schema: Any, given: str) -> None:
    checker = compile_schema(json.dumps(schema), Limits())
    assert with_whole_numbers(checker, given, 10_000) is given
