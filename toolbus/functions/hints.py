"""Writes the JSON Schema of a function's arguments from its type hints and docstring.

It reads the signature once, when a tool is declared. A hint that cannot be resolved or expressed in JSON Schema becomes
``{}`` (anything) and never an error: an unusual hint must not keep a plugin from starting. The parameter that gets the
`ToolScope` is not an argument and does not appear.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import functools
import inspect
import json
import pathlib
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from toolbus.functions import docstring
from toolbus.functions.constraints import Default, constrain, default_of, is_field, is_made
from toolbus.functions.fields import enum_values, record_fields, resolved, unwrapped
from toolbus.functions.scope import ToolScope
from toolbus.normal_schema import normal_form, properties_of

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
_BESIDE: Any = Annotated  # as an object, which is subscripted with values
_UNIONS = (typing.Union, types.UnionType)
_TRANSPARENT = (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar)


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """What calling a function takes.

    Attributes:
        parameters: those that arguments may fill, in order; without `self` and the injected one. Their defaults are
            those of arguments: not a `Field`, but the default that it holds.
        hints: the resolved hints of those that have one; a `Field` that is a default stands beside the hint.
        scope: the name of the parameter that gets the `ToolScope`; empty where there is none.
        any_keyword: whether the function takes any other keyword (`**kwargs`).
        positional_only: names that cannot be passed by keyword.
        defaults: what makes the defaults that fields hold, which calling the function would not fill in.
    """

    parameters: tuple[inspect.Parameter, ...]
    hints: Mapping[str, Any]
    scope: str
    any_keyword: bool
    positional_only: tuple[str, ...]
    defaults: tuple[tuple[str, Default], ...] = ()


def signature_of(function: Callable[..., Any]) -> Signature:
    """Reads a function, method, partial or callable object; one that cannot be read takes anything."""
    try:
        listed = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return Signature((), {}, "", True, ())
    if listed and listed[0].name in ("self", "cls") and listed[0].annotation is inspect.Parameter.empty:
        listed = listed[1:]
    hints = _hints(function)
    scope = next((each.name for each in listed if _is_scope(each, hints)), "")
    kinds = inspect.Parameter
    by_keyword = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    defaults: dict[str, Default] = {}
    return Signature(
        parameters=tuple(
            _with_field(each, hints, defaults) for each in listed if each.name != scope and each.kind in by_keyword
        ),
        hints=hints,
        scope=scope,
        any_keyword=any(each.kind is kinds.VAR_KEYWORD for each in listed),
        positional_only=tuple(each.name for each in listed if each.kind is kinds.POSITIONAL_ONLY),
        defaults=tuple(defaults.items()),
    )


def _with_field(parameter: inspect.Parameter, hints: dict[str, Any], defaults: dict[str, Default]) -> inspect.Parameter:
    """Returns a parameter with the default that its `Field` holds, and adds it to its hint and to the defaults."""
    name, field, empty = parameter.name, parameter.default, inspect.Parameter.empty
    if is_field(field):
        try:
            hints[name] = _BESIDE[hints.get(name, Any), field]
        except TypeError:  # the hint is not one
            hints[name] = _BESIDE[Any, field]
    elif field is empty and typing.get_origin(hints.get(name)) is Annotated:
        field = next((each for each in typing.get_args(hints[name])[1:] if is_field(each)), None)
    if not is_field(field):
        return parameter
    default = default_of(field)
    if default is None:
        return parameter.replace(default=empty)
    defaults[name] = default
    return parameter.replace(default=object() if is_made(field) else default())  # an object is not shown


def parameters_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a function's arguments.

    A function without any hint has the empty object schema (REST-60); as soon as one parameter has a hint, those
    without accept anything. Defaults are shown where JSON can hold them.
    """
    signature = signature_of(function)
    if not any(each.name in signature.hints for each in signature.parameters):
        return {"type": "object", "properties": {}}
    described = docstring.parse(inspect.getdoc(function)).parameters
    builder = _Builder()
    properties: dict[str, Any] = {}
    required: list[str] = []
    for each in signature.parameters:
        schema = builder.schema(signature.hints.get(each.name, Any))
        if each.name in described:
            schema.setdefault("description", described[each.name])
        if each.default is inspect.Parameter.empty:
            required.append(each.name)
        else:
            _show_default(schema, each.default)
        properties[each.name] = schema
    result: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        result["required"] = required
    if builder.defs:
        result["$defs"] = builder.defs
    return result


