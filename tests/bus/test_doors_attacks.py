"""Tries to use a key beyond its scopes or its end: nested calls, tasks, watches, streams and sessions of others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.bus.keys.keys_directory import KeysDirectory
from tests.bus.test_doors import NO_HEARTBEATS, House, attached, bearer, next_of, open_house
from tests.support.waiting import within
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import Globs, Scopes
from toolbus.parts.identity.scope_texts import template
from toolbus.protocol.limits import Timings
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path) as house:
        yield house


async def call(stream: Any, **fields: Any) -> pb.ToolResult:
    """Makes one call on a stream and returns its result."""
    await stream.write(wire.InvokeRequest(calls=[pb.ToolCall(**fields)]))
    result: pb.ToolResult = (await next_of(stream, "results"))[0]
    return result


async def end_of(stream: Any) -> grpc.StatusCode:
    """Reads a stream to its end, and returns its status."""

    async def read() -> None:
        while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass

    with contextlib.suppress(grpc.aio.AioRpcError):
        await within(read())
    code: grpc.StatusCode = await stream.code()
    return code


@contextlib.asynccontextmanager
async def plugin(house: House, scopes: Scopes) -> AsyncIterator[tuple[Any, str]]:
    """Yields the stream of a plugin with these scopes, and the id of a call of this machine that it answers."""
    plug = house.keys.add("plug", scopes)
    async with house.channel(plug) as channel:
        stream, _ = await attached(channel, "plug", tools=[pb.Tool(name="t")])
        waiting = asyncio.create_task(house.bus.call("t", {}))
        (outer,) = await next_of(stream, "calls")
        yield stream, outer.call_id
        stream.cancel()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_plugin_beyond_this_machine_does_not_administer_the_bus_by_a_nested_call(house: House) -> None:
    async with plugin(house, template("plugin", "plug")) as (stream, parent):
        for name in ("stats", "calls", "keys", "drain"):
            result = await call(stream, call_id=name, name=f"toolbus:{name}", parent_call_id=parent)
            assert result.error.code == pb.ERROR_CODE_PERMISSION_DENIED
            assert "in its scope administer" in result.error.message
        assert (await call(stream, call_id="other", name="danger", parent_call_id=parent)).output_json == '"boom"'


async def test_a_nested_call_does_not_reach_what_the_plugins_own_scopes_exclude(house: House) -> None:
    scopes = Scopes(attach=Globs(["plug"]), offer=Globs(["t"]), never=Globs(["danger"]))
    async with plugin(house, scopes) as (stream, parent):
        result = await call(stream, call_id="n", name="danger", parent_call_id=parent)
        assert result.error.code == pb.ERROR_CODE_NOT_FOUND


async def test_nested_calls_of_a_task_may_nothing_more_once_the_key_of_its_caller_is_revoked(house: House) -> None:
    chat, plug = house.keys.add("chat", template("host", "chat")), house.keys.add("plug", template("plugin", "plug"))
    async with house.channel(plug) as plugs, house.channel(chat) as chats:
        offer, _ = await attached(plugs, "plug", tools=[pb.Tool(name="t")])
        stream, _ = await attached(chats, "chat")
        envelope = await call(stream, call_id="1", name="t", background_after_seconds=0.01)
        assert "running" in envelope.output_json
        (outer,) = await next_of(offer, "calls")
        before = await call(offer, call_id="before", name="danger", parent_call_id=outer.call_id)
        assert before.output_json == '"boom"'
        house.keys.store.revoke("chat")
        assert await end_of(stream) is grpc.StatusCode.UNAUTHENTICATED
        after = await call(offer, call_id="after", name="danger", parent_call_id=outer.call_id)
        assert after.error.code == pb.ERROR_CODE_NOT_FOUND
        offer.cancel()


async def test_a_call_that_became_a_task_counts_as_a_call_in_flight_of_its_identity(house: House) -> None:
    gate = asyncio.Event()

    @house.bus.tool
    async def slow() -> int:
        await gate.wait()
        return 1

    chat = house.keys.add("chat", Scopes(attach=Globs(["chat"]), call=Globs(["slow"]), in_flight=1))
    async with house.channel(chat) as channel:
        stream, _ = await attached(channel, "chat")
        first = await call(stream, call_id="1", name="slow", background_after_seconds=0.01)
        assert "running" in first.output_json
        second = await call(stream, call_id="2", name="slow", background_after_seconds=0.01)
        assert second.error.code == pb.ERROR_CODE_OVERLOADED
        gate.set()
        stream.cancel()


async def test_a_watch_of_a_sources_health_ends_with_the_key(house: House) -> None:
    chat, plug = house.keys.add("chat", Scopes(call=Globs(["*"]))), house.keys.add("plug", template("plugin", "plug"))
    async with house.channel(plug) as plugs, house.channel(chat, certificate=False) as channel:
        stream, _ = await attached(plugs, "plug", tools=[pb.Tool(name="t")])
        request = health_pb2.HealthCheckRequest(service="toolbus.source.plug")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, metadata=bearer(chat))
        assert (await within(watch.read())).status == health_pb2.HealthCheckResponse.SERVING
        house.keys.store.revoke("chat")
        assert await end_of(watch) is grpc.StatusCode.UNAUTHENTICATED
        stream.cancel()


async def test_streams_without_an_attach_count_as_streams_of_their_identity(house: House) -> None:
    chat = house.keys.add("chat", Scopes(attach=Globs(["chat"]), sessions=1))
    async with house.channel(chat) as channel:
        stub: Any = rpc.ToolBusServiceStub(channel)
        held = [stub.Invoke() for _ in range(10)]
        ended = [asyncio.create_task(end_of(each)) for each in held]
        for each in asyncio.as_completed(ended):
            assert await within(each) is grpc.StatusCode.RESOURCE_EXHAUSTED
            if sum(task.done() for task in ended) == 8:
                break
        for stream in held:
            stream.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


async def test_a_watcher_is_not_notified_of_changed_tools_out_of_its_scope(house: House) -> None:
    near = house.keys.add("near", Scopes(attach=Globs(["near"]), call=Globs(["add", "seen"])))
    plug = house.keys.add("plug", template("plugin", "plug"))
    async with house.channel(plug) as plugs, house.channel(near) as channel:
        stream, first = await attached(channel, "near", subscribe=[wire.SUBSCRIPTION_CATALOG])
        await next_of(stream, "events", first)
        offer, _ = await attached(plugs, "plug", tools=[pb.Tool(name="hidden")])
        for tools in ([pb.Tool(name="hidden", description="new")], [pb.Tool(name="seen")]):
            attach = wire.Attach(protocol_version=1, source="plug", tools=tools)
            await offer.write(wire.InvokeRequest(attach=attach))
            await within(offer.read())
        added: list[str] = []
        while "seen" not in added:
            for event in await next_of(stream, "events"):
                assert not event.catalog.removed
                added += [each.tool.name for each in event.catalog.added]
        offer.cancel()
        stream.cancel()


async def test_a_session_ends_when_the_id_of_its_key_gets_another_secret(house: House) -> None:
    chat = house.keys.add("chat", template("host", "chat"))
    async with house.channel(chat, certificate=False) as channel:
        stream, _ = await attached(channel, "chat", bearer(chat))
        house.keys.edit(hashlib.sha256(chat["token"].encode()).hexdigest(), "ab" * 32)
        assert await end_of(stream) is grpc.StatusCode.UNAUTHENTICATED


async def test_an_identity_does_not_take_over_the_session_of_another(house: House) -> None:
    mine, theirs = (house.keys.add(name, template("plugin", "w*")) for name in ("a", "b"))
    async with house.channel(mine) as first, house.channel(theirs) as second:
        stream, _ = await attached(first, "w", instance="i", tools=[pb.Tool(name="t")])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attached(second, "w", instance="i", tools=[pb.Tool(name="t")])
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "is attached by another identity" in (refused.value.details() or "")
        again, frame = await attached(first, "w", instance="i", tools=[pb.Tool(name="t")])
        assert frame.attached.registered == ["t"]
        stream.cancel()
        again.cancel()


async def test_tools_that_a_session_declares_again_are_in_the_audit(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    config = Config(grpc=("mtls:127.0.0.1:0",), http="off", keys=keys.path, data_dir=tmp_path / "data")
    async with Bus(config, timings=NO_HEARTBEATS) as bus:
        plug = keys.add("plug", template("plugin", "plug"))
        house = House(bus, keys, mtls=bus.grpc_addresses[0].partition(":")[2])
        async with house.channel(plug) as channel:
            stream, _ = await attached(channel, "plug")
            again = wire.Attach(protocol_version=1, source="plug", tools=[pb.Tool(name="later")])
            await stream.write(wire.InvokeRequest(attach=again))
            assert (await within(stream.read())).attached.registered == ["later"]
            stream.cancel()
    text = (tmp_path / "data" / "audit" / "000001.jsonl").read_text("utf-8")
    (line,) = (line for line in map(json.loads, text.splitlines()) if line["act"] == "register")
    assert (line["who"], line["target"], line["tools"]) == ("plug", "later", 1)


async def test_the_tasks_of_an_identity_are_not_those_of_a_source_that_is_named_like_it(house: House) -> None:
    gate = asyncio.Event()

    @house.bus.tool
    async def slow() -> int:
        await gate.wait()
        return 1

    chat, eve = house.keys.add("chat", Scopes(call=Globs(["slow"]))), house.keys.add("eve", Scopes(attach=Globs(["*"])))
    async with house.web(chat) as web, house.channel(eve) as channel:
        body = {"name": "slow", "arguments": {}, "background_after_seconds": 0.01}
        assert (await web.post("/api/tools/invoke", json=body)).json()["output"]["status"] == "running"
        assert (await web.get("/api/tasks")).json()["count"] == 1
        for source in ("http:chat", "http"):
            stream, _ = await attached(channel, source)
            listed = await call(stream, call_id="1", name="toolbus:list_tasks")
            assert json.loads(listed.output_json)["count"] == 0
            stream.cancel()
        gate.set()


async def test_without_a_key_a_limited_number_of_streams_watch_the_bus_and_leave_it_to_those_with_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolbus.bus.streams.health.MAX_OPEN_WATCHES", 2)
    chat, request = house.keys.add("chat"), health_pb2.HealthCheckRequest()
    async with house.channel(chat, certificate=False) as stranger, house.channel(chat) as keyed:
        watches = []
        for channel in (stranger, stranger, keyed, keyed):
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(request))
            assert (await within(watches[-1].read())).status == health_pb2.HealthCheckResponse.SERVING
        stub = health_pb2_grpc.HealthStub(stranger)
        assert await end_of(stub.Watch(request)) is grpc.StatusCode.UNAUTHENTICATED
        assert (await within(stub.Check(request))).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()


@pytest.mark.parametrize("revoked", [True, False])
async def test_a_call_over_https_ends_with_its_key_and_goes_on_under_other_scopes(
    house: House, revoked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    started, gate = asyncio.Event(), asyncio.Event()

    @house.bus.tool
    async def slow() -> int:
        started.set()
        await gate.wait()
        return 1

    chat = house.keys.add("chat", Scopes(call=Globs(["slow"])))
    other = house.keys.add("other", Scopes(attach=Globs(["other"])))
    async with house.web(chat) as web, house.channel(other) as channel:
        stream, _ = await attached(channel, "other")
        answer = asyncio.create_task(web.post("/api/tools/invoke", json={"name": "slow", "arguments": {}}))
        await within(started.wait())
        house.keys.edit('call = ["slow"]', 'call = ["slow", "add"]')
        if revoked:
            house.keys.store.revoke("chat")
        house.keys.store.revoke("other")
        assert await end_of(stream) is grpc.StatusCode.UNAUTHENTICATED  # the files were looked at
        if not revoked:
            gate.set()
        response = await within(answer)
    if revoked:
        assert response.status_code == 401
        assert "was revoked on" in response.json()["detail"]
    else:
        assert response.json()["output"] == 1
    assert "Exception in ASGI application" not in caplog.text


async def test_a_connection_that_does_not_finish_its_tls_handshake_is_closed(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    config = Config(grpc=("127.0.0.1:0",), http="off", https="127.0.0.1:0", keys=keys.path)
    async with Bus(config, timings=Timings(head_seconds=0.2)) as bus:
        host, _, port = str(bus.https_address).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionResetError):
            assert await within(reader.read()) == b""
        writer.close()


async def test_an_identity_does_not_see_roles_out_of_its_scope(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    addresses = ("127.0.0.1:0", "mtls:127.0.0.1:0")
    config = Config(grpc=addresses, http="off", https="127.0.0.1:0", keys=keys.path, roles=("desk", "board"))
    async with Bus(config, timings=NO_HEARTBEATS) as bus:

        @bus.tool
        def add() -> int:
            return 3

        chat = keys.add("chat", Scopes(attach=Globs(["chat"]), call=Globs(["*"]), roles=Globs(["desk"])))
        house = House(bus, keys, mtls=bus.grpc_addresses[1].partition(":")[2])
        async with house.web(chat) as web, house.channel(chat) as channel:
            assert list((await web.get("/api/tools")).json()["tools_by_role"]) == ["desk"]
            answers = [(await web.get("/api/tools", params={"role": role})).json() for role in ("board", "none")]
            assert answers[0]["detail"].replace("board", "none") == answers[1]["detail"]
            body = {"name": "add", "arguments": {}}
            answers = [
                (await web.post("/api/tools/invoke", json={**body, "role": role})).json() for role in ("board", "none")
            ]
            assert json.dumps(answers[0]).replace("board", "none") == json.dumps(answers[1])
            stream, _ = await attached(channel, "chat")
            errors = [
                (await call(stream, call_id=role, name="add", role=role)).error.message for role in ("board", "none")
            ]
            assert errors[0].replace("board", "none") == errors[1]
            assert errors[1].endswith("(configured: desk)")
            assert (await call(stream, call_id="1", name="add", role="desk")).output_json == "3"
            stub = rpc.ToolBusServiceStub(channel)
            whys = []
            for role in ("board", "none"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.List(wire.ListRequest(role=role))
                whys.append(refused.value.details() or "")
            assert whys[0].replace("board", "none") == whys[1]
            stream.cancel()


async def test_a_nested_call_for_a_role_that_the_plugin_does_not_see_is_answered(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    addresses = ("127.0.0.1:0", "mtls:127.0.0.1:0")
    roles = ("desk", "board")
    config = Config(grpc=addresses, http="off", keys=keys.path, roles=roles, grace_seconds=0)
    async with Bus(config, timings=NO_HEARTBEATS) as bus:
        scopes = Scopes(attach=Globs(["plug"]), offer=Globs(["t"]), roles=Globs(["desk"]))
        house = House(bus, keys, mtls=bus.grpc_addresses[1].partition(":")[2])
        async with plugin(house, scopes) as (stream, parent):
            result = await call(stream, call_id="n", name="none", role="board", parent_call_id=parent)
            assert result.error.code == pb.ERROR_CODE_NOT_FOUND


async def notified(house: House, name: str, scopes: Scopes, user: str) -> dict[str, Any]:
    """Notifies a user over HTTPS as a new identity, and returns the answer."""
    async with house.web(house.keys.add(name, scopes)) as web:
        answer: dict[str, Any] = (await web.post("/api/bus/notify", json={"text": "Buy!", "user": user})).json()
        return answer


async def test_a_key_notifies_only_users_of_its_scope_unless_it_is_a_plugins(house: House) -> None:
    ann = Scopes(call=Globs(["add"]), users=Globs(["ann"]))
    for number, (scopes, user) in enumerate(((ann, "bob"), (ann, ""), (Scopes(), "ann"), (Scopes(), ""))):
        answer = await notified(house, f"refused{number}", scopes, user)
        assert "may not notify" in answer["error"]["message"]
    everyone = template("host", "chat")
    passes = ((ann, "ann"), (everyone, "bob"), (everyone, ""), (template("plugin", "plug"), "bob"))
    for number, (scopes, user) in enumerate(passes):
        assert (await notified(house, f"passes{number}", scopes, user))["is_error"] is False


async def test_a_plugin_notifies_from_within_a_call_whom_it_likes(house: House) -> None:
    near = house.keys.add("near", Scopes(attach=Globs(["near"]), call=Globs(["t"]), users=Globs(["ann"])))
    async with house.channel(near) as nears, grpc.aio.insecure_channel(house.bus.grpc_addresses[0]) as local:
        offer, _ = await attached(local, "plug", tools=[pb.Tool(name="t")])
        stream, _ = await attached(nears, "near")
        await stream.write(wire.InvokeRequest(calls=[pb.ToolCall(call_id="1", name="t")]))
        (outer,) = await next_of(offer, "calls")
        arguments = json.dumps({"text": "hi", "user": "bob"})
        said = await call(
            offer, call_id="n", name="toolbus:notify", parent_call_id=outer.call_id, arguments_json=arguments
        )
        assert not said.is_error
        offer.cancel()
        stream.cancel()
