"""Declares a setting once: its default, how it is read, its rule, its help, and its option of ``toolbus serve``.

A record of settings is a frozen dataclass whose fields are made by `setting`; a field's name is the key in the file,
and in capitals behind ``TOOLBUS_`` the variable. From these declarations the configuration checks itself, the readers
of file and environment work, the command line gets its options, and the reference page its table. `Config` has the
settings of the core; a part has a record of its own, which `toolbus.parts` lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from toolbus.common.part import HOW_TO_INSTALL, installed, is_installed, load, parts
from toolbus.common.reader import Read, Reader
from toolbus.common.text import list_names, nearest, quote
from toolbus.errors import SetupError

SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)

Check = Callable[[str, Any], None]  # gets a setting's name and value; raises SetupError


# -- kinds of values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueKind:
    """How the values of a setting are read.

    Attributes:
        read: checks the value of a file, and returns the setting's.
        of_text: turns a variable's text into what a file would hold, and leaves text that it cannot convert to be
            refused; None: the setting is a table, without variable, option and row of the reference page.
        of_word: the type of an option's word.
        repeats: whether an option may be given several times.
    """

    read: Read
    of_text: Callable[[str], Any] | None = str
    of_word: type = str
    repeats: bool = False


def _texts(reader: Reader) -> tuple[str, ...]:
    return (reader.value,) if isinstance(reader.value, str) else tuple(item.text() for item in reader.items())


def _number_of(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def texts(read: Read = _texts) -> ValueKind:
    """Returns the kind of a list of texts; one text alone is a list of it."""
    return ValueKind(read, lambda text: [item.strip() for item in text.split(",") if item.strip()], repeats=True)


def table(read: Read) -> ValueKind:
    """Returns the kind of a table, which only a file holds."""
    return ValueKind(read, None)


TEXT = ValueKind(Reader.text)
TEXTS = texts()
PATH = ValueKind(lambda reader: Path(reader.text()).expanduser(), of_word=Path)
FLAG = ValueKind(Reader.flag, lambda text: SWITCHES.get(text.lower(), text), bool)
NUMBER = ValueKind(Reader.number, _number_of, float)
WHOLE = ValueKind(Reader.whole, lambda text: int(text) if text.isdecimal() else text, int)


# -- rules -----------------------------------------------------------------------------------------------------------


def within(least: float, most: float, unit: str = "") -> Check:
    """Returns the rule that a number is within bounds; NaN is not."""

    def check(name: str, value: float) -> None:
        if not least <= value <= most:
            raise SetupError(f"{name} is {value:g}, it must be from {least:g} to {most:g}{unit and f' {unit}'}")

    return check


def at_least_one(name: str, value: int) -> None:
    """Refuses a count below 1."""
    if value < 1:
        raise SetupError(f"{name} is {value}, it must be at least 1")


def is_file(name: str, value: Path | None) -> None:
    """Refuses a path that is not a file."""
    if value is not None and not value.is_file():
        raise SetupError(f"{name} {str(value)!r} is not a file: create it or name another one")


def is_folder(name: str, value: Path | None) -> None:
    """Refuses a path that is not a folder."""
    if value is not None and not value.is_dir():
        raise SetupError(f"{name} {str(value)!r} is not a folder: create it or name another one")


def one_of(*choices: str) -> Check:
    """Returns the rule that a text is one of some."""

    def check(name: str, value: str) -> None:
        if value not in choices:
            raise SetupError(f"{name} is {value!r}, it must be one of {', '.join(choices)}")

    return check


def check_items(name: str, values: Sequence[str]) -> None:
    """Refuses a list with an empty item, or with one twice."""
    seen: set[str] = set()
    for value in values:
        if not value:
            raise SetupError(f"{name} has an empty item: name it or leave it out")
        if value in seen and not value.endswith(":0"):  # two free ports are two addresses
            raise SetupError(f"{name} names {value!r} twice: name it once")
        seen.add(value)


# -- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """An option of ``toolbus serve``.

    Attributes:
        help: its line in ``--help``.
        metavar: stands for its value there; "" for a switch.
        name: such as ``--role``; "" for the setting's name with dashes. A name that begins with ``--no-`` is that of a
            switch that turns the setting off.
        only_once: what to do where the option is given several times, which is refused then; "": the last one counts.
    """

    help: str
    metavar: str = ""
    name: str = ""
    only_once: str = ""

    def word(self, setting: str) -> str:
        """Returns the option as it is written, for a setting's name."""
        return self.name or f"--{setting.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Switch:
    """A key, variable and option of its own that empties a setting, such as ``no_roles``."""

    name: str
    empty: Any
    help: str
    option: Option


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, as its record declares it; see `setting`."""

    name: str
    kind: ValueKind
    default: Any
    help: str
    check: Check | None
    option: Option | None
    shown: str
    switch: Switch | None

    @property
    def variable(self) -> str:
        """Its variable of the environment."""
        return variable_of(self.name)


def variable_of(name: str) -> str:
    """Returns the variable of the environment for a key of the file."""
    return f"TOOLBUS_{name.upper()}"


def setting(
    default: Any,
    kind: ValueKind,
    help: str = "",  # the word that options have for it
    *,
    check: Check | None = None,
    option: Option | None = None,
    shown: str = "",
    switch: Switch | None = None,
) -> Any:
    """Declares a field of a record as a setting.

    Args:
        default: its value where no source has one; a function makes one that cannot be shared.
        kind: how it is read.
        help: what it means, as its row of the reference page says.
        check: its rule; one that concerns several settings belongs to the record's `__post_init__`.
        option: how ``toolbus serve`` takes it; None: it has no option.
        shown: the default as the page shows it, where it is not the value.
        switch: a key that empties it.
    """
    declared = Setting("", kind, default, help, check, option, shown, switch)
    if callable(default):
        return field(default_factory=default, metadata={"setting": declared})
    return field(default=default, metadata={"setting": declared})


@functools.cache
def settings_of(record: Any) -> Mapping[str, Setting]:
    """Returns the settings that the class of a record declares, by name."""
    return {
        each.name: replace(each.metadata["setting"], name=each.name)
        for each in fields(record)
        if "setting" in each.metadata
    }


def check_settings(record: Any) -> None:
    """Checks each setting of a record by its own rule.

    Raises:
        SetupError: naming the first rule that is broken.
    """
    for name, each in settings_of(record.__class__).items():
        if each.check is not None:
            each.check(name, getattr(record, name))


class CheckedRecord:
    """Base of the records of settings: dataclasses that check each setting by its own rule."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_settings(self)


