"""Converts parsed JSON to the types of a handler's type hints.

For tools whose schema came from their hints: if the schema says "one of red, green" because the hint is an Enum, the
handler gets the Enum. JSON Schema counts 3.0 as an integer, so models write it: a handler that takes an int gets 3.
Hints for which the parsed JSON is right already (str, float, list[str] …) need no converter and cost nothing per call;
Python itself accepts an int for a float. Everything that does not depend on the value, such as which member of a union
takes which values, is decided when the tool is declared.
"""

from __future__ import annotations

import base64
import collections.abc
import datetime
import decimal
import enum
import functools
import inspect
import itertools
import json
import pathlib
import re
import types
import typing
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from toolbus.functions.type_hints import (
    DECIMAL_TEXT,
    enum_values,
    is_alias,
    is_record,
    is_text_class,
    is_typed_dict,
    literal_values,
    pydantic_adapter,
    record_fields,
    tuple_items,
    unwrapped,
    unwrapped_once,
)

Converter = Callable[[Any], Any]
Test = Callable[[Any], bool]


class AmbiguousUnion(TypeError):
    """A value can fit two members of a union, so no rule says which one the function gets."""


class WrittenNumber(float):
    """A fraction of a JSON text that remembers how it was written, so that a `Decimal` made of it loses no digit."""

    def __new__(cls, text: str) -> WrittenNumber:
        """Returns the number of a JSON text."""
        made = super().__new__(cls, text)
        made.text = str(text)
        return made

    text: str


_DURATION = re.compile(
    r"(?P<sign>[+-]?)P(?=.)(?:(?P<weeks>[\d.]+)W)?(?:(?P<days>[\d.]+)D)?"
    r"(?:T(?=.)(?:(?P<hours>[\d.]+)H)?(?:(?P<minutes>[\d.]+)M)?(?:(?P<seconds>[\d.]+)S)?)?"
)
_MICROSECONDS = {
    unit: datetime.timedelta(**{unit: 1}) // datetime.timedelta(microseconds=1)
    for unit in ("weeks", "days", "hours", "minutes", "seconds")
}


def _duration(text: str) -> datetime.timedelta:
    match = _DURATION.fullmatch(text)
    try:
        parts = match.groupdict() if match else {}
        sign = -1 if parts.pop("sign") == "-" else 1
        total = sum(decimal.Decimal(count) * _MICROSECONDS[unit] for unit, count in parts.items() if count)
        return datetime.timedelta(microseconds=sign * round(total))
    except (KeyError, ArithmeticError):  # no match; "1.2.3"; more than a timedelta holds
        raise ValueError(
            f"{text!r:.80} is not a duration of at most {datetime.timedelta.max.days} days: write PT90S, PT1H30M or "
            "P2D (no years and months)"
        ) from None


def _iso(kind: Any, example: str, text: str) -> Any:
    try:
        return kind.fromisoformat(text)
    except ValueError as problem:
        raise ValueError(f"{text!r:.80} is not a {kind.__name__} ({problem}): write it as {example}") from None


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as problem:
        raise ValueError(f"{text!r:.80} is not base64: {problem}") from None


def _decimal(value: Any) -> Any:
    """Returns the `Decimal` of a number or a text; other values, which the schema refuses, as they are."""
    kind = type(value)
    if kind is str:
        try:
            return decimal.Decimal(value)
        except ArithmeticError:
            raise ValueError(f"{value!r:.80} is not a decimal number: write it as 12.50") from None
    if kind is WrittenNumber:
        return decimal.Decimal(value.text)
    if kind is float:
        return decimal.Decimal(repr(value))  # the shortest digits that mean this float, which is what was written
    return decimal.Decimal(value) if kind is int else value


