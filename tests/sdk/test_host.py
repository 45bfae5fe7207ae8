from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from typing import Any

import pytest

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.waiting import until, within
from toolbus.bus import Bus
from toolbus.errors import Code, PeerLost, RequestError
from toolbus.functions.call_context import CallContext, CallOptions, Inputs
from toolbus.functions.scope import ToolScope
from toolbus.protocol.questions import Answer, Question
from toolbus.sdk.host import MAX_UNREAD, FeedReader, Host, HostDelegate, SyncHost
from toolbus.sdk.listing import CatalogChange, ListedTool
from toolbus.sdk.outgoing_calls import OutgoingCall
from toolbus.sdk.plugin_client import Plugin
from toolbus.testing import PairedSessions, running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


def at(bus: Bus) -> str:
    return bus.grpc_addresses[0]


def calculator(address: str) -> Plugin:
    plugin = Plugin("calc", address=address)

    @plugin.tool
    async def add(a: int, b: int) -> int:
        return a + b

    @plugin.tool
    async def who(ctx: ToolScope) -> str:
        return ctx.context.user_id

    return plugin


# -- calling ----------------------------------------------------------------------------------------------------------


async def test_many_calls_at_once_come_back_in_their_order() -> None:
    async with running_bus() as bus, Host(at(bus), max_in_flight=8) as host, calculator(at(bus)) as plugin:
        await within(plugin.ready())
        results = await within(host.call_many([("add", {"a": number, "b": 1}) for number in range(300)]))
        assert [result.unwrap() for result in results] == list(range(1, 301))
        assert len({result.call_id for result in results}) == 300


async def test_a_host_tells_whether_it_is_connected() -> None:
    async with running_bus() as bus:
        host = Host(at(bus))
        seen = [host.connected]
        await within(host.ready())
        seen.append(host.connected)
        assert seen == [False, True]
        await bus.stop()
        await until(lambda: not host.connected, "the end of the connection")
        await host.close()


async def test_of_many_calls_none_is_sent_where_one_cannot_be() -> None:
    async with running_bus() as bus:
        ran: list[int] = []

        @bus.tool
        async def note(n: int) -> None:
            ran.append(n)

        calls: list[tuple[str, Any]] = [("note", {"n": 1}), ("note", {"n": object()})]

        def blocking() -> None:
            with SyncHost(at(bus)) as host:
                host.ready()
                with pytest.raises(TypeError):
                    host.call_many(calls)
                host.call("note", {"n": 2})

        await within(asyncio.to_thread(blocking))
        async with Host(at(bus)) as host:
            with pytest.raises(TypeError):
                await host.call_many(calls)
            await within(host.call("note", {"n": 3}))
        with pytest.raises(TypeError):
            await bus.call_many(calls)
        await within(bus.call("note", {"n": 4}))
        assert ran == [2, 3, 4]


def test_a_timeout_above_300_s_counts_as_300_for_waiting_too() -> None:
    out = OutgoingCall("add", "{}", lambda out, came: None, options=CallOptions(1_000.0))
    assert out.timeout == 300.0
    assert out.soft_deadline - out.started_at == pytest.approx(300.0)


async def test_context_of_a_host_reaches_the_tool() -> None:
    async with running_bus() as bus, Host(at(bus)) as host, calculator(at(bus)) as plugin:
        await within(plugin.ready())
        result = await within(host.call("who", context=CallContext(user_id="ann")))
        assert result.unwrap() == "ann"


