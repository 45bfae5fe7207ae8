"""Tells which forms of a schema count as the same: keywords that say nothing, and other ways to write a rule.

`NEUTRAL` and `KEPT` are the tables of equivalences that an export may use without reporting a loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.wire_capture import SentTool

Json = dict[str, Any]

# Keywords that say nothing about arguments, whatever their value: they organize a schema.
ORGANIZING = frozenset(
    ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$vocabulary", "$defs", "definitions")
)
# Keywords and values of them that mean the same as no keyword at all.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "additionalProperties": (True, {}),
    "unevaluatedProperties": (True, {}),
    "additionalItems": (True, {}),
    "unevaluatedItems": (True, {}),
    "items": (True, {}),
    "contains": (),
    "properties": ({},),
    "patternProperties": ({},),
    "required": ([],),
    "minLength": (0,),
    "minItems": (0,),
    "minProperties": (0,),
    "uniqueItems": (False,),
    "exclusiveMinimum": (False,),  # the flags of draft 4
    "exclusiveMaximum": (False,),
    "nullable": (False,),
    "deprecated": (False,),
    "readOnly": (False,),
    "writeOnly": (False,),
    "default": (None,),  # left out means null
    "description": ("",),
    "title": ("",),
    "multipleOf": (),
}


def is_null(schema: Json) -> bool:
    return schema.get("type") in ("null", ["null"]) or schema.get("enum") == [None] or schema.get("const", 0) is None


def allows_null(schemas: Sequence[Json]) -> bool:
    """Tells whether the wire says that a place may be null, or does not restrict it."""
    for schema in schemas:
        types = schema.get("type")
        if types == "null" or (isinstance(types, list) and "null" in types) or schema.get("nullable") is True:
            return True
        if None in (schema.get("enum") or ()) or ("const" in schema and schema["const"] is None):
            return True
    return False


def apart(one: Json, other: Json) -> bool:
    types = [_type_set(each) for each in (one, other)]
    if all(types) and not _overlap(types[0] or set(), types[1] or set()):
        return True
    values = [_value_list(each) for each in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not any(each in values[1] for each in values[0])
    properties = [each.get("properties") or {} for each in (one, other)]
    required = [set(each.get("required") or ()) for each in (one, other)]
    closed = [each.get("additionalProperties") is False for each in (one, other)]
    if any(closed[index] and required[1 - index] - set(properties[index]) for index in (0, 1)):
        return True
    return any(
        apart(properties[0][name], properties[1][name])
        for name in required[0] & required[1]
        if isinstance(properties[0].get(name), dict) and isinstance(properties[1].get(name), dict)
    )


def _overlap(one: set[str], other: set[str]) -> bool:
    return bool(one & other) or ("integer" in one and "number" in other) or ("number" in one and "integer" in other)


def _type_set(schema: Json) -> set[str] | None:
    types = schema.get("type")
    if types is None:
        values = _value_list(schema)
        return {_type_of(each) for each in values} if values else None
    return {types} if isinstance(types, str) else set(types)


def _value_list(schema: Json) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"


Kept = Callable[[str, Any, list[Json], list[Json], bool], bool]


def same(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    return any(keyword in each and _equal(each[keyword], value) for each in wire)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(each, other[key]) for key, each in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _type_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    """A type is the same as a list, as alternatives of one type each, as nullable, and as values of that type."""
    wanted = {value} if isinstance(value, str) else set(value)
    if "null" in wanted:
        if not allows_null(wire):
            return False
        wanted = wanted - {"null"}
    written: set[str] = set()
    for each in wire:
        written |= _type_set(each) or set()
    written -= {"null"}
    if branch:
        return wanted <= written
    narrower = any(_narrows(each, wanted) for each in wire)
    return wanted == written or (wanted <= written and narrower)


def _narrows(schema: Json, wanted: set[str]) -> bool:
    types = _type_set(schema)
    return types is not None and types - {"null"} == wanted


def _values_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    """One value is the same as a list of one; alternatives of one value each are the same as a list."""
    wanted = [value] if keyword == "const" else value
    if not isinstance(wanted, list):
        return False
    if None in wanted and len(wanted) > 1:
        if not allows_null(wire):
            return False
        wanted = [each for each in wanted if each is not None]
    lists = [[one for one in values if one is not None] for each in wire if (values := _value_list(each)) is not None]
    if keyword == "const" and value is None:
        return allows_null(wire)
    together = [one for each in lists for one in each]
    holds = all(any(_equal(one, other) for other in together) for one in wanted)
    if {*map(repr, wanted)} == {"True", "False"} and any(each.get("type") == "boolean" for each in wire):
        return True
    return holds and (branch or any(len(each) == len(wanted) for each in lists) or len(together) == len(wanted))


def _bound_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    """For integers, more than 0 is the same as at least 1; draft 4 writes a flag beside the bound."""
    inclusive = keyword.replace("exclusiveM", "m")
    if same(keyword, value, original, wire, branch):
        return True
    if value is True:  # draft 4
        edges = [each[inclusive] for each in original if each.get(keyword) is True and inclusive in each]
        return bool(edges) and _bound_kept(keyword, edges[0], original, wire, branch)
    types = {name for each in original for name in _type_set(each) or ()}
    if types - {"null"} != {"integer"} or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    nearest = int(value) + 1 if inclusive == "minimum" else -(int(-value) + 1)
    return any(each.get(inclusive) == nearest for each in wire)


def _inclusive_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    """A bound with the flag of draft 4 may be written as the number alone, and a weaker bound as the stronger one."""
    if same(keyword, value, original, wire, branch):
        return True  # the flag of draft 4 has to be found by itself
    exclusive = "exclusiveM" + keyword[1:]
    if any(each.get(keyword) == value and each.get(exclusive) is True for each in original):
        return _bound_kept(exclusive, value, original, wire, branch)
    others = [each[keyword] for each in original if isinstance(each.get(keyword), int | float)]
    strongest = (max if keyword.startswith("min") else min)(others, default=value)
    return strongest != value and any(each.get(keyword) == strongest for each in wire)


def _pattern_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    """A pattern is the same with its classes and escapes written in another way, and with other kinds of groups."""
    wanted = pattern_tokens(str(value))
    return any(pattern_tokens(str(each["pattern"])) == wanted for each in wire if "pattern" in each)


_ASCII = frozenset(map(chr, range(128)))
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset(each for each in _ASCII if each.isalnum() or each == "_")
_SPACES = frozenset(" \t\n\r\f\v")
_SETS = {
    "d": _DIGITS,
    "w": _LETTERS,
    "s": _SPACES,
    "D": _ASCII - _DIGITS,
    "W": _ASCII - _LETTERS,
    "S": _ASCII - _SPACES,
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_TOKEN = re.compile(
    r"(?P<group>\(\?(?::|P?<\w+>))|(?P<set>\[(?:\\.|[^\]\\])*\])|\\u(?P<code>[0-9a-fA-F]{4})|\\(?P<escaped>.)"
    r"|(?P<times>\{\d+,?\d*\})|(?P<mark>[()|*+?^$.]|\(\?)|(?P<char>.)",
    re.DOTALL,
)


def pattern_tokens(pattern: str) -> list[Any]:
    """Returns a regular expression as sets of ASCII characters and marks, so that two ways to write one are equal."""
    tokens: list[Any] = []
    for match in _TOKEN.finditer(pattern):
        kind, text = match.lastgroup, match[match.lastgroup or 0]
        if kind == "group":
            tokens.append("(")
        elif kind == "set":
            tokens.append(_set(text[1:-1]))
        elif kind == "escaped" and text in "bBpPk123456789":
            tokens.append(f"\\{text}")
        elif kind in ("escaped", "code", "char"):
            tokens.append(_escape(match))
        else:
            tokens.append(text)
    return tokens


def _set(inside: str) -> frozenset[str]:
    negated = inside.startswith("^")
    found: set[str] = set()
    matches = list(_TOKEN_IN_SET.finditer(inside[negated:]))
    index = 0
    while index < len(matches):
        first = _escape(matches[index])
        is_range = index + 2 < len(matches) and matches[index + 1][0] == "-" and len(first) == 1
        if is_range:
            last = _escape(matches[index + 2])
            found |= (
                {each for each in _ASCII if min(first) <= each <= max(last)} if len(last) == 1 else {*first, "-"} | last
            )
        else:
            found |= first
        index += 3 if is_range else 1
    return _ASCII - found if negated else frozenset(found)


_TOKEN_IN_SET = re.compile(r"\\u(?P<code>[0-9a-fA-F]{4})|\\(?P<escaped>.)|(?P<char>.)", re.DOTALL)


def _escape(match: re.Match[str]) -> frozenset[str]:
    if match["code"]:
        return frozenset((chr(int(match["code"], 16)),))
    if match["escaped"]:
        return _SETS.get(match["escaped"]) or frozenset((_CONTROLS.get(match["escaped"], match["escaped"]),))
    return frozenset((match["char"],))


def _description_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    return any(str(value).strip() in str(each.get("description", "")) for each in wire)


def _nullable_kept(keyword: str, value: Any, original: list[Json], wire: list[Json], branch: bool) -> bool:
    return allows_null(wire)


def ends_after_the_first(keyword: str, original: Json, wire: list[Json]) -> bool:
    """Tells whether the wire says with a number of items that none follow the first ones."""
    tuples = [original.get("prefixItems"), original.get("items")]
    first = max((len(each) for each in tuples if isinstance(each, list)), default=0)
    return keyword in ("items", "additionalItems") and any(each.get("maxItems", first + 1) <= first for each in wire)


KEPT: Mapping[str, Kept] = {
    "type": _type_kept,
    "enum": _values_kept,
    "const": _values_kept,
    "exclusiveMinimum": _bound_kept,
    "exclusiveMaximum": _bound_kept,
    "minimum": _inclusive_kept,
    "maximum": _inclusive_kept,
    "pattern": _pattern_kept,
    "description": _description_kept,
    "nullable": _nullable_kept,
}


_SNAKE = re.compile(r"_([a-z])")
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))


def plain_schema(sent: SentTool) -> Json:
    """Returns the schema of a tool on the wire as JSON Schema; Gemini's own form has other names and cases.

    Arguments are an object, so no schema is the same as an object without properties.
    """
    if sent.schema is None:
        return {"type": "object"}
    return _from_gemini(sent.schema) if "parameters" in sent.declaration and _is_gemini(sent.schema) else sent.schema


def _is_gemini(schema: Json) -> bool:
    return schema.get("type") == "OBJECT"


def _from_gemini(schema: Json) -> Json:
    plain: Json = {}
    for key, value in schema.items():
        name = _SNAKE.sub(lambda match: match[1].upper(), key)
        if name == "properties":
            plain[name] = {each: _from_gemini(inner) for each, inner in value.items()}
        elif name in ("items", "additionalProperties") and isinstance(value, dict):
            plain[name] = _from_gemini(value)
        elif name == "anyOf":
            plain[name] = [_from_gemini(each) for each in value]
        elif name == "type":
            plain[name] = value.lower()
        elif name in _COUNTS:
            plain[name] = int(value)
        else:
            plain[name] = value
    if plain.pop("nullable", False):
        if "enum" in plain:
            plain["enum"] = [*plain["enum"], None]
        if "type" in plain:
            plain["type"] = [plain["type"], "null"]
        else:
            plain.setdefault("anyOf", []).append({"type": "null"})
    return plain