_FROM_TEXT: dict[Any, Converter] = {
    datetime.datetime: functools.partial(_iso, datetime.datetime, "2026-01-31T14:30:00+01:00"),
    datetime.date: functools.partial(_iso, datetime.date, "2026-01-31"),
    datetime.time: functools.partial(_iso, datetime.time, "14:30:00"),
    datetime.timedelta: _duration,
    uuid.UUID: uuid.UUID,
    pathlib.Path: pathlib.Path,
    pathlib.PurePath: pathlib.PurePath,
    re.Pattern: re.compile,
    bytes: _bytes,
    bytearray: lambda text: bytearray(_bytes(text)),
}
# The texts that are meant as such a value where a union takes other texts too, in the order in which they are tried.
# Those that Python's readers take as well, such as 32 hex digits for a UUID, are left to the other members.
_FORMATS: dict[Any, re.Pattern[str]] = {
    uuid.UUID: re.compile(r"[\da-fA-F]{8}(-[\da-fA-F]{4}){3}-[\da-fA-F]{12}"),
    datetime.date: re.compile(r"\d{4}-\d\d-\d\d"),
    datetime.datetime: re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:.*"),
    datetime.time: re.compile(r"\d\d:\d\d.*"),
    datetime.timedelta: _DURATION,
    decimal.Decimal: re.compile(DECIMAL_TEXT),
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
    collections.abc.Iterator: iter,
    collections.deque: collections.deque,
}
_MAPPINGS = (dict, collections.abc.Mapping)
_JSON_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int, float),
    float: (int, float),
    types.NoneType: (types.NoneType,),
}
_KNOWN = {*_COLLECTIONS, *_MAPPINGS, *_FROM_TEXT, *_JSON_TYPES, decimal.Decimal}
_ANY = (str, bool, int, float, list, dict, types.NoneType)
_Above = dict[Any, Converter]  # the converters of the classes and aliases around a hint, complete or not yet


def converter(hint: Any) -> Converter | None:
    """Returns a function that turns a JSON value into the hinted type; None if the value needs no change.

    The converter raises ValueError, with a text, for a value that does not fit. It does not change values of another
    JSON type than that of the schema: the bus refuses those.
    """
    return _converter(hint, {})


def fitting(hint: Any) -> Test:
    """Returns a function that tells whether a JSON value is one of a hint; it never raises."""
    return _fits(hint, {})


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
        return _literal(hint)
    kind: Any = origin or hint
    return _class(hint, kind, above) if isinstance(kind, type) else None


def _kind(hint: Any) -> Any:
    """Returns the class of the tables above that a hint's class is or derives from; its own class for all others."""
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or issubclass(kind, enum.Enum) or is_record(kind) or _is_model(kind):
        return kind
    return next((each for each in kind.__mro__ if each in _KNOWN), kind)


def _alias(name: Any, hint: Any, above: _Above) -> Converter | None:
    if name in above:  # it contains itself: its converter is complete when the first value comes
        return lambda value: above[name](value)
    above[name] = _same
    made = _converter(hint, above)
    above[name] = made or _same
    return made


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _union(members: tuple[Any, ...], above: _Above) -> Converter | None:
    """Returns the converter of a union: by a value's JSON type, and if several members take that by the value."""
    kinds: dict[type, list[Any]] = {}
    for member in _members(members):
        for kind in _json_types(unwrapped(member)):
            kinds.setdefault(kind, []).append(member)
    own = {
        kind: made
        for kind, each in kinds.items()
        if (made := _converter(each[0], above) if len(each) == 1 else _choice(each, above))
    }
    if not own:
        return None

    def convert(value: Any) -> Any:
        kind = type(value)
        made = own.get(float if kind is WrittenNumber else kind)
        return value if made is None else made(value)

    return convert


def _members(members: Iterable[Any]) -> Iterator[Any]:
    """Yields the members of a union and of the unions within it."""
    for member in members:
        inside = unwrapped(member)
        if isinstance(inside, Hashable) and typing.get_origin(inside) in (typing.Union, types.UnionType):
            yield from _members(typing.get_args(inside))
        else:
            yield member