async def test_a_host_answers_what_a_tool_asks_and_the_tool_runs_again() -> None:
    async with running_bus() as bus, Host(at(bus)) as host:
        plugin = Plugin("hotel", address=at(bus))
        runs = []

        @plugin.tool(needs=["elicitation.form"], output_schema={"type": "string"}, validate_output=True)
        async def book(city: str, ctx: ToolScope) -> Any:
            runs.append(ctx.accepts)
            day = await ctx.elicit("Which day?", {"day": {"type": "string"}})
            sure = await ctx.elicit(f"{city} on {day.content['day']}?")
            return f"{city} {day.content['day']}" if sure.accepted else 0

        async def answer(question: Question) -> Any:
            await asyncio.sleep(0)
            return {"day": "friday"} if question.schema["properties"] else Answer(agrees)

        async with plugin:
            await within(plugin.ready())
            (listed,) = await within(host.list(names=["book"]))
            assert (listed.tool.needs, listed.tool.output_schema) == (("elicitation.form",), {"type": "string"})
            agrees = "accept"
            assert (await within(host.call("book", {"city": "Oslo"}, on_input=answer))).unwrap() == "Oslo friday"
            assert runs == [("elicitation.form",)] * 3
            with SyncHost(at(bus)) as blocking:
                fill_in: dict[str, Any] = {"Which day?": {"day": "monday"}, "Oslo on monday?": Answer()}
                done = asyncio.to_thread(
                    blocking.call, "book", {"city": "Oslo"}, on_input=lambda question: fill_in[question.message]
                )
                assert (await within(done)).unwrap() == "Oslo monday"
            assert (await within(bus.call("book", {"city": "Oslo"}, on_input=answer))).unwrap() == "Oslo friday"

            asked = await within(host.call("book", {"city": "Oslo"}, inputs=Inputs()))
            (key,) = json.loads(asked.input_requests_json)
            later = Inputs(answers={key: Answer("accept", {"day": "sunday"}).to_json()}, state=asked.request_state)
            assert "Oslo on sunday?" in (await within(host.call("book", {"city": "Oslo"}, inputs=later))).text

            agrees, before = "decline", len(runs)
            refused = await within(host.call("book", {"city": "Oslo"}, on_input=answer))
            assert refused.error is not None
            assert refused.error.reason == "output_schema"
            alone = await within(host.call("book", {"city": "Oslo"}))
            assert alone.error is not None
            assert (alone.error.code, alone.error.reason) == (Code.INVALID_ARGUMENTS, "needs_input")
            assert len(runs) == before + 3


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
async def test_a_timeout_that_is_not_above_zero_is_refused(timeout: float) -> None:
    async with running_bus() as bus, Host(at(bus)) as host:
        with pytest.raises(ValueError, match="more than 0"):
            await host.call("add", timeout=timeout)


async def test_one_host_serves_several_loops() -> None:
    async with running_bus() as bus, Host(at(bus)) as host, calculator(at(bus)) as plugin:
        await within(plugin.ready())

        async def ten() -> list[Any]:
            return [(await host.call("add", {"a": number, "b": 0})).unwrap() for number in range(10)]

        elsewhere = asyncio.to_thread(asyncio.run, ten())
        here, there = await within(asyncio.gather(ten(), elsewhere))
        assert here == there == list(range(10))


async def test_a_host_keeps_no_loop_that_was_closed() -> None:
    async with running_bus() as bus, Host(at(bus)) as host, calculator(at(bus)) as plugin:
        await within(plugin.ready())
        loops = weakref.WeakSet[asyncio.AbstractEventLoop]()

        async def call() -> None:
            loops.add(asyncio.get_running_loop())
            await host.call("add", {"a": 1, "b": 0})

        for _ in range(5):
            await within(asyncio.to_thread(asyncio.run, call()))
        gc.collect()
        assert len(loops) == 1, "only that of the last call"


