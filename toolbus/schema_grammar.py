"""Defines the grammar of JSON Schema: which keywords hold schemas, and which values the others may have.

All readers of schemas use it: the normal form, the bus's validator, the dialects. Their errors show places and values
in the same way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
MAX_BOUND = 2**63 - 1  # providers read bounds into 64 bits
SHOWN_CHARACTERS = 200
DRAFTS = {
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-04/schema": 4,
}
"""The known drafts by their address, without its scheme and its empty fragment."""

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


class SchemaFault(ValueError):
    """A schema breaks a rule; the text names the place (a JSON pointer), the value, the rule and how to fix it."""


def draft_of(schema: dict[str, Any]) -> int | None:
    """Returns which draft a schema names: a number of `DRAFTS`, 2020 if it names none; None for an unknown one."""
    uri = schema.get("$schema", "json-schema.org/draft/2020-12/schema")
    if not isinstance(uri, str):
        return None
    return DRAFTS.get(uri.removesuffix("#").removeprefix("https://").removeprefix("http://"))


def show(value: object) -> str:
    """Returns a value as JSON for an error text, cut in the middle where it is long."""
    return cut(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """Shortens a text in the middle, as the rule that a value breaks stands at the end."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {text[3 - half :]}"


def pointer(place: Iterable[str | int]) -> str:
    """Returns a place in a schema as a JSON pointer in a URL's fragment, cut where it is long."""
    return cut("#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place))


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
