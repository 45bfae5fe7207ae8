# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

import asyncio
import json
from typing import Any

import pytest

from tests.bus.gateway.calling import client, invoke, legacy_plugin
from tests.bus.gateway.invoke_cases import Tools, raw_peer, running_tools, shared, tools
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.errors import Code
from toolbus.protocol.tool import Limits
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

# -- failures ------------------------------------------------------------------------------------------------------


async def test_an_unknown_tool_is_an_error_that_lists_the_tools(tools: Tools) -> None:
    error = (await invoke(tools.http, "locla"))["error"]
    assert error["code"] == "NOT_FOUND"
    for word in ("locla", "local", "grpc", "callback"):
        assert word in error["message"]
    assert "toolbus:" not in error["message"]


async def test_an_unknown_role_is_a_404_and_a_known_one_finds_its_tool(tools: Tools) -> None:
    refused = await tools.http.post("/api/tools/invoke", json={"name": "local", "role": "Nobody"})
    assert (refused.status_code, refused.json()) == (404, {"detail": "unknown role: Nobody"})
    for role in ("Ran", "", None):
        assert not (await invoke(tools.http, "local", role=role))["is_error"]


async def test_every_code_of_a_plugin_is_returned_by_its_name(tools: Tools) -> None:
    def answer(call: pb.ToolCall) -> pb.ToolResult:
        error = pb.CallError(
            code=json.loads(call.arguments_json)["code"],
            stage=pb.CALL_STAGE_ACCEPTED,
            message="so it is",
            retry_safe=True,
            limit=pb.Limit(name="tools", value=3),
        )
        return pb.ToolResult(call_id=call.call_id, is_error=True, output_json="[5.0]", error=error)

    peer = await raw_peer(tools.bus, answer, "fails")
    try:
        for code in [each for each in Code if each]:
            said = await invoke(tools.http, "fails", {"code": code.value}, call_id="mine")
            assert (said["call_id"], said["is_error"]) == ("mine", True)
            assert repr(said["output"]) == "[5.0]"
            assert list(said["error"]) == [
                *("code", "message", "stage", "retry_safe", "limit", "retry_after_seconds", "reason"),
            ]
            assert said["error"]["code"] == code.name
            assert said["error"]["message"] == "so it is"
    finally:
        await peer.close()


async def test_an_exception_keeps_its_class_and_its_message(tools: Tools) -> None:
    @tools.bus.tool
    def refuses() -> None:
        raise LookupError("kein Land 那里")

    error = (await invoke(tools.http, "refuses"))["error"]
    assert (error["code"], error["reason"]) == ("TOOL", "LookupError")
    assert "kein Land 那里" in error["message"]


async def test_a_timeout_names_its_limit(tools: Tools) -> None:
    seconds = 0.05
    error = (await invoke(tools.http, "nap", timeout_seconds=seconds))["error"]
    while error["stage"] == "DISPATCHED" and seconds < WAIT_SECONDS:  # a busy machine has not begun it in time
        seconds *= 4
        error = (await invoke(tools.http, "nap", timeout_seconds=seconds))["error"]
    assert (error["code"], error["stage"]) == ("DEADLINE_EXCEEDED", "ACCEPTED")
    assert error["limit"]["value"] == seconds
    await asyncio.wait_for(tools.cancelled.wait(), WAIT_SECONDS)


async def test_an_outdated_schema_hash_is_refused_before_the_tool_runs(tools: Tools) -> None:
    error = (await invoke(tools.http, "local", schema_hash="old"))["error"]
    assert (error["code"], error["stage"]) == ("CATALOG_STALE", "NOT_DISPATCHED")


async def test_too_large_a_result_and_too_many_calls_name_their_limits() -> None:
    limits = Limits(result_bytes=1_000, calls_in_flight=1)
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0, limits=limits) as bus, client(bus) as http:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def answer(body: dict[str, Any]) -> bytes:
            entered.set()
            await leave.wait()
            return b'"done"'

        async with legacy_plugin(answer) as url:
            await http.post("/api/tools/register", json={"name": "slow", "callback_url": url})

            @bus.tool
            def large() -> str:
                return "x" * 1_001

            error = (await invoke(http, "large"))["error"]
            assert (error["code"], error["limit"]) == ("RESULT_TOO_LARGE", {"name": "result_bytes", "value": 1_000})
            first = asyncio.create_task(invoke(http, "slow"))
            await entered.wait()
            error = (await invoke(http, "slow"))["error"]
            assert (error["code"], error["stage"], error["retry_safe"]) == ("OVERLOADED", "NOT_DISPATCHED", True)
            assert error["retry_after_seconds"] > 0
            assert error["limit"]["value"] == 1
            leave.set()
            assert (await first)["output"] == "done"


async def test_a_draining_bus_refuses_calls_and_says_that_a_retry_is_safe() -> None:
    async with running_tools() as tools:
        napping = asyncio.create_task(invoke(tools.http, "nap", timeout_seconds=0.3))
        await until(lambda: tools.scopes, "the call to reach its tool")
        drained = asyncio.create_task(tools.bus.drain(WAIT_SECONDS))
        ready = await tools.http.get("/readyz")
        assert ready.status_code == 503
        error = (await invoke(tools.http, "local"))["error"]
        assert (error["code"], error["stage"], error["retry_safe"]) == ("UNAVAILABLE", "NOT_DISPATCHED", True)
        assert (await napping)["error"]["code"] == "DEADLINE_EXCEEDED"
        await drained