def _choice(members: list[Any], above: _Above) -> Converter | None:
    """Returns the converter for values of one JSON type that several members of a union take.

    A member that asks for more comes first: one of a list, a format, a class; then those that get the parsed value.

    Raises:
        AmbiguousUnion: one value fits two members, and they would get different values of it.
    """
    made = {index: _converter(member, above) for index, member in enumerate(members)}
    plain = [index for index in made if made[index] is None or unwrapped(members[index]) is int]
    built = sorted((index for index in made if index not in plain), key=lambda index: _rank(members[index]))
    needed = _told_apart([members[index] for index in built], [members[index] for index in plain])
    if not built:
        whole = int in map(unwrapped, members) and not any(_takes_fractions(members[index]) for index in plain)
        return _whole if whole else None
    lists = [index for index in plain if _is_list(members[index])]  # before a set of the same items
    order = sorted([*built, *lists], key=lambda index: _rank(members[index]))
    tries = [(_fits(members[index], {}, needed), made[index] or _same) for index in order]
    models = [
        (_named(unwrapped(members[index]), needed), made[index] or _same)
        for index in built
        if _is_model(members[index])
    ]
    rest = next((made[index] for index in plain), None) or _same
    choices = ", ".join(_described(members[index]) for index in built)
    keys = ", ".join(map(repr, sorted(needed)))
    hint = f": set {keys} to say which" if keys else ""

    def convert(value: Any) -> Any:
        for fits, own in tries:
            if fits(value):
                return own(value)
        if plain:
            return rest(value)
        meant = [own for named, own in models if named(value)]
        for own in meant:  # a model may take keys that it does not name, and says itself what is wrong
            try:
                return own(value)
            except Exception:  # its validators may raise anything
                if len(meant) == 1:
                    raise
        raise ValueError(f"{value!r:.200} fits none of {choices}{hint}")

    return convert


def _is_model(hint: Any) -> bool:
    return hasattr(unwrapped(hint), "model_validate")


def _named(kind: Any, needed: frozenset[str]) -> Test:
    """Returns a function that tells whether a dict has what a model requires, and those of its choices that it has."""
    fields = _fields(kind) or {}
    required = {name for name, (_, must) in fields.items() if must} | (needed & fields.keys())
    tests = {name: _fits(hint, {}) for name, (hint, _) in fields.items() if _choices(unwrapped(hint)) is not None}
    return lambda value: (
        isinstance(value, dict)
        and required <= value.keys()
        and all(test(value[name]) for name, test in tests.items() if name in value)
    )


def _rank(hint: Any) -> int:
    hint = unwrapped(hint)
    if _choices(hint) is not None:
        return 0
    if hint in _FORMATS:
        return 1 + list(_FORMATS).index(hint)
    if _fields(hint) is not None or _is_model(hint):
        return 20
    return 30 if _is_list(hint) else 31


def _is_list(hint: Any) -> bool:
    hint = unwrapped(hint)
    return _COLLECTIONS.get(_kind(hint)) is list


def _takes_fractions(hint: Any) -> bool:
    hint = unwrapped(hint)
    return hint is float or _json_types(hint) == _ANY


def _described(hint: Any) -> str:
    """Returns the name of a member for an error, and the keys that it requires."""
    keys = [name for name, (_, required) in (_fields(unwrapped(hint)) or {}).items() if required]
    return _name(hint) + (f" ({', '.join(keys)})" if keys else "")


def _name(hint: Any) -> str:
    hint = unwrapped(hint)
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _told_apart(built: list[Any], plain: list[Any]) -> frozenset[str]:
    """Returns the keys that a value must have to tell classes apart that differ only in these.

    Raises:
        AmbiguousUnion: one value fits two members.
    """
    keys: set[str] = set()
    pairs = [*itertools.combinations(built, 2), *itertools.product(built, plain)]
    for one, other in pairs:
        found = _difference(unwrapped(one), unwrapped(other))
        if found is None:
            first, second = _name(one), _name(other)
            raise AmbiguousUnion(
                f"a value can fit both {first} and {second}: give them different required fields, or each a field such "
                f'as kind: Literal["…"] with a value of its own'
                if _fields(unwrapped(one)) is not None
                else f"a value can fit both {first} and {second}, which get different values of it: take one of them"
            )
        keys |= found
    return frozenset(keys)


_NOTHING_MORE: frozenset[str] = frozenset()


