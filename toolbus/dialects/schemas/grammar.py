"""Defines the grammar of JSON Schema: which keywords hold schemas, and which values the others may have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
MAX_BOUND = 2**63 - 1  # providers read bounds into 64 bits

_ANCHOR = re.compile("[A-Za-z_][-A-Za-z0-9._]*", re.ASCII)

# Keywords that hold schemas: by name, in a list, or one.
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
SINGLE = frozenset(
    (
        *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "not", "if", "then", "else", "contentSchema"),
    )
)


def is_count(value: Any) -> bool:
    """Tells whether a value can be a number of characters, items or properties."""
    return is_number(value) and value >= 0 and value == int(value) and value <= MAX_BOUND


def is_number(value: Any) -> bool:
    """Tells whether a value is a number that fits into a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def is_names(value: Any) -> bool:
    """Tells whether a value is a list of different texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len(set(value)) == len(value)


def is_type(value: Any) -> bool:
    """Tells whether a value is a type, or a list of different types."""
    if isinstance(value, list):
        return bool(value) and is_names(value) and all(item in TYPES for item in value)
    return isinstance(value, str) and value in TYPES


def of_type(value: Any, kind: str) -> bool:
    """Tells whether a JSON value is of a type."""
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case str():
            return kind == "string"
        case list():
            return kind == "array"
        case dict():
            return kind == "object"
        case _:
            return kind == "number" or (kind == "integer" and value == int(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_values(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": is_type,
    "enum": _is_values,
    "examples": lambda value: isinstance(value, list),
    **dict.fromkeys(("required", "propertyOrdering"), is_names),
    **dict.fromkeys(("title", "description", "format", "pattern", "$ref", "$dynamicRef", "$schema"), _is_text),
    **dict.fromkeys(
        ("$anchor", "$dynamicAnchor"), lambda value: _is_text(value) and _ANCHOR.fullmatch(value) is not None
    ),
    "$id": lambda value: _is_text(value) and "#" not in value[:-1],
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(is_names, value.values())),
    **dict.fromkeys(("$comment", "contentEncoding", "contentMediaType"), _is_text),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), is_count),
    **dict.fromkeys(("minContains", "maxContains"), is_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), is_number),
    "multipleOf": lambda value: is_number(value) and value > 0,
    **dict.fromkeys(("uniqueItems", "deprecated", "readOnly", "writeOnly", "nullable"), _is_flag),
}
"""Keyword → check of its value; providers refuse a request for a single invalid value."""