def without_property(schema: Any, name: str) -> Any:
    """Returns a schema without one property, in its normal form; one without that property as it is."""
    properties = properties_of(schema)
    if name not in properties:
        return schema
    schema = normal_form(schema).schema
    rest = {**schema, "properties": {each: value for each, value in properties.items() if each != name}}
    if isinstance(required := schema.get("required"), list):
        rest["required"] = [each for each in required if each != name]
    return rest


def description_of(function: Callable[..., Any]) -> str:
    """Returns the first paragraph of a function's docstring, on one line."""
    if isinstance(function, functools.partial):
        function = function.func
    return docstring.parse(inspect.getdoc(function)).summary


def _is_scope(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    """Tells whether the SDK fills a parameter: annotated `ToolScope`, or called `ctx` and not annotated at all."""
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.name == "ctx" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    hint = hints.get(parameter.name)
    if hint is ToolScope or (typing.get_origin(hint) in _UNIONS and ToolScope in typing.get_args(hint)):
        return True
    # An annotation imported for type checkers only cannot be resolved; its last name is enough.
    spelled = parameter.annotation
    return isinstance(spelled, str) and spelled.removesuffix(" | None").rpartition(".")[2] == ToolScope.__name__


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolves a function's hints; those that cannot be resolved are `Any`."""
    target: Any = function
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target)
    if not isinstance(target, type) and not hasattr(target, "__annotations__"):
        target = getattr(type(target), "__call__", target)  # noqa: B004  # where a callable object keeps its hints
    return resolved(target, getattr(getattr(target, "__func__", target), "__globals__", {}))


def _show_default(schema: dict[str, Any], default: Any) -> None:
    value = default.value if isinstance(default, enum.Enum) else default
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return
    if value is None and schema and not _takes_null(schema):
        # `name: str = None` is common and means that null is fine.
        description = schema.pop("description", None)
        inner = dict(schema)
        schema.clear()
        schema["anyOf"] = [inner, {"type": "null"}]
        if description is not None:
            schema["description"] = description
    schema["default"] = list(value) if isinstance(value, tuple) else value


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_takes_null(each) for each in schema["anyOf"])
    if "enum" in schema:
        return None in schema["enum"]
    return schema.get("type") in ("null", None) and "$ref" not in schema


class _Builder:
    """Builds the schemas of one function.

    Attributes:
        defs: shared definitions that a class brought along (`model_json_schema`), for the root's `$defs`.
    """

    def __init__(self) -> None:
        self.defs: dict[str, Any] = {}
        self._open: list[Any] = []  # record classes being described, to stop at one that contains itself

    def schema(self, hint: Any) -> dict[str, Any]:
        """Returns a schema of its own for a hint; `{}` for one that it does not know."""
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            inner, *extras = typing.get_args(hint)
            return constrain(self.schema(inner), extras)
        if origin in _TRANSPARENT:
            return self.schema(typing.get_args(hint)[0])
        if origin in _UNIONS:
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
            return self._of_model(dict(model()))
        fields = record_fields(kind)
        if fields is None:
            for base in kind.__mro__[1:-1]:
                if base in _PLAIN:
                    return dict(_PLAIN[base])
            return {}
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
        """Returns the schema that a class wrote itself; its definitions move to the root, under names of their own."""
        for name, definition in schema.pop("$defs", {}).items():
            own = name
            while own in self.defs and self.defs[own] != definition:
                own += "_"
            if own != name:
                schema, definition = (_renamed(each, name, own) for each in (schema, definition))
            self.defs[own] = definition
        return schema


def _renamed(schema: dict[str, Any], name: str, own: str) -> dict[str, Any]:
    """Returns a schema whose references to one definition lead to another name of it."""
    text = json.dumps(schema).replace(json.dumps(f"#/$defs/{name}"), json.dumps(f"#/$defs/{own}"))
    return dict(json.loads(text))


def _choices(values: Sequence[Any]) -> dict[str, Any]:
    kinds = {type(each.value if isinstance(each, enum.Enum) else each) for each in values}
    plain = [each.value if isinstance(each, enum.Enum) else each for each in values]
    typed = _PLAIN.get(next(iter(kinds)), {}) if len(kinds) == 1 else {}
    return {**typed, "enum": plain}
