"""Tests which calls of a lost bus run again at the next one, by what that lists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from tests.support.waiting import HANG_SECONDS, until, within
from toolbus.errors import Code, PeerLost, Stage
from toolbus.functions.call_context import CallOptions
from toolbus.functions.workers import ChangeSignal
from toolbus.parts.buses.connections import LostCalls
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk.outgoing_calls import OutgoingCall
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

LOST = Result("1", is_error=True, error=CallError(Code.UNAVAILABLE, "it broke", Stage.UNKNOWN))


class NextBus:
    """The connections of a host, whose next bus answers with these listings, one after the other."""

    connected = True
    is_over = False

    def __init__(self, *listings: dict[str, bool]) -> None:
        self.changes = ChangeSignal()
        self.begun: list[str] = []
        self._listings = [*listings]

    async def unary(self, method: str, request: wire.ListRequest, timeout: float) -> wire.ListResponse:
        listing = self._listings.pop(0) if len(self._listings) > 1 else self._listings[0]
        if not listing:
            raise PeerLost("it was lost too")
        tools = [wire.ListedTool(tool=pb.Tool(name=name), repeatable=may) for name, may in listing.items()]
        return wire.ListResponse(tools=[each for each in tools if each.tool.name in request.names])

    def begin_now(self, calls: Iterable[OutgoingCall]) -> None:
        self.begun += [out.name for out in calls]


async def settled(connections: NextBus, *names: str, seconds: float = HANG_SECONDS) -> list[str]:
    """Returns the names of the calls that ended as lost."""
    ended: list[str] = []
    lost = LostCalls(connections, seconds)  # type: ignore[arg-type]  # what it uses of them

    def deliver(out: OutgoingCall, result: Any) -> None:
        assert result == LOST
        ended.append(out.name)

    for name in names:
        lost.add(OutgoingCall(name, "{}", deliver), LOST)
    await within(lost.settle())
    return ended


async def test_a_lost_call_waits_until_the_next_bus_lists_its_tool_and_ends_at_once_where_that_must_not_run_twice() -> (
    None
):
    bus = NextBus({}, {"write": False, "other": True}, {"write": False, "other": True, "read": True})
    assert await settled(bus, "read", "write", "other") == ["write"]
    assert bus.begun == ["other", "read"]


async def test_a_lost_call_of_a_tool_that_no_bus_lists_in_time_ends() -> None:
    bus = NextBus({"other": True})
    assert await settled(bus, "read", seconds=0.0) == ["read"]
    assert bus.begun == []


async def test_a_lost_call_waits_no_longer_than_its_own_timeout() -> None:
    ended: list[str] = []
    lost = LostCalls(NextBus({"other": True}), HANG_SECONDS)  # type: ignore[arg-type]
    for name, timeout in (("short", 0.05), ("long", HANG_SECONDS)):
        lost.add(OutgoingCall(name, "{}", lambda out, result: ended.append(out.name), None, CallOptions(timeout)), LOST)
    settling = asyncio.create_task(lost.settle())
    await until(lambda: ended, "the short call to end")
    assert (ended, len(lost)) == (["short"], 1)  # the other one counts as unfinished
    lost.fail()
    await within(settling)
    assert ended == ["short", "long"]
