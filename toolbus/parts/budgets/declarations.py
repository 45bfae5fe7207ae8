"""Reads the tools that less trusted peers declare, on a thread, and only as many as fit into what their account has.

A schema with thousands of properties or dear patterns takes as long as hundreds of calls, and many times its size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

from toolbus.bus.access.budgets import Budgets, Declaring
from toolbus.bus.catalog.entry import CompiledTool, Entry, memory_of
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams.catalog_messages import read_tool
from toolbus.common.beside_loop import beside_loop
from toolbus.common.newest import NewestCache
from toolbus.common.text import quote
from toolbus.errors import InvalidTool
from toolbus.parts.budgets.loop_share import MAX_ACCOUNTS, LoopShare
from toolbus.protocol.limits import Limits
from toolbus.v1 import tool_pb2 as pb

Answer = TypeVar("Answer")
CHUNK_BYTES = 32 * 1024  # of declarations that are read before it is the turn of others
MAX_NODES, MAX_PATTERN_COST = 4_000, 15_000  # of a schema, see `Limits`
READ_SHARE, READ_BURST_SECONDS = 0.05, 0.25  # of the time, for the tools of one account; at once, after a rest
Read = CompiledTool | InvalidTool


def no_room(name: str, account: str, limit: str, value: int) -> InvalidTool:
    """Returns why a tool is refused that does not fit."""
    return InvalidTool(
        [
            f"tool {quote(name)}: with it the tools of {account} would take more memory than the limit {limit} = "
            f"{value}, with their schemas and patterns as they are compiled: declare fewer or smaller ones"
        ]
    )


class PeerBudgets(Budgets):
    """Bounds what the less trusted peers of one bus use.

    Args:
        share: the loop's.
    """

    def __init__(self, registry: Registry, policy: Policy, limits: Limits, share: LoopShare) -> None:
        self.share = share
        self._registry, self._policy, self._limits = registry, policy, limits
        # The validator is native code, in which the thread gives the interpreter to nobody: 20 ms at most.
        nodes, patterns = min(limits.schema_nodes, MAX_NODES), min(limits.pattern_cost, MAX_PATTERN_COST)
        self._schemas = replace(limits, schema_nodes=nodes, pattern_cost=patterns)
        self._sources: dict[str, set[str]] = {}  # by account, those that have tools
        self._held: dict[str, int] = {}  # what they counted when it was last summed up
        self._declaring: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one request of an account
        self._due: NewestCache[str, float] = NewestCache(MAX_ACCOUNTS)  # when more tools of an account may be read
        self._thread = ThreadPoolExecutor(1, "toolbus declarations")
        self._read: dict[bytes, Read] = {}  # what the thread has read of the request that is being judged

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Works for an account when it is its turn."""
        return await self.share.run(account, work)

    async def spend(self, account: str, seconds: float) -> None:
        """Waits for the turn of an account, for work that takes about so long."""
        await self.share.turn(account)
        self.share.spent(seconds)

    async def declare(self, declaring: Declaring, work: Callable[[], Answer]) -> Answer:
        """Reads declared tools on a thread, then works."""
        if not declaring.tools:
            return await self.run(declaring.account, work)
        async with self._declaring.setdefault(declaring.account, asyncio.Lock()):  # so that no two use the same room
            return await self._declare(declaring, work)

    async def _declare(self, declaring: Declaring, work: Callable[[], Answer]) -> Answer:
        read: dict[bytes, Read] = {}
        room = self._room(declaring)
        for chunk in _chunks(declaring.tools):
            await self._rest(declaring.account)
            await self.share.turn(declaring.account)
            loop = asyncio.get_running_loop()
            items, seconds = await loop.run_in_executor(self._thread, self._read_all, declaring, chunk, room)
            read.update(items)
            self.share.spent(seconds)
            rested = time.monotonic() - READ_BURST_SECONDS / READ_SHARE
            self._due[declaring.account] = max(self._due.get(declaring.account, 0.0), rested) + seconds / READ_SHARE

        def judge() -> Answer:
            self._read = read
            try:
                return work()
            finally:
                self._read = {}
                self._sum(declaring.account)

        self._sources.setdefault(declaring.account, set()).add(declaring.source)
        return await self.run(declaring.account, judge)

    async def _rest(self, account: str) -> None:
        """Waits until an account may have tools read again."""
        while (left := self._due.get(account, 0.0) - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def read(
        self, message: pb.Tool, limits: Limits, *, qualified: bool = False, hints_trusted: bool = True
    ) -> CompiledTool:
        """Returns a tool that the thread has read, or reads it.

        Raises:
            InvalidTool: it breaks a rule, or there is no room for it.
        """
        found = self._read.get(message.SerializeToString()) if self._read else None
        if isinstance(found, InvalidTool):
            raise InvalidTool(found.faults)
        return found or read_tool(message, limits, qualified=qualified, hints_trusted=hints_trusted)

    def _room(self, declaring: Declaring) -> dict[str, int]:
        """Returns how much memory is left for declared tools, by the name of each limit."""
        limits, account = self._limits, declaring.account
        held = self._sum(account, declaring.source, {message.name for message in declaring.tools})
        if sum(self._held.values()) > limits.declared_bytes // 2:  # some may have gone since they were summed up
            for each in [each for each in self._held if each != account]:
                self._sum(each)
        all_held = held + sum(self._held.values()) - self._held.get(account, 0)
        return {
            "declared_bytes_per_source": limits.declared_bytes_per_source - held,
            "declared_bytes": limits.declared_bytes - all_held,
        }

    def _sum(self, account: str, source: str = "", but: Iterable[str] = ()) -> int:
        """Sums up what the tools of an account count, without those of a source that are declared anew."""
        held = 0
        for each in list(self._sources.get(account, ())):
            entries = self._registry.all_entries(each)
            if not entries:
                self._sources[account].discard(each)
            held += sum(map(_size, entries if each != source else (it for it in entries if it.bare_name not in but)))
        self._held[account] = held
        if not self._sources.get(account):
            self._sources.pop(account, None)
            del self._held[account]
        return held

    def _read_all(
        self, declaring: Declaring, messages: list[pb.Tool], room: dict[str, int]
    ) -> tuple[dict[bytes, Read], float]:
        """Reads tools as far as there is room for them; on the thread. Returns them, and how long that took."""
        began, read = time.thread_time(), dict[bytes, Read]()
        with beside_loop():
            for message in messages:
                read[message.SerializeToString()] = self._read_one(declaring, message, room)
        return read, time.thread_time() - began

    def _read_one(self, declaring: Declaring, message: pb.Tool, room: dict[str, int]) -> Read:
        trusted = not self._policy.is_untrusted(declaring.source)
        size = memory_of(message)  # what has no room is not even compiled
        try:
            if size <= min(room.values()):
                tool = read_tool(message, self._schemas, qualified=declaring.qualified, hints_trusted=trusted)
                size = memory_of(tool.tool, tool.compile_cost)
        except InvalidTool as fault:
            return fault
        for limit, left in room.items():
            if size > left:
                return no_room(message.name, declaring.account, limit, getattr(self._limits, limit))
        for limit in room:
            room[limit] -= size
        return tool


def _chunks(messages: Iterable[pb.Tool]) -> Iterator[list[pb.Tool]]:
    chunk: list[pb.Tool] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += message.ByteSize()
        if size > CHUNK_BYTES or '"pattern' in message.parameters_json:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(entry: Entry) -> int:
    """Returns what an entry counts: a tool for all roles has one in each table."""
    return entry.memory if entry.table.role is None or entry.tool.role else 0