def _difference(one: Any, other: Any) -> frozenset[str] | None:
    """Returns the keys that must be set to tell two hints apart, mostly none; None if a value can fit both.

    A hint that takes every value of a JSON type (`str`, `dict`) is no rival: it gets what the other does not take.
    """
    choices, others = _choices(one), _choices(other)
    if choices is not None and others is not None:
        return None if choices & others else _NOTHING_MORE
    fields, more = _fields(one), _fields(other)
    if fields is not None and more is not None:
        if is_typed_dict(one) and is_typed_dict(other):  # the function gets a dict of both
            return _NOTHING_MORE
        return _different_fields(fields, more)
    kinds = [_kind(one), _kind(other)]
    if all(kind in _LOOSE for kind in kinds):
        return None
    inner = [typing.get_args(each) for each in (one, other)]
    if all(kind in _COLLECTIONS for kind in kinds):
        if _COLLECTIONS[kinds[0]] is _COLLECTIONS[kinds[1]]:
            return _difference(unwrapped(inner[0][0]), unwrapped(inner[1][0])) if all(inner) else _NOTHING_MORE
        return _NOTHING_MORE if list in (_COLLECTIONS[kind] for kind in kinds) else None
    if all(kind in _MAPPINGS for kind in kinds) and all(inner):
        return _difference(unwrapped(inner[0][-1]), unwrapped(inner[1][-1]))
    return _NOTHING_MORE


_Fields = Mapping[str, tuple[Any, bool]]
_LOOSE = (bytes, bytearray, pathlib.Path, pathlib.PurePath)


def _different_fields(one: _Fields, other: _Fields) -> frozenset[str] | None:
    names = {name for fields in (one, other) for name, (_, required) in fields.items() if required}
    for name in names:
        if name not in one or name not in other or _disjoint(one[name][0], other[name][0]):
            return _NOTHING_MORE
    for name in one.keys() & other.keys():  # optional in both: a `kind` with a default
        choices, others = _choices(unwrapped(one[name][0])), _choices(unwrapped(other[name][0]))
        if choices is not None and others is not None and not choices & others:
            return frozenset((name,))
    return None


def _disjoint(one: Any, other: Any) -> bool:
    """Tells whether no JSON value fits both hints."""
    one, other = unwrapped(one), unwrapped(other)
    if not set(_json_types(one)) & set(_json_types(other)):
        return True
    choices, others = _choices(one), _choices(other)
    if choices is not None and others is not None:
        return not choices & others
    if one in _FORMATS and other in _FORMATS:
        return one is not other
    fields, more = _fields(one), _fields(other)
    return fields is not None and more is not None and _different_fields(fields, more) == _NOTHING_MORE


def _choices(hint: Any) -> frozenset[tuple[bool, Any]] | None:
    """Returns the JSON values of a Literal or Enum, each with whether it is a boolean; None for any other hint."""
    if typing.get_origin(hint) is typing.Literal:
        values = [value for _, value in literal_values(hint)]
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = list(enum_values(hint))
    else:
        return None
    return frozenset((type(each) is bool, each) for each in values)


def _fields(hint: Any) -> _Fields | None:
    """Returns the keys of a record class or pydantic model with their hints; None for any other hint."""
    fields = getattr(hint, "model_fields", None) if isinstance(hint, type) else None
    if not isinstance(fields, Mapping) or not hasattr(hint, "model_validate"):
        return record_fields(hint)
    keys: dict[str, tuple[Any, bool]] = {}
    for name, field in fields.items():
        alias = next(
            (each for each in (getattr(field, "validation_alias", None), getattr(field, "alias", None)) if each), name
        )
        required = getattr(field, "is_required", lambda: False)
        keys[alias if isinstance(alias, str) else name] = (getattr(field, "annotation", Any), bool(required()))
    return keys