# -- settings of parts -----------------------------------------------------------------------------------------------


@functools.cache
def part_records() -> tuple[type, ...]:
    """Returns the records of settings that the installed parts have."""
    return tuple(load(home) for part in installed() for home in part.settings)


def read_parts(given: Iterable[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns one record of settings for each part.

    Args:
        given: those that exist; the others are made.
        keywords: settings of parts by name, which replace those of the given records.

    Raises:
        TypeError: no part has a setting of such a name.
        SetupError: a setting breaks a rule.
    """
    existing = {type(record): record for record in given}
    rest, made = dict(keywords), []
    for kind in dict.fromkeys((*part_records(), *existing)):
        own = {name: rest.pop(name) for name in settings_of(kind) if name in rest}
        record = existing.get(kind)
        made.append(kind(**own) if record is None else replace(record, **own) if own else record)
    if rest:
        name = next(iter(rest))
        near = nearest(name, {known for kind in part_records() for known in settings_of(kind)})
        raise TypeError(
            f"no setting is named {quote(name)}{f' (did you mean {near}?)' if near else ''}{missing_parts()}"
        )
    return tuple(made)


def missing_parts() -> str:
    """Returns the end of an error about an unknown setting: which parts are not installed; "" where all are."""
    missing = [part.name for part in parts() if part.settings and not is_installed(part)]
    if not missing:
        return ""
    return (
        f"; this installation of toolbus lacks its part{'s' * (len(missing) > 1)} {list_names(missing)}, and does not "
        "know those settings: "
        f"{HOW_TO_INSTALL}"
    )
