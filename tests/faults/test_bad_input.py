"""Schemas, arguments, messages and bytes that break the rules: each ends in a sentence, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.faults.conftest import Connect
from tests.faults.raw_peer import RawPeer, echo, opening, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.protocol.tool import MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.usefixtures("bystander")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
INVALID_ARGUMENTS = pb.ERROR_CODE_INVALID_ARGUMENTS


def _exploding(levels: int) -> dict[str, Any]:
    """A schema of a few lines whose references expand to 2 ** levels nodes."""
    names = [f"d{n}" for n in range(levels)]
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for below, name in itertools.pairwise(names):
        definitions[name] = {"allOf": [{"$ref": f"#/$defs/{below}"}, {"$ref": f"#/$defs/{below}"}]}
    return {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{names[-1]}"}}, "$defs": definitions}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "not JSON"),
        ("nonsense", "not JSON"),
        ("[]", "must be an object"),
        ("null", "must be an object"),
        ('{"type": "object", "minProperties": NaN}', "NaN"),
        ('{"type": "strin"}', "did you mean"),
        ('{"type": "string"}', "object"),
        ('{"description": "' + "x" * MIB + '"}', "schema_bytes"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "nested"),
        ('{"not":' * 100 + "{}" + "}" * 100, "schema_depth"),
        (_exploding(25), "schema_nodes"),
        ({"$ref": "#"}, "without end"),
    ],
    ids=lambda value: (value if isinstance(value, str) else str(value))[:30],
)
async def test_a_tool_with_a_bad_schema_is_refused_with_what_is_wrong_and_the_next_is_offered(
    stranger: RawPeer, schema: object, said: str
) -> None:
    attached = await stranger.attach("schemas", tool("bad", schema), tool("good"))
    ((name, error),) = [(refused.name, refused.error) for refused in attached.refused]
    assert name == "bad"
    assert said in error
    assert "'bad'" in error
    assert len(error) <= 1_000
    assert list(attached.registered) == ["good"]


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """Listens for somebody who fetches a reference."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


async def test_a_reference_into_the_network_or_to_a_file_is_not_followed(
    stranger: RawPeer, trap: socket.socket
) -> None:
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/schema.json"
    tools = [
        tool(f"t{number}", {"properties": {"x": {"$ref": each}}}) for number, each in enumerate((url, "/etc/passwd"))
    ]
    attached = await stranger.attach("schemas", *tools, tool("own", {"$schema": url}))
    assert (list(attached.registered), attached.refused_total) == (["t0", "t1", "own"], 0)
    with pytest.raises(BlockingIOError):
        trap.accept()


async def test_every_fault_of_an_attach_that_is_all_or_none_is_named_at_once(stranger: RawPeer) -> None:
    tools = [tool("bad name"), tool("schema", "{"), tool("long", description="x" * 20_000), tool("fine")]
    code, details = await stranger.refused(opening("faults", *tools, all_or_none=True))
    assert code is INVALID
    assert "'bad name'" in details
    assert "'schema'" in details
    assert "description_bytes" in details


LONG_TEXTS = {
    "Chinese": "很长的名字" * 20,
    "emoji": "\U0001f63a" * 100,
    "ASCII": "bad name " * 100,
    "controls": "a\x01\n%" * 100,
}


