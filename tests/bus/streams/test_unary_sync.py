"""The unary RPCs, and whole streams, through the generated synchronous stubs.

The bus runs on a thread and loop of its own; pytest-grpc brings the channel and the stub to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus, Config
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb


class _Served:
    """A bus on a thread of its own."""

    def __init__(self) -> None:
        self.address = ""  # set once it serves
        self._serving = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # set once it serves
        self._end: asyncio.Event | None = None  # set once it serves
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        async with Bus(Config(grpc=("127.0.0.1:0",), http="off", roles=("cat", "dog"), grace_seconds=0.2)) as bus:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            self.address = bus.grpc_addresses[0]
            self._serving.set()
            await self._end.wait()

    def __enter__(self) -> _Served:
        self._thread.start()
        assert self._serving.wait(WAIT_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def grpc_server() -> Iterator[_Served]:
    """Stands in for pytest-grpc's server, which runs servicers on threads: ours belong to a loop."""
    with _Served() as served:
        yield served


@pytest.fixture(scope="module")
def grpc_addr(grpc_server: _Served) -> str:
    return grpc_server.address


@pytest.fixture(scope="module")
def grpc_stub_cls(grpc_channel: grpc.Channel) -> type[rpc.ToolBusServiceStub]:
    return rpc.ToolBusServiceStub


class SyncPeer:
    """One Invoke stream, written and read by a thread that blocks."""

    def __init__(self, stub: rpc.ToolBusServiceStub, source: str, *tools: pb.Tool, **fields: Any) -> None:
        self._outbox: queue.SimpleQueue[wire.InvokeRequest | None] = queue.SimpleQueue()
        attach = wire.Attach(protocol_version=1, source=source, tools=tools, **fields)
        self.send(attach=attach)
        frames: Any = stub.Invoke(iter(self._outbox.get, None), timeout=WAIT_SECONDS)
        self.frames = frames
        self.session_id: str = next(self.frames).attached.session_id

    def send(self, **arms: Any) -> None:
        self._outbox.put(wire.InvokeRequest(**arms))

    def end(self) -> None:
        self.send(drain=wire.Drain())
        for _ in self.frames:
            pass
        self._outbox.put(None)


@contextlib.contextmanager
def attached(stub: rpc.ToolBusServiceStub, source: str, *tools: pb.Tool, **fields: Any) -> Iterator[SyncPeer]:
    peer = SyncPeer(stub, source, *tools, **fields)
    try:
        yield peer
    finally:
        peer.end()


def tool(name: str, **fields: Any) -> pb.Tool:
    return pb.Tool(name=name, parameters_json=json.dumps({"type": "object"}), **fields)


def names(stub: rpc.ToolBusServiceStub, **request: Any) -> list[str]:
    return [item.tool.name for item in stub.List(wire.ListRequest(**request)).tools]


