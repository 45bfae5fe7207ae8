"""Names who takes part in a run: the bus, and everything round it that can be killed, frozen, slowed or drained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a part is, and so what can happen to it."""

    BUS = "bus"
    PLUGIN = "plugin over a stream"
    FOLDER = "drop-in tools"
    CALLBACK = "plugin with a callback URL"
    HOST = "host"
    MAIN_SERVER = "upstream main server"
    LINE = "slow line"


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a run, or one line between two.

    Attributes:
        source: whose tools a plugin offers; empty for what offers none.
        line: the line over which it reaches the bus, or the bus reaches it; empty: directly.
        way: how a host calls: ``sdk``, ``raw`` (generated stubs) or ``rest``.
        rate: calls a second of a host.
    """

    name: str
    kind: Kind
    source: str = ""
    line: str = ""
    way: str = ""
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class ChaosTool:
    """A tool of a run.

    Attributes:
        parts: the processes that run it.
        trusted: whether the bus believes its hints: not those of files in a folder.
    """

    name: str
    idempotent: bool
    parts: tuple[str, ...]
    trusted: bool = True


BUS = "bus"
WATCHER = "watcher"  # this process, which is not a part: nothing is done to it, but it may have no processor
TIMEOUT_SECONDS = 8.0  # of the tools, for callers that set none
PARTS = (
    Part(BUS, Kind.BUS),
    Part("solo", Kind.PLUGIN, "solo"),
    Part("pair-1", Kind.PLUGIN, "pair"),
    Part("pair-2", Kind.PLUGIN, "pair"),
    Part("remote", Kind.PLUGIN, "remote", "remote-line"),
    Part("folder", Kind.FOLDER, "dropin:tool"),
    Part("callback", Kind.CALLBACK, "callback"),
    Part("remote-callback", Kind.CALLBACK, "remote-callback", "callback-line"),
    Part("sdk-host", Kind.HOST, way="sdk", rate=25),
    Part("remote-host", Kind.HOST, line="host-line", way="sdk", rate=15),
    Part("raw-host", Kind.HOST, way="raw", rate=20),
    Part("rest-host", Kind.HOST, way="rest", rate=10),
    Part("main-server", Kind.MAIN_SERVER, rate=5),
    Part("remote-line", Kind.LINE),
    Part("callback-line", Kind.LINE),
    Part("host-line", Kind.LINE),
)
FEW = {BUS, "solo", "folder", "callback", "raw-host", "rest-host"}


def cast(few: bool = False) -> tuple[Part, ...]:
    """Returns all parts, or as few as show every way of offering a tool."""
    return tuple(part for part in PARTS if not few or part.name in FEW)


def part_of(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def tools(parts: Sequence[Part]) -> dict[str, ChaosTool]:
    """Returns the tools that these parts offer, by name. A tool that came by REST cannot be declared idempotent."""
    found: dict[str, ChaosTool] = {}
    for source in dict.fromkeys(part.source for part in parts if part.source):
        its = [part for part in parts if part.source == source]
        for idempotent in (False,) if its[0].kind is Kind.CALLBACK else (False, True):
            name = tool_name(its[0], idempotent)
            trusted = its[0].kind is not Kind.FOLDER
            found[name] = ChaosTool(name, idempotent, tuple(part.name for part in its), trusted)
    return found


def tool_name(part: Part, idempotent: bool) -> str:
    """Returns the name of one of a part's two tools."""
    return f"{part.name.split('-')[0] if part.source == 'pair' else part.name}_{'again' if idempotent else 'once'}"
