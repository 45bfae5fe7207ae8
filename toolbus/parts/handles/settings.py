"""Declares which results become handles, for how long, and how much the bus stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from toolbus.common.reader import Keys, Reader
from toolbus.common.setting import CheckedRecord, setting, table
from toolbus.errors import SetupError

KIB, MIB = 1 << 10, 1 << 20
LEAST_BOUND = 4 * KIB  # below it a result is hardly larger than its beginning and the link


@dataclass(frozen=True, slots=True)
class ResultRules:
    """Which results become handles. All sizes are bytes.

    Attributes:
        above: a larger result becomes a handle; 0: none does, but those of `tools` and `sources`.
        tools, sources: the same for one tool, by its listed name, or one source.
        ttl_seconds: how long a handle can be read.
        memory_bytes: what is held in memory; the rest is in the data directory, or dropped where there is none.
        disk_bytes: what is in the data directory.
        user_bytes: of one owner.
        source_bytes: of the tools of one source.
    """

    above: int = 0
    tools: Mapping[str, int] | None = None
    sources: Mapping[str, int] | None = None
    ttl_seconds: float = 3600.0
    memory_bytes: int = 64 * MIB
    disk_bytes: int = 1024 * MIB
    user_bytes: int = 256 * MIB
    source_bytes: int = 256 * MIB

    def bound(self, name: str, source: str) -> int:
        """Returns above which size a result of a tool becomes a handle; 0: never."""
        return (self.tools or {}).get(name, (self.sources or {}).get(source, self.above))

    @property
    def least(self) -> int:
        """The lowest bound; 0 where no result becomes a handle."""
        bounds = (self.above, *(self.tools or {}).values(), *(self.sources or {}).values())
        return min(filter(None, bounds), default=0)


def _bound(reader: Reader) -> int:
    value = reader.whole(0)
    if 0 < value < LEAST_BOUND:
        raise reader.error(f"it must be at least {LEAST_BOUND}, or 0 for no handles")
    return value


def _bounds(reader: Reader) -> dict[str, int]:
    return {name: _bound(each) for name, each in reader.entries().items()}


_KEYS: Keys = {
    "above": ("above", _bound),
    "tools": ("tools", _bounds),
    "sources": ("sources", _bounds),
    "ttl_seconds": ("ttl_seconds", lambda reader: reader.number(1, 30 * 86_400)),
    **{
        each.name: (each.name, lambda reader: reader.whole(0))
        for each in fields(ResultRules)
        if each.name.endswith("_bytes")
    },
}


def _check(name: str, rules: ResultRules) -> None:
    if rules.least and not (rules.memory_bytes or rules.disk_bytes):
        raise SetupError(f"{name} has neither memory_bytes nor disk_bytes, so nothing can be stored: give one of them")


@dataclass(frozen=True, slots=True)
class HandleSettings(CheckedRecord):
    """The large results of a bus."""

    results: ResultRules = setting(ResultRules, table(lambda reader: ResultRules(**reader.record(_KEYS))), check=_check)
