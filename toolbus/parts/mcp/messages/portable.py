"""Writes schemas so that the common readers of MCP take them, and refuse nothing that the bus takes.

Clients compile the output schemas of all tools when they list, and one that they cannot compile costs them all tools:
the TypeScript SDK 1.x reads draft 7 with strict patterns, others read 2020-12, in Python, Go or Rust. So what these
read in different ways is written in the way that all of them read, or left out: a schema becomes wider, never narrower.
Of results clients also demand formats, which the bus and 2020-12 do not (`date-time` with a time zone), and divide by
0.01 in floating point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from toolbus.common.text import dump_json
from toolbus.protocol.json_schema import LISTS, MAPS, SINGLE, type_of_values
from toolbus.protocol.patterns import Unreadable, in_words, portable_pattern

Json = dict[str, Any]

_READ_DIFFERENTLY = (
    *('"$id"', '"id"', '"$anchor"', '"pattern', '"prefixItems"', '"minContains"', '"$schema"', '"exclusiveM'),
    *('"format"', '"multipleOf"', ":true", ":false", ": true", ": false", '"enum"', '"const"'),
)
_REFERENCE = re.compile(r'"\$ref":\s*"(?!#/\$defs/[\w.-]+")')  # readers follow no other
_PLAIN_REFERENCE = re.compile(r"#/\$defs/[\w.-]+")
_DRAFTS = ("2020-12", "2019-09", "draft-07")  # that the SDKs for TypeScript compile
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_LEFT_OUT = object()  # in place of the value of a keyword
_CLOSING = ("additionalProperties", "unevaluatedProperties", "propertyNames")  # what may forbid names
_PARTS = frozenset(("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", *_CLOSING))


def portable(schema: Json, text: str = "", *, of_results: bool = False) -> Json:
    """Returns a schema for all readers; the same object if nothing is to change. What is left out is in words.

    Args:
        schema: of a tool that the bus has taken, so the value of every keyword has its type.
        text: the schema as JSON; "" if it is not at hand.
        of_results: whether clients check results against it.
    """
    text = text or dump_json(schema)
    is_open = text.count('"object"') + ("type" not in schema) > text.count('"properties"')
    if not is_open and not any(each in text for each in _READ_DIFFERENTLY) and _REFERENCE.search(text) is None:
        return schema
    names = _names(schema) if '"$id"' in text or '"$anchor"' in text else {}
    writer = _Writer(schema, names, of_results=of_results)
    written = writer.root()
    return _Writer(schema, names, of_results=of_results, loosely=True).root() if writer.widened else written


def _names(root: Json) -> dict[str, str]:
    """Returns the places, as JSON pointers, of what is named by `$id` or `$anchor`, by the whole name."""
    names = {"": ""}
    todo: list[tuple[Any, str, str]] = [(root, "", "")]
    for schema, place, base in todo:
        if isinstance(schema, dict):
            base = _base(schema, base)
            names.setdefault(base, place)
            if isinstance(anchor := schema.get("$anchor"), str):
                names[f"{base}#{anchor}"] = place
            todo += [(part, f"{place}/{key}", base) for key, part in _parts(schema)]
    return names


def _base(schema: Json, base: str) -> str:
    name = schema.get("$id")
    return urljoin(base, name).partition("#")[0] if isinstance(name, str) else base


def _parts(schema: Json) -> Iterator[tuple[str, Any]]:
    """Yields the schemas in a schema with their places."""
    for keyword, value in schema.items():
        if keyword in SINGLE:
            yield keyword, value
        elif keyword in LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{number}", part) for number, part in enumerate(value))
        elif keyword in MAPS and isinstance(value, dict):
            yield from (
                (f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", each) for name, each in value.items()
            )


class _Writer:
    """Writes the parts of one schema.

    Args:
        root: the schema.
        names: as `_names` returns them; empty where nothing has a name.
        of_results: as for `portable`.
        loosely: whether keywords for which a wider part makes the whole narrower are left out, since a part is wider.

    Attributes:
        widened: whether something became wider than it was.
    """

    def __init__(self, root: Json, names: Mapping[str, str], *, of_results: bool, loosely: bool = False) -> None:
        self._root = root
        self._names = names
        self._of_results = of_results
        self._loosely = loosely
        self.widened = False
        self._moved: dict[str, str] = {}  # by pointer: the name below `$defs` of what is elsewhere

    def root(self) -> Json:
        """Returns the whole for all readers."""
        written: Json = self.schema(self._root, "")
        if "additionalProperties" not in self._root:  # most such tools have no arguments
            written.pop("additionalProperties", None)
        definitions: Json = {}
        while len(definitions) < len(self._moved):  # what is moved may refer to more
            for pointer, name in [*self._moved.items()][len(definitions) :]:
                part = _as_object(self.schema(*self._target(pointer)))
                definitions[name] = {key: each for key, each in part.items() if key not in ("$defs", "definitions")}
        if definitions:
            written.pop("definitions", None)  # nothing refers to it any more
            written["$defs"] = {**written.get("$defs", {}), **definitions}
        return written

    def _target(self, pointer: str) -> tuple[Any, str]:
        """Returns what a pointer names, and the base of names there; None if it names nothing."""
        target: Any = self._root
        base = ""
        for token in pointer.split("/")[1:]:
            base = _base(target, base) if isinstance(target, dict) else base
            token = unquote(token).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(token)] if isinstance(target, list) else target[token]
            except (LookupError, TypeError, ValueError):
                return None, ""
        return target, base

    def _reference(self, pointer: str) -> str:
        """Returns a pointer into `$defs` in place of another one."""
        if _PLAIN_REFERENCE.fullmatch(pointer) or not isinstance(self._target(pointer)[0], dict | bool):
            return pointer
        if pointer not in self._moved:
            taken = {*self._root.get("$defs", ()), *self._moved.values()}
            name = pointer.rpartition("/")[2].replace("#", "root")
            if name in taken or not re.fullmatch(r"[\w.-]+", name):
                name = next(each for number in range(len(taken) + 1) if (each := f"ref{number}") not in taken)
            self._moved[pointer] = name
        return f"#/$defs/{self._moved[pointer]}"

    def schema(self, schema: Any, base: str) -> Any:
        """Returns a part for all readers."""
        if not isinstance(schema, dict):
            return schema
        base = _base(schema, base)
        words: list[str] = []  # of rules that are left out
        notes: list[str] = []  # of what is no rule for the bus
        written: Json = {}
        for keyword, value in schema.items():
            if keyword not in ("$id", "id"):  # several tools may have the same, in one table of a client
                written[keyword] = self._keyword(keyword, value, base, words, notes)
        written = {keyword: value for keyword, value in written.items() if value is not _LEFT_OUT}
        if words or notes:
            self.widened = self.widened or bool(words)
            written["description"] = "\n".join(filter(None, (schema.get("description"), *words, *notes)))
            if len(written.get("patternProperties", ())) < len(schema.get("patternProperties", ())):
                for closing in _CLOSING:  # it would forbid names that a pattern that is left out allows
                    written.pop(closing, None)
        self._adjust(written)
        return written

    def _keyword(self, keyword: str, value: Any, base: str, words: list[str], notes: list[str]) -> Any:
        """Returns the value of a keyword, or `_LEFT_OUT`."""
        if self._of_results and keyword == "format" and isinstance(value, str):
            notes.append(f"Format: {value}.")
            return _LEFT_OUT
        if self._of_results and keyword == "multipleOf" and isinstance(value, float) and not value.is_integer():
            words.append(f"A multiple of {value}.")
            return _LEFT_OUT
        if keyword == "$schema" and not any(each in str(value) for each in _DRAFTS):
            return _LEFT_OUT
        if keyword == "$ref" and isinstance(value, str):
            pointer = _pointer(value, base, self._names) if self._names else value
            return _LEFT_OUT if pointer is None else self._reference(pointer)
        if keyword == "pattern" and isinstance(value, str):
            return _pattern(value, keyword, words) or _LEFT_OUT
        if keyword in SINGLE:
            return self.schema(value, base)
        if keyword in LISTS and isinstance(value, list):
            return [self.schema(each, base) for each in value]
        if keyword in MAPS and isinstance(value, dict):
            if keyword == "patternProperties":
                value = {key: each for name, each in value.items() if (key := _pattern(name, keyword, words))}
            return {name: self.schema(_as_object(each), base) for name, each in value.items()}
        return value

    def _adjust(self, written: Json) -> None:
        """Changes the keywords that draft 7 reads otherwise, and those that would make the whole narrower."""
        for flag, bound in _BOUNDS.items():
            is_flag = isinstance(written.get(flag), bool)  # beside the bound, in draft 4
            if is_flag and written.pop(flag) and bound in written:
                written[flag] = written.pop(bound)
        if written.get("minContains") == 0:  # without this keyword, draft 7 wants one
            del written["minContains"]
            if "contains" in written and "maxContains" not in written:
                del written["contains"]
            elif "contains" in written:
                self.widened = True
                del written["contains"], written["maxContains"]
        first = written.get("prefixItems")
        if isinstance(first, list) and "items" in written:  # which is for all items in draft 7
            rest = written.pop("items")
            if rest is False:
                written["maxItems"] = min(written.get("maxItems", len(first)), len(first))
            elif rest is True:
                written.pop("unevaluatedItems", None)  # it would be for the items that are free now
            else:
                self.widened = True
                written["items"] = {"anyOf": [*first, rest]}
        if "$ref" not in written and (kind := type_of_values(written)):
            written["type"] = kind  # for litellm, towards Gemini, a choice without it is an object
        if written.get("type") == "object" and _PARTS.isdisjoint(written):
            written["additionalProperties"] = True  # pydantic-ai, towards OpenAI, would let it have nothing
        if self._loosely:
            for keyword in ("not", "if", "then", "else", "maxContains"):
                written.pop(keyword, None)
            if "oneOf" in written:
                written["allOf"] = [*written.get("allOf", ()), {"anyOf": written.pop("oneOf")}]


def _as_object(schema: Any) -> Any:
    """Returns a schema that is not true or false: the TypeScript SDK 1.x refuses the whole list for one of them."""
    return {} if schema is True else {"not": {}} if schema is False else schema


def _pattern(text: str, keyword: str, words: list[str]) -> str:
    """Returns a pattern for all readers; "" where there is none, which the words then tell."""
    try:
        return portable_pattern(text)
    except Unreadable:
        words.append(f"{in_words(text, keyword)}.")
        return ""


def _pointer(reference: Any, base: str, names: Mapping[str, str]) -> str | None:
    """Returns a reference as a JSON pointer from the root; None where it names nothing in the schema."""
    if not isinstance(reference, str):
        return None
    whole = base + reference if reference[:1] == "#" else urljoin(base, reference)
    resource, _, fragment = whole.partition("#")
    if fragment and fragment[0] != "/":
        place = names.get(f"{resource}#{fragment}")
        return None if place is None else f"#{place}"
    return f"#{names[resource]}{fragment}" if resource in names else None
