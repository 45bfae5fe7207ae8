"""Writes the JSON Schema of a function's arguments from its type hints and docstring.

It reads the signature once, when a tool is declared. A hint that cannot be resolved or expressed in JSON Schema becomes
``{}`` (anything) and never an error: a plugin must start also with an unusual hint. The parameter that gets the
`ToolScope` is not an argument and is left out.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from toolbus.functions import docstring
from toolbus.functions.constraints import Default, default_of, is_field, is_made
from toolbus.functions.fields import resolved
from toolbus.functions.reply import Err, Ok, Reply
from toolbus.functions.schema_builder import UNIONS, SchemaBuilder
from toolbus.functions.scope import ToolScope
from toolbus.normal_schema import normal_form, properties_of
from toolbus.tool import Result

_ANY_OUTPUT = (Reply, Ok, Result)  # records of the SDK that hold an output
_AWAITABLE = (collections.abc.Awaitable, collections.abc.Coroutine)
_BESIDE: Any = Annotated  # as an object, which is subscripted with values


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function, as a call by keywords fills them.

    Attributes:
        parameters: those for arguments, in order; without `self` and the scope. The default of a `Field` replaces the
            `Field` itself.
        hints: the resolved hints of those that have one; a `Field` that is a default is added to the hint.
        scope: the name of the parameter that gets the `ToolScope`; empty without one.
        any_keyword: whether the function takes any other keyword (`**kwargs`).
        positional_only: names that cannot be passed by keyword.
        defaults: functions that make the defaults of fields, which Python would not fill in.
    """

    parameters: tuple[inspect.Parameter, ...]
    hints: Mapping[str, Any]
    scope: str
    any_keyword: bool
    positional_only: tuple[str, ...]
    defaults: tuple[tuple[str, Default], ...] = ()


def signature_of(function: Callable[..., Any]) -> Signature:
    """Returns the signature of a function, method, partial or callable object; an unreadable one takes anything."""
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
        except TypeError:  # it is not a valid hint
            hints[name] = _BESIDE[Any, field]
    elif field is empty and typing.get_origin(hints.get(name)) is Annotated:
        field = next((each for each in typing.get_args(hints[name])[1:] if is_field(each)), None)
    if not is_field(field):
        return parameter
    default = default_of(field)
    if default is None:
        return parameter.replace(default=empty)
    defaults[name] = default
    return parameter.replace(default=object() if is_made(field) else default())  # no schema shows an object


def parameters_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a function's arguments.

    A function without any hint has the empty object schema (REST-60). If one parameter has a hint, those without accept
    anything. The schema shows the defaults that JSON can hold.
    """
    signature = signature_of(function)
    if not any(each.name in signature.hints for each in signature.parameters):
        return {"type": "object", "properties": {}}
    described = docstring.parse(inspect.getdoc(function)).parameters
    builder = SchemaBuilder()
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


def output_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a function's return annotation; `{}` if that does not describe the output."""
    hint = _hints(function).get("return", Any)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return {"type": "string"}  # of the joined chunks
    if typing.get_origin(hint) in _AWAITABLE:
        hint = typing.get_args(hint)[-1]
    members = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    builder = SchemaBuilder(of_output=True)
    hints = [each for each in members if each is not Err]  # a failure is not an output
    if not hints or any(each in _ANY_OUTPUT for each in hints):
        return {}
    schema = builder.schema(typing.Union[tuple(hints)])  # noqa: UP007  # of any number
    if builder.defs:
        schema["$defs"] = builder.defs
        if "$ref" in schema:  # a model that contains itself
            schema["type"] = "object"
    return schema


def without_property(schema: Any, name: str) -> Any:
    """Returns a schema without one property, in its normal form; unchanged if it has no such property."""
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
    if hint is ToolScope or (typing.get_origin(hint) in UNIONS and ToolScope in typing.get_args(hint)):
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
        target = getattr(type(target), "__call__", target)  # noqa: B004  # it has the hints of a callable object
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