def status(function: Any, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failure:
        function(request)
    return failure.value.code(), failure.value.details() or ""


def test_a_registered_tool_is_listed_in_every_role(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "plugin") as peer:
        answer = grpc_stub.Register(wire.RegisterRequest(session_id=peer.session_id, tools=[tool("a"), tool("b")]))
        assert list(answer.registered) == ["a", "b"]
        assert list(answer.affected_roles) == ["cat", "dog"]
        assert (answer.ok, list(answer.failed_roles)) == (True, [])
        (item, _) = grpc_stub.List(wire.ListRequest()).tools
        assert (item.source, list(item.roles), item.session_state) == ("plugin", ["cat", "dog"], 1)
        assert len(item.schema_hash) == 32
    assert names(grpc_stub) == []


def test_a_tool_for_one_role_is_listed_there_only(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "plugin", tool("meow", role="cat"), tool("both")):
        assert names(grpc_stub, role="cat") == ["meow", "both"]
        assert names(grpc_stub, role="dog") == ["both"]
        assert names(grpc_stub) == ["meow", "both"]
        code, text = status(grpc_stub.List, wire.ListRequest(role="bird"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "bird" in text


def test_conditions_of_a_list_add_up(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "one", tool("a"), tool("b")), attached(grpc_stub, "two", tool("c")):
        assert names(grpc_stub, names=["a", "c"]) == ["a", "c"]
        assert names(grpc_stub, names=["a", "c"], source="two") == ["c"]
        assert names(grpc_stub, source="nobody") == []
        assert "toolbus:drain" in names(grpc_stub, source="toolbus")


def test_one_bad_tool_refuses_a_register_that_is_all_or_none_and_itself_alone_otherwise(
    grpc_stub: rpc.ToolBusServiceStub,
) -> None:
    with attached(grpc_stub, "plugin") as peer:
        request = wire.RegisterRequest(session_id=peer.session_id, tools=[tool("good"), tool("bad name")])
        request.all_or_none = True
        code, text = status(grpc_stub.Register, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "'bad name'" in text
        assert names(grpc_stub) == []
        request.all_or_none = False
        answer = grpc_stub.Register(request)
        assert (list(answer.registered), answer.ok, answer.refused_total) == (["good"], False, 1)
        assert [(each.name, "[A-Za-z0-9_.-]" in each.error) for each in answer.refused] == [("bad name", True)]
        assert names(grpc_stub) == ["good"]


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "attach first"),
        ({"session_id": "unknown"}, grpc.StatusCode.FAILED_PRECONDITION, "Attach again"),
        ({"source": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "attach first"),
    ],
    ids=["none", "unknown", "source alone"],
)
def test_a_register_without_a_live_session_is_refused(
    grpc_stub: rpc.ToolBusServiceStub, fields: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    refused, text = status(grpc_stub.Register, wire.RegisterRequest(tools=[tool("t")], **fields))
    assert refused is code
    assert reason in text


def test_a_register_for_another_source_is_refused(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "mine") as peer:
        request = wire.RegisterRequest(session_id=peer.session_id, source="other", tools=[tool("t")])
        code, text = status(grpc_stub.Register, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "'mine'" in text


def test_a_callback_url_beside_a_session_is_refused(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "plugin") as peer:
        tools = [tool("t", callback_url="http://127.0.0.1:1/")]
        answer = grpc_stub.Register(wire.RegisterRequest(session_id=peer.session_id, tools=tools))
        assert "callback_url" in answer.refused[0].error


def test_unregistering_for_one_role_leaves_the_others(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "plugin", tool("t")):
        answer = grpc_stub.Unregister(wire.UnregisterRequest(name="t", role="cat"))
        assert (answer.removed, answer.name, list(answer.affected_roles), answer.ok) == (True, "t", ["cat"], True)
        assert names(grpc_stub, role="cat") == []
        assert names(grpc_stub, role="dog") == ["t"]


def test_unregistering_an_unknown_tool_is_not_an_error(grpc_stub: rpc.ToolBusServiceStub) -> None:
    answer = grpc_stub.Unregister(wire.UnregisterRequest(name="nothing"))
    assert (answer.removed, answer.ok) == (False, True)
    assert status(grpc_stub.Unregister, wire.UnregisterRequest())[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_session_cannot_unregister_the_tools_of_another_source(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "one", tool("a")), attached(grpc_stub, "two", tool("b")) as two:
        assert not grpc_stub.Unregister(wire.UnregisterRequest(session_id=two.session_id, name="a")).removed
        assert names(grpc_stub) == ["a", "b"]


def test_clear_withdraws_every_tool_of_a_source(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with attached(grpc_stub, "one", tool("a"), tool("b")), attached(grpc_stub, "two", tool("c")):
        answer = grpc_stub.Clear(wire.ClearRequest(source="one"))
        assert (answer.removed, answer.source, list(answer.affected_roles)) == (4, "one", ["cat", "dog"])
        assert names(grpc_stub) == ["c"]
        assert grpc_stub.Clear(wire.ClearRequest(source="nobody")).removed == 0


@pytest.mark.parametrize(
    ("source", "code"),
    [("", grpc.StatusCode.INVALID_ARGUMENT), ("toolbus", grpc.StatusCode.PERMISSION_DENIED)],
)
def test_clear_refuses_no_source_and_the_bus_itself(
    grpc_stub: rpc.ToolBusServiceStub, source: str, code: grpc.StatusCode
) -> None:
    assert status(grpc_stub.Clear, wire.ClearRequest(source=source))[0] is code


def test_a_qualified_source_is_listed_under_its_own_names(grpc_stub: rpc.ToolBusServiceStub) -> None:
    with (
        attached(grpc_stub, "a", tool("search"), qualified=True),
        attached(grpc_stub, "b", tool("search"), qualified=True) as b,
    ):
        assert names(grpc_stub) == ["a:search", "b:search"]
        b.send(calls=[pb.ToolCall(call_id="1", name="b:search")])
        call = next(b.frames).calls[0]
        assert call.name == "search"
        b.send(results=[pb.ToolResult(call_id=call.call_id, output_json="1")])
        assert next(b.frames).results[0].output_json == "1"


def test_a_blocking_stub_makes_a_whole_call_in_one_frame(grpc_stub: rpc.ToolBusServiceStub) -> None:
    frame = wire.InvokeRequest(
        attach=wire.Attach(protocol_version=1, source="once"),
        calls=[pb.ToolCall(call_id="1", name="toolbus:stats")],
    )
    frames = list(grpc_stub.Invoke(iter([frame]), timeout=WAIT_SECONDS))
    (result,) = [result for frame in frames for result in frame.results]
    assert json.loads(result.output_json)["sessions"] >= 1
