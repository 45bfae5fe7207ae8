"""Declares overlays, and reads the file that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolbus.common.reader import Keys, Reader, read_file
from toolbus.common.setting import PATH, CheckedRecord, Option, is_file, setting
from toolbus.errors import SetupError
from toolbus.protocol.tool import MAX_LEVEL, MAX_NAME

MAX_OVERLAYS = 10_000
HINTS = ("read_only", "idempotent", "destructive", "open_world")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Argument:
    """How one argument is offered.

    Attributes:
        name: under which callers give it; "" for its own.
        description: "" for its own.
        fixed: the value that the tool always gets; `has_fixed` tells whether there is one.
        hidden: whether callers cannot give it.
    """

    name: str = ""
    description: str = ""
    fixed: Any = _ABSENT
    hidden: bool = False

    @property
    def has_fixed(self) -> bool:
        """Whether the tool always gets the same value."""
        return self.fixed is not _ABSENT


@dataclass(frozen=True, slots=True)
class Overlay:
    """What changes in how a tool is offered; what is empty stays as its author declared it.

    Attributes:
        original: the fingerprint (`schema_hash`) of the declaration that the overlay was written for; "" for the first
            that the bus sees.
        name: the listed name.
        min_level: the access level that callers need; None: the author's.
        hidden: whether only callers of the highest access level see and call it.
        answer: what callers get, without a run; `has_answer` tells whether there is one.
        hints: of `HINTS`.
        arguments: by the author's names.
    """

    original: str = ""
    name: str = ""
    title: str = ""
    description: str = ""
    min_level: int | None = None
    hidden: bool = False
    answer: Any = _ABSENT
    hints: Mapping[str, bool] = field(default_factory=dict)
    arguments: Mapping[str, Argument] = field(default_factory=dict)

    @property
    def has_answer(self) -> bool:
        """Whether calls are answered without a run."""
        return self.answer is not _ABSENT


def _any(reader: Reader) -> Any:
    return reader.value


def _text(reader: Reader) -> str:
    text = reader.text()
    if not text:
        raise reader.error("it must not be empty", "leave it out to keep what the author wrote")
    return text


def _name(reader: Reader) -> str:
    name = _text(reader)
    if len(name) > MAX_NAME:
        raise reader.error(f"it must have at most {MAX_NAME} characters")
    return name


_ARGUMENT: Keys = {
    "name": ("name", _name),
    "description": ("description", _text),
    "fixed": ("fixed", _any),
    "hidden": ("hidden", Reader.flag),
}


def _argument(reader: Reader) -> Argument:
    argument = Argument(**reader.record(_ARGUMENT))
    if argument.name and (argument.has_fixed or argument.hidden):
        raise reader.error("callers cannot give it, so it needs no name", "leave out name, or fixed and hidden")
    return argument


_OVERLAY: Keys = {
    **{name: (name, _text) for name in ("original", "title", "description")},
    "name": ("name", _name),
    "min_level": ("min_level", lambda reader: reader.whole(0, MAX_LEVEL)),
    "hidden": ("hidden", Reader.flag),
    "answer": ("answer", _any),
    "hints": ("hints", lambda reader: reader.record({hint: (hint, Reader.flag) for hint in HINTS})),
    "arguments": ("arguments", lambda reader: {name: _argument(each) for name, each in reader.entries().items()}),
}


def read_overlays(content: Any) -> dict[str, Overlay]:
    """Returns the overlays of a file by ``SOURCE:NAME``.

    Raises:
        SetupError: naming the place, the value, the rule and how to fix it.
    """
    entries = Reader(content).entries()
    if len(entries) > MAX_OVERLAYS:
        raise SetupError(f"the file has {len(entries)} overlays, at most {MAX_OVERLAYS} are possible")
    overlays: dict[str, Overlay] = {}
    names: dict[str, str] = {}
    for key, reader in entries.items():
        source, colon, name = key.rpartition(":")
        if not (source and colon and name):
            raise SetupError(f"{key!r} names no tool: write SOURCE:NAME, the tool's source and its own name", (key,))
        overlay = overlays[key] = Overlay(**reader.record(_OVERLAY))
        if overlay.name and names.setdefault(overlay.name, key) != key:
            raise SetupError(
                f"{names[overlay.name]!r} and {key!r} have the name {overlay.name!r}: give them two", (key,)
            )
    return overlays


def read_overlay_file(path: Path) -> dict[str, Overlay]:
    """Reads the overlays of a file.

    Raises:
        SetupError: it cannot be read, or breaks a rule.
    """
    return read_file(path, read_overlays)


@dataclass(frozen=True, slots=True)
class OverlaySettings(CheckedRecord):
    """Where the overlays of a bus are."""

    overlays: Path | None = setting(
        None,
        PATH,
        "a TOML file of [overlays](../start/overlays.md) over how tools are offered; read again when it changes",
        check=is_file,
        option=Option(
            "Change how tools are offered, as this TOML file says; it is read again when it changes.", "FILE"
        ),
        shown="none",
    )

    @property
    def needed_room(self) -> str:
        """The room that applies them; "" where there are none."""
        return "OverlaysRoom" if self.overlays is not None else ""
