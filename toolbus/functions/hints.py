"""Writes the JSON Schema of a function's arguments from its type hints and docstring.

It reads the signature once, when a tool is declared. A hint that cannot be resolved or expressed in JSON Schema becomes
``{}`` (anything) and never an error: a plugin must start also with an unusual hint. The parameter that gets the
`ToolScope` is not an argument and is left out.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import datetime
import enum
import functools
import inspect
import json
import pathlib
import re
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from toolbus.functions.reply import Err, Ok, Reply
from toolbus.functions.scope import ToolScope
from toolbus.protocol.json_schema import normal_form, properties_of
from toolbus.protocol.tool import Result

# Reads the annotations beside a hint (`Annotated[int, Field(ge=1)]`) as keywords of JSON Schema.
#
# Texts and mappings of keywords are read as they are. All others are recognized by their attributes, so no library is
# imported: `annotated_types` (`Ge`, `Len` …), `typing_extensions.Doc`, pydantic's `Field` and `StringConstraints`, and
# similar classes. A `Field` may also be the default of a parameter, and hold the default of its argument.


Default = Callable[[], Any]

_KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_TEXTS = ("description", "documentation")
_PATTERNS = ("pattern", "regex")
_LENGTHS = {"min_length": "min", "max_length": "max"}
_COUNTED = {"string": "Length", "array": "Items", "object": "Properties"}
_UNDEFINED = ("PydanticUndefinedType", "UndefinedType", "ellipsis")


def constrain(schema: dict[str, Any], extras: Iterable[Any]) -> dict[str, Any]:
    """Adds the annotations beside a hint to its schema, and returns the schema."""
    for extra in _flat(extras):
        if isinstance(extra, Mapping):
            schema.update(_json_members(extra))
            continue
        for text in (extra, *(getattr(extra, name, None) for name in _TEXTS)):
            if isinstance(text, str) and text:
                schema["description"] = text
        if isinstance(extra, str):
            continue
        for attribute, keyword in _KEYWORDS.items():
            if isinstance(bound := getattr(extra, attribute, None), int | float) and _is_json(bound):
                schema[keyword] = bound
        for attribute in _PATTERNS:
            pattern = getattr(extra, attribute, None)
            if isinstance(pattern := getattr(pattern, "pattern", pattern), str):
                schema["pattern"] = pattern
        counted = _counted(schema)
        for attribute, prefix in _LENGTHS.items():
            if counted and isinstance(bound := getattr(extra, attribute, None), int):
                schema[prefix + counted] = bound
        if isinstance(examples := getattr(extra, "examples", None), list) and _is_json(examples):
            schema["examples"] = examples
        if isinstance(more := getattr(extra, "json_schema_extra", None), Mapping):
            schema.update(_json_members(more))
    return schema


def is_field(value: object) -> bool:
    """Tells whether a parameter's default is a description of the argument: pydantic's `Field()`."""
    return any(each.__name__ == "FieldInfo" for each in type(value).__mro__)


def default_of(field: Any) -> Default | None:
    """Returns a function that makes the default of a field; None if the field has no default."""
    if callable(factory := getattr(field, "default_factory", None)):
        return factory  # type: ignore[no-any-return]
    default = getattr(field, "default", ...)
    if type(default).__name__ in _UNDEFINED:
        return None
    return lambda: copy.copy(default)


def is_made(field: Any) -> bool:
    """Tells whether a factory makes the default of a field anew for each call, so that no schema can show it."""
    return callable(getattr(field, "default_factory", None))


def _flat(extras: Iterable[Any]) -> Iterator[Any]:
    """Yields annotations, each after its own parts."""
    for extra in extras:
        parts = getattr(extra, "metadata", None)
        if isinstance(parts, list | tuple):
            yield from _flat(parts)
        yield extra


def _counted(schema: Mapping[str, Any]) -> str:
    """Returns the unit of a length in a schema's keywords; empty if its values have no length, or several kinds."""
    branches = [each for each in schema.get("anyOf", ()) if isinstance(each, Mapping)]
    counted = {_COUNTED[kind] for each in (schema, *branches) if (kind := str(each.get("type"))) in _COUNTED}
    return counted.pop() if len(counted) == 1 else ""


