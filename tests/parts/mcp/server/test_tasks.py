"""The extension for tasks: calls that go on in the background, for clients that follow them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.parts.mcp.server.asking import (
    FORM,
    TASKS,
    Channel,
    Json,
    McpBench,
    accepted,
    answers_of,
    asks,
    mcp_bench,
    question,
)
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus.calls.call import Call
from toolbus.errors import Code
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server.methods import moment
from toolbus.parts.mcp.settings import Profile
from toolbus.v1 import tool_pb2 as pb

BOTH: Json = {**FORM, **TASKS}


def test_a_moment_has_milliseconds_and_is_of_utc() -> None:
    assert moment(1_000_000_000.1234) == "2001-09-09T01:46:40.123Z"


class Jobs:
    """Calls of one tool that end when a test says so."""

    def __init__(self, bench: McpBench, name: str = "job", **more: Any) -> None:
        self.bench = bench
        self.calls: list[Call] = []
        bench.offer(name, self._take, always_background=True, **more)

    def _take(self, call: Call) -> None:
        self.calls.append(call)

    def end(self, output: object = "done", **more: Any) -> None:
        """Ends the newest call."""
        call = self.calls[-1]
        result = pb.ToolResult(call_id=call.id, output_json=json.dumps(output), **more)
        self.bench.bus.dispatcher.results(call.handler, [result], time.monotonic())


async def get(bench: McpBench, task_id: str, **more: Any) -> Json:
    return await bench.ask("tasks/get", {"taskId": task_id}, capabilities=TASKS, **more)


async def ended(bench: McpBench, task_id: str) -> Json:
    """Waits until a task needs nothing more of the bus."""
    async with asyncio.timeout(WAIT_SECONDS):
        while (task := await get(bench, task_id))["status"] == "working":
            await asyncio.sleep(0)
    return task


async def test_a_call_that_takes_long_is_answered_with_a_task_and_its_result_is_fetched_later() -> None:
    async with mcp_bench() as bench:
        jobs = Jobs(bench)
        created = await bench.call("job", capabilities=TASKS)
        assert (created["resultType"], created["status"]) == ("task", "working")
        assert {"createdAt", "lastUpdatedAt", "ttlMs", "pollIntervalMs"} < set(created)
        assert not {"result", "error", "inputRequests", "requestState", "task"} & set(created)
        working = await get(bench, created["taskId"])
        assert (working["resultType"], working["status"], working["taskId"]) == (
            "complete",
            "working",
            created["taskId"],
        )
        jobs.end({"pages": 7})
        task = await get(bench, created["taskId"])
        assert task["status"] == "completed"
        assert task["result"]["structuredContent"] == {"pages": 7}
        assert "io.modelcontextprotocol/related-task" not in task["result"]["_meta"]


async def test_only_what_takes_longer_than_task_after_becomes_a_task() -> None:
    async with mcp_bench(task_after=0.01) as bench:
        bench.offer("fast", lambda call: pb.ToolResult(output_json='"at once"'))
        bench.offer("slow", lambda call: None)
        assert (await bench.call("fast", capabilities=TASKS))["resultType"] == "complete"
        assert (await bench.call("slow", capabilities=TASKS))["resultType"] == "task"


async def test_a_client_without_tasks_is_refused_a_tool_that_is_always_one_and_waits_for_any_other() -> None:
    async with mcp_bench(task_after=0.001) as bench:
        jobs = Jobs(bench)
        with pytest.raises(RpcError) as raised:
            await bench.call("job")
        assert raised.value.code == McpCode.MISSING_CAPABILITY
        assert raised.value.data == {"requiredCapabilities": TASKS}
        assert jobs.calls == []
        bench.offer("other", lambda call: pb.ToolResult(output_json="1"))
        assert "taskId" not in await bench.call("other")
        legacy = asyncio.create_task(bench.call("job", session=bench.session()))
        while not jobs.calls:
            await asyncio.sleep(0)
        jobs.end()
        assert (await legacy)["content"][0]["text"] == "done"


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
async def test_methods_of_tasks_need_the_extension_and_a_task_of_this_client(method: str) -> None:
    async with mcp_bench() as bench:
        Jobs(bench)
        created = await bench.call("job", capabilities=TASKS)
        params: Json = {"taskId": created["taskId"], "inputResponses": {}}
        with pytest.raises(RpcError) as raised:
            await bench.ask(method, params)
        assert (raised.value.code, raised.value.data) == (McpCode.MISSING_CAPABILITY, {"requiredCapabilities": TASKS})
        plain = created["taskId"].partition(".")[0]
        for wrong in ("unknown", plain, plain + ".AAAAAAAAAAAAAAAAAAAAAAAA", ""):
            with pytest.raises(RpcError) as raised:
                await bench.ask(method, {**params, "taskId": wrong}, capabilities=TASKS)
            assert raised.value.code == McpCode.INVALID_PARAMS
        other = Profile("other", user="ann")
        with pytest.raises(RpcError) as raised:
            await bench.ask(method, params, capabilities=TASKS, profile=other)
        assert raised.value.code == McpCode.INVALID_PARAMS


async def test_tools_list_and_result_of_tasks_are_gone() -> None:
    async with mcp_bench() as bench:
        for method in ("tasks/list", "tasks/result"):
            with pytest.raises(RpcError) as raised:
                await bench.ask(method, {"taskId": "x"}, capabilities=TASKS)
            assert raised.value.code == McpCode.METHOD_NOT_FOUND


async def test_a_tool_that_fails_has_completed_and_a_fault_of_the_protocol_has_failed() -> None:
    async with mcp_bench() as bench:
        jobs = Jobs(bench)
        tasks = [(await bench.call("job", capabilities=TASKS))["taskId"]]
        jobs.end(None, is_error=True, error=pb.CallError(message="no page 7"))
        tasks.append((await bench.call("job", capabilities=TASKS))["taskId"])
        jobs.end({"half": 1}, is_error=True)
        tasks.append((await bench.call("job", capabilities=TASKS))["taskId"])
        fault = pb.CallError(code=Code.INTERNAL.value, message="broken")  # type: ignore[arg-type]
        jobs.end(None, is_error=True, error=fault)
        tasks.append((await bench.call("job", capabilities=TASKS))["taskId"])
        theirs = pb.CallError(code=Code.TOOL.value, message="theirs", reason="jsonrpc:-32042")  # type: ignore[arg-type]
        jobs.end(None, is_error=True, error=theirs)
        told, output, broken, foreign = [await get(bench, each) for each in tasks]
        assert (told["status"], told["result"]["isError"]) == ("completed", True)
        assert told["result"]["content"][0]["text"] == "Error: no page 7"
        assert (output["status"], output["result"]["isError"]) == ("completed", True)
        assert "half" in output["result"]["content"][0]["text"]
        assert (broken["status"], broken["error"]["code"], "result" in broken) == ("failed", McpCode.INTERNAL, False)
        assert foreign["error"] == {"code": -32042, "message": "theirs"}


async def test_a_cancelled_task_is_cancelled_and_cancelling_again_changes_nothing() -> None:
    async with mcp_bench() as bench:
        jobs = Jobs(bench)
        task_id = (await bench.call("job", capabilities=TASKS))["taskId"]
        for _ in range(2):
            acknowledged = await bench.ask("tasks/cancel", {"taskId": task_id}, capabilities=TASKS)
            assert set(acknowledged) == {"resultType", "_meta"}
        task = await get(bench, task_id)
        assert (task["status"], "result" in task, "error" in task) == ("cancelled", False, False)
        async with asyncio.timeout(WAIT_SECONDS):
            while not jobs.calls[0].handler.cancelled:  # type: ignore[attr-defined]
                await asyncio.sleep(0)


async def test_a_task_asks_collects_answers_one_by_one_and_goes_on_under_its_id() -> None:
    async with mcp_bench() as bench:

        def run(call: Call) -> pb.ToolResult:
            answers = answers_of(call)
            state = call.exchange.state if call.exchange is not None else ""
            if not answers:
                return asks("mine", a=question("a?"), b=question("b?"))
            output = [answers["a"]["content"], answers["b"]["action"], state, call.arguments_json]
            return pb.ToolResult(output_json=json.dumps(output))

        bench.offer("multi", run, always_background=True)
        task_id = (await bench.call("multi", {"n": 1}, capabilities=BOTH))["taskId"]
        asking = await ended(bench, task_id)
        assert (asking["status"], set(asking["inputRequests"])) == ("input_required", {"a", "b"})
        assert "requestState" not in asking

        async def answer(**answers: Json) -> Json:
            params = {"taskId": task_id, "inputResponses": answers}
            return await bench.ask("tasks/update", params, capabilities=TASKS)

        assert set(await answer(unknown={"ignored": True})) == {"resultType", "_meta"}
        with pytest.raises(RpcError) as raised:
            await answer(a=accepted(name=7), b={"action": "decline"})
        assert raised.value.code == McpCode.INVALID_PARAMS
        assert set((await get(bench, task_id))["inputRequests"]) == {"a", "b"}  # none of them counts
        await answer(a=accepted(name="Ann"))
        task = await get(bench, task_id)
        assert (task["status"], set(task["inputRequests"])) == ("input_required", {"b"})
        await answer(b={"action": "decline"})
        task = await ended(bench, task_id)
        assert (task["status"], task["taskId"]) == ("completed", task_id)
        assert json.loads(task["result"]["content"][0]["text"]) == [{"name": "Ann"}, "decline", "mine", '{"n": 1}']
        await answer(a=accepted(name="late"))


async def test_what_was_asked_before_the_task_is_answered_by_the_call_and_the_task_follows() -> None:
    async with mcp_bench(task_after=0.01) as bench:
        calls: list[Call] = []

        def run(call: Call) -> pb.ToolResult | None:
            calls.append(call)
            return None if answers_of(call) else asks(who=question())

        bench.offer("trip", run)
        first = await bench.call("trip", capabilities=BOTH)
        assert (first["resultType"], "taskId" in first) == ("input_required", False)
        sent = {"inputResponses": {"who": accepted(name="Ann")}, "requestState": first["requestState"]}
        created = await bench.call("trip", capabilities=BOTH, sent=sent)
        assert (created["resultType"], "requestState" in created) == ("task", False)
        done = pb.ToolResult(call_id=calls[-1].id, output_json='"Hello Ann"')
        bench.bus.dispatcher.results(calls[-1].handler, [done], time.monotonic())
        assert (await get(bench, created["taskId"]))["result"]["content"][0]["text"] == "Hello Ann"


async def test_a_task_is_on_disk_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mcp_bench(data_dir=tmp_path) as bench:
        Jobs(bench)
        written: list[str] = []
        flush = bench.bus.tasks.flush

        async def flushed() -> None:
            await flush()
            written.append("written")

        monkeypatch.setattr(bench.bus.tasks, "flush", flushed)
        task_id = (await bench.call("job", capabilities=TASKS))["taskId"]
        assert written == ["written"]
    async with mcp_bench(data_dir=tmp_path) as bench:  # the id is valid after a restart
        task = await get(bench, task_id)
        assert (task["status"], task["result"]["isError"]) == ("completed", True)
        assert "the bus stopped" in task["result"]["content"][0]["text"]


async def test_a_listener_is_told_of_each_change_of_its_tasks_and_of_no_other() -> None:
    async with mcp_bench() as bench:
        jobs = Jobs(bench)
        task_id = (await bench.call("job", capabilities=TASKS))["taskId"]
        channel = Channel()
        params = {"notifications": {"taskIds": [task_id, "unknown"]}}
        listening = asyncio.create_task(bench.ask("subscriptions/listen", params, capabilities=TASKS, channel=channel))
        first = (await channel.wait("notifications/subscriptions/acknowledged"))[0]
        assert first["notifications"] == {"taskIds": [task_id]}
        await channel.wait("notifications/tasks")
        await bench.call("job", capabilities=TASKS)
        jobs.end()  # of a task that it does not follow
        jobs.calls.pop()
        jobs.end()
        told = await channel.wait("notifications/tasks", 2)
        assert [(each["taskId"], each["status"]) for each in told] == [(task_id, "working"), (task_id, "completed")]
        assert told[1]["result"]["content"][0]["text"] == "done"
        assert all("io.modelcontextprotocol/subscriptionId" in each["_meta"] for each in told)
        listening.cancel()


async def test_following_tasks_needs_the_extension() -> None:
    async with mcp_bench() as bench:
        with pytest.raises(RpcError) as raised:
            await bench.ask("subscriptions/listen", {"notifications": {"taskIds": ["x"]}})
        assert raised.value.code == McpCode.MISSING_CAPABILITY
