"""Resolves type hints, and lists the fields of record classes and the values of enums.

Shared by the two readers of type hints: `hints`, which writes their schemas, and `conversion`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

DECIMAL_TEXT = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"
UNIONS = (typing.Union, types.UnionType)
_TEXT_CLASS = re.compile(r"ipaddress\.IPv[46](Address|Interface|Network)|fractions\.Fraction|zoneinfo\.ZoneInfo")
_WRAPPERS = ("Annotated", "Required", "NotRequired", "ReadOnly", "Final", "ClassVar")


def special(hint: Any) -> str:
    """Returns the name of a special form of `typing` or `typing_extensions`, as `Unpack`; empty for other hints."""
    origin = typing.get_origin(hint) or hint
    ours = str(getattr(origin, "__module__", "")).startswith("typing")
    return str(getattr(origin, "_name", None) or getattr(origin, "__name__", "")) if ours else ""


def is_text_class(kind: type) -> bool:
    """Tells whether a class reads its values from texts; it is known by its name, since few programs import it."""
    return _TEXT_CLASS.fullmatch(f"{kind.__module__}.{kind.__qualname__}") is not None


def pydantic_adapter(kind: type) -> Any:
    """Returns the `TypeAdapter` of a class that pydantic knows, as `AwareDatetime`; None for models and others."""
    known = hasattr(kind, "__get_pydantic_core_schema__") or hasattr(kind, "__pydantic_validator__")
    pydantic = sys.modules.get("pydantic")
    return None if not known or pydantic is None or hasattr(kind, "model_validate") else _adapter(kind, pydantic)


@functools.lru_cache(256)  # it takes as long to make as 20 results to write
def _adapter(kind: type, pydantic: Any) -> Any:
    try:
        adapter = pydantic.TypeAdapter(kind)
        adapter.json_schema()
    except Exception:  # an author's class may raise anything
        return None
    return adapter


def tuple_items(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a `tuple[…]`; those of a tuple of anything if some of its items are unpacked."""
    unpacked = any(special(each) == "Unpack" or getattr(each, "__unpacked__", False) for each in arguments)
    return (Any, ...) if unpacked else arguments


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
    if origin is not None and special(hint) in _WRAPPERS:
        return typing.get_args(hint)[0]
    if origin is not None and not hasattr(hint, "__args__"):
        return origin
    if isinstance(hint, typing.NewType):
        return hint.__supertype__
    if isinstance(hint, dataclasses.InitVar):
        return hint.type
    if isinstance(hint, typing.TypeVar):
        bound = hint.__bound__ or functools.reduce(operator.or_, hint.__constraints__ or (Any,))
        names = vars(sys.modules.get(hint.__module__, typing))
        return resolved(types.SimpleNamespace(__annotations__={"bound": bound}), names)["bound"]
    if is_alias(hint):
        return _filled(
            hint.__value__, dict(zip(getattr(hint, "__type_params__", ()), typing.get_args(hint), strict=False))
        )
    return str if hint is typing.LiteralString else hint


def is_alias(hint: Any) -> bool:
    """Tells whether a hint is a `type Name = …`, of Python 3.12 or of typing_extensions; it may contain itself."""
    return type(typing.get_origin(hint) or hint).__name__ == "TypeAliasType"


def _filled(hint: Any, given: Mapping[Any, Any]) -> Any:
    """Returns a hint with types in the place of its type variables."""
    if isinstance(hint, typing.TypeVar):
        return given.get(hint, hint)
    names = () if isinstance(hint, type) or not given else getattr(hint, "__parameters__", ())
    return hint[tuple(given.get(each, each) for each in names)] if names else hint


def _field_hints(kind: Any) -> dict[str, Any]:
    """Returns the hints of a record class, with the types that it or a class below it gives to type variables."""
    origin = typing.get_origin(kind) or kind
    module = inspect.getmodule(origin)
    hints = resolved(origin, dict(vars(module)) if module else {})
    for base in vars(origin).get("__orig_bases__", origin.__bases__):
        if typing.get_args(base) and special(base) not in ("Generic", "Protocol"):
            raw = resolved(typing.get_origin(base), {})
            hints |= {name: own for name, own in _field_hints(base).items() if hints.get(name) == raw.get(name)}
    given = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(kind), strict=False))
    return {name: _filled(hint, given) for name, hint in hints.items()}


def enum_values(kind: type[enum.Enum]) -> dict[Any, enum.Enum]:
    """Returns the members by their JSON form: the value, or for all the name if a value is not a JSON scalar."""
    members = list(kind)
    if all(isinstance(each.value, str | int | float | bool) or each.value is None for each in members):
        return {each.value: each for each in members}
    return {each.name: each for each in members}


def literal_values(hint: Any) -> dict[tuple[type, Any], Any]:
    """Returns the values of a `Literal` by the type and value of their JSON form, which is as for the whole Enum."""
    values = {}
    for each in typing.get_args(hint):
        forms = enum_values(type(each)) if isinstance(each, enum.Enum) else {each: each}
        form = next(form for form, value in forms.items() if value == each)
        values[type(form), form] = each
    return values


def record_fields(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """Returns name → (hint, required) of a dataclass, TypedDict or NamedTuple; None for any other hint."""
    origin = typing.get_origin(kind) or kind
    if not is_record(origin):
        return None
    hints = _field_hints(kind)
    if dataclasses.is_dataclass(origin):
        missing = dataclasses.MISSING
        return {
            each.name: (hints.get(each.name, Any), each.default is missing and each.default_factory is missing)
            for each in origin.__dataclass_fields__.values()  # `fields()` leaves out what only `__post_init__` gets
            if each.init and special(hints.get(each.name)) != "ClassVar"
        }
    if _is_named_tuple(origin):
        defaults = getattr(origin, "_field_defaults", {})
        return {name: (hints.get(name, Any), name not in defaults) for name in origin._fields}
    needed: frozenset[str] = getattr(origin, "__required_keys__", frozenset())
    # The hint says it: `__required_keys__` is wrong if annotations are texts (PEP 563).
    marks = {"Required": True, "NotRequired": False}
    return {name: (hint, marks.get(special(hint), name in needed)) for name, hint in hints.items()}


def is_record(kind: Any) -> bool:
    """Tells whether it is a dataclass, TypedDict or NamedTuple."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or is_typed_dict(kind) or _is_named_tuple(kind))


def is_typed_dict(kind: Any) -> bool:
    """Tells whether a hint is a TypedDict, of `typing` or of `typing_extensions`."""
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
