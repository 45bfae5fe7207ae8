"""What a source declares that is trusted less: read on a thread, within its memory, and each tool on its own."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from aiohttp import web

from tests.bus.gateway.misbehaving import offer
from tests.faults.raw_peer import RawPeer, opening, tool
from tests.support.waiting import WAIT_SECONDS, until, within
from tests.support.waiting_messages import budgets_of, waits
from toolbus.bus import Bus
from toolbus.bus.access.budgets import MANY_TOOLS, OWN, Declaring
from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Seams
from toolbus.bus.catalog.entry import NODE_BYTES, SCHEMA_BYTES, TOOL_BYTES, CompiledTool, memory_of, read_tool
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.gateway import callback_messages
from toolbus.bus.gateway.callback import BYTE_SECONDS
from toolbus.bus.gateway.callback_messages import LARGE_BODY
from toolbus.bus.streams.invoke_stream import LATE_SECONDS
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.refused_tools import DEFAULT_RECEIVE_BYTES, TEXT_BYTES
from toolbus.errors import Code, InvalidTool, LimitExceeded
from toolbus.parts.budgets import declarations
from toolbus.parts.budgets.declarations import (
    IDLE_READ_SHARE,
    MAX_NODES,
    PIECE_BYTES,
    PIECE_CALLS,
    READ_BURST_SECONDS,
    READ_SHARE,
    PeerBudgets,
    first_calls,
    rest_of,
)
from toolbus.parts.budgets.loop_share import LoopShare
from toolbus.parts.tripwire import tripwire
from toolbus.protocol.limits import KIB, MIB, Limits
from toolbus.protocol.session import MAX_ITEMS
from toolbus.testing import PATIENT, running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

ROOM = 4 * MIB
LIMITS = Limits(declared_bytes_per_source=ROOM, declared_bytes=2 * ROOM)


def wide(name: str, properties: int) -> pb.Tool:
    schema = {"type": "object", "properties": {f"{name}_{each}": {"type": "string"} for each in range(properties)}}
    return tool(name, schema)


def patterned(name: str, *patterns: str) -> pb.Tool:
    properties = {f"p{number}": {"type": "string", "pattern": each} for number, each in enumerate(patterns)}
    return tool(name, {"type": "object", "properties": properties})


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(limits=LIMITS) as bus:
        yield bus


def names(bus: Bus) -> set[str]:
    return {each.entry.name for each in bus.list()}


@pytest.mark.parametrize("later", [False, True], ids=["at the attach", "registered later"])
async def test_what_does_not_fit_is_refused_by_name_and_its_neighbours_are_offered(bus: Bus, later: bool) -> None:
    tools = [tool("first"), *(wide(f"wide{number}", 1100) for number in range(6)), tool("last")]
    async with RawPeer(await bus.dropin_address()) as peer:
        attached = await peer.attach("dropin", *(() if later else tools), token="t")
        refused = attached.refused
        if later:
            request = wire.RegisterRequest(session_id=attached.session_id, tools=tools)
            refused = (await peer.stub.Register(request)).refused
        assert {"first", "wide0", "last"} <= names(bus)
        assert {each.name for each in refused} == {each.name for each in tools} - names(bus)
        assert refused[0].name in refused[0].error
        assert f"declared_bytes_per_source = {ROOM}" in refused[0].error
    assert (await bus.call("toolbus:this_bus", {"kind": "tool", "name": "first"})).error is None


@pytest.mark.parametrize(
    "pattern",
    [r"^\p{{L}}{number}$", "^[a-z]{{0,100}}{number}$", "^.{{0,100}}{number}$", "^(?=.*x{number})y.*$"],
    ids=["a class", "counted", "any", "ahead"],
)
async def test_what_patterns_compile_to_counts(pattern: str) -> None:
    async with running_bus(limits=LIMITS) as bus, RawPeer(await bus.dropin_address()) as peer:
        patterns = [pattern.format(number=number) for number in range(10)]
        tools = [patterned(f"p{number}", *patterns) for number in range(100)]  # of 100 kB of texts together
        attached = await peer.attach("dropin", *tools, token="t")
        assert 1 < len(attached.registered) < 30
        assert f"declared_bytes_per_source = {ROOM}" in attached.refused[0].error


async def test_own_programs_declare_what_they_want(bus: Bus) -> None:
    async with RawPeer(bus.grpc_addresses[0]) as peer:
        attached = await peer.attach("own", *(wide(f"wide{number}", 1100) for number in range(6)))
        assert len(attached.registered) == 6


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (patterned("dear", *(rf"^[\p{{L}}\p{{N}}]{{0,{most}}}$" for most in range(40, 140))), "pattern_cost = 15000"),
        (patterned("dear", r"^\p{L}{0,31}$"), "pattern_cost = 15000"),
        (patterned("dear", r"^([a-z]{90}){200}$"), "pattern_cost = 15000"),
        (wide("dear", MAX_NODES), f"schema_nodes = {MAX_NODES}"),
    ],
    ids=["many patterns", "a class", "nested counts", "many properties"],
)
async def test_a_schema_that_is_too_dear_for_a_guarded_source_is_refused_before_it_is_compiled(
    declared: pb.Tool, says: str
) -> None:
    async with running_bus() as bus, RawPeer(await bus.dropin_address()) as peer:
        attached = await peer.attach("dropin", tool("a"), declared, patterned("b", "^[a-z]{1,20}$"), token="t")
        assert names(bus) == {"a", "b"}
        (refused,) = attached.refused
        assert refused.name == "dear"
        assert says in refused.error


@pytest.mark.parametrize(
    ("source", "token", "says"),
    [
        ("dropin", "", "carries no token"),
        ("own", "t", "is not guarded"),
        ("dropin:one", "other", "is bound to a token"),
    ],
)
async def test_tools_of_a_peer_that_may_not_attach_are_not_read(
    source: str, token: str, says: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RawPeer(await bus.dropin_address()) as first, RawPeer(await bus.dropin_address()) as peer:
        await first.attach("dropin:one", tool("a"), token="t")
        read = list[str]()
        monkeypatch.setattr(declarations, "read_tool", lambda message, *_, **options: read.append(message.name))
        status, text = await peer.refused(opening(source, tool("b"), token=token))
        assert (status, says in text, read) == (grpc.StatusCode.PERMISSION_DENIED, True, []), text


class Account:
    """A catalog in which budgets judge what accounts declare."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.registry = Registry()
        self.budgets = PeerBudgets(self.registry, Policy(), limits, LoopShare(lambda: False), Seams())
        self.limits = limits
        self.read: Callable[..., CompiledTool] = self.budgets.read
        self.peers: dict[str, Peer] = {}

    async def declare(self, account: str, source: str, *tools: pb.Tool) -> list[str]:
        """Declares tools; returns the names of those that were refused."""
        peer = self.peers.setdefault(source, Peer(self.limits, 0.0))
        peer.source = source
        refused: list[str] = []

        def work() -> None:
            for message in tools:
                try:
                    self.registry.register(peer, [self.read(message, self.limits)])
                except InvalidTool:
                    refused.append(message.name)

        await self.budgets.declare(Declaring(account, source, False, tools), work)
        return refused

    def lose(self, source: str) -> None:
        self.registry.clear(source)


