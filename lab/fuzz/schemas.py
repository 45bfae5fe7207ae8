"""Compiles JSON Schemas of tools: in bounded time, and with the verdicts of a second validator.

The first byte decides. Raw text has to be refused with a sentence or compiled; a schema that is made of decisions
keeps to the words in which `jsonschema` and `jsonschema-rs` promise the same, and their verdicts are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema

from lab.fuzz.choices import Choices
from lab.fuzz.json_texts import text_of
from lab.fuzz.target import Target, hold
from toolbus.bus.catalog.schema import ArgumentChecker, SchemaFault, compile_schema, load_arguments
from toolbus.protocol.tool import Limits

SECONDS = 3.0  # of processor time, for one schema or one check; measured while coverage is traced, five times as slow
DEPTH = 4
KEYS = ("a", "b", "userId", "é")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
TEXTS = ("", "a", "aaa", "b1", "é", "😀", "A", "\n")
NUMBERS = (0, 1, -1, 2, 5, 10, 0.5, 5.0, -0.0, 1e300, 2**53, 2**53 + 1, 2**63, 2**64, 10**30)
STEPS = (1, 2, 5, 0.5)  # for multipleOf: halves are exact in binary
PATTERNS = ("^a", "^[a-z]+$", "b|c", "a{2,3}", "^$", ".", "[0-9]")
INNER = ("items", "additionalProperties", "not", "propertyNames", "contains")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
DEEP_ARRAY = [[[1]], [1.0]]


def _value(choose: Choices, depth: int = 0) -> Any:
    kind = choose.byte() % (8 if depth < DEPTH else 6)
    match kind:
        case 0:
            return choose.pick(TEXTS)
        case 1 | 2:
            return choose.pick(NUMBERS)
        case 3:
            return choose.flag()
        case 4:
            return None
        case 5:
            return choose.pick(([], {}, DEEP_ARRAY, {"a": 1, "b": 1.0}))
        case 6:
            return [_value(choose, depth + 1) for _ in range(choose.byte() % 4)]
    return {choose.pick(KEYS): _value(choose, depth + 1) for _ in range(choose.byte() % 4)}


def _schema(choose: Choices, depth: int = 0) -> Any:
    """Returns a schema in words that both validators know and promise the same for."""
    if depth == DEPTH:
        return choose.pick((True, False, {}, {"type": "string"}))
    schema: dict[str, Any] = {}
    for _ in range(choose.byte() % 4 + 1):
        word, value = choose.pick(RULES)(choose, depth)
        schema[word] = value
    return schema


def _schemas(choose: Choices, depth: int) -> list[Any]:
    return [_schema(choose, depth + 1) for _ in range(choose.byte() % 3 + 1)]


# Each makes one rule from decisions, at a depth.
RULES: tuple[Callable[[Choices, int], tuple[str, Any]], ...] = (
    lambda choose, depth: ("type", choose.pick(TYPES)),
    lambda choose, depth: ("type", list(dict.fromkeys([choose.pick(TYPES), choose.pick(TYPES)]))),
    lambda choose, depth: (
        "properties",
        {choose.pick(KEYS): _schema(choose, depth + 1) for _ in range(choose.byte() % 3 + 1)},
    ),
    lambda choose, depth: ("required", list(dict.fromkeys(choose.some(KEYS)))),
    lambda choose, depth: (choose.pick(INNER), _schema(choose, depth + 1)),
    lambda choose, depth: (choose.pick(("anyOf", "oneOf", "allOf")), _schemas(choose, depth)),
    lambda choose, depth: ("enum", [_value(choose, DEPTH - 1) for _ in range(choose.byte() % 4 + 1)]),
    lambda choose, depth: ("const", _value(choose, DEPTH - 1)),
    lambda choose, depth: (choose.pick(BOUNDS), choose.pick(NUMBERS)),
    lambda choose, depth: ("multipleOf", choose.pick(STEPS)),
    lambda choose, depth: (choose.pick(LENGTHS), choose.byte() % 4),
    lambda choose, depth: ("uniqueItems", choose.flag()),
    lambda choose, depth: ("pattern", choose.pick(PATTERNS)),
    lambda choose, depth: ("prefixItems", [_schema(choose, depth + 1)]),
    lambda choose, depth: ("dependentRequired", {choose.pick(KEYS): [choose.pick(KEYS)]}),
)


def compiled(text: str) -> ArgumentChecker | None:
    """Compiles a schema; None where it is refused. Either takes a bounded time."""
    began = time.process_time()
    try:
        return compile_schema(text, Limits())
    except SchemaFault as fault:
        hold(str(fault).startswith("schema at #"), f"the refusal does not name the place: {fault}")
        return None
    finally:
        spent = time.process_time() - began
        hold(spent < SECONDS, f"a schema took {spent:.1f} s: {text[:300]!r}")


def judged(checker: ArgumentChecker, value: Any, shown: str) -> bool:
    """Returns the verdict on a value, which takes a bounded time and is the one that `explain` gives."""
    began = time.process_time()
    verdict = checker.is_valid(value)
    why = checker.explain(value)
    spent = time.process_time() - began
    hold(spent < SECONDS, f"a check took {spent:.1f} s: {shown}")
    hold(verdict == (why == ""), f"is_valid returns {verdict}, explain {why!r}: {shown}")
    return verdict


def run(data: bytes) -> None:
    """Compiles a schema and checks values against it."""
    choose = Choices(data)
    if choose.flag():
        text = text_of(data[1:])
        checker = compiled(text)
        if checker is not None:
            for value in ({}, {"a": 1}, {"a": {"a": ["x" * 50] * 50}, "b": None}):
                judged(checker, value, text[:500])
        return
    schema, value = _schema(choose), {choose.pick(KEYS): _value(choose), choose.pick(KEYS): _value(choose)}
    text, arguments = json.dumps({"type": "object", **schema}), json.dumps(value)
    checker = compiled(text)
    if checker is None:
        return
    read = checker.load(arguments)
    verdict = judged(checker, read, f"{text} on {arguments}")
    if any(type(each) is float and abs(each) > 2**53 for each in _numbers(read)):
        return  # a wide integer that the schema does not look at was read as a float
    # Where the bus has said that it reads or checks something otherwise, the schema as it is checked is the measure.
    meant = json.loads(checker.text if checker.warnings else text)
    wanted = jsonschema.Draft202012Validator(meant).is_valid(load_arguments(arguments))
    hold(verdict == wanted, f"the verdict is {verdict}, jsonschema's is {wanted}: {text} on {arguments}")


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [number for each in inner for number in _numbers(each)]
    return [value]


def seeds() -> Iterator[bytes]:
    """Schemas as tools have them, some that would hurt, and decisions that make others."""
    for schema in (
        '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}',
        '{"type":"object","properties":{"a":{"$ref":"#/$defs/n"}},"$defs":{"n":{"items":{"$ref":"#/$defs/n"}}}}',
        '{"$ref":"#"}',
        '{"$ref":"file:///etc/passwd"}',
        '{"$schema":"http://json-schema.org/draft-07/schema#","definitions":{"a":{"type":"string"}}}',
        '{"properties":{"a":{"pattern":"(a+)+$"}}}',
        '{"anyOf":[{"type":"object"},{"type":"object","properties":{"a":{"enum":[1,1.0,"x",null]}}}]}',
        '{"$dynamicRef":"#a","$dynamicAnchor":"a","unevaluatedProperties":false,"dependentSchemas":{"a":{}}}',
        '{"properties":{"a":{"multipleOf":0.01,"minimum":1e308,"const":123456789012345678901234567890}}}',
        '{"patternProperties":{"^x":{"uniqueItems":true,"contains":{"type":"null"},"minContains":2}}}',
        '{"if":{"required":["a"]},"then":{"maxProperties":1},"else":false}',
        '{"type":"strin"}',
    ):
        yield b"\1" + schema.encode()
    for word in range(len(RULES)):
        yield bytes([0, 3, 2, 0, 0, 0, word, 0, 0, 1, 0, 1, word, 1, 1, 1, 2, 2, 7, 1, 0, 1, 1])
        yield bytes([0, 0, word, 1, 2, 0, word, 3, 1, 1, 0, 5, 7, 2, 0, 1, 1, 3, 6, 2, 1, 1, 1, 2])


TARGET = Target("schemas", "schemas compile or are refused in time, and verdicts are those of jsonschema", run, seeds)
