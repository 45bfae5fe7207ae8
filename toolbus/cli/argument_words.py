"""Reads the arguments of a tool from the words of a command line: a JSON document, then KEY=VALUE pairs.

What a value means is decided by the type that the tool's schema declares for its key: `city=2024` is a text where the
schema says string. Where nothing is declared, a value that is JSON is read as JSON, and any other is a text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolbus.cli import terminal
from toolbus.text import parse_json

if TYPE_CHECKING:
    from toolbus.functions.call_context import CallContext
    from toolbus.sdk import Host

MAX_REFERENCES = 32  # that are followed for one value; a schema may refer to itself
_KINDS = ("string", "integer", "number", "boolean", "array", "object", "null")
_BRANCHES = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class ArgumentWords:
    """The arguments of a command line, before the schema of their tool is known.

    Attributes:
        document: the JSON text before all pairs; empty without one.
        pairs: the values by their keys, as they were written.
    """

    document: str
    pairs: Mapping[str, str]

    @classmethod
    def read(cls, words: Sequence[str]) -> ArgumentWords:
        """Reads words; ends the command if they are not arguments."""
        first = words[0] if words and (words[0] == "-" or words[0].startswith(("{", "@"))) else ""
        pairs = dict(read_pair(word, "argument") for word in words[1 if first else 0 :])
        return cls(_document(first) if first else "", pairs)

    def text(self, schema: Mapping[str, Any] | None = None) -> str:
        """Returns the JSON text of the arguments.

        Args:
            schema: of the tool's arguments; None where it is not known.
        """
        if not self.pairs:
            return self.document or "{}"  # as it was written
        values = {key: typed_value(value, declared_types(schema or {}, key)) for key, value in self.pairs.items()}
        document = parse_json(self.document) if self.document else {}
        return json.dumps({**document, **values}, ensure_ascii=False)


async def schema_of(host: Host, name: str, role: str | None, context: CallContext | None) -> Mapping[str, Any] | None:
    """Returns the schema of a tool's arguments; None if the bus lists no such tool for this caller."""
    from toolbus.errors import RequestError

    try:
        listed = list(await host.list(role, names=(name,), context=context, include_offline=True))
        if not listed and ":" not in name:  # the bare name of a tool that is listed with its source
            everything = await host.list(role, context=context, include_offline=True)
            listed = [each for each in everything if each.tool.name.endswith(f":{name}")]
        elif not listed:  # of operators: the bus lists those of one source only
            source = name.rpartition(":")[0]
            listed = list(await host.list(role, names=(name,), source=source, context=context, include_offline=True))
        return listed[0].tool.parameters if listed else None
    except (RequestError, ValueError):  # the call says better what is wrong
        return None


def typed_value(text: str, types: frozenset[str]) -> Any:
    """Returns the value that a text on the command line stands for.

    Args:
        types: those that the schema declares; none where it declares no type.
    """
    from toolbus.schema_grammar import of_type

    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return text
    if types and "string" in types and not any(of_type(value, kind) for kind in types):
        return text
    return value  # where it is of none of the types, the bus says so


def declared_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Returns the types that a schema declares for one argument; none where every type, or no type, is declared."""
    from toolbus.normal_schema import normal_form
    from toolbus.schema_grammar import SchemaFault

    try:
        root = normal_form(dict(schema)).schema
    except SchemaFault:
        return frozenset()
    properties = root.get("properties")
    part = properties.get(key) if isinstance(properties, Mapping) else None
    types = frozenset(_types(root.get("additionalProperties") if part is None else part, root, [MAX_REFERENCES]))
    return frozenset() if types.issuperset(_KINDS) else types


def _types(schema: Any, root: Mapping[str, Any], left: list[int]) -> Iterator[str]:
    """Yields the types of a schema: its own, those of its values, else those of its branches and of its reference."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    if declared is not None:
        yield from declared if isinstance(declared, list) else [declared]
        return
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    yield from (_type_of(value) for value in values)
    if isinstance(reference := schema.get("$ref"), str) and left[0] > 0:
        left[0] -= 1
        yield from _types(_target(reference, root), root, left)
    for branch in (branch for keyword in _BRANCHES for branch in schema.get(keyword) or ()):
        types = list(_types(branch, root, left))
        yield from types or (_KINDS if branch in ({}, True) else ())


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the part of a schema that a reference within it names; None where it names nothing."""
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part if reference.startswith("#") else None


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def read_pair(word: str, what: str) -> tuple[str, str]:
    """Returns the key and the value of a word; ends the command if it is not KEY=VALUE.

    Args:
        what: the word is, for the error text.
    """
    key, equals, value = word.partition("=")
    if not key or not equals:
        terminal.fail(
            f"{what} {word!r} is not KEY=VALUE; a JSON object, @FILE or - comes before all pairs", terminal.USAGE
        )
    return key, value


def _document(word: str) -> str:
    """Returns the text of a document that is an object of JSON; ends the command if it is not."""
    place, text = _opened(word)
    try:
        arguments = parse_json(text)
    except (ValueError, RecursionError) as error:
        terminal.fail(f"{place} is not JSON: {error}", terminal.USAGE)
    if not isinstance(arguments, dict):
        terminal.fail(
            f"{place} is not a JSON object: arguments have names, write for example city=Paris", terminal.USAGE
        )
    return text


def _opened(word: str) -> tuple[str, str]:
    """Returns the place of a document, for error texts, and its text."""
    if word == "-":
        return "standard input", sys.stdin.read()
    if not word.startswith("@"):
        return "the argument", word
    try:
        with open(word[1:], encoding="utf-8") as opened:
            return word[1:], opened.read()
    except (OSError, UnicodeDecodeError) as error:
        terminal.fail(f"cannot read {word[1:]}: {getattr(error, 'strerror', None) or error}", terminal.USAGE)
