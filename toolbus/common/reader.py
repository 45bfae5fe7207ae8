"""Reads settings from parsed files and requests; an error names the place, the value, the rule and how to fix it.

A `Reader` is one value with its place. Its methods check the value's kind and return it; `items`, `entries` and
`matched` return readers of the values inside a list or object, so that places follow by themselves. The meaning of the
settings is not known here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from toolbus.common.text import is_utf8, nearest, quote, shorten
from toolbus.errors import SetupError

MAX_NUMBER = sys.float_info.max
MAX_UNKNOWN_SHOWN = 8  # unknown keys that one message names

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that sets nothing.

    Attributes:
        loc: where it stands, the key itself last.
        folded: the key in the spelling of the known ones.
        known: the known keys.
    """

    loc: tuple[str | int, ...]
    folded: str
    known: Collection[str]

    def __str__(self) -> str:
        near = nearest(self.folded, self.known)
        return f"{path_of(self.loc)} (did you mean {near}?)" if near else path_of(self.loc)


@dataclass(frozen=True, slots=True)
class Reader:
    """A value that a person or another program wrote, and where it stands.

    Attributes:
        subject: what begins each message, such as a file's name; "" for nothing.
        path: the value's place below the subject, as messages show it: `members[0].chance`.
        loc: the same as keys and indexes, for `SetupError.loc`.
        unknown: gets each key that is not known; None refuses such a key.
    """

    value: Any
    subject: str = ""
    path: str = ""
    loc: tuple[str | int, ...] = ()
    unknown: list[UnknownKey] | None = None

    @property
    def place(self) -> str:
        """Where the value stands, as messages show it."""
        return ": ".join(part for part in (self.subject, self.path) if part)

    def labelled(self, label: str) -> Reader:
        """Returns this reader with a label behind its place: the name of a member, say, beside its index."""
        return replace(self, subject=f"{self.place} {label}", path="")

    def error(self, rule: str, fix: str = "") -> SetupError:
        """Returns the error that this value breaks a rule, to be raised.

        Args:
            rule: goes on after the value: `it must be text`.
            fix: what to do; "" where the rule says it.
        """
        sentence = f"{self.place or 'it'} is {shorten(repr(self.value))}, {rule}"
        return SetupError(f"{sentence}: {fix}" if fix else sentence, self.loc)

    # -- one value ---------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Returns text that UTF-8 can carry.

        Raises:
            SetupError: the value is not such a text; so in each method below.
        """
        if not isinstance(self.value, str):
            raise self.error("it must be text", "put it in quotes")
        if not is_utf8(self.value):
            raise self.error("it holds half of a surrogate pair, which UTF-8 cannot carry", "replace that character")
        return self.value

    def choice(self, options: Collection[str]) -> str:
        """Returns text that is one of the options."""
        if not isinstance(self.value, str) or self.value not in options:
            raise self.error(f"it must be one of {', '.join(options)}")
        return self.value

    def flag(self) -> bool:
        """Returns True or False; 0, 1 and texts are neither."""
        if not isinstance(self.value, bool):
            quoted = isinstance(self.value, str) and self.value.lower() in ("true", "false")
            raise self.error("it must be true or false", "write it without quotes" if quoted else "")
        return self.value

    def number(self, least: float = -MAX_NUMBER, most: float = MAX_NUMBER) -> float:
        """Returns a finite number within bounds."""
        if not self._is_number() or not least <= self.value <= most:  # NaN fails this too
            raise self.error(f"it must be a number{_bounds(least, most)}", self._quoted())
        return float(self.value)

    def whole(self, least: int | None = None, most: int | None = None) -> int:
        """Returns a whole number within bounds; 3.0 is one, since JSON of many languages has one kind of number."""
        low, high = -MAX_NUMBER if least is None else least, MAX_NUMBER if most is None else most
        if not self._is_number() or not low <= self.value <= high or self.value != int(self.value):
            raise self.error(f"it must be a whole number{_bounds(low, high)}", self._quoted())
        return int(self.value)

    def _is_number(self) -> bool:
        return isinstance(self.value, int | float) and not isinstance(self.value, bool)

    def _quoted(self) -> str:
        is_quoted = isinstance(self.value, str) and re.fullmatch(r"\s*[-+]?[0-9]+(\.[0-9]+)?\s*", self.value)
        return "write it without quotes" if is_quoted else ""

    # -- lists and objects -------------------------------------------------------------------------------------------

    def items(self) -> list[Reader]:
        """Returns a reader of each item of a list."""
        if not isinstance(self.value, list | tuple):
            raise self.error("it must be a list", "put [ and ] around it")
        return [
            replace(self, value=item, path=f"{self.path}[{index}]", loc=(*self.loc, index))
            for index, item in enumerate(self.value)
        ]

    def names(self) -> tuple[str, ...]:
        """Returns a list of names; one that is listed twice counts once."""
        names = dict.fromkeys(item.text() for item in self.items())
        if "" in names:
            raise self.items()[list(self.value).index("")].error("it must be a name", "fill it in or leave it out")
        return tuple(names)

    def entries(self) -> dict[str, Reader]:
        """Returns a reader of each value of an object, by key."""
        if not isinstance(self.value, Mapping):
            raise self.error("it must be an object", "give names with values")
        before = f"{self.path}." if self.path else ""
        return {
            str(key): replace(self, value=value, path=before + _shown(str(key)), loc=(*self.loc, str(key)))
            for key, value in self.value.items()
        }

    def matched(self, keys: Keys, fold: Callable[[str], str] = str) -> dict[str, Match]:
        """Returns the fields that an object sets; null is as if the key were missing.

        Args:
            keys: the known ones.
            fold: turns a key into the spelling of `keys`, such as `snake_case`.

        Raises:
            SetupError: it is not an object, two keys set one field, or a key is unknown and `unknown` is None.
        """
        fields: dict[str, Match] = {}
        for key, reader in self.entries().items():
            field, read = keys.get(fold(key), ("", None))
            if read is None:
                self._report_unknown(UnknownKey(reader.loc, fold(key), keys.keys()))
            elif reader.value is None or not field:
                continue
            elif field in fields:
                raise reader.error(
                    f"it sets {field} a second time", f"keep one of {fields[field][0].loc[-1]} and {key}"
                )
            else:
                fields[field] = (reader, read)
        return fields

    def record(self, keys: Keys, fold: Callable[[str], str] = str) -> dict[str, Any]:
        """Returns the values of the fields that an object sets; see `matched`."""
        return {field: read(reader) for field, (reader, read) in self.matched(keys, fold).items()}

    def records(self, kind: Callable[..., T], keys: Keys, **missing: Any) -> tuple[T, ...]:
        """Makes something of each object of a list, by the values of its fields; `missing` has those it needs."""
        made = []
        for each in self.items():
            values = missing | each.record(keys)
            try:
                made.append(kind(**values))
            except SetupError as error:
                raise SetupError(f"{each.place}: {error}") from None
        return tuple(made)

    def _report_unknown(self, key: UnknownKey) -> None:
        if self.unknown is not None:
            self.unknown.append(key)
            return
        before = f"{self.subject}: " if self.subject else ""
        raise SetupError(f"{before}unknown key {key}; known are {', '.join(sorted(key.known))}", key.loc)


Read = Callable[[Reader], Any]
Keys = Mapping[str, tuple[str, Read]]  # key → the field that it sets, "" for none, and how its value is read
Match = tuple[Reader, Read]


def snake_case(key: str) -> str:
    """Returns a key as Python spells it: `timeoutMs` as `timeout_ms`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower()


