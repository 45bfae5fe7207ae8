"""The ways in which a tool can be offered, behind one face, so that one suite runs against all of them.

A test writes its tools as `Work`: what is declared, and a function that sees its call as `Scope`. Each kind below turns
that into what an author of that kind would write. A further kind joins with one class, a subclass of `Offer`, and one
line in `KINDS`. What a kind cannot do is said in its line of `KINDS` and nowhere else: tests ask that table, not which
kind it is.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from peer import Call as PeerCall
from peer import Peer

from tests.contract.dropin_offer import DropinOffer
from tests.contract.offer import SOURCE, Offer, as_function, on
from tests.contract.rest_offer import RestOffer
from tests.contract.works import Refuses, Scope, Shows, Work, drop
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.functions.tool_spec import spec_of
from toolbus.sdk import CallContext, Plugin
from toolbus.sdk.shared_loop import SharedLoop
from toolbus.tools import ToolRegistry
from toolbus.v1 import tool_pb2 as pb


class LocalOffer(Offer):
    """Functions of the bus's own process."""

    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        for name in set(removed) - self.works.keys():
            self.bus.remove_tool(name, SOURCE)
        for work in added:
            self.bus.add_tool(spec_of(as_function(work)), SOURCE)

    async def close(self) -> None:
        for name in self.works:
            self.bus.remove_tool(name, SOURCE)


class RegistryOffer(Offer):
    """`toolbus.tools.ToolRegistry` on the bus: functions of the bus's own process, too, with other words."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._registry = ToolRegistry(bus=bus, source=SOURCE)

    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        for name in set(removed) - self.works.keys():
            assert self._registry.unregister_tool(name)
        for work in added:
            offer = self._registry.tool(
                work.name, work.description, work.parameters, timeout=work.timeout, idle_timeout=work.idle_timeout
            )
            offer(as_function(work))

    async def close(self) -> None:
        assert self._registry.clear_tools(SOURCE) == len(self.works)


class SdkOffer(Offer):
    """`toolbus.sdk.Plugin` over gRPC; its handlers run on a loop and on threads of their own."""

    lane = "off"

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._thread = SharedLoop("contract-sdk")
        self._plugin: Plugin | None = None  # None before the first tool

    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOOLBUS_LANE", self.lane)
            plugin = self._plugin or Plugin(SOURCE, address=self.bus.grpc_addresses[0])
        for name in set(removed) - self.works.keys():
            plugin.remove_tool(name)
        for work in added:
            plugin.add_tool(as_function(work), replace=work.name in removed)
        if self._plugin is None:
            self._plugin = plugin
            self._thread.start()
            await on(self._thread, plugin.start())
        await on(self._thread, plugin.ready())

    async def close(self) -> None:
        if self._plugin is not None:
            await on(self._thread, self._plugin.close(WAIT_SECONDS))
            await asyncio.to_thread(self._thread.stop)


class LaneOffer(SdkOffer):
    """The same over the lane."""

    lane = "on"


class StubsOffer(Offer):
    """`clients/python/peer.py` on a loop of its own.

    A peer offers what it had when it attached. So a change is what its author would do: a new peer is started beside
    the old one, which then leaves and finishes its calls.
    """

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._thread = SharedLoop("contract-stubs")
        self._thread.loop.set_default_executor(ThreadPoolExecutor(32))  # for works that are plain functions
        self._running: list[tuple[Peer, asyncio.Task[None]]] = []  # the newest last; the older ones are leaving

    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        if not self._running:
            self._thread.start()
        await on(self._thread, self._restart())

    async def _restart(self) -> None:
        peer = Peer(self.bus.grpc_addresses[0], SOURCE)
        for work in self.works.values():
            fields = {"timeout_seconds": work.timeout, "idle_timeout_seconds": work.idle_timeout or 0.0}
            handler = as_peer_handler(work)
            peer.tool(work.description, work.parameters, **fields)(handler)
        running = asyncio.create_task(peer.run())
        await asyncio.wait_for(peer.attached.wait(), WAIT_SECONDS)
        if self._running:
            self._running[-1][0].drain()
        self._running.append((peer, running))

    async def close(self) -> None:
        if self._running:
            await on(self._thread, self._leave())
            await asyncio.to_thread(self._thread.stop)

    async def _leave(self) -> None:
        self._running[-1][0].drain()
        async with asyncio.timeout(WAIT_SECONDS):
            for _, running in self._running:
                await running


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs by nature between ways of offering a tool.

    Attributes:
        make: the class that offers.
        raised: how the message of a tool that raised ``ValueError("no such city")`` begins. The stubs leave the
            wording to their author; the class is in the error's ``reason`` wherever ``names_class``.
        slots_of: whom 256 slots belong to: each tool, or the session and with it all tools of the source.
        names_class: whether the error's ``reason`` is the class of what a tool raised. Else it is the sentence that
            the tool's author wrote: a legacy envelope has one text for both.
        checks_arguments: whether arguments have to fit the schema. Else all arrive, in the forms of REST-40.
        strips_user_keys: whether keys that only a host may set are taken out of the arguments.
        shows_context: whether the tool learns what the host says of the circumstances.
        sends_content: whether a result may have parts beside its output.
        fills_defaults: whether the bus fills in the defaults that a schema declares.
        hints_believed: whether the hints of its tools decide anything.
        reports_progress: whether a tool can show that it works. Else an idle timeout cannot be declared either.
        holds_slots: whether a plain function that was cancelled keeps its slot until it returns. Else nothing shows
            when it does.
        soft_errors: whether a dict with an `error` is the tool's own word for its failure, and not just a value.
        shows_chunks: whether pieces of the output are shown before the result. Else they are held back with it where it
            may hold a secret.
    """

    make: type[Offer]
    raised: str
    slots_of: str
    names_class: bool = True
    checks_arguments: bool = True
    strips_user_keys: bool = True
    shows_context: bool = True
    sends_content: bool = True
    fills_defaults: bool = True
    hints_believed: bool = True
    reports_progress: bool = True
    holds_slots: bool = True
    soft_errors: bool = False
    shows_chunks: bool = True