def _fits(hint: Any, above: dict[Any, Test], needed: frozenset[str] = _NOTHING_MORE) -> Test:
    """Returns a function that tells whether a JSON value is one of a hint; it never raises.

    Args:
        above: the tests of the classes around the hint, complete or not yet.
        needed: keys that a record must have in addition to those that it requires itself.
    """
    hint = unwrapped(hint)
    if not isinstance(hint, Hashable):
        return _anything
    if hint in above:  # it contains itself
        return lambda value: above[hint](value)
    origin, arguments = _kind(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        tests = [_fits(each, above) for each in arguments]
        return lambda value: any(test(value) for test in tests)
    if (choices := _choices(hint)) is not None:
        return lambda value: isinstance(value, str | int | float | None) and (type(value) is bool, value) in choices
    if origin in _COLLECTIONS:
        return _fits_collection(origin, arguments, above)
    if origin in _MAPPINGS:
        inner = _fits(arguments[-1], above) if arguments else _anything
        return lambda value: isinstance(value, dict) and all(inner(each) for each in value.values())
    if (fields := _fields(hint)) is not None:
        return _fits_record(hint, fields, above, needed)
    if origin in _FROM_TEXT or origin is decimal.Decimal or (isinstance(origin, type) and is_text_class(origin)):
        read = _decimal if origin is decimal.Decimal else _FROM_TEXT.get(origin, origin)
        return functools.partial(_reads, _FORMATS.get(origin), read)
    if isinstance(origin, type) and (adapter := pydantic_adapter(origin)) is not None:
        return functools.partial(_succeeds, adapter.validate_python)
    kinds = _json_types(hint)
    if hint is int:
        return lambda value: type(value) is int or (isinstance(value, float) and value.is_integer())
    return (
        _anything
        if kinds == _ANY
        else lambda value: isinstance(value, kinds) and (type(value) is not bool or bool in kinds)
    )


def _anything(value: Any) -> bool:
    return True


def _reads(form: re.Pattern[str] | None, read: Converter, value: Any) -> bool:
    if not isinstance(value, str):
        return read is _decimal and isinstance(value, int | float) and type(value) is not bool
    return (form is None or form.fullmatch(value) is not None) and _succeeds(read, value)


def _succeeds(read: Converter, value: Any) -> bool:
    try:
        read(value)
    except Exception:  # validators may raise anything
        return False
    return True


def _fits_collection(kind: Any, arguments: tuple[Any, ...], above: dict[Any, Test]) -> Test:
    arguments = tuple_items(arguments)
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        tests = [_fits(each, above) for each in arguments if each != ()]
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(tests)
            and all(test(each) for test, each in zip(tests, value, strict=True))
        )
    inner = _fits(arguments[0], above) if arguments else _anything
    return lambda value: isinstance(value, list) and all(inner(each) for each in value)


def _fits_record(kind: Any, fields: _Fields, above: dict[Any, Test], needed: frozenset[str]) -> Test:
    above[kind] = _anything
    tests = {name: _fits(hint, above) for name, (hint, _) in fields.items()}
    required = {name for name, (_, must) in fields.items() if must} | (needed & fields.keys())
    validate = getattr(kind, "model_validate", None)

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or not required <= value.keys() <= fields.keys():
            return False
        if validate is None:
            return all(tests[name](each) for name, each in value.items())
        return _succeeds(validate, value)

    above[kind] = fits
    return fits


def _json_types(hint: Any) -> tuple[type, ...]:
    """Returns the Python types of the parsed JSON values that fit a member of a union."""
    origin = _kind(hint)
    if not isinstance(origin, Hashable):
        return _ANY
    if origin in (typing.Union, types.UnionType):
        return tuple({kind for each in typing.get_args(hint) for kind in _json_types(unwrapped(each))})
    if origin is typing.Literal:
        return tuple({kind for each, _ in literal_values(hint) for kind in _JSON_TYPES.get(each, ())})
    if origin in _COLLECTIONS:
        return (list,)
    if origin in _MAPPINGS:
        return (dict,)
    if origin in _JSON_TYPES:
        return _JSON_TYPES[origin]
    if origin is decimal.Decimal:
        return (str, int, float)
    if origin in _FROM_TEXT or (isinstance(origin, type) and is_text_class(origin)):
        return (str,)
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return tuple({kind for each in enum_values(origin) for kind in _JSON_TYPES[type(each)]})
    return (dict,) if is_record(origin) or _is_model(origin) else _ANY


def _literal(hint: Any) -> Converter | None:
    """Returns the converter to the literal itself: 2 for a model's 2.0, an Enum's member for its value."""
    own = {value: each for (kind, value), each in literal_values(hint).items() if kind is not bool}
    if not any(isinstance(each, int | enum.Enum) for each in own.values()):
        return None

    return lambda value: own.get(value, value) if type(value) in (int, float, str) else value


def _key(hint: Any) -> Converter | None:
    """Returns the converter of the keys of a JSON object, which are texts, to the hinted type."""
    hint = unwrapped(hint)
    if hint is int or hint is float:
        return typing.cast(Converter, hint)
    if hint is decimal.Decimal:
        return _decimal
    if hint in _FROM_TEXT:
        return _FROM_TEXT[hint]
    if hint is bool:
        values: dict[Any, Any] = {True: True, False: False}
    elif typing.get_origin(hint) is typing.Literal:
        values = {value: each for (_, value), each in literal_values(hint).items()}
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = enum_values(hint)
    else:
        return _text(hint) if isinstance(hint, type) and is_text_class(hint) else None
    by_text = {each if isinstance(each, str) else json.dumps(each): own for each, own in values.items()}
    return lambda key: _one_of(by_text, key)