def _json_members(keywords: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the keywords that JSON can hold; a plugin must start although its author wrote others."""
    return {key: value for key, value in keywords.items() if _is_json({key: value})}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


# Reads the docstring of a function: its summary, and the description of each parameter.
#
# It knows the three layouts that Python authors use (Google ``Args:``, reST ``:param name:``, numpy ``Parameters``
# with a rule below it). Of any other docstring it reads the first paragraph. It never fails: it leaves out text that
# it cannot read.


# Chinese authors write full-width colons.
_HEADER = re.compile(r"(?:Keyword |Other )?(?:Args|Arguments|Parameters|Params|Attributes|参数)\s*[:：]", re.IGNORECASE)
_OTHER_HEADER = re.compile(r"(?:Returns?|Yields?|Raises|Examples?|Notes?|See Also|References|Warnings?|Todo)\s*:")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\(.*?\))?\s*[:：]\s*(?P<text>.*)")
_REST_ENTRY = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(?P<name>\w+)\s*:\s*(?P<text>.*)")
_NUMPY_NAMES = re.compile(r"\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*(?=\s*(?::|$))")
_RULE = re.compile(r"-{3,}")


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring for models.

    Attributes:
        summary: the first paragraph, on one line.
        parameters: the description of each parameter that has one, on one line.
    """

    summary: str
    parameters: Mapping[str, str]


def parse(text: str | None) -> Docstring:
    """Reads a docstring as it stands in the source, indentation included."""
    lines = inspect.cleandoc(text or "").splitlines()
    parts_of: dict[str, list[str]] = {}
    for read in (_rest, _numpy, _google):
        for name, part in read(lines):
            parts_of.setdefault(name, []).append(part)
    described = {name: " ".join(filter(None, parts)) for name, parts in parts_of.items()}
    return Docstring(_summary(lines), {name: text for name, text in described.items() if text})


def _summary(lines: list[str]) -> str:
    summary: list[str] = []
    for index, line in enumerate(lines):
        bare = line.strip()
        underlined = index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1].strip())
        starts = _HEADER.fullmatch(bare) or _OTHER_HEADER.fullmatch(bare) or re.match(r":\w+[^:]*:", bare)
        if not bare or starts or underlined:
            break
        summary.append(bare)
    return " ".join(summary)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _google(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, part of its text) from the indented block below each ``Args:``."""
    inside = False
    base = -1  # indent of the entries of this block; -1 before the first
    name = ""
    for line in lines:
        bare = line.strip()
        if not bare:
            continue
        if not inside or _indent(line) == 0:
            inside, base, name = _HEADER.fullmatch(bare) is not None, -1, ""
            continue
        base = _indent(line) if base < 0 else base
        entry = _GOOGLE_ENTRY.fullmatch(bare) if _indent(line) <= base else None
        if entry:
            name = entry["name"]
            yield name, entry["text"]
        elif name and _indent(line) > base:
            yield name, bare


def _rest(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, part of its text) from ``:param name: text`` and the indented lines that follow."""
    name = ""
    for line in lines:
        bare = line.strip()
        entry = _REST_ENTRY.fullmatch(bare)
        if entry:
            name = entry["name"]
            yield name, entry["text"]
        elif name and bare and _indent(line) > 0 and not bare.startswith(":"):
            yield name, bare
        else:
            name = ""


