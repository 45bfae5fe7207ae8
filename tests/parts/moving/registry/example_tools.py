"""Tools and waiting, for the tests of the registry."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, TypeVar

from toolbus.tools import ToolRegistry

T = TypeVar("T")

ANYTHING: dict[str, Any] = {"type": "object"}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "City and state"}},
    "required": ["location"],
}


def with_tools(*names: str) -> ToolRegistry:
    """A registry whose tools answer with their own names."""
    registry = ToolRegistry()
    for name in names:
        offer(registry, name)
    return registry


def offer(registry: ToolRegistry, name: str, **options: Any) -> None:
    async def says_its_name() -> str:
        return name

    registry.tool(name, f"Says {name}.", ANYTHING, **options)(says_its_name)


class BlockedTool:
    """An async tool that runs until it is let go, from any thread, or cancelled."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self._go = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def __call__(self) -> str:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self._waiting.append((loop, ended))
        self.begun += 1
        try:
            if not self._go.is_set():
                await ended
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "released"

    def release(self) -> None:
        self._go.set()
        for loop, ended in self._waiting:
            loop.call_soon_threadsafe(_end, ended)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