def fitting(count: int) -> int:
    """Returns how many properties tools may have of which so many just fit."""
    each = NODE_BYTES + SCHEMA_BYTES * len('"a000_000": {"type": "string"}, ')
    return (ROOM // count - TOOL_BYTES) // each - 4


async def test_the_same_tools_may_be_declared_again_and_again() -> None:
    account = Account()
    tools = [wide(f"a{number}", fitting(4)) for number in range(4)]
    for _ in range(3):
        assert not await account.declare("x", "x", *tools)
        assert not await account.declare("x", "x", tools[1])
    assert await account.declare("x", "x", wide("more", 200)) == ["more"]


async def test_the_sources_of_one_identity_share_its_memory_and_give_it_back() -> None:
    account = Account()
    tools = [wide(f"a{number}", fitting(4)) for number in range(4)]
    assert not await account.declare("identity i", "one", *tools)
    assert await account.declare("identity i", "two", wide("b", 200)) == ["b"]
    assert not await account.declare("identity j", "other", wide("b", 200))
    account.lose("one")
    assert not await account.declare("identity i", "two", wide("b", 200))


async def test_all_accounts_together_have_a_bound_too() -> None:
    account = Account()
    for number in range(2):
        tools = [wide(f"a{number}{each}", fitting(4)) for each in range(4)]
        assert not await account.declare(f"identity {number}", f"s{number}", *tools)
    assert await account.declare("identity 3", "s3", wide("b", 3000)) == ["b"]
    account.lose("s1")
    assert not await account.declare("identity 3", "s3", wide("b", 3000))


def small_limits() -> Limits:
    """Returns limits with room for 100 small tools of one account, and for 120 of all."""
    one = read_tool(tool("a00"), Limits())
    size = memory_of(one.tool, one.compile_cost)
    return Limits(declared_bytes_per_source=100 * size, declared_bytes=120 * size)


def small(first: str, count: int) -> list[pb.Tool]:
    return [tool(f"{first}{number:02}") for number in range(count)]


async def test_what_a_request_has_offered_counts_although_its_next_part_fails() -> None:
    account = Account(small_limits())

    def work(part: wire.RegisterRequest) -> wire.RegisterResponse:
        if account.registry.all_entries("a"):
            raise RuntimeError("the session drains")
        account.registry.register(peer, [account.read(each, account.limits) for each in part.tools])
        return wire.RegisterResponse(ok=True)

    peer = Peer(account.limits, 0.0)
    peer.source = "a"
    request = wire.RegisterRequest(session_id="s", tools=small("a", 2 * MANY_TOOLS))
    with pytest.raises(RuntimeError):
        await account.budgets.register(Declaring("a", "a", False, request.tools), request, work)
    assert not await account.declare("b", "b", *small("b", 60))
    assert len(await account.declare("c", "c", *small("c", 60))) == 60 - (120 - MANY_TOOLS - 60)


async def test_what_is_declared_anew_counts_although_the_request_is_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account, loop = Account(small_limits()), asyncio.get_running_loop()
    assert not await account.declare("a", "a", *small("a", 40))

    def cancel(message: pb.Tool, *arguments: Any, **options: Any) -> CompiledTool:
        loop.call_soon_threadsafe(declaring.cancel)
        return read_tool(message, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(declarations, "read_tool", cancel)
        declaring = asyncio.create_task(account.declare("a", "a", *small("a", 40)))
        with pytest.raises(asyncio.CancelledError):
            await within(declaring)
    assert not await account.declare("b", "b", *small("b", 60))
    assert len(await account.declare("c", "c", *small("c", 60))) == 60 - (120 - 40 - 60)


async def test_what_has_no_room_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    account, compiled = Account(), list[str]()

    def read(message: pb.Tool, *arguments: Any, **options: Any) -> CompiledTool:
        compiled.append(message.name)
        return read_tool(message, *arguments, **options)

    monkeypatch.setattr(declarations, "read_tool", read)
    tools = [wide(f"a{number}", fitting(4)) for number in range(8)]
    refused = await account.declare("x", "x", *tools, tool("small"))
    assert refused == [each.name for each in tools[4:]]
    assert compiled == [*(each.name for each in tools[:4]), "small"]


async def test_declarations_are_not_held_a_second_time_while_they_are_read() -> None:
    tools, held = [wide(f"a{number}", 10_000) for number in range(8)], list[int]()
    own = tracemalloc.Filter(True, declarations.__file__)

    def work() -> None:
        held.append(sum(each.size for each in tracemalloc.take_snapshot().filter_traces([own]).traces))

    tracemalloc.start()
    try:
        await Account().budgets.declare(Declaring("x", "x", False, tools), work)
    finally:
        tracemalloc.stop()
    assert held[0] < sum(each.ByteSize() for each in tools) / 10


async def test_two_requests_of_one_account_do_not_use_the_same_room() -> None:
    account = Account()
    requests = [
        account.declare("x", f"s{number}", *(wide(f"a{number}{each}", fitting(4)) for each in range(4)))
        for number in range(3)
    ]
    refused = await asyncio.gather(*requests)
    assert [len(each) for each in refused] == [0, 4, 4]


@pytest.mark.parametrize("whose", ["x", OWN], ids=["less trusted", "own"])
async def test_many_tools_are_read_while_the_loop_goes_on(whose: str) -> None:
    account, turns = Account(Limits()), 0

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    assert not await account.declare(whose, "x", *(wide(f"a{number}", 300) for number in range(20)))
    beating.cancel()
    assert turns > 10


async def test_a_request_is_done_in_parts_and_answered_as_one() -> None:
    account, sizes = Account(Limits()), list[int]()
    tools = [*(tool(f"a{number}") for number in range(2 * MANY_TOOLS + 1)), tool("bad name")]

    def work(part: wire.RegisterRequest) -> wire.RegisterResponse:
        sizes.append(len(part.tools))
        bad = [wire.RefusedTool(name=each.name) for each in part.tools if " " in each.name]
        good = [each.name for each in part.tools if " " not in each.name]
        return wire.RegisterResponse(
            registered=good, affected_roles=["default"], refused=bad, refused_total=len(bad), ok=not bad
        )

    request = wire.RegisterRequest(session_id="s", tools=tools)
    response = await account.budgets.register(Declaring("x", "x", False, request.tools), request, work)
    assert sizes == [MANY_TOOLS, MANY_TOOLS, 2]
    assert list(response.registered) == [each.name for each in tools[:-1]]
    assert [each.name for each in response.refused] == ["bad name"]
    assert (response.refused_total, response.ok, list(response.affected_roles)) == (1, False, ["default"])
    request.all_or_none = True
    await account.budgets.register(Declaring("x", "x", False, request.tools), request, work)
    assert sizes[3:] == [len(tools)]


async def test_tools_that_are_declared_twice_are_refused_in_parts_as_they_are_in_one(bus: Bus) -> None:
    tools = [*(tool(f"a{number}") for number in range(2 * MANY_TOOLS)), *(tool("a7") for _ in range(3))]
    async with RawPeer(await bus.dropin_address()) as peer, RawPeer(bus.grpc_addresses[0]) as own:
        attached = await peer.attach("dropin", token="t")
        response = await peer.stub.Register(wire.RegisterRequest(session_id=attached.session_id, tools=tools))
        assert names(bus) == {f"a{number}" for number in range(2 * MANY_TOOLS)}
        assert [each.name for each in response.refused] == ["a7"] * 3
        assert all("declared twice" in each.error for each in response.refused)
        assert (response.refused_total, response.ok) == (3, False)
        listed = await own.stub.List(wire.ListRequest(include_refused=True))
        assert [each.name for each in listed.refused] == ["a7"], "the others would say the same"


@pytest.mark.parametrize("receives", [0, 256 * KIB])
async def test_the_answer_to_a_request_in_parts_is_no_larger_than_its_session_takes(bus: Bus, receives: int) -> None:
    long = "x" * 120
    tools = [tool(f"{long} {number}", f"no JSON {long}") for number in range(1000)]
    async with RawPeer(await bus.dropin_address()) as peer:
        attached = await peer.attach("dropin", token="t", max_message_bytes=receives)
        response = await peer.stub.Register(wire.RegisterRequest(session_id=attached.session_id, tools=tools))
        assert response.refused_total == len(tools)
        assert sum(len(each.error.encode()) for each in response.refused) <= TEXT_BYTES
        assert 0 < response.ByteSize() <= (receives or DEFAULT_RECEIVE_BYTES) // 4


async def test_others_have_their_turn_between_the_parts_of_a_request() -> None:
    account = Account(Limits())
    request = wire.RegisterRequest(tools=[tool(f"a{number}") for number in range(3 * MANY_TOOLS)])
    seen: list[str] = []

    def work(part: wire.RegisterRequest) -> wire.RegisterResponse:
        seen.append("part")
        asyncio.get_running_loop().call_soon(seen.append, "other")
        return wire.RegisterResponse(ok=True)

    assert (await account.budgets.register(Declaring("x", "x", False, request.tools), request, work)).ok
    assert seen == 3 * ["part", "other"]


async def test_refused_declarations_leave_no_cycles_that_hold_them(bus: Bus) -> None:
    tools = [wide("fits", 10), *(wide(f"wide{number}", MAX_NODES) for number in range(5)), tool("bad name")]
    async with RawPeer(await bus.dropin_address()) as peer:
        attached = await peer.attach("dropin", token="t")
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await peer.stub.Register(wire.RegisterRequest(session_id=attached.session_id, tools=tools))
            gc.collect()
            assert not [each for each in gc.garbage if isinstance(each, InvalidTool | pb.Tool)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


@pytest.mark.parametrize("said", ["result", "progress"])
async def test_what_is_long_is_searched_for_secrets_beside_the_loop(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, own, find = set[int](), threading.get_ident(), tripwire._finds_none

    def note(text: str) -> bool:
        threads.add(threading.get_ident())
        return find(text)

    monkeypatch.setattr(tripwire, "_finds_none", note)
    long = json.dumps({f"max_tokens_{number}": number for number in range(1000)})
    async with running_bus() as bus, RawPeer(await bus.dropin_address()) as peer:
        await peer.attach("dropin", tool("users"), token="t")
        for output in (long, long[:-1] + ', "password": "hunter2"}'):
            calling = asyncio.create_task(bus.call("users"))
            await until(lambda: peer.calls, "the call")
            call_id = peer.calls.pop().call_id
            if said == "progress":
                await peer.send(progress=[pb.ToolProgress(call_id=call_id, message=output)])
                await peer.send(results=[pb.ToolResult(call_id=call_id, output_json="1")])
            else:
                await peer.send(results=[pb.ToolResult(call_id=call_id, output_json=output)])
            error = (await within(calling)).error
            blocked = said == "result" and output is not long
            assert (error is not None and error.code is Code.SECRET_BLOCKED) is blocked
        assert own not in threads or said == "progress"
        assert threads - {own}


async def test_what_is_compiled_for_one_account_takes_a_part_of_the_time_however_much_waits_at_once() -> None:
    account, times = Account(), list[tuple[float, float]]()

    def work() -> None:
        began, worked = time.monotonic(), time.thread_time()
        while time.thread_time() < worked + 2 * READ_BURST_SECONDS:
            pass
        times.append((began, time.monotonic()))

    await asyncio.gather(*(account.budgets.compile("a", work) for _ in range(2)))
    (_, ended), (began, _) = times
    assert began - ended > 0.5 * READ_BURST_SECONDS / IDLE_READ_SHARE


async def test_reading_counts_that_fails_or_whose_request_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, budgets = list[float](), Account().budgets
    began, cancelled = threading.Event(), threading.Event()

    def rest_of(seconds: float, *, is_busy: bool, piece: float) -> float:
        if piece:
            counted.append(seconds)
        return 0.0

    def work() -> None:
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        began.set()
        assert cancelled.wait(WAIT_SECONDS)
        raise InvalidTool(["bad"])

    monkeypatch.setattr(declarations, "rest_of", rest_of)
    reading = asyncio.create_task(budgets.compile("a", work))
    await until(began.is_set)
    reading.cancel()
    cancelled.set()
    await asyncio.wait([reading])
    assert reading.cancelled()
    with pytest.raises(InvalidTool):
        await budgets.compile("a", work)
    assert len(counted) == 2
    assert min(counted) >= 0.005


def test_a_schema_that_holds_own_calls_for_long_counts_more_than_many_short_ones() -> None:
    assert rest_of(0.01, is_busy=True, piece=0.01) == 0.01 / READ_SHARE
    assert rest_of(0.04, is_busy=True, piece=0.04) == 4 * 4 * 0.01 / READ_SHARE
    assert rest_of(0.04, is_busy=False, piece=0.04) == 0.04 / IDLE_READ_SHARE


def test_a_message_with_many_or_large_calls_is_read_in_pieces() -> None:
    for frame, sizes in (
        (wire.InvokeRequest(calls=[pb.ToolCall() for _ in range(2 * PIECE_CALLS + 1)]), [PIECE_CALLS, PIECE_CALLS]),
        (wire.InvokeRequest(calls=[pb.ToolCall(arguments_json="x" * PIECE_BYTES) for _ in range(3)]), [1, 1]),
        (wire.InvokeRequest(calls=[pb.ToolCall()]), []),
        (wire.InvokeRequest(), []),
    ):
        pieces = list(iter(lambda frame=frame: first_calls(frame), None))  # type: ignore[misc]
        assert [len(each.calls) for each in pieces] == sizes
        assert len(frame.calls) <= 1


async def test_a_large_response_of_a_callback_is_read_at_the_pace_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, threads, read = list[tuple[str, float]](), list[bool](), callback_messages.read_response

    async def spend(budgets: PeerBudgets, account: str, seconds: float) -> None:
        spent.append((account, seconds))

    def note(status: int, body: bytes, charset: str, tool_name: str) -> pb.ToolResult:
        threads.append(threading.current_thread() is not threading.main_thread())
        return read(status, body, charset, tool_name)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"output": "x" * sizes[0]})

    monkeypatch.setattr(callback_messages, "read_response", note)

    monkeypatch.setattr(PeerBudgets, "spend", spend)
    sizes, server = [1_000], web.Application()
    server.router.add_post("/tool", answer)
    runner = web.AppRunner(server, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with running_bus() as bus:
        await offer(bus, {"tool": f"http://127.0.0.1:{runner.addresses[0][1]}/tool"})
        assert (await bus.call("tool")).unwrap() == "x" * 1_000
        assert not spent
        sizes[0] = 4 * LARGE_BODY
        assert (await bus.call("tool")).unwrap() == "x" * sizes[0]
        assert sum(seconds for _, seconds in spent) >= 2 * LARGE_BODY * BYTE_SECONDS
        assert threads == [False, True]
    await runner.cleanup()


def test_what_waits_for_an_account_has_a_bound_and_one_message_of_each_always_fits() -> None:
    waiting = Account(Limits(held_bytes_per_source=10, held_bytes=25)).budgets.waiting
    with waiting("x", 12), waiting("y", 5), waiting("y", 5):
        with (
            pytest.raises(LimitExceeded, match=r"x .* 13 bytes .* \(limit held_bytes_per_source = 10\)"),
            waiting("x", 1),
        ):
            pass
        with waiting("z", 2), pytest.raises(LimitExceeded, match=r"\(limit held_bytes = 25\)"), waiting("z", 2):
            pass
        with waiting("w", 9):
            pass
    with waiting("x", 5), waiting("x", 5):
        pass


@pytest.mark.parametrize("source", ["", "identity chat", "x" * 129])
async def test_an_attach_with_a_source_that_no_peer_may_have_counts_for_all_whom_the_bus_refuses(source: str) -> None:
    budgets = Account(Limits(held_bytes_per_source=MIB)).budgets
    frame = wire.InvokeRequest(attach=wire.Attach(source=source, tools=[tool("t", "x" * MIB)]))
    with budgets.waiting("peers that attach as refused", 1), pytest.raises(LimitExceeded, match="attach as refused"):
        await budgets.take(Principal(source), {}, frame, lambda frame: None)


async def test_an_attach_takes_no_room_from_the_sessions_of_the_source_that_it_claims() -> None:
    budgets, text = Account(Limits(held_bytes_per_source=MIB)).budgets, "x" * 800_000
    attach = wire.Attach(source="x", tools=[tool("t", text)])
    frames = wire.InvokeRequest(attach=attach), wire.InvokeRequest(results=[pb.ToolResult(output_json=text)])
    async with budgets.share.turn("another"):
        taking = [asyncio.create_task(budgets.take(Principal("x"), {}, each, lambda frame: None)) for each in frames]
        await asyncio.sleep(0)
    await within(asyncio.gather(*taking))


async def test_empty_items_count_with_the_memory_that_they_take() -> None:
    budgets, context = Account(Limits(held_bytes_per_source=MIB)).budgets, pb.CallContext()
    context.messages.extend([pb.ContextMessage()] * MAX_ITEMS)
    frames = (
        wire.InvokeRequest(calls=[pb.ToolCall()] * MAX_ITEMS),
        wire.InvokeRequest(cancels=[pb.ToolCancel()] * MAX_ITEMS),
        wire.InvokeRequest(calls=[pb.ToolCall(context=context)]),
        wire.InvokeRequest(results=[pb.ToolResult(content=[pb.ContentBlock()] * MAX_ITEMS)]),
    )
    with budgets.waiting("x", 1):
        for frame in frames:
            with pytest.raises(LimitExceeded, match="held_bytes_per_source"):
                await budgets.take(Principal("x"), {}, frame, lambda frame: None)


async def test_requests_and_frames_that_would_wait_beyond_the_bound_are_refused_by_its_name() -> None:
    async with running_bus(limits=Limits(held_bytes_per_source=MIB)) as bus, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(RawPeer(await bus.dropin_address())) for _ in range(4)]
        ids = [(await peer.attach("dropin", token="t")).session_id for peer in peers]
        large = [pb.ToolResult(call_id="not in flight", output_json="x" * 400_000)]
        async with budgets_of(bus).share.turn("another"):  # so that everything waits
            await asyncio.gather(*(peer.send(results=large) for peer in peers[:3]))
            await until(lambda: any(peer.code for peer in peers[:3]), "the end of the stream that would wait too")
            (ended,) = (peer for peer in peers if peer.code)
            assert ended.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "held_bytes_per_source = 1048576" in ended.details
            tools = [tool("large", "x" * 400_000)]
            with pytest.raises(grpc.aio.AioRpcError, match="held_bytes_per_source = 1048576"):
                await peers[3].stub.Register(wire.RegisterRequest(session_id=ids[3], tools=tools))
            # What breaks the rule of the number of items waits for nothing, whatever it takes in memory.
            await peers[3].send(calls=[pb.ToolCall()] * (MAX_ITEMS + 1))
            assert (await peers[3].ended())[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert not [peer for peer in peers[:3] if peer is not ended and peer.code]


async def test_a_call_that_its_caller_gave_up_while_it_waited_does_not_run() -> None:
    async with running_bus() as bus, RawPeer(await bus.dropin_address()) as peer:
        ran = list[int]()

        @bus.tool
        def note(number: int) -> None:
            ran.append(number)

        await peer.attach("dropin", token="t")
        async with budgets_of(bus).share.turn("another"):  # so that everything waits
            calls = [
                pb.ToolCall(call_id=str(each), name="note", arguments_json=f'{{"number":{each}}}') for each in (1, 2)
            ]
            await peer.send(calls=calls)
            await until(lambda: waits(bus, "dropin"), "the calls to wait")
            await peer.send(cancels=[pb.ToolCancel(call_id="1")])
            await asyncio.sleep(LATE_SECONDS + 0.1)
        await until(lambda: len(peer.results) == 2, "both results")
        assert ran == [2]
        assert {each.call_id: Code(each.error.code) for each in peer.results} == {
            "1": Code.CANCELLED,
            "2": Code.UNSPECIFIED,
        }


async def test_a_peer_is_not_taken_for_hung_while_its_message_waits() -> None:
    timings = replace(PATIENT, tick_seconds=0.01, busy_heartbeat_seconds=0.02, idle_heartbeat_seconds=0.02)
    async with running_bus(timings=timings) as bus, RawPeer(await bus.dropin_address()) as peer:
        await peer.attach("dropin", tool("t"), token="t")
        calling = asyncio.create_task(bus.call("t"))
        await until(lambda: peer.calls, "the call")
        async with budgets_of(bus).share.turn("another"):  # so that everything waits
            await peer.send(progress=[pb.ToolProgress(call_id=peer.calls[0].call_id)])
            await until(lambda: waits(bus, "dropin"), "the message to wait")
            before = peer.heartbeats
            await until(lambda: calling.done() or peer.heartbeats > before + 2 * timings.missed_heartbeats_gone)
        await peer.send(results=[pb.ToolResult(call_id=peer.calls[0].call_id, output_json="1")])
        assert (await within(calling)).output == 1