def _text(read: Converter) -> Converter:
    return lambda value: read(value) if isinstance(value, str) else value


def _mapping(kind: Any, arguments: tuple[Any, ...], above: _Above) -> Converter | None:
    build = dict if inspect.isabstract(kind) else kind
    if issubclass(kind, collections.defaultdict):
        made = (typing.get_origin(arguments[1]) or arguments[1]) if len(arguments) == 2 else None
        build = functools.partial(kind, made if callable(made) else None)
    key = _key(arguments[0]) if arguments else None
    inner = _converter(arguments[1], above) if len(arguments) == 2 else None
    if key is None and inner is None and build is dict:
        return None
    own_key, own = key or _same, inner or _same
    return lambda value: (
        build({own_key(name): own(each) for name, each in value.items()}) if isinstance(value, dict) else value
    )


def _collection(kind: Any, arguments: tuple[Any, ...], above: _Above) -> Converter | None:
    base, arguments = _kind(kind), tuple_items(arguments)
    build = _COLLECTIONS[base] if kind is base or inspect.isabstract(kind) else kind
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        each_own = [_converter(each, above) or _same for each in arguments]
        return lambda value: (
            tuple(own(each) for own, each in zip(each_own, value, strict=True)) if isinstance(value, list) else value
        )
    inner = _converter(arguments[0], above) if arguments else None
    if inner is None:
        return None if build is list else lambda value: build(value) if isinstance(value, list) else value
    return lambda value: build([inner(each) for each in value]) if isinstance(value, list) else value


def _class(hint: Any, kind: type, above: _Above) -> Converter | None:
    if issubclass(kind, enum.Enum):
        members = enum_values(kind)
        return lambda value: _one_of(members, value)
    adapter = pydantic_adapter(kind)
    if callable(validate := getattr(kind, "model_validate", getattr(adapter, "validate_python", None))):
        return typing.cast(Converter, validate)
    if hint in above:  # as for an alias
        return lambda value: above[hint](value)
    fields = record_fields(hint)
    if fields is None:
        return _text(kind) if is_text_class(kind) else _plain_class(kind, typing.get_args(hint), above)
    above[hint] = _same
    inner = {name: own for name, (of_field, _) in fields.items() if (own := _converter(of_field, above)) is not None}
    if is_typed_dict(kind) and not inner:
        return None

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return kind(**{key: inner[key](each) if key in inner else each for key, each in value.items()})

    above[hint] = build
    return build


def _plain_class(kind: Any, arguments: tuple[Any, ...], above: _Above) -> Converter | None:
    """Returns the converter of a class of the tables, or of one that derives from it, which makes its own instances."""
    base = _kind(kind)
    if base in _COLLECTIONS:
        return _collection(kind, arguments, above)
    if base in _MAPPINGS:
        return _mapping(kind, arguments, above)
    if base in _FROM_TEXT:
        read = _FROM_TEXT[base]
        own = getattr(kind, "fromisoformat", kind if read is base else lambda text: kind(read(text)))
        return _text(read if kind is base else own)
    plain = {int: _whole, decimal.Decimal: _decimal}.get(base)
    if kind is base or base not in _KNOWN:
        return plain
    return lambda value: kind((plain or _same)(value)) if isinstance(value, _json_types(base)) else value


def _one_of(members: Mapping[Any, Any], value: Any) -> Any:
    try:
        return members[value]
    except (KeyError, TypeError):
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, members))}") from None


def _same(value: Any) -> Any:
    return value


def holds(hint: Any, kind: type, above: Sequence[Any] = ()) -> bool:
    """Tells whether a class occurs in a hint, within containers, unions and record classes too."""
    hint = unwrapped(hint)
    if hint is kind:
        return True
    if not isinstance(hint, Hashable) or hint in above:
        return False
    parts = [*typing.get_args(hint), *(each for each, _ in (_fields(hint) or {}).values())]
    return any(holds(each, kind, (*above, hint)) for each in parts)
