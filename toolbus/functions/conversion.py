"""Converts parsed JSON to the types of a handler's type hints.

For tools whose schema came from their hints: if the schema says "one of red, green" because the hint is an Enum, the
handler gets the Enum. JSON Schema counts 3.0 as an integer, so models write it: a handler that takes an int gets 3.
Hints for which the parsed JSON is right already (str, float, list[str] …) need no converter and cost nothing per call;
Python itself accepts an int for a float.
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
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from toolbus.functions.hints import enum_values, is_alias, is_typed_dict, record_fields, unwrapped, unwrapped_once

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
_JSON_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int, float),
    float: (int, float),
    types.NoneType: (types.NoneType,),
}
_ANY = (str, bool, int, float, list, dict, types.NoneType)
_Above = dict[Any, Converter]  # the converters of the classes and aliases around a hint, complete or not yet


def converter(hint: Any) -> Converter | None:
    """Returns a function that turns a JSON value into the hinted type; None if the value needs no change.

    The converter raises ValueError, with a text, for a value that does not fit. It does not change values of another
    JSON type than that of the schema: the bus refuses those.
    """
    return _converter(hint, {})


def _converter(hint: Any, above: _Above) -> Converter | None:
    while (inside := unwrapped_once(hint)) is not hint:
        if is_alias(hint):
            return _alias(hint, inside, above)
        hint = inside
    if not isinstance(hint, Hashable):  # it is not a hint
        return None
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, above)
    if origin is typing.Literal:
        return _literal(arguments)
    if (origin or hint) in _COLLECTIONS:
        return _collection(origin or hint, arguments, above)
    if origin in _MAPPINGS:
        return _mapping(_key(arguments[0]), _converter(arguments[1], above))
    if hint is int:
        return _whole
    if hint in _FROM_TEXT:
        return _text(_FROM_TEXT[hint])
    if isinstance(hint, type):
        return _class(hint, above)
    return None


def _alias(name: Any, hint: Any, above: _Above) -> Converter | None:
    if name in above:  # it contains itself: its converter is complete when the first value comes
        return lambda value: above[name](value)
    above[name] = _same
    made = _converter(hint, above)
    above[name] = made or _same
    return made


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _union(members: tuple[Any, ...], above: _Above) -> Converter | None:
    """Returns the converter of a union: by a value's JSON type, if exactly one member takes that type."""
    kinds: dict[type, list[Any]] = {}
    for member in members:
        for kind in _json_types(unwrapped(member)):
            kinds.setdefault(kind, []).append(member)
    own = {kind: made for kind, each in kinds.items() if len(each) == 1 and (made := _converter(each[0], above))}
    if not own:
        return None

    def convert(value: Any) -> Any:
        made = own.get(type(value))
        return value if made is None else made(value)

    return convert


def _json_types(hint: Any) -> tuple[type, ...]:
    """Returns the Python types of the parsed JSON values that fit a member of a union."""
    origin = typing.get_origin(hint) or hint
    if not isinstance(origin, Hashable):
        return _ANY
    if origin in (typing.Union, types.UnionType):
        return tuple({kind for each in typing.get_args(hint) for kind in _json_types(unwrapped(each))})
    if origin is typing.Literal:
        return tuple({kind for each in typing.get_args(hint) for kind in _json_types_of(each)})
    if origin in _COLLECTIONS:
        return (list,)
    if origin in _MAPPINGS:
        return (dict,)
    if origin in _JSON_TYPES:
        return _JSON_TYPES[origin]
    if origin in _FROM_TEXT:
        return (str,)
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return tuple({kind for each in enum_values(origin) for kind in _json_types_of(each)})
    if isinstance(origin, type) and (record_fields(origin) is not None or hasattr(origin, "model_validate")):
        return (dict,)
    return _ANY


def _json_types_of(value: Any) -> tuple[type, ...]:
    value = value.value if isinstance(value, enum.Enum) else value
    return _JSON_TYPES.get(type(value), ())


def _literal(values: tuple[Any, ...]) -> Converter | None:
    """Returns the converter to the literal itself: 2 for a model's 2.0, an Enum's member for its value."""
    own = {each.value if isinstance(each, enum.Enum) else each: each for each in values if not isinstance(each, bool)}
    if not any(isinstance(each, int | enum.Enum) for each in own.values()):
        return None

    def pick(value: Any) -> Any:
        return own.get(value, value) if type(value) in (int, float, str) else value

    return pick


def _key(hint: Any) -> Converter | None:
    """Returns the converter of the keys of a JSON object, which are texts, to the hinted type."""
    hint = unwrapped(hint)
    if hint is int or hint is float:
        return typing.cast(Converter, hint)
    if hint in _FROM_TEXT:
        return _FROM_TEXT[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        by_text = {each if isinstance(each, str) else json.dumps(each): own for each, own in enum_values(hint).items()}
        return lambda key: _one_of(by_text, key)
    return None


def _text(read: Converter) -> Converter:
    return lambda value: read(value) if isinstance(value, str) else value


def _mapping(key: Converter | None, inner: Converter | None) -> Converter | None:
    if key is None and inner is None:
        return None
    own_key, own = key or _same, inner or _same
    return lambda value: (
        {own_key(name): own(each) for name, each in value.items()} if isinstance(value, dict) else value
    )


def _collection(kind: Any, arguments: tuple[Any, ...], above: _Above) -> Converter | None:
    build = _COLLECTIONS[kind]
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        each_own = [_converter(each, above) or _same for each in arguments]
        return lambda value: (
            tuple(own(each) for own, each in zip(each_own, value, strict=True)) if isinstance(value, list) else value
        )
    inner = _converter(arguments[0], above) if arguments else None
    if inner is None:
        return None if build is list else lambda value: build(value) if isinstance(value, list) else value
    return lambda value: build([inner(each) for each in value]) if isinstance(value, list) else value


def _class(kind: type, above: _Above) -> Converter | None:
    if issubclass(kind, enum.Enum):
        return _enum(kind)
    if callable(validate := getattr(kind, "model_validate", None)):
        return typing.cast(Converter, validate)
    if kind in above:  # as for an alias
        return lambda value: above[kind](value)
    fields = record_fields(kind)
    if fields is None:
        return None
    above[kind] = _same
    inner = {name: own for name, (hint, _) in fields.items() if (own := _converter(hint, above)) is not None}
    if is_typed_dict(kind) and not inner:
        return None

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return kind(**{key: inner[key](each) if key in inner else each for key, each in value.items()})

    above[kind] = build
    return build


def _enum(kind: type[enum.Enum]) -> Converter:
    members = enum_values(kind)
    return lambda value: _one_of(members, value)


def _one_of(members: Mapping[Any, Any], value: Any) -> Any:
    try:
        return members[value]
    except (KeyError, TypeError):
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, members))}") from None


def _same(value: Any) -> Any:
    return value
