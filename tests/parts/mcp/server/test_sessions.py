"""Sessions of legacy clients: sealed ids, limits, silence, and their end."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parts.mcp.server.asking import Mounted, mcp_bench
from tests.parts.mcp.server.http_client import HttpClient, serving
from tests.support.waiting import until, within
from toolbus.bus.access.identity import LOCAL, Identity, Scopes
from toolbus.bus.keys.seal import Sealer
from toolbus.bus.storage.store import Kind, MemoryDriver, Store, WriteFailed
from toolbus.bus.web_paths import Message
from toolbus.errors import LimitExceeded
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages.jsonrpc import RpcError
from toolbus.parts.mcp.server import sessions as sessions_module
from toolbus.parts.mcp.server import subscriptions
from toolbus.parts.mcp.server.calls import ERROR_META
from toolbus.parts.mcp.server.mcp_endpoint import lost_answer
from toolbus.parts.mcp.server.message_stream import MAX_BYTES, MAX_EVENTS, MessageStream
from toolbus.parts.mcp.server.sessions import (
    CHANGED,
    IDLE_SECONDS,
    MAX_STREAMS,
    UPDATED,
    ClientCapabilities,
    McpSession,
    Sessions,
    UnknownSession,
)
from toolbus.parts.mcp.server.subscriptions import COALESCE_SECONDS
from toolbus.parts.mcp.settings import Profile
from toolbus.protocol.limits import MIB, Timings

PROFILE = Profile()
KEY = b"k" * 32
ABLE = ClientCapabilities(frozenset({"roots", "elicitation.form"}), frozenset({"x"}))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_an_id_says_what_was_agreed_on_to_the_next_bus_with_the_same_key() -> None:
    id = Sessions(Sealer(KEY)).begin("2025-06-18", ABLE, PROFILE, LOCAL).id
    session = await Sessions(Sealer(KEY)).find(id, PROFILE, LOCAL)
    assert (session.version, session.client, session.log_level) == ("2025-06-18", ABLE, "info")


async def test_an_id_is_valid_for_its_profile_and_its_key_only() -> None:
    sessions = Sessions(Sealer(KEY))
    id = sessions.begin("2025-06-18", ABLE, PROFILE, LOCAL).id
    for profile, identity in ((Profile(name="other"), LOCAL), (PROFILE, Identity("chat", Scopes()))):
        with pytest.raises(UnknownSession):
            await sessions.find(id, profile, identity)
    for other in ("", "x", id[:-1], Sessions(Sealer(b"x" * 32)).begin("2025-06-18", ABLE, PROFILE, LOCAL).id):
        with pytest.raises(UnknownSession):
            await sessions.find(other, PROFILE, LOCAL)


async def test_a_silent_session_is_forgotten_and_made_anew_as_it_was_when_it_speaks() -> None:
    clock = Clock()
    sessions = Sessions(Sealer(KEY), clock)
    session = sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL)
    session.set_level("error")
    await sessions.save(session)
    clock.now += IDLE_SECONDS + 1
    sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL)
    assert len(sessions) == 1
    again = await sessions.find(session.id, PROFILE, LOCAL)
    assert (again is session, again.client, again.log_level) == (False, ABLE, "error")


async def test_the_session_that_was_silent_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    clock = Clock()
    sessions = Sessions(Sealer(KEY), clock)
    first, second = (sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL) for _ in range(2))
    clock.now += 1
    await sessions.find(first.id, PROFILE, LOCAL)
    sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL)
    assert len(sessions) == 2
    assert await sessions.find(first.id, PROFILE, LOCAL) is first
    assert await sessions.find(second.id, PROFILE, LOCAL) is not second


def test_a_session_that_runs_something_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 1)
    sessions = Sessions(Sealer(KEY))
    sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL).running[1] = set()
    with pytest.raises(LimitExceeded, match="mcp_sessions = 1"):
        sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL)


async def test_streams_that_ended_make_room_for_others() -> None:
    session = Sessions(Sealer(KEY)).begin("2025-11-25", ABLE, PROFILE, LOCAL)
    streams = [session.new_stream() for _ in range(MAX_STREAMS)]
    with pytest.raises(LimitExceeded, match="mcp_streams"):
        session.new_stream()
    streams[3].close()
    session.new_stream()
    assert session.stream_of(f"{streams[3].id}-1") is None
    assert session.stream_of(f"{streams[4].id}-1") == (streams[4], 1)


async def test_streams_that_ended_keep_little_in_all() -> None:
    session = Sessions(Sealer(KEY)).begin("2025-11-25", ABLE, PROFILE, LOCAL)
    streams = [session.new_stream() for _ in range(4)]
    for stream in streams:
        stream.send(b"x" * 2 * MIB)
        if stream is not streams[0]:
            stream.close()
    session.new_stream()
    found = [session.stream_of(f"{stream.id}-1") is not None for stream in streams]
    assert found == [True, False, True, True]


async def test_a_stream_that_nobody_may_listen_to_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MAX_LISTENERS", 0)
    async with mcp_bench() as bench:
        session, stream = bench.session(), MessageStream("s")
        with pytest.raises(LimitExceeded, match="mcp_listeners"):
            session.stand(stream, bench.server.subscriptions.follow)
        session.notify("notifications/tools/list_changed")
        assert stream.size == 0


async def test_a_stream_keeps_its_newest_events_only() -> None:
    stream = MessageStream("s")
    for number in range(MAX_EVENTS + 5):
        stream.send(b"%d" % number)
    stream.close()
    written = await body_of(stream)
    assert written.count(b"data: ") == MAX_EVENTS
    assert written.startswith(b"id: s-6\nevent: message\ndata: 5\n\n")
    large = MessageStream("s")
    large.send(b"small")
    large.send(b"x" * 2 * MAX_BYTES)
    large.close()
    assert (await body_of(large)).count(b"data: ") == 1


async def test_the_newest_response_takes_a_stream_over() -> None:
    stream = MessageStream("s")
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    first = asyncio.create_task(stream.write(send, ping_seconds=60))
    await until(lambda: stream.writing == 1)
    second = asyncio.create_task(stream.write(send, ping_seconds=60))
    await within(first)
    stream.send(b"x")
    stream.close()
    await within(second)
    assert sum(b"data: x" in message.get("body", b"") for message in sent) == 1


async def body_of(stream: MessageStream) -> bytes:
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    await within(stream.write(send, ping_seconds=60))
    return b"".join(parts)


# -- over HTTP -------------------------------------------------------------------------------------------------------


async def test_a_session_goes_on_after_a_restart_of_the_bus(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path) as bus:
        client = HttpClient(bus)
        await client.initialize("2025-06-18", {"roots": {}})
    async with serving(data_dir=tmp_path) as bus:
        again = HttpClient(bus)
        again.session = client.session
        assert await again.names() == []


async def test_a_call_that_the_bus_took_with_it_ends_when_its_client_resumes_the_stream(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path, timings=replace(Timings(), resumable_seconds=0.0)) as bus:
        client = HttpClient(bus)
        await client.initialize()

        @bus.tool
        async def long() -> None:
            await asyncio.Event().wait()

        calls = [client.begin("tools/call", {"name": "long", "arguments": {}}, id=id) for id in (7, "a-b.c", "x" * 99)]
        standing = client.listen()
        await until(lambda: all(each.events for each in (*calls, standing)), "an event of each stream")
        last = [each.events[0]["id"] for each in (*calls, standing)]
    async with serving(data_dir=tmp_path) as bus:
        again = HttpClient(bus)
        again.session = client.session
        for id, event in zip((7, "a-b.c"), last[:2], strict=True):
            resumed = await again.listen(event).done()
            assert (resumed.answer["id"], resumed.result["isError"]) == (id, True)
            assert resumed.result["_meta"][ERROR_META] == {
                "code": "UNAVAILABLE",
                "stage": "UNKNOWN",
                "retry_safe": False,
            }
        assert (await again.listen(last[2]).done()).status == 404
        assert await again.names() == []
        for broken in ("c.-1", "c.%%.1-1", "c.WzFd.1-1", "r.~.2-2"):
            assert (await again.listen(broken).done()).status == 404
        # What changed while there was no bus was not told: the client lists again.
        stream = again.listen(last[3])
        told = [message["method"] for message in await stream.told(3)]
        assert told == [f"notifications/{kind}/list_changed" for kind in ("tools", "prompts", "resources")]
        stream.leave()
        await within(stream.task)


async def test_a_client_that_never_opens_its_stream_again_hears_once_that_lists_may_have_changed(
    tmp_path: Path,
) -> None:
    async with serving(data_dir=tmp_path) as bus:
        client = HttpClient(bus)
        await client.initialize()
    async with serving(data_dir=tmp_path) as bus:

        @bus.tool
        def add(a: int = 1) -> int:
            return a

        again = HttpClient(bus)
        again.session = client.session
        plain = await again.call("add", headers={"Accept": "application/json"})
        assert (plain.is_stream, plain.result["content"][0]["text"]) == (False, "1")
        first, second = await again.call("add"), await again.call("add")
        changed = [f"notifications/{kind}/list_changed" for kind in ("tools", "prompts", "resources")]
        assert [each.get("method") for each in first.messages] == [*changed, None]
        assert [each.get("method") for each in second.messages] == [None]
        stream = again.listen()
        await until(lambda: stream.events, "the first event")
        assert not stream.messages
        stream.leave()
        await within(stream.task)


async def test_streams_that_wait_for_changes_end_properly_before_the_bus_stops(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path) as bus:
        modern, legacy = HttpClient(bus), HttpClient(bus)
        await legacy.initialize()
        listening = modern.begin("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        standing = legacy.listen()
        await listening.told(1)
        await until(lambda: standing.events, "the first event")

        @bus.tool
        def add(a: int) -> int:
            return a

        await listening.told(2)
        await standing.told(1)
        bus.core.sessions.presence.draining = True  # as a plugin that leaves at a drain sees it
        assert bus.remove_tool("add")
        await asyncio.sleep(5 * COALESCE_SECONDS)
        bus.core.signals.close()
        await listening.done()
        await standing.done()
        assert listening.result["_meta"]
        assert [each.get("method", "").rpartition("/")[2] for each in listening.messages] == [
            "acknowledged", "list_changed", "",
        ]  # fmt: skip
        assert len(standing.messages) == 1


def test_an_answer_that_is_no_call_is_lost_as_an_error() -> None:
    event = f"r.{base64.urlsafe_b64encode(b'5').decode().rstrip('=')}.1a-1"
    answer = json.loads(lost_answer(event) or b"")
    assert (answer["id"], answer["error"]["data"][ERROR_META]["stage"]) == (5, "UNKNOWN")


async def test_a_stream_that_its_client_has_read_to_the_end_is_not_found() -> None:
    async with serving() as bus:
        client = HttpClient(bus)
        await client.initialize()
        first = client.listen()
        await until(lambda: first.events, "the first event")
        second = client.listen()
        await first.done()  # which the other has taken over
        assert (await client.listen(first.events[0]["id"]).done()).status == 404
        assert not second.ended
        second.leave()
        await within(second.task)


async def test_older_clients_get_no_event_without_data() -> None:
    async with serving() as bus:
        client = HttpClient(bus)
        await client.initialize("2025-06-18")
        stream = client.listen()
        await until(lambda: stream.status, "the stream")

        @bus.tool
        async def another() -> None: ...

        await stream.told(1)
        assert all(event.get("data") for event in stream.events)
        stream.leave()
        await within(stream.task)


async def test_subscriptions_and_the_level_of_a_session_go_on_after_a_restart_of_the_bus(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path) as bus:
        features_of(bus.core).add(Mounted("m", resources=["x://a", "x://b", "y://gone"]))
        client = HttpClient(bus)
        await client.initialize()
        for uri in ("x://a", "x://b", "y://gone"):
            assert (await client.ask("resources/subscribe", {"uri": uri})).result == {}
        await client.ask("resources/unsubscribe", {"uri": "x://b"})
        await client.ask("logging/setLevel", {"level": "error"})
    async with serving(data_dir=tmp_path) as bus:
        again = HttpClient(bus)
        again.session = client.session
        stream = again.listen()
        missed = [(each["method"], each.get("params")) for each in await stream.told(5)]
        assert missed[3:] == [(UPDATED, {"uri": "x://a"}), (UPDATED, {"uri": "y://gone"})]
        mounted = Mounted("m", resources=["x://a", "x://b"])  # its server takes longer to start than the bus
        features_of(bus.core).add(mounted)
        assert [each.get("params") for each in (await stream.told(7))[5:]].count({"uri": "x://a"}) == 1
        assert {uri: len(each) for uri, each in mounted.listeners.items()} == {"x://a": 1}
        bus.core.sessions.presence.notifications.publish("tea", "", "is of level notice", "")
        mounted.listeners["x://a"][0]("x://a")
        assert (await stream.told(8))[-1]["params"] == {"uri": "x://a"}
        assert (await again.send(b"", {"Mcp-Session-Id": client.session}, "DELETE").done()).status == 204
        assert mounted.listeners == {"x://a": []}
        assert bus.core.program.store.load(CHANGED) == {}


async def test_the_store_has_the_changes_of_so_many_sessions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_CHANGED", 2)
    store = Store.of(None)
    for _ in range(2):  # of a later run of the bus too
        sessions = Sessions(Sealer(KEY), store=store)
        for level in ("error", "alert", "debug"):
            session = sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL)
            session.set_level(level)
            await sessions.save(session)
        assert [each["level"] for each in store.load(CHANGED).values()] == ["alert", "debug"]


async def test_a_change_that_could_not_be_deleted_is_deleted_with_the_next() -> None:
    class Filling(Store):
        is_full = False

        def write(self, kind: Kind, rows: Mapping[str, Any], deleted: Iterable[str] = ()) -> None:
            if self.is_full:
                raise WriteFailed("the disk is full")
            super().write(kind, rows, deleted)

    store = Filling(MemoryDriver())
    sessions = Sessions(Sealer(KEY), store=store)
    session = sessions.begin("2025-11-25", ABLE, PROFILE, LOCAL)
    for level, store.is_full, rows in (("error", False, 1), ("info", True, 1), ("info", False, 0)):
        session.set_level(level)
        await sessions.save(session)
        assert len(store.load(CHANGED)) == rows


async def test_a_session_that_its_client_ended_is_unknown(tmp_path: Path) -> None:
    async with serving() as bus:
        client = HttpClient(bus)
        await client.initialize()
        stream = client.listen()
        await until(lambda: stream.status, "the stream")
        assert (await client.send(b"", {"Mcp-Session-Id": client.session}, "DELETE").done()).status == 204
        await stream.done()
        assert (await client.ask("ping")).status == 404
        assert (await client.send(b"", {"Mcp-Session-Id": client.session}, "DELETE").done()).status == 404
        await client.initialize()
        assert (await client.ask("ping")).result == {}


async def test_a_session_of_another_bus_is_unknown_so_that_its_client_initializes_anew(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path / "a") as first, serving(data_dir=tmp_path / "b") as second:
        client, moved = HttpClient(first), HttpClient(second)
        await client.initialize("2025-06-18")
        moved.session = client.session
        refused = [await moved.ask("tools/list"), await moved.listen().done(), await moved.ask("x", id=None)]
        assert [each.status for each in refused] == [404] * 3
        assert all("not issued by this bus" in each.error["message"] for each in refused)
        assert all("initialize again" in each.error["message"] for each in refused)
        await moved.initialize("2025-06-18")
        assert await moved.names() == []
        assert await client.names() == [], "the other session goes on"


async def test_a_request_without_the_id_of_its_session_is_refused() -> None:
    async with serving() as bus:
        client = HttpClient(bus)
        client.session = "x"
        assert (await client.ask("ping")).status == 404
        assert (await client.ask("ping", headers={"Mcp-Session-Id": None})).status == 400
        for method in ("GET", "DELETE"):
            for accept in ("text/event-stream", "application/json", None):
                refused = await client.send(b"", {"Accept": accept}, method).done()
                assert (refused.status, refused.headers["allow"]) == (405, "POST")
                assert "Mcp-Session-Id" in refused.error["message"]
        assert (await client.send(b"", {}, "PUT").done()).headers["allow"] == "POST, GET, DELETE"


@pytest.mark.parametrize("version", ["not-a-version", "1999-01-01", "2099-01-01"])
async def test_a_request_of_a_session_with_an_unknown_version_is_refused(version: str) -> None:
    async with serving() as bus:
        client = HttpClient(bus)
        await client.initialize()
        known = {"Mcp-Session-Id": client.session, "Accept": "text/event-stream"}
        for method in ("GET", "DELETE"):
            refused = await client.send(b"", {**known, "MCP-Protocol-Version": version}, method).done()
            assert (refused.status, refused.error["code"]) == (400, -32022)
            assert "2025-11-25" in refused.error["data"]["supported"]
        assert (await client.ask("ping", headers={"MCP-Protocol-Version": version})).status == 400
        assert (await client.ask("ping")).status == 200
        assert (await client.ask("ping", headers={"MCP-Protocol-Version": "2025-06-18"})).status == 200


async def test_a_failed_handshake_begins_no_session() -> None:
    async with serving() as bus:
        message = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}'
        answer = await HttpClient(bus).send(message, {"Content-Type": "application/json"}).done()
        assert "protocolVersion" in answer.error["message"]
        assert "mcp-session-id" not in answer.headers


async def test_a_client_learns_that_there_are_too_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 0)
    async with mcp_bench() as bench:
        idle = McpSession("x", "2025-11-25", ABLE, PROFILE, LOCAL)
        with pytest.raises(RpcError, match="mcp_sessions = 0"):
            await bench.ask("initialize", {"protocolVersion": "2025-11-25"}, session=idle)


async def test_a_level_that_is_none_is_refused() -> None:
    async with serving() as bus:
        client = HttpClient(bus)
        await client.initialize()
        assert (await client.ask("logging/setLevel", {"level": "error"})).result == {}
        assert "debug" in (await client.ask("logging/setLevel", {"level": "loud"})).error["message"]
        assert "level" in (await client.ask("logging/setLevel", {})).error["message"]
