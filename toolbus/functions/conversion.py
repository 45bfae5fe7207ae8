"""Converts parsed JSON to the types of a handler's type hints.

Used for tools whose schema came from their hints: where that schema says "one of red, green" because the hint is an
Enum, the handler gets the Enum. JSON Schema counts 3.0 as an integer, so models write it: a handler that takes an int
gets 3. Hints that JSON already satisfies (str, float, list[str] …) need no converter and cost nothing per call.
"""

from __future__ import annotations

import collections.abc
import datetime
import enum
import pathlib
import types
import typing
import uuid
from collections.abc import Callable
from typing import Any

from toolbus.functions.fields import enum_values, record_fields

Converter = Callable[[Any], Any]

_FROM_TEXT: dict[Any, Converter] = {
    datetime.datetime: datetime.datetime.fromisoformat,
    datetime.date: datetime.date.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
    uuid.UUID: uuid.UUID,
    pathlib.Path: pathlib.Path,
}
_COLLECTIONS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    tuple: tuple,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Set: set,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_WRAPPERS = (typing.Annotated, typing.Required, typing.NotRequired)


def converter(hint: Any, _open: tuple[Any, ...] = ()) -> Converter | None:
    """Returns what turns a JSON value into the hinted type; None where the value is fine as it is.

    The converter raises ValueError, with a text, for a value that does not fit. Values of another JSON type than
    the schema names are passed on unchanged: the schema refuses them.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in _WRAPPERS:
        return converter(arguments[0], _open)
    if origin in (typing.Union, types.UnionType):
        rest = [each for each in arguments if each is not types.NoneType]
        return _unless_none(converter(rest[0], _open)) if len(rest) == 1 else None  # which one is meant is a guess
    if isinstance(hint, typing.NewType):
        return converter(hint.__supertype__, _open)
    if (origin or hint) in _COLLECTIONS:
        return _collection(origin or hint, arguments, _open)
    if origin in _MAPPINGS:
        return _values(converter(arguments[1], _open))
    if hint is int:
        return _whole
    if hint in _FROM_TEXT:
        return _text(_FROM_TEXT[hint])
    if isinstance(hint, type) and hint not in _open:
        return _class(hint, (*_open, hint))
    return None


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _unless_none(inner: Converter | None) -> Converter | None:
    return None if inner is None else lambda value: None if value is None else inner(value)


def _text(read: Converter) -> Converter:
    return lambda value: read(value) if isinstance(value, str) else value


def _values(inner: Converter | None) -> Converter | None:
    if inner is None:
        return None
    return lambda value: {key: inner(each) for key, each in value.items()} if isinstance(value, dict) else value


def _collection(kind: Any, arguments: tuple[Any, ...], open_: tuple[Any, ...]) -> Converter | None:
    build = _COLLECTIONS[kind]
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        each_own = [converter(each, open_) or _same for each in arguments]
        return lambda value: (
            tuple(own(each) for own, each in zip(each_own, value, strict=True)) if isinstance(value, list) else value
        )
    inner = converter(arguments[0], open_) if arguments else None
    if inner is None:
        return None if build is list else lambda value: build(value) if isinstance(value, list) else value
    return lambda value: build([inner(each) for each in value]) if isinstance(value, list) else value


def _class(kind: type, open_: tuple[Any, ...]) -> Converter | None:
    if issubclass(kind, enum.Enum):
        return _enum(kind)
    if callable(validate := getattr(kind, "model_validate", None)):
        return typing.cast(Converter, validate)
    fields = record_fields(kind)
    if fields is None:
        return None
    inner = {name: own for name, (hint, _) in fields.items() if (own := converter(hint, open_)) is not None}
    if typing.is_typeddict(kind) and not inner:
        return None

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return kind(**{key: inner[key](each) if key in inner else each for key, each in value.items()})

    return build


def _enum(kind: type[enum.Enum]) -> Converter:
    members = enum_values(kind)

    def pick(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, members))}") from None

    return pick


def _same(value: Any) -> Any:
    return value
