"""Declares what every way of offering tools has: the base class, and what an author of a plain Python function would
write."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tests.contract.works import Refuses, Scope, Shows, Work
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.functions.tool_spec import spec_of
from toolbus.protocol.tool import Tool
from toolbus.sdk import Reply, ToolScope, llm_tool
from toolbus.sdk.shared_loop import SharedLoop

SOURCE = "contract"  # whose the tools are, where the author chooses

T = TypeVar("T")


class Offer(ABC):
    """Tools of one source, offered in one way.

    Attributes:
        source: whose the tools are.
        arrival_seconds: how long a change may take to be there.
    """

    source = SOURCE
    arrival_seconds = WAIT_SECONDS

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.works: dict[str, Work] = {}

    async def offer(self, *works: Work) -> None:
        """Offers tools beside those that are offered already, in place of those of the same name."""
        replaced = [work.name for work in works if work.name in self.works]
        self.works |= {work.name: work for work in works}
        await self._change(works, replaced)
        await self._arrived()

    async def withdraw(self, name: str) -> None:
        """Takes a tool away; calls of it go on."""
        del self.works[name]
        await self._change((), (name,))
        await self._arrived()

    @abstractmethod
    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        """Makes what is offered equal to ``works``."""

    @abstractmethod
    async def close(self) -> None:
        """Leaves in good order."""

    def pending(self) -> int:
        """How many calls the bus counts against the tools' slots."""
        handlers = {handler: None for each in self.bus.list() for handler in each.entry.handlers()}
        return sum(len(handler.pending) for handler in handlers)

    async def idle(self) -> None:
        """Waits until every slot is free."""
        await until(lambda: self.pending() == 0, "every slot to be free")

    async def _arrived(self) -> None:
        expected = {name: declared(work).schema_hash for name, work in self.works.items()}

        def there() -> bool:
            listed = {each.tool.name: each for each in self.bus.list() if each.source == self.source}
            return {name: each.tool.schema_hash for name, each in listed.items()} == expected and all(
                len(each.entry.handlers()) == 1 for each in listed.values()
            )

        await until(there, f"the bus to offer {', '.join(expected) or 'nothing'}", self.arrival_seconds)


def declared(work: Work) -> Tool:
    """Returns what every kind has to make of a tool."""
    return spec_of(as_function(work)).tool


def as_function(work: Work) -> Callable[..., Any]:
    """Returns what an author of a function would write, local or in a plugin."""

    async def run_async(ctx: ToolScope, **arguments: Any) -> Any:
        return _reply(await work.run(arguments, _scope(ctx)))

    def run_plain(ctx: ToolScope, **arguments: Any) -> Any:
        return _reply(work.run(arguments, _scope(ctx)))

    return llm_tool(
        name=work.name,
        description=work.description,
        parameters=work.parameters,
        timeout=work.timeout,
        idle_timeout=work.idle_timeout,
    )(run_async if inspect.iscoroutinefunction(work.run) else run_plain)


def _scope(ctx: ToolScope) -> Scope:
    return Scope(ctx.context, ctx.progress, ctx.cancelled)


def _reply(returned: Any) -> Any:
    if isinstance(returned, Refuses):
        return {"is_error": True, "error": returned.error, "output": returned.output}
    return Reply(returned.output, returned.content) if isinstance(returned, Shows) else returned


async def on(thread: SharedLoop, work: Coroutine[Any, Any, T]) -> T:
    """Runs something on a thread's loop, and waits for it on this one."""
    result: Awaitable[T] = asyncio.wrap_future(thread.submit(work))
    return await result
