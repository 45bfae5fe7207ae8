"""Resolves type hints, and lists the fields of record classes and the values of enums.

Shared by the two readers of type hints: `hints`, which writes their schemas, and `conversion`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from typing import Any

DECIMAL_TEXT = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"
UNIONS = (typing.Union, types.UnionType)
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
