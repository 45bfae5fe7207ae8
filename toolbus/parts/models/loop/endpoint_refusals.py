"""Stores the declarations that an endpoint refuses, and finds those that an error does not name.

Each loop has its own, since its conversations share an endpoint. A declaration is identified by its schema_hash, so a
tool that changes is offered again. It is stored only after a request without it was accepted, so that a wrong guess
hides no tool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from toolbus.common.newest import NewestCache
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.export import Export, LeftOut
from toolbus.protocol.tool import Tool

MAX_REFUSED = 1000  # stored declarations
MAX_PROBES = 40  # requests that search declarations that an error does not name; one among 128 needs 15 or fewer
MAX_HOPELESS = 16  # exports without a refused declaration

Refuses: TypeAlias = Callable[[Sequence[Tool]], Awaitable[bool]]


class EndpointRefusals:
    """The refusals of one endpoint.

    Attributes:
        revision: rises with each stored declaration.
        max_tools: the number of tools that it takes; None: it refused no number.
        strict: how declarations are sent: with `strict` unchanged, off, or absent.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.max_tools: int | None = None
        self.strict: Literal["unchanged", "off", "absent"] = "unchanged"
        self._refused: NewestCache[str, str] = NewestCache(MAX_REFUSED)  # schema_hash → why
        self._loose: NewestCache[str, None] = NewestCache(MAX_REFUSED)  # schema_hash of tools that must not be strict
        self._hopeless: NewestCache[tuple[str, ...], None] = NewestCache(MAX_HOPELESS)  # exports, by their hashes

    def __repr__(self) -> str:
        return f"EndpointRefusals({len(self._refused)} refused, max_tools={self.max_tools}, strict={self.strict})"

    def remember(self, whys: Mapping[Tool, str]) -> None:
        """Stores declarations that the endpoint refused, each with the reason."""
        for tool, why in whys.items():
            self._refused[tool.schema_hash] = why
        self.revision += 1

    def split(self, tools: Sequence[Tool]) -> tuple[Sequence[Tool], tuple[LeftOut, ...]]:
        """Returns the tools that are not known to be refused, and the others with the reason."""
        if not self._refused:
            return tools, ()
        accepted = [tool for tool in tools if tool.schema_hash not in self._refused]
        left_out = (tool for tool in tools if tool.schema_hash in self._refused)
        return accepted, tuple(LeftOut(tool.name, self._refused[tool.schema_hash]) for tool in left_out)

    async def find(self, export: Export, refuses: Refuses) -> Halving:
        """Finds the tools of an export that the endpoint refuses.

        Finds none if it refuses them only together, or refuses another part of the request.

        Args:
            refuses: asks the endpoint whether it refuses a request with these tools.
        """
        halving = Halving(refuses)
        if not await halving.is_refused(()):
            await halving.search(list(export.kept.values()))
        return halving

    def is_hopeless(self, export: Export) -> bool:
        """Tells whether an earlier request without some tools of this export was refused, too."""
        return tuple(export.hashes.values()) in self._hopeless

    def give_up(self, export: Export) -> None:
        """Leaving out tools of this export did not help, and is not tried again."""
        self._hopeless[tuple(export.hashes.values())] = None

    def loosen(self, hashes: Iterable[str]) -> None:
        """Stores declarations, by their schema_hash, that the endpoint accepts only if they are not strict."""
        self._loose.update(dict.fromkeys(hashes))

    def relaxed(self, export: Export, loose: Set[str] = frozenset()) -> Export:
        """Returns an export whose declarations have `strict` as the endpoint accepts it.

        Args:
            loose: further declarations, by their schema_hash, that are not strict.
        """
        loose = loose | self._loose.keys()
        if self.strict == "unchanged" and loose.isdisjoint(export.hashes.values()):
            return export
        absent = self.strict == "absent"
        tools = tuple(
            _relaxed(declaration, absent=absent) if self.strict != "unchanged" or schema_hash in loose else declaration
            for declaration, schema_hash in zip(export.tools, export.hashes.values(), strict=True)
        )
        return replace(export, tools=tools)


def _relaxed(declaration: Mapping[str, Any], *, absent: bool) -> dict[str, Any]:
    """Returns a declaration in which `strict` is false or absent; if it was absent, it stays absent."""
    relaxed = {key: value for key, value in declaration.items() if key != "strict" or not absent}
    if "strict" in relaxed:
        relaxed["strict"] = False
    if isinstance(function := relaxed.get("function"), dict):
        relaxed["function"] = _relaxed(function, absent=absent)
    return relaxed


class Halving:
    """Finds the refused tools of a refused group by bisection; used once.

    Attributes:
        found: tools that are refused alone.
        undecided: groups with refused tools that MAX_PROBES requests could not separate.
        accepted: the number of tools in the largest group that the endpoint accepted.
    """

    def __init__(self, refuses: Refuses) -> None:
        self.found: list[Tool] = []
        self.undecided: list[Tool] = []
        self.accepted = 0
        self._refuses = refuses
        self._left = MAX_PROBES  # requests

    async def search(self, group: Sequence[Tool], *, sure: bool = True) -> None:
        """Searches a group of tools that is refused.

        Args:
            sure: False if the refusal only follows from the other group being accepted: perhaps the endpoint refuses
                both groups only together.
        """
        if len(group) == 1:
            if sure or await self.is_refused(group):
                self.found += group
            return
        first, second = group[: len(group) // 2], group[len(group) // 2 :]
        if not await self.is_refused(first):
            await self.search(second, sure=False)
            return
        await self.search(first)
        if await self.is_refused(second):
            await self.search(second)

    async def is_refused(self, group: Sequence[Tool]) -> bool:
        """Tells whether a request with these tools is refused, as long as requests are left."""
        if not self._left:
            self.undecided += group
            return False
        self._left -= 1
        is_refused = await self._refuses(group)
        if not is_refused:
            self.accepted = max(self.accepted, len(group))
        return is_refused


def without(dialect: Dialect, export: Export, whys: Mapping[Tool, str]) -> Export:
    """Returns an export without some of its tools."""
    others: Iterable[Tool] = (tool for tool in export.kept.values() if tool not in whys)
    left_out = tuple(LeftOut(tool.name, why) for tool, why in whys.items() if tool.name in export.kept)
    return replace(renewed := dialect.export(others), left_out=(*export.left_out, *renewed.left_out, *left_out))
