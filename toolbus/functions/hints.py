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
import decimal
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

from toolbus.functions.conversion import AmbiguousUnion, converter
from toolbus.functions.reply import Err, Ok, Reply, dump_output
from toolbus.functions.scope import ToolScope
from toolbus.functions.type_hints import (
    DECIMAL_TEXT,
    UNIONS,
    enum_values,
    is_text_class,
    literal_values,
    pydantic_adapter,
    record_fields,
    resolved,
    special,
    tuple_items,
    unwrapped,
    unwrapped_once,
)
from toolbus.protocol.json_schema import normal_form, properties_of
from toolbus.protocol.tool import Result

# Texts and mappings of keywords are read as they are. All others are recognized by their attributes, so no library is
# imported: `annotated_types` (`Ge`, `Len` …), `typing_extensions.Doc`, pydantic's `Field` and `StringConstraints`, and
# similar classes. A `Field` may also be the default of a parameter, and hold the default of its argument.

Default = Callable[[], Any]

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_KEYWORDS = {**_BOUNDS, "multiple_of": "multipleOf"}
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
    datetime.timedelta: {"type": "string", "format": "duration"},
    uuid.UUID: {"type": "string", "format": "uuid"},
    pathlib.Path: {"type": "string"},
    pathlib.PurePath: {"type": "string"},
    re.Pattern: {"type": "string", "format": "regex"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    bytearray: {"type": "string", "contentEncoding": "base64"},
    decimal.Decimal: {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL_TEXT}]},
    list: {"type": "array"},
    tuple: {"type": "array"},
    collections.deque: {"type": "array"},
    collections.abc.Sequence: {"type": "array"},
    collections.abc.Iterable: {"type": "array"},
    collections.abc.Collection: {"type": "array"},
    set: {"type": "array", "uniqueItems": True},
    frozenset: {"type": "array", "uniqueItems": True},
    collections.abc.Set: {"type": "array", "uniqueItems": True},
    dict: {"type": "object"},
    collections.abc.Mapping: {"type": "object"},
}


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
        self._open: list[Any] = []  # the record classes and aliases around the current hint
        self._names: dict[Any, str] = {}  # those that contain themselves, with the names of their definitions

    def schema(self, hint: Any) -> dict[str, Any]:
        """Returns a new schema for a hint; `{}` for an unknown one."""
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            inner, *extras = typing.get_args(hint)
            return constrain(self.schema(inner), extras)
        if origin in UNIONS:
            return self._union([self.schema(each) for each in typing.get_args(hint)])
        if origin is typing.Literal:
            return _choices([value for _, value in literal_values(hint)])
        if (inside := unwrapped_once(hint)) is not hint:  # a NewType, or an alias, which may contain itself
            if hint in self._open:
                return {}
            self._open.append(hint)
            schema = self.schema(inside)
            self._open.pop()
            return schema
        if origin is not None and record_fields(hint) is None:
            return self._container(origin, typing.get_args(hint))
        if hint is decimal.Decimal and self._of_output:  # it is written as text
            return {"type": "string", "pattern": DECIMAL_TEXT}
        if isinstance(kind := origin or hint, type) and kind not in _PLAIN:
            return self._class(hint, kind)
        return copy.deepcopy(_PLAIN.get(hint, {})) if isinstance(hint, type) or hint is None else {}

    def _named(self, hint: Any, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the schema of a hint with a name; a reference to its definition if it contains itself."""
        if hint in self._open and hint not in self._names:
            name = str(getattr(hint, "__name__", "Node"))
            while name in self.defs:
                name += "_"
            self._names[hint], self.defs[name] = name, {}
        if hint not in self._names:
            self._open.append(hint)
            schema = describe()
            self._open.pop()
            if hint not in self._names:
                return schema
            self.defs[self._names[hint]] = schema
        return {"$ref": f"#/$defs/{self._names[hint]}"}

    def _union(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        if {} in members:
            return {}
        unique = [each for index, each in enumerate(members) if each not in members[:index]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _container(self, origin: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
        schema = self.schema(origin)
        arguments = arguments if origin is not tuple else tuple_items(arguments)
        if origin is tuple and arguments[-1:] != (Ellipsis,):
            prefix = [self.schema(each) for each in arguments if each != ()]
            schema |= {"prefixItems": prefix} if prefix else {}
            return schema | {"minItems": len(prefix), "maxItems": len(prefix)}
        keyword, count = {"array": ("items", 1), "object": ("additionalProperties", 2)}.get(
            str(schema.get("type")), ("", 0)
        )
        held = self.schema(arguments[count - 1]) if count and len(arguments) >= count else {}
        return schema | ({keyword: held} if held else {})

    def _class(self, hint: Any, kind: type) -> dict[str, Any]:
        if issubclass(kind, enum.Enum):
            return _choices(list(enum_values(kind)))
        adapter = pydantic_adapter(kind)
        if callable(model := getattr(kind, "model_json_schema", getattr(adapter, "json_schema", None))):
            return self._of_model(dict(model(by_alias=False, mode="serialization") if self._of_output else model()))
        fields = record_fields(hint)
        if fields is not None and self._of_output and issubclass(kind, tuple):  # a NamedTuple is written as an array
            return self._container(tuple, tuple(hint for hint, _ in fields.values()))
        if fields is not None:
            return self._named(hint, lambda: self._record(kind, fields))
        if is_text_class(kind):
            return {"type": "string"} | ({"format": kind.__name__[:4].lower()} if "Address" in kind.__name__ else {})
        return copy.deepcopy(next((_PLAIN[base] for base in kind.__mro__ if base in _PLAIN), {}))

    def _record(self, kind: type, fields: Mapping[str, tuple[Any, bool]]) -> dict[str, Any]:
        described = parse(kind.__doc__).parameters
        properties = {name: self.schema(hint) for name, (hint, _) in fields.items()}
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
    kinds = {type(each) for each in values}
    typed = _PLAIN.get(next(iter(kinds)), {}) if len(kinds) == 1 else {}
    return {**typed, "enum": list(values)} if _is_json(values) else {}


_ANY_OUTPUT = (Reply, Ok, Result)  # records of the SDK that hold an output
_AWAITABLE = (collections.abc.Awaitable, collections.abc.Coroutine)
_BESIDE: Any = Annotated  # as an object, which is subscripted with values


UNSET: Any = object()  # the default of an argument that is optional and has no default to show


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function, as a call by keywords fills them.

    Attributes:
        parameters: those for arguments, in order; without `self` and the scope. The default of a `Field` replaces the
            `Field` itself.
        hints: the resolved hints of those that have one; a `Field` that is a default is added to the hint.
        scope: the name of the parameter that gets the `ToolScope`; empty without one.
        any_keyword: whether the function takes any other keyword (`**kwargs`).
        rest: the hint of each other keyword (`**kwargs: int`); `Any` without one.
        unfillable: parameters that no keyword can fill, as they are written in a signature: `/` after a name, `*names`.
        defaults: functions that make the defaults of fields, which Python would not fill in.
    """

    parameters: tuple[inspect.Parameter, ...]
    hints: Mapping[str, Any]
    scope: str
    any_keyword: bool
    unfillable: tuple[str, ...]
    defaults: tuple[tuple[str, Default], ...] = ()
    rest: Any = Any


def signature_of(function: Callable[..., Any]) -> Signature:
    """Returns the signature of a function, method, partial or callable object; an unreadable one takes anything."""
    try:
        listed = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return Signature((), {}, "", True, ())
    if listed and listed[0].name in ("self", "cls") and listed[0].annotation is inspect.Parameter.empty:
        listed = listed[1:]
    hints = _hints(function)
    listed = [part for each in listed for part in _unpacked(each, hints)]
    scope = next((each.name for each in listed if _is_scope(each, hints)), "")
    kinds = inspect.Parameter
    by_keyword = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    others = next((each for each in listed if each.kind is kinds.VAR_KEYWORD), None)
    defaults: dict[str, Default] = {}
    return Signature(
        parameters=tuple(
            _with_field(each, hints, defaults) for each in listed if each.name != scope and each.kind in by_keyword
        ),
        hints=hints,
        scope=scope,
        any_keyword=others is not None,
        unfillable=tuple(_unfillable(listed, inspect.isbuiltin(function))),
        defaults=tuple(defaults.items()),
        rest=Any if others is None else hints.get(others.name, Any),
    )


def _unpacked(parameter: inspect.Parameter, hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yields a parameter; in place of `**options: Unpack[Options]` the keys of that TypedDict."""
    hint = hints.get(parameter.name)
    unpacked = parameter.kind is inspect.Parameter.VAR_KEYWORD and special(hint) == "Unpack"
    keys = record_fields(typing.get_args(hint)[0]) if unpacked else None
    if keys is None:
        yield parameter
        return
    for name, (of_key, required) in keys.items():
        hints[name] = of_key
        default = inspect.Parameter.empty if required else UNSET
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=of_key)


def _unfillable(listed: list[inspect.Parameter], builtin: bool) -> Iterator[str]:
    """Yields the parameters that no keyword can fill.

    `*_` says itself that nothing is expected there, a wrapper's `*args, **kwargs` takes all arguments as keywords, and
    nobody can change the signature of a builtin.
    """
    kinds = inspect.Parameter
    wrapper = builtin or any(each.kind is kinds.VAR_KEYWORD and each.annotation is kinds.empty for each in listed)
    for each in listed:
        if each.kind is kinds.POSITIONAL_ONLY:
            yield f"{each.name}, /"
        elif each.kind is kinds.VAR_POSITIONAL and not wrapper and not each.name.startswith("_"):
            yield f"*{each.name}"


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
    return parameter.replace(default=UNSET if is_made(field) else default())


def parameters_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON Schema of a function's arguments.

    A parameter without a hint accepts anything. A function without any hint that takes all keywords, as handlers of
    N.E.K.O. are written (`def ping(*, value, **_)`), or that is a builtin, has the empty object schema (REST-60). The
    schema shows the defaults that JSON can hold and that arrive as they are written in Python.
    """
    signature = signature_of(function)
    hinted = any(each.name in signature.hints for each in signature.parameters)
    if not hinted and ((signature.any_keyword and signature.rest is Any) or inspect.isbuiltin(function)):
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
            _show_default(schema, signature.hints.get(each.name, Any), each.default)
        properties[each.name] = schema
    result: dict[str, Any] = {"type": "object", "properties": properties}
    if signature.any_keyword and (rest := builder.schema(signature.rest)):
        result["additionalProperties"] = rest
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
        reference = str(schema.get("$ref", "")).removeprefix("#/$defs/")
        if builder.defs.get(reference, {}).get("type") == "object":  # a class that contains itself
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
    return parse(inspect.getdoc(function.func if isinstance(function, functools.partial) else function)).summary


def _is_scope(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    """Tells whether the SDK fills a parameter: annotated `ToolScope`, or called `ctx` and not annotated at all."""
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.name == "ctx" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    hint = unwrapped(hints.get(parameter.name))
    if hint is ToolScope or (typing.get_origin(hint) in UNIONS and ToolScope in map(unwrapped, typing.get_args(hint))):
        return True
    # An annotation imported for type checkers only cannot be resolved; the name in it is enough.
    return isinstance(parameter.annotation, str) and ToolScope.__name__ in re.findall(r"\w+", parameter.annotation)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolves a function's hints; those that cannot be resolved are `Any`."""
    target: Any = function
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target)
    if not isinstance(target, type) and not hasattr(target, "__annotations__"):
        target = getattr(type(target), "__call__", target)  # noqa: B004  # it has the hints of a callable object
    return resolved(target, getattr(getattr(target, "__func__", target), "__globals__", {}))


def _show_default(schema: dict[str, Any], hint: Any, default: Any) -> None:
    """Adds a default to a schema, if JSON can hold it and the function gets the same when a caller sends that."""
    value = default
    if not _is_json(default) or isinstance(default, enum.Enum):
        try:
            value = _json_form(default)
            convert = converter(hint)
            if (value if convert is None else convert(value)) != default:
                return
        except AmbiguousUnion:
            raise
        except Exception:  # an author's class may raise anything
            return
    if value is None and schema and not _takes_null(schema):
        # `name: str = None` is common and means that null is fine.
        described = {"description": schema.pop("description")} if "description" in schema else {}
        inner = dict(schema)
        schema.clear()
        schema.update({"anyOf": [inner, {"type": "null"}], **described})
    schema["default"] = list(value) if isinstance(value, tuple) else value


def _json_form(default: Any) -> Any:
    """Returns the JSON form of a default, the same in every process."""
    if isinstance(default, set | frozenset):
        return sorted(map(_json_form, default), key=json.dumps)
    if callable(dump := getattr(default, "model_dump", None)):
        return dump(mode="json", by_alias=True)
    return json.loads(dump_output(default, with_bytes=True))


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_takes_null(each) for each in schema["anyOf"])
    if "enum" in schema:
        return None in schema["enum"]
    return schema.get("type") in ("null", None) and "$ref" not in schema