def path_of(loc: Iterable[str | int]) -> str:
    """Returns a place as messages show it, without anything that could look like another line of a log."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{_shown(step)}" for step in loc)
    return "".join(steps).removeprefix(".")


def list_unknown(unknown: Collection[UnknownKey]) -> str:
    """Returns the places of unknown keys for one message, each with the nearest known key."""
    more = f" and {len(unknown) - MAX_UNKNOWN_SHOWN} more" if len(unknown) > MAX_UNKNOWN_SHOWN else ""
    return ", ".join(str(each) for each in islice(unknown, MAX_UNKNOWN_SHOWN)) + more


def read_file(path: Path, read: Callable[[Any], T]) -> T:
    """Parses a file, as TOML where its name ends so, else as JSON, and returns what a function makes of the content.

    Raises:
        SetupError: naming the file, and what is wrong in it, or that another user can change it.
    """
    import tomllib  # the processes of drop-in tools read no TOML, and start sooner without it

    from toolbus.common.path_ownership import check_path

    try:
        check_path(path, str(path))
        text = path.read_text("utf-8-sig")
        return read(tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text))
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}: name a file that can be read") from None
    except RecursionError:
        raise SetupError(f"{path}: it is nested too deep: flatten it") from None
    except ValueError as error:  # what JSON, TOML and UTF-8 refuse
        raise SetupError(f"{path}: it cannot be parsed: {error}: correct the file") from None
    except SetupError as error:
        raise SetupError(f"{path}: {error}", error.loc) from None


def _bounds(least: float, most: float) -> str:
    if least == -MAX_NUMBER and most == MAX_NUMBER:
        return ""
    return f" of at least {least:.15g}" if most == MAX_NUMBER else f" from {least:.15g} to {most:.15g}"


def _shown(key: str) -> str:
    return quote(key)[1:-1]