async def test_closing_ends_the_calls_in_flight_as_cancelled_and_refuses_new_ones() -> None:
    async def accept(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read_until("calls")
        called.set()
        cancels.extend((await stream.read_until("cancels")).cancels)

    called = asyncio.Event()
    cancels: list[pb.ToolCancel] = []
    async with played_bus(accept) as bus:
        host = Host(bus.address)
        call = asyncio.create_task(host.call("add"))
        await within(called.wait())
        await within(host.close())
        error = (await within(call)).error
        assert error is not None
        assert error.code is Code.CANCELLED
        assert len(cancels) == 1
        with pytest.raises(PeerLost, match="closed"):
            await host.call("add")
        await host.close()


async def test_drain_waits_for_the_calls_in_flight() -> None:
    async with running_bus() as bus:
        plugin = Plugin("calc", address=at(bus))
        began, release = asyncio.Event(), asyncio.Event()

        @plugin.tool
        async def slow() -> str:
            began.set()
            await release.wait()
            return "done"

        async with plugin:
            await within(plugin.ready())
            host = Host(at(bus))
            call = asyncio.create_task(host.call("slow"))
            await within(began.wait())
            drained = asyncio.create_task(host.drain())
            release.set()
            await within(drained)
            assert (await within(call)).unwrap() == "done"


# -- listing ----------------------------------------------------------------------------------------------------------


async def test_a_listing_has_the_tool_its_source_state_and_hash() -> None:
    async with running_bus() as bus, Host(at(bus)) as host, calculator(at(bus)) as plugin:
        await within(plugin.ready())
        listing = await within(host.list())
        listed = listing[0]
        assert [each.name for each in listing] == ["add", "who"]
        assert (listed.source, listed.state, listed.roles, listed.sessions) == ("calc", "live", ("default",), 1)
        assert listed.schema_hash == plugin.tools.get("add").tool.schema_hash  # type: ignore[union-attr]
        assert (await host.call("add", {"a": 1, "b": 1}, schema_hash=listed.schema_hash)).unwrap() == 2
        assert [each.name for each in await host.list(names=["who"])] == ["who"]
        assert len(await host.list(source="other")) == 0
        again = await host.list(if_revision=listing.revision)
        assert (again.unchanged, len(again), again.revision) == (True, 0, listing.revision)
        with pytest.raises(RequestError, match="nobody"):
            await host.list("nobody")


async def test_a_long_listing_is_followed_page_by_page() -> None:
    async with running_bus() as bus, Host(at(bus)) as host:
        plugin = Plugin("many", address=at(bus))
        for number in range(300):
            plugin.add_tool(lambda: 1, name=f"t{number}", description="d" * 15_000)
        async with plugin:
            await within(plugin.ready())
            assert [each.name for each in await within(host.list())] == [f"t{number}" for number in range(300)]


def test_names_that_only_listings_have_are_read_as_they_are() -> None:
    for name in ("calc:" + "x" * 64, "any thing: really ✓"):
        message = wire.ListedTool(tool=pb.Tool(name=name, description="d"), source="calc", schema_hash="h")
        message.session_state = wire.SESSION_STATE_OFFLINE
        listed = ListedTool.from_wire(message)
        assert (listed.name, listed.tool.name, listed.schema_hash, listed.state) == (name, name, "h", "offline")
        assert listed.tool.schema_hash == "h"


# -- watching ---------------------------------------------------------------------------------------------------------


async def test_a_watcher_gets_everything_first_and_then_what_changes() -> None:
    async with running_bus() as bus, Host(at(bus)) as host:
        await within(host.ready())  # the subscription comes with a later attach
        async with calculator(at(bus)) as plugin:
            await within(plugin.ready())
            changes = host.watch()
            first: CatalogChange = await within(anext(changes))
            assert first.full
            assert [each.name for each in first.added] == ["add", "who"]
            plugin.add_tool(lambda: 1, name="one")
            second: CatalogChange = await within(anext(changes))
            assert not second.full
            assert [each.name for each in second.added] == ["one"]
            other = host.watch()
            late: CatalogChange = await within(anext(other))
            assert (late.full, late.revision, len(late.added)) == (True, second.revision, 3)
            plugin.remove_tool("add")
            third: CatalogChange = await within(anext(changes))
            assert [(each.name, each.source) for each in third.removed] == [("add", "calc")]
            await changes.aclose()
            await other.aclose()


async def test_a_watcher_gets_the_whole_again_after_a_new_connection() -> None:
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        host = Host(address)
        changes = host.watch()
        assert (await within(anext(changes))).full
    async with running_bus(grpc=(address,)):
        assert (await within(anext(changes))).full
        await changes.aclose()
    await host.close()


async def test_a_reader_that_is_far_behind_gets_the_newest_notifications_and_the_whole_catalog() -> None:
    delegate, woken = HostDelegate(0.0), list[str]()
    changes, notices = FeedReader(lambda: woken.append("changes")), FeedReader(lambda: woken.append("notices"))
    await delegate.read("catalog", changes)
    await delegate.read("notifications", notices)
    names = [f"t{number}" for number in range(MAX_UNREAD + 2)]
    delegate.event(wire.Event(catalog=wire.CatalogChange(revision=1, full=True)))
    for number, name in enumerate(names, 1):
        listed = wire.ListedTool(tool=pb.Tool(name=name), source="x")
        delegate.event(wire.Event(catalog=wire.CatalogChange(revision=1 + number, added=[listed])))
        delegate.event(wire.Event(notification=wire.Notification(source="x", number=number, lost=int(number == 1))))
    whole, *later = changes.take()
    assert (whole.full, [each.name for each in whole.added]) == (True, names[:MAX_UNREAD])
    assert [(each.full, each.added[0].name) for each in later] == [(False, name) for name in names[MAX_UNREAD:]]
    oldest, *others = notices.take()
    assert (oldest.number, oldest.lost, len(others), others[-1].number) == (3, 3, MAX_UNREAD - 1, len(names))
    assert {each.lost for each in others} == {0}
    assert woken == ["changes", "notices"]


async def test_a_feed_gives_what_came_before_the_end_of_the_connection() -> None:
    async def tell(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.write(events=[wire.Event(notification=wire.Notification(source="x", number=7))])
        await stream.write(drain=wire.Drain(reason="requested"))
        await stream.read()

    async with played_bus(tell) as bus:
        with SyncHost(bus.address) as host:
            seen = await within(asyncio.to_thread(_all_of, host))
    assert seen == [7]


def _all_of(host: SyncHost) -> list[int]:
    seen: list[int] = []
    with pytest.raises(PeerLost, match="operator"):
        seen.extend(each.number for each in host.notifications())
    return seen


async def test_watching_ends_with_the_connection() -> None:
    async def send_away(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.write(drain=wire.Drain(reason="requested"))
        await stream.read()

    async with played_bus(send_away) as bus, Host(bus.address) as host:
        with pytest.raises(PeerLost, match="operator"):
            await within(anext(host.watch()))


# -- without asyncio --------------------------------------------------------------------------------------------------


async def test_the_blocking_twin_does_the_same() -> None:
    async with running_bus() as bus:
        plugin = calculator(at(bus))

        @plugin.tool
        async def count(ctx: ToolScope) -> str:
            ctx.progress(1, total=2)
            ctx.progress(2, total=2)
            return "done"

        async with plugin:
            await within(plugin.ready())

            def blocking() -> None:
                here = threading.current_thread()
                with SyncHost(at(bus)) as host:
                    host.ready()
                    assert host.call("add", {"a": 1, "b": 2}).unwrap() == 3
                    many = host.call_many([("add", {"a": number, "b": 0}) for number in range(20)])
                    assert [result.unwrap() for result in many] == list(range(20))
                    assert [each.name for each in host.list()] == ["add", "who", "count"]
                    threads = []
                    host.call("count", on_progress=lambda progress: threads.append(threading.current_thread()))
                    assert threads == [here, here]
                    first = next(iter(host.watch()))
                    assert (first.full, len(first.added)) == (True, 3)
                    host.drain()
                with pytest.raises(PeerLost):
                    host.call("add")

            await within(asyncio.to_thread(blocking))


# -- paired sessions --------------------------------------------------------------------------------------------------


def test_paired_sessions_carry_frames_without_a_network() -> None:
    pair = PairedSessions()
    pair.peer.outbox.room(10).calls.add(call_id="1", name="add")

    def answer(arm: str, value: Any) -> None:
        if arm == "calls":
            pair.bus.outbox.room(10).results.add(call_id=value[0].call_id, output_json="3")

    assert pair.pump(to_bus=answer) == 2
    assert [arm for arm, _ in pair.seen_by_bus] == ["calls"]
    assert pair.seen_by_peer[0][1][0].output_json == "3"
    pair.break_off()
    assert pair.pump() == 0
