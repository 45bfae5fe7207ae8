"""Tries every way into a bus beyond this machine: over TLS, mTLS and HTTPS, with each kind of key and without one."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import VERBS, Globs, Scopes
from toolbus.bus.catalog.policy import EVERYTHING, PUBLIC_TOOLS, VERBS_OF_TOOLS
from toolbus.bus.gateway.app import ASSETS_PATH, DOCS_PATH, endpoints_of
from toolbus.bus.gateway.remote_access import LOCAL_ONLY, NO_KEY, RULES
from toolbus.parts.console.app import PATHS as CONSOLE_PATHS
from toolbus.parts.identity.scope_texts import template
from toolbus.parts.mcp.server.mcp_endpoint import METHODS
from toolbus.parts.mcp.server.room import PATH
from toolbus.parts.mcp.settings import LOGIN_PATH
from toolbus.parts.observability.metrics_room import PATH as METRICS_PATH
from toolbus.testing import PATIENT
from toolbus.v1 import tool_bus_service_pb2
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

NAME = (("grpc.ssl_target_name_override", "bus.example"),)
# The streams of these tests echo no heartbeats, and on a busy machine a test may take longer than their bus waits.
NO_HEARTBEATS = replace(PATIENT, busy_heartbeat_seconds=3_600.0, idle_heartbeat_seconds=3_600.0)


class House:
    """A bus with keys, and clients of it."""

    def __init__(self, bus: Bus, keys: KeysDirectory, *, tls: str = "", mtls: str = "") -> None:
        self.bus = bus
        self.keys = keys
        self.tls = tls
        self.mtls = mtls

    def channel(self, credential: dict[str, Any], *, certificate: bool = True) -> grpc.aio.Channel:
        root = credential["ca"].encode()
        pair = (credential["key"].encode(), credential["certificate"].encode()) if certificate else (None, None)
        address = self.mtls if certificate else self.tls
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root, *pair), NAME)

    def web(self, credential: dict[str, Any] | None, *, certificate: bool = False) -> httpx.AsyncClient:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # has read no certificates of the system, which takes 25 ms
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        headers = {}
        if credential is not None and certificate:
            file = self.keys.folder / "client.pem"
            file.write_text(credential["key"] + credential["certificate"])
            context.load_cert_chain(file)
        elif credential is not None:
            headers["Authorization"] = f"Bearer {credential['token']}"
        return httpx.AsyncClient(
            base_url=f"https://{self.bus.https_address}", verify=context, headers=headers, timeout=WAIT_SECONDS
        )


@contextlib.asynccontextmanager
async def open_house(tmp_path: Path) -> AsyncIterator[House]:
    keys = KeysDirectory(tmp_path, time.time())
    port = "127.0.0.1:0"
    grpc_addresses = (port, f"tls:{port}", f"mtls:{port}")
    # Without a grace period an unknown tool is NOT_FOUND at once.
    config = Config(grpc=grpc_addresses, http="off", https=port, keys=keys.path, grace_seconds=0)
    async with Bus(config, timings=NO_HEARTBEATS) as bus:

        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b

        @bus.tool
        def danger() -> str:
            return "boom"

        tls, mtls = (address.partition(":")[2] for address in bus.grpc_addresses[1:])
        yield House(bus, keys, tls=tls, mtls=mtls)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path) as house:
        yield house


def bearer(credential: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {credential['token']}"),)


async def names(channel: grpc.aio.Channel, metadata: Any = ()) -> list[str]:
    response = await rpc.ToolBusServiceStub(channel).List(wire.ListRequest(), metadata=metadata)
    return [tool.tool.name for tool in response.tools]


async def attached(
    channel: grpc.aio.Channel, source: str, metadata: Any = (), **more: Any
) -> tuple[Any, wire.InvokeResponse]:
    stub: Any = rpc.ToolBusServiceStub(channel)  # the published types know no Invoke without an iterator
    stream = stub.Invoke(metadata=metadata)
    await stream.write(wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source=source, **more)))
    return stream, await stream.read()


async def next_of(stream: Any, field: str, first: wire.InvokeResponse | None = None) -> Any:
    """Returns a repeated field of the next frame that has it, beginning with one that was read already."""
    frame = first
    while frame is None or not getattr(frame, field):
        frame = await within(stream.read())
    return getattr(frame, field)


async def test_a_token_over_tls_and_a_certificate_over_mtls_prove_the_same_identity(house: House) -> None:
    chat = house.keys.add("chat", template("host", "chat"))
    async with house.channel(chat, certificate=False) as tls, house.channel(chat) as mtls:
        assert await names(tls, bearer(chat)) == ["add", "danger"]
        assert await names(mtls) == ["add", "danger"]
        for channel, metadata in ((tls, bearer(chat)), (mtls, ())):
            _, first = await attached(channel, "chat", metadata)
            assert first.attached.identity == "chat"
            assert 80 * 86_400 < first.attached.expires_seconds < 91 * 86_400


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ((), "needs a key, and the request carries none"),
        ((("authorization", "Bearer nonsense"),), "is not a key of this bus"),
        ((("authorization", "Basic abc"),), "is not 'Bearer TOKEN'"),
    ],
)
async def test_without_a_valid_key_every_rpc_is_refused_with_what_to_do(house: House, metadata: Any, why: str) -> None:
    chat = house.keys.add("chat")
    async with house.channel(chat, certificate=False) as channel:
        stub = rpc.ToolBusServiceStub(channel)
        requests: tuple[tuple[Any, Any], ...] = (
            (stub.List, wire.ListRequest()),
            (stub.Register, wire.RegisterRequest()),
            (stub.Unregister, wire.UnregisterRequest(name="add")),
            (stub.Clear, wire.ClearRequest(source="local")),
        )
        for method, request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(request, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert why in (refused.value.details() or "")
        invoke: Any = stub.Invoke
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await invoke(metadata=metadata).read()  # a write to a stream that has ended would hide its status
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "add" in house.bus.core.catalog.registry.first


async def test_what_is_out_of_scope_is_as_if_it_were_not_there(house: House) -> None:
    scopes = Scopes(
        attach=Globs(["chat"]), call=Globs(["*"]), never=Globs(["danger*"]), users=Globs(["team-*"]), level=5
    )
    chat = house.keys.add("chat", scopes)
    async with house.channel(chat) as channel:
        assert await names(channel) == ["add"]
        stream, first = await attached(channel, "chat", subscribe=[wire.SUBSCRIPTION_CATALOG])
        events = await next_of(stream, "events", first)
        assert [tool.tool.name for tool in events[0].catalog.added] == ["add"]

        async def call(name: str, **context: Any) -> pb.ToolResult:
            arguments = '{"a":1,"b":2}' if name == "add" else "{}"
            message = pb.ToolCall(call_id=name, name=name, arguments_json=arguments)
            if context:
                message.context.CopyFrom(pb.CallContext(**context))
            await stream.write(wire.InvokeRequest(calls=[message]))
            result: pb.ToolResult = (await next_of(stream, "results"))[0]
            return result

        assert (await call("add", user_id="team-a", attributes={"level": "5"})).output_json == "3"
        assert (await call("add")).output_json == "3"
        unknown = await call("danger")
        assert unknown.error.code == pb.ERROR_CODE_NOT_FOUND
        assert "there are: add" in unknown.error.message
        denied = await call("add", user_id="bob")
        assert denied.error.code == pb.ERROR_CODE_PERMISSION_DENIED
        assert "may not act for user 'bob'" in denied.error.message
        assert "may not state level 6" in (await call("add", attributes={"level": "6"})).error.message
        assert "'drain' in its scope administer" in (await call("toolbus:drain")).error.message


async def test_a_withdrawn_tool_out_of_scope_is_unknown(house: House) -> None:
    plug = house.keys.add("plug", template("plugin", "plug"))
    near, far = house.keys.add("near", Scopes(call=Globs(["t"]))), house.keys.add("far", Scopes(call=Globs(["add"])))
    async with house.channel(plug) as channel:
        stream, _ = await attached(channel, "plug", tools=[pb.Tool(name="t")])
        house.bus.revoke("plug")
        for credential, is_shown in ((near, True), (far, False)):
            async with house.web(credential) as web:
                answer = (await web.post("/api/tools/invoke", json={"name": "t", "arguments": {}})).json()
                assert ("is withdrawn" in answer["error"]["message"]) is is_shown
        stream.cancel()


async def test_a_plugin_attaches_and_offers_what_its_scopes_allow(house: House) -> None:
    weather = house.keys.add("weather", Scopes(attach=Globs(["weather*"]), offer=Globs(["get_*"])))
    async with house.channel(weather) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attached(channel, "home")
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "may not attach as source 'home'" in (refused.value.details() or "")
        stream, first = await attached(channel, "weather1", tools=[pb.Tool(name="get_sun"), pb.Tool(name="add")])
        assert list(first.attached.registered) == ["get_sun"]
        assert [(each.name, "may not offer" in each.error) for each in first.attached.refused] == [("add", True)]
        stub = rpc.ToolBusServiceStub(channel)
        session = first.attached.session_id
        done = await stub.Register(wire.RegisterRequest(session_id=session, tools=[pb.Tool(name="add")]))
        assert [(each.name, "may not offer" in each.error) for each in done.refused] == [("add", True)]
        assert not done.registered
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Clear(wire.ClearRequest(source="local"))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await stub.Clear(wire.ClearRequest(source="weather1"))).removed == 1
        stream.cancel()


async def test_one_identity_cannot_use_the_session_of_another(house: House) -> None:
    mine, theirs = (house.keys.add(name, template("plugin", name)) for name in ("a", "b"))
    async with house.channel(mine) as first, house.channel(theirs) as second:
        stream, frame = await attached(first, "a", tools=[pb.Tool(name="t")])
        stub = rpc.ToolBusServiceStub(second)
        request = wire.UnregisterRequest(session_id=frame.attached.session_id, name="t")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Unregister(request)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        stream.cancel()


async def test_a_revoked_key_ends_its_sessions_within_a_second_and_names_the_key(house: House) -> None:
    chat = house.keys.add("chat", template("plugin", "chat"))
    async with house.channel(chat) as channel:
        stream, frame = await attached(channel, "chat", tools=[pb.Tool(name="t")])
        assert frame.attached.registered == ["t"]
        house.keys.store.revoke("chat")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await within(_to_the_end(stream))
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "of identity 'chat' was revoked on " in (ended.value.details() or "")
        assert "t" not in house.bus.core.catalog.registry.first
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await names(channel)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_narrowed_scopes_hold_for_open_sessions_and_watchers_get_the_removed_tools(house: House) -> None:
    chat = house.keys.add("chat", template("host", "chat"))
    async with house.channel(chat) as channel:
        stream, first = await attached(channel, "chat", subscribe=[wire.SUBSCRIPTION_CATALOG])
        added = (await next_of(stream, "events", first))[0].catalog.added
        assert [tool.tool.name for tool in added] == ["add", "danger"]
        house.keys.edit('call = ["*"]', 'call = ["add"]')
        removed = (await next_of(stream, "events"))[0].catalog.removed
        assert [each.name for each in removed] == ["danger"]
        await stream.write(wire.InvokeRequest(calls=[pb.ToolCall(call_id="1", name="danger")]))
        assert (await next_of(stream, "results"))[0].error.code == pb.ERROR_CODE_NOT_FOUND
        assert await names(channel) == ["add"]


@pytest.mark.parametrize("knows", [True, False], ids=["with a key", "without a key"])
async def test_a_request_is_decoded_only_once_its_sender_is_known(house: House, knows: bool) -> None:
    chat = house.keys.add("chat", template("host", "chat"))
    async with house.channel(chat, certificate=False) as channel:
        call: Any = channel.unary_unary("/toolbus.v1.ToolBusService/Register", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\xff\xff", metadata=bearer(chat) if knows else ())
        codes = grpc.StatusCode
        assert refused.value.code() is (codes.INVALID_ARGUMENT if knows else codes.UNAUTHENTICATED)
        assert ("the request cannot be decoded: " in (refused.value.details() or "")) is knows


@pytest.mark.parametrize("knows", [True, False], ids=["with a key", "without a key"])
async def test_a_sender_is_judged_before_anything_of_its_request_has_come(house: House, knows: bool) -> None:
    chat = house.keys.add("chat", template("host", "chat"))
    async with house.channel(chat, certificate=False) as channel:
        call: Any = channel.stream_unary("/toolbus.v1.ToolBusService/Register", None, None)
        call = call(metadata=bearer(chat) if knows else ())
        if knows:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await within(call)
        codes = grpc.StatusCode
        assert refused.value.code() is (codes.INVALID_ARGUMENT if knows else codes.UNAUTHENTICATED)
        assert ("the RPC has no request" in (refused.value.details() or "")) is knows


async def _life_of(channel: grpc.aio.Channel, metadata: Any) -> tuple[bool, grpc.aio.AioRpcError]:
    """Attaches; returns whether that succeeded, and what ended the stream."""
    was_attached = False
    try:
        stream, _ = await attached(channel, "chat", metadata)
        was_attached = True
        await within(_to_the_end(stream))
    except grpc.aio.AioRpcError as ended:
        return was_attached, ended
    raise AssertionError("the stream ended with OK")


async def test_a_key_that_expires_ends_its_session(house: House) -> None:
    seconds, was_attached = 1, False
    while not was_attached and (seconds := 2 * seconds) < WAIT_SECONDS:  # it may end before a busy machine has attached
        chat = house.keys.add(f"chat.{seconds}", template("host", "chat"), days=seconds / 86_400)
        async with house.channel(chat, certificate=False) as channel:
            was_attached, ended = await _life_of(channel, bearer(chat))
    assert was_attached
    assert ended.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "expired on" in (ended.details() or "")


async def test_a_certificate_and_a_token_of_two_identities_are_refused(house: House) -> None:
    mine, theirs = house.keys.add("a"), house.keys.add("b")
    async with house.channel(mine) as channel:
        assert await names(channel, bearer(mine)) == ["add", "danger"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await names(channel, bearer(theirs))
        assert "the certificate is of identity 'a', the token of 'b'" in (refused.value.details() or "")


async def test_health_of_the_bus_is_open_and_that_of_a_source_needs_a_key_that_reaches_it(house: House) -> None:
    chat = house.keys.add("chat", Scopes(call=Globs(["add"])))
    blind = house.keys.add("blind", Scopes())
    async with house.channel(chat, certificate=False) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="toolbus.source.plug"))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        plug = house.keys.add("plug", template("plugin", "plug"))
        async with house.channel(plug) as plugin:
            stream, _ = await attached(plugin, "plug", tools=[pb.Tool(name="add")])
            request = health_pb2.HealthCheckRequest(service="toolbus.source.plug")
            assert (await stub.Check(request, metadata=bearer(chat))).status == serving
            assert (await stub.Check(request, metadata=bearer(plug))).status == serving
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(request, metadata=bearer(blind))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            stream.cancel()


async def test_https_takes_a_token_or_a_certificate_and_shows_what_the_scopes_reach(house: House) -> None:
    scopes = Scopes(call=Globs(["add"]), users=Globs(["team-*"]), level=5)
    chat = house.keys.add("chat", scopes)
    for certificate in (False, True):
        async with house.web(chat, certificate=certificate) as web:
            tools = (await web.get("/api/tools")).json()["tools_by_role"]["default"]
            assert [tool["name"] for tool in tools] == ["add"]
            export = (await web.get("/api/tools/export", params={"dialect": "openai"})).json()
            assert list(export["names"].values()) == ["add"]
            found = (await web.get("/api/tools/search", params={"q": "danger"})).json()
            assert all(each["name"] != "danger" for each in found["results"])
            body = {"name": "add", "arguments": {"a": 1, "b": 2}, "context": {"user_id": "team-a"}}
            assert (await web.post("/api/tools/invoke", json=body)).json()["output"] == 3
            missing = (await web.post("/api/tools/invoke", json={"name": "danger", "arguments": {}})).json()
            assert missing["error"]["code"] == "NOT_FOUND"
            for path in ("/api/tools", "/api/tasks"):
                denied = await web.get(path, params={"user_id": "bob"})
                assert denied.status_code == 403
                assert "may not act for user 'bob'" in denied.json()["detail"]
            assert (await web.get("/api/tools", params={"level": 6})).status_code == 403
            assert (await web.get("/api/calls")).status_code == 403
            assert (await web.post("/api/tools/clear", json={"source": "local"})).status_code == 403
            drain = await web.post("/api/bus/drain", json={})
            assert "'drain' in its scope administer" in drain.json()["error"]["message"]
            assert (await web.get("/api/nothing")).status_code == 501


async def test_https_without_a_key_answers_probes_and_nothing_else(house: House) -> None:
    async with house.web(None) as web:
        assert (await web.get("/healthz")).status_code == 200
        assert (await web.get("/readyz")).status_code == 200
        for path in ("/api/tools", "/docs", "/openapi.json", "/api/calls"):
            refused = await web.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "needs a key" in refused.json()["detail"]


async def test_a_page_of_another_site_is_refused_even_with_a_key(house: House) -> None:
    chat = house.keys.add("chat")
    async with house.web(chat) as web:
        refused = await web.get("/api/tools", headers={"Origin": "https://evil.example"})
        assert refused.status_code == 403
        assert (
            await web.get("/api/tools", headers={"Origin": f"https://{house.bus.https_address}"})
        ).status_code == 200


async def test_a_stream_of_events_ends_when_its_key_is_revoked(house: House) -> None:
    chat = house.keys.add("chat")
    async with house.web(chat) as web, web.stream("GET", "/api/tools/events") as events:
        lines = events.aiter_lines()
        assert (await within(anext(lines))).startswith("retry")
        house.keys.store.revoke("chat")

        async def read() -> None:
            async for _ in lines:
                pass

        with contextlib.suppress(httpx.RemoteProtocolError):  # the answer was not complete
            await within(read())


@pytest.mark.parametrize("path", ["/api/tools/register", "/api/llm-tools/callback/p/t", "/api/tasks/t/redirect"])
async def test_what_is_of_the_bus_own_machine_is_refused_beyond_it(house: House, path: str) -> None:
    operator = house.keys.add("operator", template("operator"))
    async with house.web(operator) as web:
        refused = await web.post(path, json={})
        assert refused.status_code == 403
        assert "is not served beyond the bus's own machine" in refused.json()["detail"]


async def test_an_operator_beyond_this_machine_administers_the_bus(house: House) -> None:
    operator = house.keys.add("operator", template("operator"))
    async with house.web(operator) as web:
        assert (await web.post("/api/bus/stats", json={})).json()["output"]["sessions"] == 0
        assert (await web.get("/api/calls")).status_code == 200
        assert (await web.post("/api/tools/clear", json={"source": "local"})).json()["removed"] == 2


# -- every way in --------------------------------------------------------------------------------------------------


def _methods() -> list[str]:
    services = [
        *tool_bus_service_pb2.DESCRIPTOR.services_by_name.values(),
        *health_pb2.DESCRIPTOR.services_by_name.values(),
        *reflection_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


@pytest.mark.parametrize("method", _methods())
async def test_every_rpc_of_every_service_needs_a_key(house: House, method: str) -> None:
    chat = house.keys.add("chat")
    async with house.channel(chat, certificate=False) as channel:
        call: Any = channel.stream_stream(method, None, None)(None)  # nothing yet
        if method.startswith("/grpc.health."):
            # Any other is refused at once, and grpc.aio has another status for one that ends while it writes.
            await call.write(b"\x0a\x01x")  # a health check: of service x
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await within(call.read())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_reflection_needs_its_verb(house: House) -> None:
    chat, operator = house.keys.add("chat"), house.keys.add("operator", template("operator"))
    async with house.channel(chat, certificate=False) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ServerReflectionInfo(iter([request]), metadata=bearer(chat)).read()
        assert "'reflect' in its scope administer" in (refused.value.details() or "")
        answer = await stub.ServerReflectionInfo(iter([request]), metadata=bearer(operator)).read()
        assert len(answer.list_services_response.service) == 4


def test_every_http_path_has_a_rule_and_every_rule_a_path() -> None:
    homes = tuple(
        f"toolbus.parts.{home}:router"
        for home in ("models.export_routes", "council.routes", "tasks.task_routes", "observability.record_routes")
    )
    endpoints = endpoints_of(homes)
    documented = {(method.upper(), path) for path, item in endpoints.openapi()["paths"].items() for method in item}
    served = documented | {("GET", DOCS_PATH), ("GET", "/openapi.json"), ("GET", f"{ASSETS_PATH}/{{file}}")}
    served |= {(method, f"{PATH}{rest}") for method in METHODS for rest in ("", "/{profile}")}
    served |= {*CONSOLE_PATHS, ("GET", "/"), ("GET", METRICS_PATH), ("GET", f"{LOGIN_PATH}/{{page}}")}
    ruled = {(method, path) for method, path, _ in RULES} | set(NO_KEY)
    local = {path.replace(":rest", "") for path in LOCAL_ONLY}
    assert {(method, path) for method, path in served if path not in local} == ruled
    assert {path for _, path in served if path in local} == local


async def test_every_tool_of_the_bus_is_public_or_needs_a_verb_that_it_is_refused_without(house: House) -> None:
    tools = [listing.entry.bare_name for listing in house.bus.core.catalog.view.own()]
    contents = {"record_calls", "record_errors"}  # which need every verb
    assert set(tools) - PUBLIC_TOOLS - VERBS_OF_TOOLS.keys() == contents
    assert set(VERBS_OF_TOOLS.values()) <= set(VERBS)
    chat = house.keys.add("chat", template("host", "chat"))
    async with house.channel(chat) as channel:
        listed = await rpc.ToolBusServiceStub(channel).List(wire.ListRequest(source="toolbus"))
        assert {tool.tool.name for tool in listed.tools} == {
            f"toolbus:{name}" for name in tools if name in PUBLIC_TOOLS
        }
        stream, _ = await attached(channel, "chat")
        for name in sorted(set(tools) - PUBLIC_TOOLS):
            await stream.write(wire.InvokeRequest(calls=[pb.ToolCall(call_id=name, name=f"toolbus:{name}")]))
            error = (await next_of(stream, "results"))[0].error
            assert error.code == pb.ERROR_CODE_PERMISSION_DENIED
            assert f"{VERBS_OF_TOOLS.get(name, EVERYTHING)!r} in its scope administer" in error.message


async def test_a_revoked_key_and_a_refused_one_are_in_the_audit(tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path, time.time())
    port = "127.0.0.1:0"
    config = Config(grpc=(f"mtls:{port}",), http="off", keys=keys.path, data_dir=tmp_path / "data")
    async with Bus(config, timings=NO_HEARTBEATS) as bus:
        chat = keys.add("chat")
        house = House(bus, keys, mtls=bus.grpc_addresses[0].partition(":")[2])
        async with house.channel(chat) as channel:
            stream, _ = await attached(channel, "chat")
            keys.store.revoke("chat")
            with pytest.raises(grpc.aio.AioRpcError):
                await within(_to_the_end(stream))
            with pytest.raises(grpc.aio.AioRpcError):
                await names(channel)
    lines = [
        json.loads(line) for line in (tmp_path / "data" / "audit" / "000001.jsonl").read_text("utf-8").splitlines()
    ]
    acts = {(line["act"], line.get("target") or line["source"]) for line in lines}
    assert {("attach", "chat"), ("end", "chat"), ("key.revoke", f"{chat['id']}-cert")} <= acts
    (attach,) = (line for line in lines if line["act"] == "attach")
    assert (attach["who"], attach["key"], attach["how"]) == ("chat", f"{chat['id']}-cert", "cert")
    assert any(line["act"] == "refuse" and "was revoked on" in line["why"] for line in lines)