KINDS = {
    "local": Kind(LocalOffer, raised="ValueError: no such city", slots_of="tool"),
    "registry": Kind(RegistryOffer, raised="ValueError: no such city", slots_of="tool", fills_defaults=False),
    "sdk": Kind(SdkOffer, raised="ValueError: no such city", slots_of="session"),
    "lane": Kind(LaneOffer, raised="ValueError: no such city", slots_of="session"),
    "stubs": Kind(StubsOffer, raised="no such city", slots_of="session"),
    "dropin": Kind(
        DropinOffer,
        raised="tool exec: no such city",
        slots_of="session",
        soft_errors=True,
        shows_chunks=False,
        fills_defaults=False,
        hints_believed=False,
    ),
    "rest": Kind(
        RestOffer,
        raised="ValueError: no such city",
        slots_of="tool",
        names_class=False,
        checks_arguments=False,
        strips_user_keys=False,
        shows_context=False,
        sends_content=False,
        fills_defaults=False,
        reports_progress=False,
        holds_slots=False,
    ),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each way of offering tools in turn."""
    return KINDS[request.param]


@pytest_asyncio.fixture(loop_scope="module")
async def offer(bus: Bus, kind: Kind) -> AsyncIterator[Offer]:
    """Offers tools, in each way in turn."""
    offer = kind.make(bus)
    yield offer
    await offer.close()


def as_peer_handler(work: Work) -> Callable[[dict[str, Any], PeerCall], Coroutine[Any, Any, Any]]:
    """Returns what an author on the stubs would write: async, with a thread for what blocks, and wire messages."""

    async def handler(arguments: dict[str, Any], call: PeerCall) -> Any:
        cancelled, loop = threading.Event(), asyncio.get_running_loop()
        context = CallContext.from_wire(call.message.context)
        if inspect.iscoroutinefunction(work.run):
            return _result(await work.run(arguments, Scope(context, call.progress, cancelled)))

        def report(progress: float = 0.0, /, **more: Any) -> None:
            loop.call_soon_threadsafe(partial(call.progress, progress, **more))

        scope = Scope(context, report, cancelled)
        running = asyncio.ensure_future(asyncio.to_thread(work.run, arguments, scope))
        try:
            returned = await asyncio.shield(running)
            return _result(await returned if inspect.isawaitable(returned) else returned)
        except asyncio.CancelledError:
            cancelled.set()
            drop(await running)  # a thread cannot be stopped, and its slot is not free before it ends
            raise

    handler.__name__ = work.name
    return handler


def _result(returned: Any) -> Any:
    if isinstance(returned, Refuses):
        error = pb.CallError(code=pb.ERROR_CODE_TOOL, message=returned.error, reason=returned.error)
        return pb.ToolResult(output_json=json.dumps(returned.output), is_error=True, error=error)
    if isinstance(returned, Shows):
        return pb.ToolResult(output_json=json.dumps(returned.output), content=returned.content)
    return returned
