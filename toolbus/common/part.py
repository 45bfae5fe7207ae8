"""Says what a part of toolbus is to the core: names of what it brings along, each loaded when it is first used.

The core never imports a part. `toolbus.parts.PARTS` lists the parts; here is how the core reads that list. A part whose
folder was removed is skipped, and its commands say what is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolbus.errors import SetupError


@dataclass(frozen=True, slots=True)
class PartCommand:
    """A command of the command line.

    Attributes:
        name: its words after ``toolbus``, one or two: a noun, and what to do with it.
        home: ``module:function``, or ``module:app`` for a Typer of several commands; "" for a noun of this list.
        help: one line, for ``toolbus --help``.
        group: the panel of ``toolbus --help`` that lists it; "" for the first.
        hidden: whether no panel lists it.
        old: another name, which works as well and is not listed.
        raw: whether its function takes the words that follow, and reads them itself.
    """

    name: str
    home: str
    help: str
    group: str = ""
    hidden: bool = False
    old: str = ""
    raw: bool = False


@dataclass(frozen=True, slots=True)
class PartRoom:
    """A room of a part (`toolbus.bus.core.Room`).

    Attributes:
        home: ``module:Class``.
        before: the class name of the room of the core that opens right after it; "" for the end of the list.
    """

    home: str
    before: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What a part brings along; each home is ``module:attribute``.

    Attributes:
        name: its folder below ``toolbus/parts``.
        extra: the extra of the distribution with what it needs besides the server; "" if it needs nothing more.
        commands: what the command line offers of it.
        rooms: its rooms in a bus, in the order in which they open.
        loaders: what reads its kinds of files and folders as plugins.
        settings: its settings in the configuration of a bus.
        guards: settings that protect: a bus without the part does not start where the environment has one of them.
        several: what connects a peer to several buses, and chooses one of them (`toolbus.sdk.connection_settings`).
        probe: finds out why a server cannot be talked to (`toolbus.sdk.connection_settings`).
        needs: other parts that it imports; without one of them it counts as removed.
    """

    name: str
    extra: str = ""
    commands: tuple[PartCommand, ...] = ()
    rooms: tuple[PartRoom, ...] = ()
    loaders: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    several: str = ""
    probe: str = ""
    needs: tuple[str, ...] = ()


def parts() -> tuple[Part, ...]:
    """Returns the parts that the distribution has, removed ones included."""
    listed: tuple[Part, ...] = importlib.import_module("toolbus.parts").PARTS
    return listed


def is_installed(part: Part) -> bool:
    """Tells whether the folders of a part and of those that it needs are there."""
    return all(importlib.util.find_spec(f"toolbus.parts.{name}") is not None for name in (part.name, *part.needs))


def installed() -> Iterator[Part]:
    """Yields the parts whose folders are there."""
    return (part for part in parts() if is_installed(part))


def load(home: str) -> Any:
    """Returns the attribute of ``module:attribute``, importing the module.

    Raises:
        SetupError: the part of the module was removed from this installation.
    """
    module, _, name = home.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        part = module.removeprefix("toolbus.parts.").partition(".")[0]
        if missing.name != f"toolbus.parts.{part}":
            raise
        raise SetupError(f"this installation of toolbus lacks its part {part!r}: {HOW_TO_INSTALL}") from None


HOW_TO_INSTALL = "install the whole distribution (pip install --force-reinstall toolbus)"
