"""Tools with a callback URL that are registered over gRPC, without a session, and what each way does to the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from tests.bus.gateway.calling import client, legacy_plugin
from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.errors import Code
from toolbus.protocol.tool import Limits
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

NOBODY = "http://127.0.0.1:9/run"
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WAYS = ("grpc", "rest")


@asynccontextmanager
async def stub_of(bus: Bus) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel:
        yield rpc.ToolBusServiceStub(channel)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0, roles=("a", "b"), silenced=("mute",)) as running:
        running.dispatcher.admission.settled_at = 0.0  # a bus that has just started calls unknown names UNAVAILABLE
        yield running


@pytest.fixture
async def stub(bus: Bus) -> AsyncIterator[Any]:
    async with stub_of(bus) as found:
        yield found


@pytest.fixture
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus) as found:
        yield found


async def register(stub: Any, *tools: pb.Tool, **fields: Any) -> wire.RegisterResponse:
    request = wire.RegisterRequest(tools=tools, **fields)
    answer: wire.RegisterResponse = await stub.Register(request, timeout=WAIT_SECONDS)
    return answer


async def refused(stub: Any, *tools: pb.Tool, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await register(stub, *tools, **fields)
    return caught.value.code(), caught.value.details() or ""


async def listed(http: httpx.AsyncClient, role: str = "a") -> list[tuple[str, str]]:
    tools = (await http.get("/api/tools")).json()["tools_by_role"][role]
    return [(each["name"], each["source"]) for each in tools]


async def answered(body: dict[str, Any]) -> bytes:
    return json.dumps({"output": body["arguments"]}).encode()


# -- registering -------------------------------------------------------------------------------------------------------


async def test_a_tool_is_registered_and_called_without_a_session_and_without_http() -> None:
    async with running_bus(http="off") as bus, stub_of(bus) as stub, legacy_plugin(answered) as url:
        assert bus.http_address is None
        done = await register(stub, tool("add", NUMBER, callback_url=url), source="calc")
        assert (done.ok, list(done.registered), list(done.affected_roles)) == (True, ["add"], ["default"])
        result = await bus.call("add", {"n": 5}, timeout=WAIT_SECONDS)
        assert result.unwrap() == {"n": 5}
        assert [(each.tool.name, each.source) for each in bus.list()] == [("add", "calc")]


async def test_several_tools_are_registered_at_once_in_their_roles(stub: Any, http: httpx.AsyncClient) -> None:
    tools = [tool("one", callback_url=NOBODY), tool("two", callback_url=NOBODY, role="b")]
    done = await register(stub, *tools, source="s")
    assert (list(done.registered), list(done.affected_roles)) == (["one", "two"], ["a", "b"])
    assert await listed(http, "a") == [("one", "s")]
    assert await listed(http, "b") == [("one", "s"), ("two", "s")]


async def test_without_a_source_it_is_external(stub: Any, http: httpx.AsyncClient) -> None:
    await register(stub, tool("t", callback_url=NOBODY))
    assert await listed(http) == [("t", "external")]


async def test_a_password_is_listed_masked_by_both_ways(stub: Any, http: httpx.AsyncClient) -> None:
    await register(stub, tool("t", callback_url="http://user:hunter2@127.0.0.1:9/run"))
    by_grpc = await stub.List(wire.ListRequest(), timeout=WAIT_SECONDS)
    shown = [each.tool.callback_url for each in by_grpc.tools if each.tool.name == "t"]
    assert shown == ["http://user:***@127.0.0.1:9/run"]
    assert "hunter2" not in (await http.get("/api/tools")).text


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.example/run",
        "http://user:hunter2@192.168.0.1/run",
        "http://localhost./run",
        "http://2130706433/run",
        "http://0.0.0.0/run",
        "http://[::]/run",
        "http://127.0.0.1:0/run",
        "http://user:hunter2@127.0.0.1:65536/run",
        "http://127.0.0.1/a b",
        "http://127.0.0.1\\@evil.example/",
        "ftp://user:hunter2@127.0.0.1/run",
        "127.0.0.1:9/run",
        " ",
    ],
)
async def test_a_foreign_url_refuses_its_tool_and_all_or_none_the_whole_request(
    stub: Any, http: httpx.AsyncClient, url: str
) -> None:
    tools = tool("good", callback_url=NOBODY), tool("bad", callback_url=url)
    code, details = await refused(stub, *tools, all_or_none=True)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'bad'" in details
    assert "callback_url" in details
    assert "hunter2" not in details
    assert await listed(http) == []
    done = await register(stub, *tools)
    assert (list(done.registered), done.ok, [each.error for each in done.refused]) == (["good"], False, [details])
    assert await listed(http) == [("good", "external")]


async def test_every_fault_of_a_request_is_named(stub: Any, http: httpx.AsyncClient) -> None:
    faulty = [
        tool("good", callback_url=NOBODY),
        tool("two words", callback_url=NOBODY),
        tool("away", callback_url="http://evil.example"),
        tool("late", callback_url=NOBODY, timeout_seconds=301),
        tool("broken", "{", callback_url=NOBODY),
    ]
    code, details = await refused(stub, *faulty, all_or_none=True)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    for name in ("two words", "away", "late", "broken"):
        assert name in details
    roles = tool("good", callback_url=NOBODY), tool("t", callback_url=NOBODY, role="nobody")
    code, details = await refused(stub, *roles, all_or_none=True)
    assert (code, "nobody" in details) == (grpc.StatusCode.NOT_FOUND, True)
    assert await listed(http) == []


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("two words", grpc.StatusCode.INVALID_ARGUMENT),
        ("a/b", grpc.StatusCode.INVALID_ARGUMENT),
        ("天", grpc.StatusCode.INVALID_ARGUMENT),
        ("s" * 129, grpc.StatusCode.INVALID_ARGUMENT),
        ("toolbus", grpc.StatusCode.PERMISSION_DENIED),
        ("mute", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_a_source_that_may_not_offer_is_refused(stub: Any, bus: Bus, source: str, code: grpc.StatusCode) -> None:
    found, details = await refused(stub, tool("t", callback_url=NOBODY), source=source)
    assert (found, source[:79] in details) == (code, True)
    assert not bus.list()


@pytest.mark.parametrize("way", WAYS)
async def test_a_source_that_a_token_binds_accepts_no_tool_from_outside_its_sessions(
    bus: Bus, stub: Any, http: httpx.AsyncClient, way: str
) -> None:
    async with RawPeer(bus.grpc_addresses[0]) as owner:
        await owner.attach("bound", tool("mine"), token="right")
        if way == "grpc":
            code, details = await refused(stub, tool("mine", callback_url=NOBODY), source="bound")
            assert code is grpc.StatusCode.PERMISSION_DENIED
        else:
            body = {"name": "mine", "callback_url": NOBODY, "source": "bound"}
            answer = await http.post("/api/tools/register", json=body)
            assert answer.status_code == 403
            details = answer.json()["detail"]
        assert "token" in details
        assert [(each.tool.name, each.tool.callback_url) for each in bus.list()] == [("mine", "")]


async def test_a_silenced_source_is_refused_by_rest_too(http: httpx.AsyncClient) -> None:
    answer = await http.post("/api/tools/register", json={"name": "t", "callback_url": NOBODY, "source": "mute"})
    assert (answer.status_code, "mute" in answer.json()["detail"]) == (403, True)


async def test_tools_with_and_without_a_callback_do_not_come_in_one_request(bus: Bus, stub: Any) -> None:
    for tools in ((), (tool("t"),), (tool("t", callback_url=NOBODY), tool("u"))):
        code, details = await refused(stub, *tools)
        assert (code, "session_id" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    async with RawPeer(bus.grpc_addresses[0]) as peer:
        attached = await peer.attach("s")
        done = await register(stub, tool("t", callback_url=NOBODY), session_id=attached.session_id)
        assert [(each.name, "callback_url" in each.error) for each in done.refused] == [("t", True)]
    assert not bus.list()


async def test_a_full_role_is_named_with_the_tool() -> None:
    async with running_bus(roles=("a", "b"), limits=Limits(tools_per_role=1)) as bus, stub_of(bus) as stub:
        await register(stub, tool("first", callback_url=NOBODY, role="a"))
        done = await register(stub, tool("second", callback_url=NOBODY))
        assert list(done.affected_roles) == ["b"]
        [failed] = done.failed_roles
        assert (failed.role, failed.tool, "tools_per_role" in failed.error) == ("a", "second", True)


# -- calling -----------------------------------------------------------------------------------------------------------


async def test_arguments_are_checked_against_the_schema_unless_the_tool_says_otherwise(bus: Bus, stub: Any) -> None:
    async with legacy_plugin(answered) as url:
        unset = tool("unset", NUMBER, callback_url=url)
        on = tool("on", NUMBER, callback_url=url, validate=True)
        off = tool("off", NUMBER, callback_url=url, validate=False)
        await register(stub, unset, on, off)
        for name in ("unset", "on"):
            assert (await bus.call(name, {"n": 1}, timeout=WAIT_SECONDS)).unwrap() == {"n": 1}
            assert (await bus.call(name, {"n": "1"}, timeout=WAIT_SECONDS)).unwrap() == {"n": 1}
            result = await bus.call(name, {"n": "x"}, timeout=WAIT_SECONDS)
            assert result.error is not None
            assert result.error.code is Code.INVALID_ARGUMENTS
        assert (await bus.call("off", {"n": "x"}, timeout=WAIT_SECONDS)).unwrap() == {"n": "x"}
        assert (await bus.call("off", "no JSON", timeout=WAIT_SECONDS)).unwrap() == {"_raw": "no JSON"}  # REST-40


async def test_defaults_are_not_filled_in_for_a_callback(bus: Bus, stub: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "m": {"type": "number", "default": 1}}}
    async with legacy_plugin(answered) as url:
        await register(stub, tool("add", schema, callback_url=url))
        for sent, arrives in (({}, {}), ({"n": 1}, {"n": 1}), ({"n": "1"}, {"n": 1})):
            assert (await bus.call("add", sent, timeout=WAIT_SECONDS)).unwrap() == arrives


async def test_a_schema_that_does_not_compile_is_refused_where_it_would_be_checked(stub: Any, bus: Bus) -> None:
    broken = {"type": "object", "properties": {"n": {"type": "no such type"}}}
    done = await register(stub, tool("t", broken, callback_url=NOBODY))
    assert [(each.name, "no such type" in each.error) for each in done.refused] == [("t", True)]
    assert not bus.list()


async def test_a_host_on_a_stream_calls_it_like_any_other(bus: Bus, stub: Any) -> None:
    async with legacy_plugin(answered) as url, RawPeer(bus.grpc_addresses[0]) as host:
        await register(stub, tool("add", NUMBER, callback_url=url))
        await host.attach("host")
        result = await host.call("add", {"n": 2**60})
        assert json.loads(result.output_json) == {"n": 2**60}


# -- each way undoes what the other did --------------------------------------------------------------------------------


async def withdraw(way: str, stub: Any, http: httpx.AsyncClient, **what: str) -> bool | int:
    """Unregisters a name, or clears a source; returns what was removed."""
    path, ask, request = (
        ("clear", stub.Clear, wire.ClearRequest)
        if "source" in what
        else ("unregister", stub.Unregister, wire.UnregisterRequest)
    )
    if way == "grpc":
        return (await ask(request(**what), timeout=WAIT_SECONDS)).removed  # type: ignore[no-any-return]
    return (await http.post(f"/api/tools/{path}", json=what)).json()["removed"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
async def test_a_callback_tool_is_withdrawn_by_either_way(stub: Any, http: httpx.AsyncClient, way: str) -> None:
    await register(stub, tool("by_grpc", callback_url=NOBODY), source="s")
    for name in ("by_rest", "other"):
        await http.post("/api/tools/register", json={"name": name, "callback_url": NOBODY, "source": "s"})
    assert await withdraw(way, stub, http, name="by_rest") is True
    assert await withdraw(way, stub, http, name="by_rest") is False
    assert await listed(http) == [("by_grpc", "s"), ("other", "s")]
    assert await withdraw(way, stub, http, source="s", role="b") == 2
    assert await withdraw(way, stub, http, source="s") == 2
    assert await listed(http) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", [{"name": "mine"}, {"source": "plugin"}], ids=["unregister", "clear"])
async def test_a_session_is_notified_of_a_tool_that_others_withdraw(
    bus: Bus, stub: Any, http: httpx.AsyncClient, way: str, what: dict[str, str]
) -> None:
    async with RawPeer(bus.grpc_addresses[0], answer=echo) as owner:
        await owner.attach("plugin", tool("mine"))
        assert await withdraw(way, stub, http, **what)
        await until(lambda: owner.events, "the event")
        [event] = owner.events
        assert (event.tool_removed.name, list(event.tool_removed.roles)) == ("mine", ["a", "b"])
        assert owner.code is None  # its stream goes on
        result = await bus.call("mine", {}, timeout=WAIT_SECONDS)
        assert result.error is not None
        assert result.error.code is Code.NOT_FOUND


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", ["", "b"])
async def test_a_session_is_notified_of_a_tool_that_a_callback_overwrites(
    bus: Bus, stub: Any, http: httpx.AsyncClient, way: str, role: str
) -> None:
    async with RawPeer(bus.grpc_addresses[0], answer=echo) as owner, legacy_plugin(answered) as url:
        await owner.attach("plugin", tool("mine"), tool("last"))
        if way == "grpc":
            await register(stub, tool("mine", callback_url=url, **({"role": role} if role else {})), source="new")
        else:
            body = {"name": "mine", "callback_url": url, "source": "new", "role": role}
            assert (await http.post("/api/tools/register", json=body)).status_code == 200
        await until(lambda: owner.events, "the event")
        [event] = owner.events
        lost = event.tool_overwritten
        assert (lost.name, lost.by_source, list(lost.roles)) == ("mine", "new", [role] if role else ["a", "b"])
        assert await listed(http, "b") == [("mine", "new"), ("last", "plugin")]  # the place is kept (REST-5)
        assert await listed(http, "a") == [("mine", "plugin" if role else "new"), ("last", "plugin")]
        assert (await bus.call("mine", {"n": 1}, role="b", timeout=WAIT_SECONDS)).unwrap() == {"n": 1}
        assert len(owner.calls) == 0


async def test_a_session_that_overwrites_a_callback_gets_the_calls(bus: Bus, http: httpx.AsyncClient) -> None:
    posted = asyncio.Event()

    async def notice(body: dict[str, Any]) -> bytes:
        posted.set()
        return b"{}"

    async with RawPeer(bus.grpc_addresses[0], answer=echo) as plugin, legacy_plugin(notice) as url:
        await http.post("/api/tools/register", json={"name": "mine", "callback_url": url, "source": "old"})
        await plugin.attach("new", tool("mine"))
        assert await listed(http) == [("mine", "new")]
        assert (await bus.call("mine", {"n": 1}, timeout=WAIT_SECONDS)).unwrap() == {"n": 1}
        assert not posted.is_set()
        assert (await http.post("/api/tools/clear", json={"source": "old"})).json()["removed"] == 0
