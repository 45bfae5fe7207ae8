"""Reads the tools that less trusted peers declare, on a thread, and only as many as fit into what their account has.

A schema with thousands of properties or dear patterns takes as long as hundreds of calls, and many times its size.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from toolbus.bus.access.budgets import (
    LONG_BYTES,
    MANY_TOOLS,
    OWN,
    REFUSED,
    Budgets,
    Declaring,
    Receive,
    Register,
    Registered,
)
from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Seams
from toolbus.bus.catalog.entry import CompiledTool, Entry, declared_twice, memory_of, read_tool
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.streams.catalog_messages import MAX_WAITING_SHOWN
from toolbus.bus.streams.refused_tools import DEFAULT_RECEIVE_BYTES, Cause, Refusal, add_refused
from toolbus.common.newest import NewestCache
from toolbus.common.text import quote
from toolbus.errors import InvalidTool, LimitExceeded
from toolbus.parts.budgets.beside_loop import beside_loop
from toolbus.parts.budgets.loop_share import MAX_ACCOUNTS, LoopShare
from toolbus.protocol.limits import Limits
from toolbus.protocol.session import MAX_ITEMS
from toolbus.protocol.tool import SOURCE
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

Answer = TypeVar("Answer")
CHUNK_BYTES = 8 * 1024  # of declarations that are read before it is the turn of others
PIECE_BYTES, PIECE_CALLS = 1 << 17, 32  # of a large message that are read in one turn of a peer with budgets: 1 ms
PIECE_SECONDS = 0.0001  # that gRPC took to read a piece, about
ITEM_BYTES, RPC_BYTES = 256, 16 * 1024  # of memory that an empty item of a message takes, and an RPC, about
MAX_NODES, MAX_PATTERN_COST = 4_000, 15_000  # of a schema, see `Limits`
# Of the time, for the tools of one account while own programs call, and else; at once, after a rest. The thread and the
# loop take turns with the interpreter, so that calls take several times as long meanwhile.
READ_SHARE, IDLE_READ_SHARE, READ_BURST_SECONDS = 0.01, 0.2, 0.1
SLICE_SECONDS = 0.001  # of reading the tools of own programs before it is the turn of others
LONG_PIECE_SECONDS = 0.01  # a piece that took n times as long counts n times
Read = CompiledTool | InvalidTool


def first_calls(frame: wire.InvokeRequest) -> wire.InvokeRequest | None:
    """Takes the first calls out of a message, if they are large; asks for the size of each once, which copies it."""
    size = 0
    for count in range(len(frame.calls) - 1):
        if (size := size + frame.calls[count].ByteSize()) >= PIECE_BYTES or count + 1 == PIECE_CALLS:
            break
    else:
        return None
    count += 1
    piece = wire.InvokeRequest(calls=frame.calls[:count])
    del frame.calls[:count]
    return piece


def items_of(frame: wire.InvokeRequest) -> int:
    """Returns how many messages a message holds, each of which takes memory also where it is empty."""
    lists: list[Sized] = [frame.calls, frame.results, frame.progress, frame.cancels, frame.attach.tools]
    lists += (call.context.messages for call in frame.calls if call.HasField("context"))
    lists += (result.content for result in frame.results)
    return sum(map(len, lists))


def rest_of(seconds: float, *, is_busy: bool, piece: float) -> float:
    """Returns how long an account rests after work of so many seconds, of which the longest piece took so long.

    The validator holds the interpreter while it compiles one schema: own calls wait for a whole piece.
    """
    if not is_busy:
        return seconds / IDLE_READ_SHARE
    return seconds / READ_SHARE * max(1.0, piece / LONG_PIECE_SECONDS)


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
        seams: of the bus, for its tripwire.
        receives: returns the largest message that a session takes, in bytes.
    """

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        limits: Limits,
        share: LoopShare,
        seams: Seams,
        receives: Callable[[str], int] = lambda session_id: DEFAULT_RECEIVE_BYTES,
    ) -> None:
        self.share = share
        self._seams, self._receives = seams, receives
        self._registry, self._policy, self._limits = registry, policy, limits
        # The validator is native code, in which the thread gives the interpreter to nobody: 20 ms at most.
        nodes, patterns = min(limits.schema_nodes, MAX_NODES), min(limits.pattern_cost, MAX_PATTERN_COST)
        self._schemas = replace(limits, schema_nodes=nodes, pattern_cost=patterns)
        self._sources: dict[str, set[str]] = {}  # by account, those that have tools
        self._held: dict[str, int] = {}  # what they counted when it was last summed up
        self._declaring: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one request of an account
        self._compiling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one piece of an account
        self._due: NewestCache[str, float] = NewestCache(MAX_ACCOUNTS)  # when more tools of an account may be read
        self._waiting = Counter[str]()  # bytes of messages that wait for their turn, by account
        self._thread = ThreadPoolExecutor(1, "toolbus declarations")
        self._read: dict[bytes, Read] = {}  # what the thread has read of the request that is being judged

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def take(
        self,
        sender: Principal | None,
        calls: Mapping[str, Any],
        frame: wire.InvokeRequest,
        receive: Receive,
        reads: Callable[[wire.InvokeRequest], bool] = lambda frame: True,
    ) -> None:
        """Handles a message when it is the turn of its account."""
        if max(len(frame.calls), len(frame.results), len(frame.progress), len(frame.cancels)) > MAX_ITEMS:
            receive(frame)  # is refused: takes less than to wait with millions of items
            return
        account, size, holder = OWN, frame.ByteSize(), OWN
        if sender is not None:
            holder = account = sender.account
            if sender.identity.scopes is None:  # a guarded peer: nothing has proven the source of its attach
                account = account if SOURCE.fullmatch(account) else REFUSED
                holder = f"peers that attach as {account}" if frame.HasField("attach") else account
        with self.waiting(holder, size + ITEM_BYTES * items_of(frame)):
            work: Callable[[], None] = partial(receive, frame)
            if sender is not None and (frame.results or frame.progress) and size > LONG_BYTES:
                work = await self.judge(sender, calls, frame, work)
            if frame.HasField("attach"):
                attach = frame.attach
                tools = attach.tools if await self.run(account, partial(reads, frame)) else ()
                await self.declare(Declaring(account, attach.source, attach.qualified, tools), work)
                return
            while piece := first_calls(frame):
                await self.spend(account, PIECE_SECONDS)
                await self.run(account, partial(receive, piece))
            await self.run(account, work)

    async def answer(self, account: str, request: Any, work: Callable[[Any], Answer]) -> Answer:
        """Answers a request when it is the turn of its account."""
        with self.waiting(account, RPC_BYTES + request.ByteSize()):
            return await self.run(account, partial(work, request))

    @contextmanager
    def waiting(self, account: str, size: int) -> Iterator[None]:
        """Counts a message while it waits; one of each account always fits."""
        waiting, limits = self._waiting, self._limits
        held = waiting[account] + size
        for limit, wait in (("held_bytes_per_source", held), ("held_bytes", waiting.total() + size)):
            if account and wait > (value := getattr(limits, limit)) and waiting[account]:
                what = f"messages of {account} wait for their turn in the bus, with which {wait} bytes would wait"
                raise LimitExceeded(limit, value, f"{what}: send less at once, or over fewer sessions")
        waiting[account] = held
        try:
            yield
        finally:
            waiting[account] -= size
            if not waiting[account]:
                del waiting[account]

    async def run(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Works for an account when it is its turn; for own programs after others have had theirs."""
        if account == OWN:
            await asyncio.sleep(0)
            return work()
        return await self.share.run(account, work)

    async def beside(
        self, account: str, work: Callable[[], Answer], spent: Callable[[float], object] = lambda seconds: None
    ) -> Answer:
        """Does long work on the thread, when it is the turn of an account.

        Args:
            spent: called with how long it took, also where it fails and where its caller has given up.
        """
        seconds = 0.0

        def run() -> Answer:
            nonlocal seconds
            began = time.thread_time()
            try:
                with beside_loop():
                    return work()
            finally:
                seconds = time.thread_time() - began

        async with self.share.turn(account):
            working = asyncio.get_running_loop().run_in_executor(self._thread, run)
            try:
                await asyncio.wait((working,))
            except asyncio.CancelledError:  # the thread goes on
                await asyncio.wait((working,))
                working.exception()  # read here, or asyncio would log it
                raise
            finally:
                self.share.spent(seconds)
                spent(seconds)
            return await working

    async def compile(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Does the same in a part of the time."""

        def spent(seconds: float) -> None:
            rested = time.monotonic() - rest_of(READ_BURST_SECONDS, is_busy=self.share.is_busy, piece=0.0)
            rest = rest_of(seconds, is_busy=self.share.is_busy, piece=seconds)
            self._due[account] = max(self._due.get(account, 0.0), rested) + rest

        async with self._compiling.setdefault(account, asyncio.Lock()):
            await self._rest(account)
            return await self.beside(account, work, spent)

    async def judge(
        self, principal: Principal, calls: Mapping[str, Any], frame: wire.InvokeRequest, work: Callable[[], None]
    ) -> Callable[[], None]:
        """Searches results and progress of a guarded source for secrets on the thread."""
        tripwire = self._seams.tripwire
        if tripwire is None or not self._policy.is_untrusted(principal.source):
            return work

        def search() -> dict[tuple[str, str | bytes], str | None]:
            found: dict[tuple[str, str | bytes], str | None] = {}
            for result in frame.results:
                if call := calls.get(result.call_id):
                    found[call.entry.name, result.SerializeToString()] = tripwire.check_result(call.entry.name, result)
            for progress in frame.progress:
                if call := calls.get(progress.call_id):
                    found[call.entry.name, progress.message] = tripwire.check(call.entry.name, progress.message)
            return found

        verdicts = await self.beside(principal.account, search)

        def judged() -> None:
            tripwire.judged = verdicts
            try:
                work()
            finally:
                tripwire.judged = {}

        return judged

    async def spend(self, account: str, seconds: float) -> None:
        """Waits for the turn of an account, for work that takes about so long."""
        async with self.share.turn(account):
            self.share.spent(seconds)

    async def declare(self, declaring: Declaring, work: Callable[[], Answer]) -> Answer:
        """Reads declared tools on a thread, then works."""
        if not declaring.tools:
            return await self.run(declaring.account, work)
        async with self._reading(declaring) as judge:
            answer: Answer = await judge(work)
            return answer

    async def register(self, declaring: Declaring, request: wire.RegisterRequest, work: Register) -> Registered:
        """Does the same, a few tools at a time where each is judged on its own."""
        parts, again = [request], list[Refusal]()
        with self.waiting(declaring.account, RPC_BYTES + request.ByteSize() + ITEM_BYTES * len(request.tools)):
            if len(request.tools) > MANY_TOOLS and not request.all_or_none:
                cut = partial(_parts, request)
                parts, again = cut() if declaring.account == OWN else await self.beside(declaring.account, cut)
            async with self._reading(declaring) as judge:
                responses = [await judge(partial(work, part)) for part in parts]
        return _joined(responses, again, self._receives(request.session_id))

    @asynccontextmanager
    async def _reading(self, declaring: Declaring) -> AsyncIterator[Callable[[Callable[[], Any]], Awaitable[Any]]]:
        """Reads declared tools on the thread; yields what works for their account as soon as it is its turn."""
        account = declaring.account
        read: dict[bytes, Read] = {}

        def judge(work: Callable[[], Any]) -> Any:
            self._read = read
            try:
                return work()
            finally:
                self._read = {}

        if account == OWN:
            read = await self._read_in_slices(declaring)
            yield lambda work: self.run(account, partial(judge, work))
            return
        async with self._declaring.setdefault(account, asyncio.Lock()):  # so that no two use the same room
            try:
                read = await self._read_beside(declaring)
                self._sources.setdefault(account, set()).add(declaring.source)
                yield lambda work: self.run(account, partial(judge, work))
            finally:  # whatever ended it: some may be offered. Nothing is awaited, so that no cancellation skips it
                began = time.thread_time()
                self._sum(account)
                self.share.spent(time.thread_time() - began)

    async def _read_in_slices(self, declaring: Declaring) -> dict[bytes, Read]:
        """Reads the tools of an own program; those that break a rule are left to who judges them."""
        read, trusted = dict[bytes, Read](), not self._policy.is_untrusted(declaring.source)
        ends = time.thread_time() + SLICE_SECONDS
        for message in declaring.tools:
            with suppress(InvalidTool):
                tool = read_tool(message, self._limits, qualified=declaring.qualified, hints_trusted=trusted)
                read[_digest(message)] = tool
            if time.thread_time() > ends:
                await asyncio.sleep(0)
                ends = time.thread_time() + SLICE_SECONDS
        return read

    async def _read_beside(self, declaring: Declaring) -> dict[bytes, Read]:
        read: dict[bytes, Read] = {}
        room = await self.run(declaring.account, partial(self._room, declaring))
        for chunk in _chunks(declaring.tools):
            reading = partial(self._read_all, declaring, chunk, room)
            read.update(await self.compile(declaring.account, reading))
        return read

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
        found = self._read.get(_digest(message)) if self._read else None
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

    def _read_all(self, declaring: Declaring, messages: list[pb.Tool], room: dict[str, int]) -> dict[bytes, Read]:
        """Reads tools as far as there is room for them; on the thread."""
        return {_digest(message): self._read_one(declaring, message, room) for message in messages}

    def _read_one(self, declaring: Declaring, message: pb.Tool, room: dict[str, int]) -> Read:
        trusted = not self._policy.is_untrusted(declaring.source)
        size = memory_of(message)  # what has no room is not even compiled
        try:
            if size <= min(room.values()):
                tool = read_tool(message, self._schemas, qualified=declaring.qualified, hints_trusted=trusted)
                size = memory_of(tool.tool, tool.compile_cost)
        except InvalidTool as fault:
            return InvalidTool(fault.faults)  # without its frames, whose variables hold all that was declared
        for limit, left in room.items():
            if size > left:
                return no_room(message.name, declaring.account, limit, getattr(self._limits, limit))
        for limit in room:
            room[limit] -= size
        return tool


def _digest(message: pb.Tool) -> bytes:
    """Returns what stands for a declaration while its request is read, which takes long: not a second copy of it."""
    return hashlib.sha256(message.SerializeToString()).digest()


def _parts(request: wire.RegisterRequest) -> tuple[list[wire.RegisterRequest], list[Refusal]]:
    """Returns requests with some tools of one each, and the refusals of tools that no request has.

    Of tools that it has twice only the first counts. The second is in the same request, which refuses it as it would
    without parts; those beyond it, of which the refusal would say the same, are in none.
    """
    same: dict[tuple[str, str], list[pb.Tool]] = {}
    for tool in request.tools:
        same.setdefault((tool.name, tool.role), []).append(tool)
    tools = list(same.values())
    parts = [
        wire.RegisterRequest(
            session_id=request.session_id,
            source=request.source,
            tools=[tool for each in tools[start : start + MANY_TOOLS] for tool in each[:2]],
        )
        for start in range(0, len(tools), MANY_TOOLS)
    ]
    again = [tool for each in tools for tool in each[2:]]
    return parts, [Refusal.of(tool, str(declared_twice(tool.name)), Cause.DECLARATION) for tool in again]


def _joined(responses: Sequence[Registered], again: Sequence[Refusal], receives_bytes: int) -> Registered:
    """Returns one response for the parts of a request, with as many refusals as one message may name."""
    if len(responses) == 1 and not again:
        return responses[0]
    joined = wire.RegisterResponse(ok=all(each.ok for each in responses))
    refused = list[Refusal]()
    for each in responses:
        joined.registered.extend(each.registered)
        joined.failed_roles.extend(each.failed_roles)
        joined.waiting.extend(each.waiting[: max(0, MAX_WAITING_SHOWN - len(joined.waiting))])
        refused += (Refusal(it.name, it.role, it.error, Cause.DECLARATION) for it in each.refused)
    joined.affected_roles.extend(dict.fromkeys(role for each in responses for role in each.affected_roles))
    add_refused(joined, [*refused, *again], receives_bytes)
    joined.refused_total = len(again) + sum(each.refused_total for each in responses)  # some had no room in theirs
    return joined


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
