"""Tells whether words that an export added to a description say what a keyword said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Json = dict[str, Any]
Texts = Sequence[tuple[tuple[str, ...], str]]
"""Added texts, each with the place that it stands at, the nearest last."""

_TYPES = {
    "string": ("string", "text"),
    "integer": ("integer", "whole number"),
    "number": ("number",),
    "boolean": ("boolean", "true or false"),
    "array": ("array", "list"),
    "object": ("object",),
    "null": ("null", "nothing"),
}
_HINTS = {  # one of these stands for the keyword itself; what it holds has to be said by itself
    "items": ("list", "array", "item", "each"),
    "prefixItems": ("first", "in this order", "items:", "item 1"),
    "additionalItems": ("more items", "other items", "further item", "rest", "exactly"),
    "contains": ("contain", "at least one", "one item"),
    "propertyNames": ("name", "key"),
    "not": ("not", "except", "anything but"),
    "if": ("if ", "if:", "when "),
    "then": ("then", "if ", "must"),
    "else": ("else", "otherwise"),
    "readOnly": ("read-only", "read only", "readonly"),
    "writeOnly": ("write-only", "write only", "writeonly"),
    "exclusiveMinimum": ("more than", "above", "greater", "over", "excl"),  # the flags of draft 4
    "exclusiveMaximum": ("less than", "below", "under", "excl"),
    "discriminator": ("discriminator", "either", "one of"),
    "additionalProperties": ("other", "additional", "any key", "any name", "each key", "keys", "names", "map", "only"),
    "patternProperties": ("key", "name", "propert", "matching"),
    "anyOf": (" or ", "one of", "either", "any of", "|"),
    "oneOf": (" or ", "one of", "either", "exactly one", "|"),
    "uniqueItems": ("unique", "different", "distinct", "duplicate", "twice", "repeat"),
    "required": ("required", "must", "always", "needs", "optional"),
}


def added_text(wire: Sequence[Json], original: Sequence[Json]) -> str:
    """Returns what the descriptions of a place say beyond those of its tool."""
    text = "\n".join(dict.fromkeys(str(each["description"]) for each in wire if each.get("description")))
    for each in sorted((str(each.get("description", "")) for each in original), key=len, reverse=True):
        if each:
            text = text.replace(each.strip(), "")
    return text


def says(texts: Texts, place: tuple[str, ...], keyword: str, value: str) -> bool:
    """Tells whether an added text at a place, or above it with the place's name, says a keyword and its value."""
    try:
        meant = json.loads(value)
    except ValueError:  # a mark of the account, such as which alternatives were merged
        meant = None
    tell = _TELLS.get(keyword, _by_value)
    return any(text and _names(text, at, place) and tell(text, keyword, meant) for at, text in texts)


def _names(text: str, at: tuple[str, ...], place: tuple[str, ...]) -> bool:
    """Tells whether a text that stands at a place above names the steps down to a place."""
    steps = [step for step in place[len(at) :] if step and step != "*" and not step.startswith("[")]
    return all(_word(step, text) for step in steps)


def _word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-]|\.\d)", text, re.IGNORECASE) is not None


def _by_type(text: str, keyword: str, value: Any) -> bool:
    names = [value] if isinstance(value, str) else value or []
    return all(
        any(_word(word, text) or _word(word + "s", text) for word in _TYPES.get(name, (name,))) for name in names
    )


def _by_values(text: str, keyword: str, value: Any) -> bool:
    values = value if keyword in ("enum", "examples") and isinstance(value, list) else [value]
    return all(_value(each, text) for each in values)


def _by_value(text: str, keyword: str, value: Any) -> bool:
    if value is True:
        return any(hint in text.lower() for hint in _HINTS.get(keyword, (keyword.lower(),)))
    return _value(value, text)


def _value(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return value in text or json.dumps(value, ensure_ascii=False)[1:-1] in text
    if isinstance(value, float | int) and not isinstance(value, bool):
        return any(_word(form, text) for form in (json.dumps(value), f"{value:g}", f"{value:,}"))
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return compact in text or json.dumps(value, ensure_ascii=False) in text


def _by_hint(text: str, keyword: str, value: Any) -> bool:
    return any(hint in text.lower() for hint in _HINTS[keyword])


def _by_name(text: str, keyword: str, value: Any) -> bool:
    return isinstance(value, str) and _word(value, text)


def _required(text: str, keyword: str, value: Any) -> bool:
    return _by_name(text, keyword, value) and _by_hint(text, keyword, value)


_TELLS: dict[str, Callable[[str, str, Any], bool]] = {
    "type": _by_type,
    "enum": _by_values,
    "const": _by_values,
    "examples": _by_values,
    "properties": _by_name,
    "required": _required,
    **dict.fromkeys(
        (
            *("items", "prefixItems", "additionalItems", "additionalProperties", "patternProperties", "propertyNames"),
            *("anyOf", "oneOf", "uniqueItems", "contains", "not", "if", "then", "else", "discriminator"),
        ),
        _by_hint,
    ),
}
