"""Results and failures of calls as MCP clients read them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.parts.mcp.server.asking import mcp_bench
from tests.parts.mcp.server.http_client import META, HttpClient, serving
from toolbus.bus import Bus
from toolbus.bus.access.identity import LOCAL
from toolbus.bus.calls.call import Call, Span
from toolbus.bus.calls.call_records import RecordFilter
from toolbus.errors import Code, Stage
from toolbus.functions.scope import ToolScope
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server.calls import ERROR_META, write_result
from toolbus.parts.mcp.server.mcp_request import McpRequest, Params
from toolbus.parts.mcp.server.sessions import ClientCapabilities
from toolbus.parts.mcp.settings import Profile
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

Run = Callable[[Call], pb.ToolResult]


class NoChannel:
    takes_messages = False

    def send(self, message: bytes) -> None:
        raise AssertionError("nothing is sent")


def written(result: Result, *, modern: bool = True) -> dict[str, Any]:
    """Returns a result as a client reads it."""
    request = McpRequest(
        *(1, "tools/call", Params(), b"{}", modern, "", Profile(), LOCAL, ClientCapabilities()), None, NoChannel(), {}
    )
    read: dict[str, Any] = json.loads(write_result(result, request))
    return read


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with serving(Profile(name="short", timeout_seconds=0.2)) as bus:
        yield bus


@pytest.fixture
def client(bus: Bus) -> HttpClient:
    return HttpClient(bus)


# -- results ---------------------------------------------------------------------------------------------------------


def failed_with(message: str) -> Result:
    return Result(is_error=True, error=CallError(Code.TOOL, message, Stage.ACCEPTED))


@pytest.mark.parametrize("modern", [True, False])
@pytest.mark.parametrize(
    ("result", "text"),
    [
        (failed_with("no page 7"), "Error: no page 7"),
        (Result(is_error=True, output_json='"no page 7"'), "Error: the tool reported a failure\nno page 7"),
        (
            Result(is_error=True, content=(pb.ContentBlock(text=pb.TextContent(text="no page 7")),)),
            "Error: no page 7",
        ),
        (failed_with("error 5: no page 7"), "error 5: no page 7"),
        (failed_with("[Error] no page 7"), "[Error] no page 7"),
        (failed_with("Failed to read page 7"), "Failed to read page 7"),
        (failed_with('{"error":"no page 7"}'), '{"error":"no page 7"}'),
        (failed_with("errors are rare"), "Error: errors are rare"),
        (Result(output_json='"no page 7"'), "no page 7"),
    ],
)
def test_a_failure_begins_with_a_word_for_it_for_clients_that_pass_on_texts_alone(
    result: Result, text: str, modern: bool
) -> None:
    assert written(result, modern=modern)["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("output", "text", "legacy", "modern"),
    [
        ('{"a":1}', '{"a":1}', {"a": 1}, {"a": 1}),
        ("[1]", "[1]", None, [1]),
        ("5", "5", None, 5),
        ('"text"', "text", None, None),
        ("null", "null", None, None),
    ],
)
def test_structured_output_is_an_object_in_sessions_and_any_json_but_a_text_since(
    output: str, text: str, legacy: Any, modern: Any
) -> None:
    for era, structured in ((False, legacy), (True, modern)):
        read = written(Result(output_json=output), modern=era)
        assert read["content"] == [{"type": "text", "text": text}]
        assert read.get("structuredContent") == structured
        assert read["isError"] is False


def test_numbers_go_out_as_the_tool_wrote_them() -> None:
    output = '{"n":123456789012345678901234567890,"x":1.10}'
    request = McpRequest(
        *(1, "tools/call", Params(), b"", True, "", Profile(), LOCAL, ClientCapabilities()), None, NoChannel(), {}
    )
    assert b'"structuredContent":' + output.encode() in write_result(Result(output_json=output), request)


@pytest.mark.parametrize("output", ['{"a":', '{"a":NaN}', '{"a":1}}', "{'a':1}", '{"a":1,"id":2}]}', "{" * 100_000])
def test_an_output_that_is_no_json_does_not_break_the_message(output: str) -> None:
    read = written(Result(output_json=output))
    assert "structuredContent" not in read or json.loads(output) == read["structuredContent"]
    assert read["content"][0]["type"] == "text"


def test_content_goes_out_beside_the_output() -> None:
    image = pb.ContentBlock(image=pb.ImageContent(data=b"\x01", mime_type="image/png"))
    read = written(Result(output_json='{"a":1}', content=(image,)))
    shown = {"type": "image", "data": "AQ==", "mimeType": "image/png"}
    assert read["content"] == [{"type": "text", "text": '{"a":1}'}, shown]
    assert written(Result(content=(image,)))["content"] == [shown]


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [code for code in Code if code not in (Code.UNSPECIFIED, Code.INTERNAL)])
def test_a_failure_is_a_result_that_a_model_reads(code: Code) -> None:
    error = CallError(code, "why", Stage.ACCEPTED, retry_safe=True, limit=("calls", 8), retry_after_seconds=0.5)
    for modern in (True, False):
        read = written(Result(is_error=True, error=error), modern=modern)
        assert read["isError"] is True
        assert "why" in read["content"][0]["text"]
        if code != Code.TOOL:
            assert read["_meta"][ERROR_META] == {
                "code": code.name,
                "stage": "ACCEPTED",
                "retry_safe": True,
                "limit": {"name": "calls", "value": 8},
                "retry_after": 0.5,
            }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CallError(Code.NOT_FOUND, "no", Stage.NOT_DISPATCHED), McpCode.INVALID_PARAMS),
        (CallError(Code.INTERNAL, "a fault"), McpCode.INTERNAL),
        (CallError(Code.TOOL, "theirs", reason="jsonrpc:-32042"), -32042),
    ],
)
def test_what_no_model_can_mend_is_an_error_of_the_protocol(error: CallError, code: int) -> None:
    with pytest.raises(RpcError) as refused:
        written(Result(is_error=True, error=error, output_json='{"x":1}'))
    assert refused.value.code == code


def test_a_reason_that_is_no_number_is_a_failure_of_the_tool() -> None:
    for reason in ("jsonrpc:", "jsonrpc:x", "jsonrpc:--1", "jsonrpc:1234567890123"):
        read = written(Result(is_error=True, error=CallError(Code.TOOL, "why", reason=reason)))
        assert read["isError"] is True


async def test_bad_arguments_are_told_to_the_model(client: HttpClient, bus: Bus) -> None:
    @bus.tool
    async def add(a: int, b: int) -> int:
        return a + b

    result = (await client.call("add", {"a": "x"})).result
    assert result["isError"] is True
    assert result["_meta"][ERROR_META]["code"] == "INVALID_ARGUMENTS"


async def test_arguments_that_are_no_object_and_other_broken_params_are_refused(client: HttpClient, bus: Bus) -> None:
    @bus.tool
    async def anything(**values: Any) -> None: ...

    broken: list[dict[str, Any]] = [
        {"name": "anything", "arguments": [1]},
        {"name": "anything", "arguments": "x"},
        {"name": 5},
    ]
    for params in broken:
        refused = await client.ask("tools/call", params, headers={"Mcp-Name": str(params["name"])})
        assert (refused.status, refused.error["code"]) == (400, McpCode.INVALID_PARAMS)
    for whole in ({"name": "anything"}, {"name": "anything", "arguments": None}):
        assert (await client.ask("tools/call", dict(whole))).result["isError"] is False


async def test_text_that_is_not_utf_8_reaches_no_tool(client: HttpClient, bus: Bus) -> None:
    @bus.tool
    async def anything(**values: Any) -> None:
        raise AssertionError("it is called")

    params = b'{"name":"anything","arguments":{"a":"\xff"},"_meta":%b}' % json.dumps(META).encode()
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":%b}' % params
    refused = await client.send(body, {"Content-Type": "application/json"}).done()
    assert (refused.status, refused.error["code"]) == (400, McpCode.PARSE_ERROR)


async def test_a_tool_that_needs_what_the_client_cannot_do_is_not_called(client: HttpClient, bus: Bus) -> None:
    @bus.tool(needs=("sampling", "elicitation.form"))  # type: ignore[untyped-decorator]
    async def asks() -> None: ...

    refused = await client.call("asks")
    assert (refused.status, refused.error["code"]) == (400, McpCode.MISSING_CAPABILITY)
    assert refused.error["data"] == {"requiredCapabilities": {"sampling": {}, "elicitation": {"form": {}}}}
    assert "tool 'asks'" in refused.error["message"]
    await client.initialize()
    assert (await client.call("asks")).result["isError"] is True


async def test_a_call_of_a_tool_without_a_timeout_has_that_of_its_profile(bus: Bus) -> None:
    @bus.tool
    async def left(scope: ToolScope) -> bool:
        return scope.time_left() <= 0.2

    assert (await HttpClient(bus, "/mcp/short").call("left")).result["structuredContent"] is True
    assert (await HttpClient(bus).call("left")).result["structuredContent"] is False


def refuses(tries: list[Call], code: Code, stage: Stage, *, retry_safe: bool, last: int = 0) -> Run:
    """Returns what refuses calls, until the one with the number ``last``."""

    def run(call: Call) -> pb.ToolResult:
        tries.append(call)
        if len(tries) == last:
            return pb.ToolResult(output_json=str(last))
        error = CallError(code, "not now", stage, retry_safe)
        return pb.ToolResult(is_error=True, error=error.to_wire())

    return run


@pytest.mark.parametrize("code", [Code.OVERLOADED, Code.UNAVAILABLE])
async def test_a_tool_that_is_busy_is_called_again(code: Code) -> None:
    tries: list[Call] = []
    async with mcp_bench() as bench:
        bench.offer("busy", refuses(tries, code, Stage.NOT_DISPATCHED, retry_safe=True, last=3))
        assert (await bench.call("busy"))["structuredContent"] == 3
    assert len(tries) == 3


async def test_a_tool_that_stays_busy_is_told_to_the_model_before_the_deadline() -> None:
    tries: list[Call] = []
    async with mcp_bench(Profile(timeout_seconds=1.0)) as bench:
        bench.offer("busy", refuses(tries, Code.OVERLOADED, Stage.NOT_DISPATCHED, retry_safe=True))
        result = await bench.call("busy")
    assert result["_meta"][ERROR_META]["code"] in ("OVERLOADED", "DEADLINE_EXCEEDED")  # the last try may have no time
    assert len(tries) > 1
    assert all(later.timeout < 1.0 for later in tries[1:])


async def test_a_loop_that_is_late_for_another_try_has_the_last_refusal_as_the_answer() -> None:
    tries: list[Call] = []

    def run(call: Call) -> pb.ToolResult:
        tries.append(call)
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.4)
        error = CallError(Code.OVERLOADED, "not now", Stage.NOT_DISPATCHED, retry_safe=True, retry_after_seconds=0.2)
        return pb.ToolResult(is_error=True, error=error.to_wire())

    async with mcp_bench(Profile(timeout_seconds=0.3)) as bench:
        bench.offer("busy", run)
        result = await bench.call("busy")
    assert result["_meta"][ERROR_META]["code"] in ("OVERLOADED", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("code", "retry_safe"), [(Code.UNAVAILABLE, False), (Code.DEADLINE_EXCEEDED, True), (Code.TOOL, True)]
)
async def test_a_call_that_may_have_run_is_not_made_again(code: Code, retry_safe: bool) -> None:
    tries: list[Call] = []
    async with mcp_bench() as bench:
        bench.offer("lost", refuses(tries, code, Stage.ACCEPTED, retry_safe=retry_safe))
        assert (await bench.call("lost"))["isError"] is True
    assert len(tries) == 1


async def test_a_tool_that_goes_while_a_client_waits_for_it_is_unavailable_and_not_unknown() -> None:
    tries: list[Call] = []
    refuse = refuses(tries, Code.UNAVAILABLE, Stage.NOT_DISPATCHED, retry_safe=True)

    def refuse_and_go(call: Call) -> pb.ToolResult | None:
        bench.bus.registry.unregister("away", "", call.entry.source)
        return refuse(call)

    async with mcp_bench(grace_seconds=0.0) as bench:  # nor does the bus wait for plugins after its own start
        bench.offer("away", refuse_and_go)
        result = await bench.call("away")
    assert result["_meta"][ERROR_META]["code"] == "UNAVAILABLE"
    assert result["_meta"][ERROR_META]["retry_safe"] is True
    assert result["content"][0]["text"].startswith("Error: not now; the last attempt: there is no tool 'away'")
    assert len(tries) == 1


async def test_calls_are_recorded_as_those_of_the_profile(client: HttpClient, bus: Bus) -> None:
    @bus.tool
    async def mine() -> None: ...

    await client.call("mine")
    [record] = bus.records.newest(RecordFilter(), 1)
    assert record.caller == "mcp:default"


# -- traces ----------------------------------------------------------------------------------------------------------


async def test_the_trace_in_the_meta_of_a_client_goes_on_to_the_tool(client: HttpClient, bus: Bus) -> None:
    spans: list[Span] = []
    bus.dispatcher.traces.start(lambda row: spans.append(Span.of(row)))
    traces: list[str] = []

    @bus.tool
    def look(ctx: ToolScope) -> None:
        traces.append(ctx.context.traceparent)

    sampled = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await client.call("look", meta={"traceparent": sampled, "tracestate": "a=1"})
    await client.call("look", meta={"traceparent": "00-zz", "tracestate": "a=1"})
    assert [(span.parent_id, span.tracestate) for span in spans] == [("00f067aa0ba902b7", "a=1")]
    assert traces[0] == sampled