@pytest.mark.parametrize("number", [12, 200])
@pytest.mark.parametrize("name", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
async def test_a_long_text_of_a_status_reaches_clients_that_take_small_headers(
    stranger: RawPeer, address: str, name: str, number: int
) -> None:
    """Some libraries take 8 KiB of headers; above that a client sees another status, and tries for ever."""
    tools = [tool(f"t{each}", {"properties": {name: {"type": name}}}) for each in range(number)]
    options = (("grpc.max_metadata_size", 8192), ("grpc.absolute_max_metadata_size", 8192))
    async with grpc.aio.insecure_channel(address, (*options, ("grpc.use_local_subchannel_pool", 1))) as channel:
        stub: Any = rpc.ToolBusServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Invoke(iter([opening("names", *tools, all_or_none=True)])):
                pass
        assert failure.value.code() is INVALID
        assert "'t0'" in (failure.value.details() or "")
        callbacks = [
            pb.Tool(name=each.name, parameters_json=each.parameters_json, callback_url="http://127.0.0.1:9/")
            for each in tools
        ]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Register(wire.RegisterRequest(source="names", tools=callbacks, all_or_none=True))
        assert failure.value.code() is INVALID


async def test_an_unknown_session_id_is_refused_with_how_to_fix_it(connect: Connect) -> None:
    peer = await connect("peer")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await peer.stub.Register(wire.RegisterRequest(session_id="0" * 32, tools=[tool("t")]))
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "Attach again" in (failure.value.details() or "")


async def test_the_session_id_of_an_ended_session_is_refused(connect: Connect) -> None:
    gone, peer = await connect("gone"), await connect("peer")
    assert gone.attached is not None
    request = wire.RegisterRequest(session_id=gone.attached.session_id, tools=[tool("t")])
    await peer.stub.Register(request)
    await gone.send(drain=wire.Drain())
    await gone.ended()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await peer.stub.Register(request)
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION


STRICT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 10}, "s": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{", "not JSON"),
        ("{'n': 1}", "not JSON"),
        ('{"n": NaN}', "not JSON"),
        ("[1]", "must be a JSON object"),
        ("1", "must be a JSON object"),
        ("", "n"),
        ({}, "n"),
        ({"n": "one"}, "arguments.n"),
        ({"n": 11}, "maximum"),
        ({"n": 10**30}, "maximum"),
        ({"n": 1, "other": 2}, "additionalProperties"),
        ('{"n":' + "[" * 5_000 + "]" * 5_000 + "}", "depth limit"),
        ({"n": 1, "s": "x" * (MIB + 1)}, "arguments_bytes"),
        ({"n": 1, "s": "𝄞" * (MIB // 3)}, "arguments_bytes"),
    ],
    ids=lambda value: (value if isinstance(value, str) else str(value))[:30],
)
async def test_arguments_that_break_the_schema_never_reach_the_plugin(
    connect: Connect, arguments: object, said: str
) -> None:
    plugin = await connect("strict", tool("strict", STRICT), answer=echo)
    host = await connect("host")
    result = await host.call("strict", arguments)
    assert result.is_error
    assert result.error.code == INVALID_ARGUMENTS
    assert result.error.stage == pb.CALL_STAGE_NOT_DISPATCHED
    assert said in f"{result.error.message} {result.error.limit.name}"
    assert len(result.error.message) < 2_000
    assert (await host.call("strict", {"n": 1})).output_json == '{"n": 1}'
    assert len(plugin.calls) == 1


@pytest.mark.parametrize("call_id", ["", "x" * 129, "x" * 1_000_000], ids=len)
async def test_a_bad_call_id_is_refused(connect: Connect, call_id: str) -> None:
    await connect("plugin", tool("t"), answer=echo)
    host = await connect("host")
    await host.send(calls=[pb.ToolCall(call_id=call_id, name="t")])
    await until(lambda: host.results, "the refusal")
    assert host.results[0].error.code == INVALID_ARGUMENTS
    assert "call_id" in host.results[0].error.message
    assert (await host.call("t", {"n": 1})).output_json == '{"n": 1}'


async def test_names_and_roles_of_megabytes_are_refused_with_a_short_error(connect: Connect) -> None:
    host = await connect("host")
    for fields in ({"name": "x" * 3_000_000}, {"name": "t", "role": "r" * 3_000_000}):
        result = await host.call(**fields)
        assert result.error.code == pb.ERROR_CODE_NOT_FOUND
        assert len(result.error.message) < 1_000
    assert host.code is None
    await connect("plugin", tool("t"), answer=echo)
    result = await host.call("t", parent_call_id="p" * 3_000_000)
    assert result.error.code == INVALID_ARGUMENTS
    assert len(result.error.message) < 1_000


async def test_a_negative_or_endless_timeout_is_refused_or_bounded(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"), answer=echo)
    host = await connect("host")
    for timeout in (-1.0, float("nan"), float("-inf")):
        assert (await host.call("t", timeout_seconds=timeout)).error.code == INVALID_ARGUMENTS
    assert not (await host.call("t", timeout_seconds=float("inf"))).is_error
    assert plugin.calls[0].timeout_seconds == pytest.approx(300, abs=1)


async def test_a_message_over_the_limit_ends_only_the_stream_that_sent_it(connect: Connect) -> None:
    await connect("plugin", tool("t"), answer=echo)
    loud, quiet = await connect("loud"), await connect("quiet")
    await loud.send_quietly(wire.InvokeRequest(calls=[loud.ask("t", {"s": "x" * (17 * MIB)})]))
    code, details = await loud.ended()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(16 * MIB) in details
    assert (await quiet.call("t", {"n": 1})).output_json == '{"n": 1}'


async def test_a_frame_of_6_mb_from_a_peer_is_read_whole(connect: Connect) -> None:
    await connect("plugin", tool("t"), answer=echo)
    host = await connect("host")
    futures = await host.start(*(host.ask("t", {"s": "x" * 500_000}) for _ in range(12)))
    results = await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS)
    assert [len(result.output_json) for result in results] == [500_009] * 12


@pytest.mark.parametrize("arm", ["calls", "results", "progress", "cancels"])
async def test_a_frame_of_300_000_empty_items_is_refused_before_any_is_read(connect: Connect, arm: str) -> None:
    host, quiet = await connect("host"), await connect("quiet")
    number = wire.InvokeRequest.DESCRIPTOR.fields_by_name[arm].number
    frame = wire.InvokeRequest.FromString(bytes([number << 3 | 2, 0]) * 300_000)
    await host.send_frame(frame)
    code, details = await host.ended()
    assert code is INVALID
    assert f"300000 {arm}, at most 4096" in details
    assert not (await quiet.call("steady")).is_error


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x04\x12\x02\xff\xff"])
@pytest.mark.parametrize("attached", [False, True], ids=["first", "later"])
async def test_bytes_that_are_not_a_message_end_the_stream_with_an_error(
    connect: Connect, stranger: RawPeer, attached: bool, garbage: bytes
) -> None:
    """The third is a message whose source is not UTF-8."""
    host = await connect("host")
    messages = [opening("garbage", tool("mine")).SerializeToString(), garbage] if attached else [garbage]
    channel: Any = stranger.channel  # its stubs want functions that turn messages into bytes, and these are bytes
    invoke = channel.stream_stream("/toolbus.v1.ToolBusService/Invoke")
    stream = invoke(iter(messages))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in stream:
            pass
    assert failure.value.code() is INVALID
    assert "InvokeRequest" in (failure.value.details() or "")
    if attached:
        assert (await host.call("mine")).error.code == pb.ERROR_CODE_UNAVAILABLE


async def test_a_role_of_megabytes_in_an_attach_is_refused_with_a_short_error(stranger: RawPeer) -> None:
    code, details = await stranger.refused(opening("roles", tool("t", role="r" * 3_000_000), all_or_none=True))
    assert code is grpc.StatusCode.NOT_FOUND
    assert len(details) < 1_000
    stranger.open()
    attached = await stranger.attach("roles", tool("t", role="r" * 3_000_000))
    assert len(attached.refused[0].SerializeToString()) < 1_500


async def test_garbage_to_a_unary_rpc_ends_that_rpc_alone(stranger: RawPeer, complaints: list[str]) -> None:
    channel: Any = stranger.channel
    method = channel.unary_unary("/toolbus.v1.ToolBusService/List")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"\xff" * 100)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert complaints == []
    assert (await rpc.ToolBusServiceStub(stranger.channel).List(wire.ListRequest())).tools
