"""Measures writing a catalog for a model: each dialect by itself, and as the tool loop does it."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from lab.benchmarks import catalog
from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured, microseconds, milliseconds
from lab.stage import Stage
from toolbus.dialects import DIALECTS, Dialect, Export, find_dialect
from toolbus.dialects.token_cost import estimate_tokens
from toolbus.loop.export_cache import ExportCache
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.loop_tools import LoopTools
from toolbus.tool import Result, Tool

TOOLS = 1_000


class Changing:
    """A source whose catalog changes by hand, one tool at a time."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.revision = 1
        self.listed = list(tools)

    def change(self) -> None:
        """Gives the next tool another description."""
        place = self.revision % len(self.listed)
        self.revision += 1
        self.listed[place] = dataclasses.replace(self.listed[place], description=f"Is number {self.revision}.")

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        return self.revision, tuple(self.listed)

    async def call(self, name: str, arguments_json: str, **circumstances: Any) -> Result:
        raise NotImplementedError("exports make no calls")

    async def changes(self) -> AsyncIterator[int]:
        yield self.revision


def export(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    tools = catalog.tools(TOOLS)
    lines: dict[str, Line] = {name: functools.partial(_exported, name, tools, repeats) for name in DIALECTS}
    with _quiet():
        return measured("export", f"Export of {TOOLS:,} tools", lines, plan.rounds)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the log about tools that are left out: they are counted."""
    log = logging.getLogger("toolbus.loop")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


async def _exported(name: str, tools: Sequence[Tool], repeats: int) -> Measured:
    dialect, source = find_dialect(name), Changing(tools)
    first = milliseconds(lambda: dialect.export(tools), 1)
    again = milliseconds(lambda: dialect.export(tools), repeats)

    def after_a_change() -> float:
        source.change()
        return milliseconds(lambda: dialect.export(source.listed), 1)[0]

    changed = [after_a_change() for _ in range(repeats)]
    offering = ExportCache(source, cast(Dialect, dialect), list_timeout=10.0)  # of a dialect it asks for exports only
    own = LoopTools(LoopSettings(), None)

    async def offered(number: int) -> Export:
        return await offering.export(own)

    renewed, cached = [], []
    for _ in range(repeats):
        source.change()
        renewed.append(await microseconds(offered, 1) / 1e3)
        cached.append(await microseconds(offered, 100))
    times: dict[Column, Sequence[float]] = {
        ("first", "ms"): first,
        ("again", "ms"): again,
        ("one tool changed", "ms"): changed,
        ("in a loop, new revision", "ms"): renewed,
        ("in a loop, same revision", "µs"): cached,
    }
    return times | _sizes(dialect.export(tools))


def _sizes(written: Export) -> dict[Column, Sequence[float]]:
    text = json.dumps(written.tools, ensure_ascii=False, separators=(",", ":"))
    return {
        ("size", "kB"): (len(text.encode()) / 1e3,),
        ("tokens, estimated", ""): (estimate_tokens(written),),
        ("losses", ""): (len(written.losses),),
        ("left out", ""): (len(written.left_out),),
    }
