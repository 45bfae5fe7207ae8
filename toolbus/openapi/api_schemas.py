"""Turns the schemas of an OpenAPI document into JSON Schema, with what they refer to as `$defs`.

A schema of OpenAPI 3.0 is written anew (`nullable`, `example`, bounds that are true or false), one of 3.1 is JSON
Schema already. References stay references, so that a schema which contains itself needs no special care.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolbus.openapi.document import Document, DocumentFault, ReadBudget, shown
from toolbus.schema_grammar import CHECKS, LISTS, MAPS, SINGLE
from toolbus.text import mark_unsafe

MAX_DEPTH = 48  # a bus takes 64 levels, and the tool's own schema is around these
MAX_NODES = 10_000  # of one tool, as a bus counts them

# What says nothing to a model, or is of the document rather than of the value.
_DROPPED = frozenset(("title", "$schema", "$id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$comment", "$defs"))
_KEPT = (CHECKS.keys() | {"const", "default"}) - _DROPPED - {"nullable", "readOnly", "writeOnly", "propertyOrdering"}
_NOT_IN_DEFS = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)


class SchemaReader:
    """Reads the schemas of one tool.

    Args:
        hidden: the keyword of properties that do not exist in this direction: `readOnly` in requests, `writeOnly` in
            responses.
        budget: of the whole document.
    """

    def __init__(self, document: Document, budget: ReadBudget, hidden: str = "readOnly") -> None:
        self._document = document
        self._budget = budget
        self._hidden = hidden
        self._names: dict[str, str] = {}  # JSON pointer → name in `$defs`
        self._numbers: dict[str, int] = {}  # name in `$defs` → the last number that was put behind it
        self._waiting: list[str] = []  # pointers whose schemas are not read yet
        self._nodes = 0
        self._is_3_0 = document.is_3_0

    def read(self, schema: Any) -> dict[str, Any]:
        """Returns a schema as JSON Schema; a reference at its root is resolved.

        Raises:
            DocumentFault: it cannot be read.
        """
        return self._schema(self._document.resolve(schema), 0)

    def definitions(self) -> dict[str, Any]:
        """Returns the `$defs` of all that was read."""
        definitions: dict[str, Any] = {}
        while self._waiting:
            pointer = self._waiting.pop()
            definitions[self._names[pointer]] = self._schema(self._document.find(pointer), 0)
        return definitions

    def _schema(self, schema: Any, depth: int) -> dict[str, Any]:
        self._count(depth)
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise DocumentFault(f"a schema is {shown(schema)}, it must be an object")
        result: dict[str, Any] = {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            result["$ref"] = f"#/$defs/{self._name(self._document.pointer(reference))}"
            if self._is_3_0:  # what stands beside a reference does not count there
                schema = {key: schema[key] for key in ("description",) if isinstance(schema.get(key), str)}
        for keyword, value in schema.items():
            self._keyword(result, keyword, value, depth)
        if "required" in result and isinstance(result.get("properties"), dict):
            properties = schema["properties"]
            names = result["required"] if isinstance(result["required"], list) else []
            result["required"] = [
                name for name in names if not isinstance(name, str) or not self._is_hidden(properties.get(name))
            ]
        return _translated(schema, result) if self._is_3_0 else result

    def _keyword(self, result: dict[str, Any], keyword: str, value: Any, depth: int) -> None:
        if keyword in ("$defs", "definitions", "$ref"):
            return
        if keyword in MAPS and isinstance(value, Mapping):
            result[keyword] = {
                str(name): self._schema(each, depth + 1)
                for name, each in value.items()
                if keyword != "properties" or not self._is_hidden(each)
            }
        elif keyword in LISTS and isinstance(value, list):
            result[keyword] = [self._schema(each, depth + 1) for each in value]
        elif keyword in SINGLE and isinstance(value, Mapping | bool):
            result[keyword] = value if isinstance(value, bool) else self._schema(value, depth + 1)
        elif keyword in _KEPT:
            result[keyword] = mark_unsafe(value) if keyword == "description" and isinstance(value, str) else value

    def _is_hidden(self, schema: Any) -> bool:
        return isinstance(schema, Mapping) and schema.get(self._hidden) is True

    def _name(self, pointer: str) -> str:
        """Returns the name of a schema in `$defs`, which is read later: one may contain itself."""
        if pointer not in self._names:
            self._document.find(pointer)
            plain = _NOT_IN_DEFS.sub("_", pointer.rpartition("/")[2])[:60] or "schema"
            name = plain
            while name in self._numbers:
                self._numbers[plain] += 1
                name = f"{plain}_{self._numbers[plain]}"
            self._numbers[name] = 1
            self._names[pointer] = name
            self._waiting.append(pointer)
        return self._names[pointer]

    def _count(self, depth: int) -> None:
        self._nodes += 1
        self._budget.spend(1)
        if depth > MAX_DEPTH:
            raise DocumentFault(f"its schemas are nested deeper than {MAX_DEPTH} levels")
        if self._nodes > MAX_NODES:
            raise DocumentFault(f"its schemas have more than {MAX_NODES} parts, too many for a tool")


def _translated(schema: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of OpenAPI 3.0 as JSON Schema.

    Args:
        schema: as the document has it.
        result: the same, its parts translated.
    """
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(result.get(exclusive), bool):
            is_exclusive = result.pop(exclusive)
            if is_exclusive and bound in result:
                result[exclusive] = result.pop(bound)
    if "example" in schema and "examples" not in result:
        result["examples"] = [schema["example"]]
    if schema.get("nullable") is not True:
        return result
    if isinstance(result.get("enum"), list) and None not in result["enum"]:
        result["enum"] = [*result["enum"], None]
    if isinstance(kind := result.get("type"), str):
        result["type"] = [kind, "null"] if kind != "null" else kind
        return result
    if "enum" in result or not result.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
        return result  # null is among the values, or any value is allowed
    description = {"description": result.pop("description")} if "description" in result else {}
    return {**description, "anyOf": [result, {"type": "null"}]}