def _numpy(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, part of its text) from the section below ``Parameters`` and its rule."""
    inside = False
    names: list[str] = []
    for index, line in enumerate(lines):
        bare = line.strip()
        if index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1].strip()):
            inside, names = _HEADER.fullmatch(bare + ":") is not None, []
        elif not inside or not bare or _RULE.fullmatch(bare):
            continue
        elif _indent(line) == 0:
            match = _NUMPY_NAMES.match(bare)
            names = [each.strip().lstrip("*") for each in match[0].split(",")] if match else []
        else:
            for name in names:
                yield name, bare


# Resolves type hints, and lists the fields of record classes and the values of enums.
#
# Shared by the two readers of type hints: `schema_builder` and `conversion`.


_WRAPPERS = (typing.Annotated, typing.Required, typing.NotRequired)


def resolved(target: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Returns the hints of a function or class; one that cannot be resolved, not even with `names`, is `Any`."""
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # an author's annotations may raise anything
        pass
    hints: dict[str, Any] = {}
    for name, spelled in dict(getattr(target, "__annotations__", {})).items():
        one = types.SimpleNamespace(__annotations__={name: spelled})
        try:
            hints |= typing.get_type_hints(one, names, names, include_extras=True)
        except Exception:
            hints[name] = Any
    return hints


def unwrapped(hint: Any) -> Any:
    """Returns a hint without wrappers that do not change its values: `Annotated`, `NotRequired`, `NewType`, an alias.

    `typing.Dict` alone is `dict`.
    """
    while (inside := unwrapped_once(hint)) is not hint:
        hint = inside
    return hint


def unwrapped_once(hint: Any) -> Any:
    """Returns a hint without the outermost of these, and any other hint as it is."""
    origin = typing.get_origin(hint)
    if origin in _WRAPPERS:
        return typing.get_args(hint)[0]
    if origin is not None and not hasattr(hint, "__args__"):
        return origin
    if isinstance(hint, typing.NewType):
        return hint.__supertype__
    return hint.__value__ if is_alias(hint) else hint


def is_alias(hint: Any) -> bool:
    """Tells whether a hint is a `type Name = …`, of Python 3.12 or of typing_extensions; it may contain itself."""
    return type(hint).__name__ == "TypeAliasType"


def enum_values(kind: type[enum.Enum]) -> dict[Any, enum.Enum]:
    """Returns the members by their JSON form: the value, or for all the name if a value is not a JSON scalar."""
    members = list(kind)
    if all(isinstance(each.value, str | int | float | bool) or each.value is None for each in members):
        return {each.value: each for each in members}
    return {each.name: each for each in members}


def record_fields(kind: type) -> dict[str, tuple[Any, bool]] | None:
    """Returns name → (hint, required) of a dataclass, TypedDict or NamedTuple; None for any other class."""
    if not (dataclasses.is_dataclass(kind) or is_typed_dict(kind) or _is_named_tuple(kind)):
        return None
    module = inspect.getmodule(kind)
    hints = resolved(kind, dict(vars(module)) if module else {})
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return {
            each.name: (hints.get(each.name, Any), each.default is missing and each.default_factory is missing)
            for each in dataclasses.fields(kind)
            if each.init
        }
    if _is_named_tuple(kind):
        defaults = getattr(kind, "_field_defaults", {})
        return {name: (hints.get(name, Any), name not in defaults) for name in kind._fields}  # type: ignore[attr-defined]
    needed: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    return {name: (hint, _needed(hint, name in needed)) for name, hint in hints.items()}


def _needed(hint: Any, otherwise: bool) -> bool:
    """Tells whether a key is required, by its hint: `__required_keys__` is wrong if annotations are texts (PEP 563)."""
    origin = typing.get_origin(hint)
    return {typing.Required: True, typing.NotRequired: False}.get(origin, otherwise)


def is_typed_dict(kind: type) -> bool:
    """Tells whether a class is a TypedDict, of `typing` or of `typing_extensions`."""
    return issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


# Writes the JSON Schema of a type hint.
#
# A hint that cannot be expressed in JSON Schema becomes ``{}`` (anything) and never an error: a plugin must start also
# with an unusual hint.


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
        described = parse(kind.__doc__).parameters
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
    described = parse(inspect.getdoc(function)).parameters
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
    return parse(inspect.getdoc(function)).summary


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
