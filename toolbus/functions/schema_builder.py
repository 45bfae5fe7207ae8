"""Writes the JSON Schema of a type hint.

A hint that cannot be expressed in JSON Schema becomes ``{}`` (anything) and never an error: a plugin must start also
with an unusual hint.
"""

from __future__ import annotations

import collections.abc
import datetime
import enum
import json
import pathlib
import types
import typing
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from toolbus.functions import docstring
from toolbus.functions.constraints import constrain
from toolbus.functions.fields import enum_values, record_fields, unwrapped

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    None: {"type": "null"},
    types.NoneType: {"type": "null"},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
    pathlib.Path: {"type": "string"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    collections.abc.Sequence: {"type": "array"},
    collections.abc.Iterable: {"type": "array"},
    collections.abc.Collection: {"type": "array"},
    set: {"type": "array", "uniqueItems": True},
    frozenset: {"type": "array", "uniqueItems": True},
    collections.abc.Set: {"type": "array", "uniqueItems": True},
    dict: {"type": "object"},
    collections.abc.Mapping: {"type": "object"},
    collections.abc.MutableMapping: {"type": "object"},
}
UNIONS = (typing.Union, types.UnionType)
_TRANSPARENT = (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar)


class SchemaBuilder:
    """Builds the schemas of one function.

    Args:
        of_output: whether the schemas describe values that the function returns, not its arguments.

    Attributes:
        defs: shared definitions of classes with `model_json_schema`, for the root's `$defs`.
    """

    def __init__(self, *, of_output: bool = False) -> None:
        self.defs: dict[str, Any] = {}
        self._of_output = of_output
        self._open: list[Any] = []  # the record classes around the current hint, to stop at one that contains itself

    def schema(self, hint: Any) -> dict[str, Any]:
        """Returns a new schema for a hint; `{}` for an unknown one."""
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            inner, *extras = typing.get_args(hint)
            return constrain(self.schema(inner), extras)
        if origin in _TRANSPARENT:
            return self.schema(typing.get_args(hint)[0])
        if origin in UNIONS:
            return self._union([self.schema(each) for each in typing.get_args(hint)])
        if origin is typing.Literal:
            return _choices(list(typing.get_args(hint)))
        if (inside := unwrapped(hint)) is not hint:  # a NewType, or an alias, which may contain itself
            return self._once(hint, lambda: self.schema(inside)) or {}
        if isinstance(hint, typing.TypeVar):
            return self.schema(hint.__bound__ or Any)
        if origin is not None:
            return self._container(origin, typing.get_args(hint))
        if isinstance(hint, type) and hint not in _PLAIN:
            return self._class(hint)
        return dict(_PLAIN.get(hint, {})) if isinstance(hint, type) or hint is None else {}

    def _once(self, hint: Any, describe: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Returns the schema of a hint with a name; None within that hint itself."""
        if hint in self._open:
            return None
        self._open.append(hint)
        schema = describe()
        self._open.pop()
        return schema

    def _union(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        if {} in members:
            return {}
        unique = [each for index, each in enumerate(members) if each not in members[:index]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _container(self, origin: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
        schema = dict(_PLAIN.get(origin, {}))
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            prefix = [self.schema(each) for each in arguments if each != ()]
            schema |= {"prefixItems": prefix} if prefix else {}
            return schema | {"minItems": len(prefix), "maxItems": len(prefix)}
        inner = {"array": "items", "object": "additionalProperties"}.get(str(schema.get("type")))
        held = self.schema(arguments[-1 if inner == "additionalProperties" else 0]) if inner and arguments else {}
        return schema | ({inner: held} if inner and held else {})

    def _class(self, kind: type) -> dict[str, Any]:
        if issubclass(kind, enum.Enum):
            return _choices(list(enum_values(kind)))
        if callable(model := getattr(kind, "model_json_schema", None)):
            return self._of_model(dict(model(by_alias=False, mode="serialization") if self._of_output else model()))
        fields = record_fields(kind)
        if fields is None:
            for base in kind.__mro__[1:-1]:
                if base in _PLAIN:
                    return dict(_PLAIN[base])
            return {}
        if self._of_output and issubclass(kind, tuple):  # a NamedTuple is written as an array
            return self._container(tuple, tuple(hint for hint, _ in fields.values()))
        described = docstring.parse(kind.__doc__).parameters
        properties = self._once(kind, lambda: {name: self.schema(hint) for name, (hint, _) in fields.items()})
        if properties is None:
            return {"type": "object"}
        for name, text in described.items():
            if name in properties:
                properties[name].setdefault("description", text)
        required = [name for name, (_, needed) in fields.items() if needed]
        return {"type": "object", "properties": properties} | ({"required": required} if required else {})

    def _of_model(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns the schema that a class wrote itself; its definitions move to the root, under unique names."""
        for name, definition in schema.pop("$defs", {}).items():
            own = name
            while own in self.defs and self.defs[own] != definition:
                own += "_"
            if own != name:
                schema, definition = (_renamed(each, name, own) for each in (schema, definition))
            self.defs[own] = definition
        return schema


def _renamed(schema: dict[str, Any], name: str, own: str) -> dict[str, Any]:
    """Returns a schema with the references to one definition renamed."""
    text = json.dumps(schema).replace(json.dumps(f"#/$defs/{name}"), json.dumps(f"#/$defs/{own}"))
    return dict(json.loads(text))


def _choices(values: Sequence[Any]) -> dict[str, Any]:
    kinds = {type(each.value if isinstance(each, enum.Enum) else each) for each in values}
    plain = [each.value if isinstance(each, enum.Enum) else each for each in values]
    typed = _PLAIN.get(next(iter(kinds)), {}) if len(kinds) == 1 else {}
    return {**typed, "enum": plain}
