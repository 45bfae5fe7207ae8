"""What outlives a bus that was killed: real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from tests.support.served_bus import start_bus
from tests.support.waiting import within
from toolbus.errors import Code, Stage
from toolbus.sdk import Host, Plugin


async def test_a_task_of_a_killed_bus_is_read_at_another_one_and_rules_hold_there(url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second = (f"unix:{tmp_path}/{name}.sock" for name in "ab")
        settings = {"TOOLBUS_STORAGE": url}
        buses = [
            stack.enter_context(start_bus(tmp_path, "--http", "off", "--grpc", each, "--offer", "tasks", **settings))
            for each in (first, second)
        ]
        plugin, gate = Plugin("work", address=first), asyncio.Event()

        @plugin.tool
        async def report() -> str:
            """Writes a report."""
            await gate.wait()
            return "a long report"

        await stack.enter_async_context(plugin)
        await within(plugin.ready())
        other = await stack.enter_async_context(Host(second, source="host"))
        async with Host(first, source="host") as host:
            task_id = (await within(host.call("report", {}, background_after=0.05))).unwrap()["task_id"]
            await within(until_status(other, task_id, "running"))
            await within(host.call("toolbus:permit", {"kind": "tools", "name": "mail", "users": ["ann"]}))
            gate.set()
            done = await within(host.call("await_task", {"task_id": task_id}))
            assert done.output["result"] == "a long report"
            await within(until_status(other, task_id, "completed"))
        buses[0].send(signal.SIGKILL)
        read = await within(other.call("await_task", {"task_id": task_id}))
        assert (read.output["status"], read.output["result"]) == ("completed", "a long report")
        async with Host(second, source="another") as stranger:
            answer = await within(stranger.call("check_task", {"task_id": task_id}))
            assert answer.is_error, "it is another program's"
        rules = (await within(other.call("toolbus:permissions", {}))).output
        assert "mail" in json.dumps(rules)


async def test_a_task_that_ran_at_a_killed_bus_is_not_shown_as_running_for_ever(url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second = (f"unix:{tmp_path}/{name}.sock" for name in "ab")
        settings = {"TOOLBUS_STORAGE": url}
        buses = [
            stack.enter_context(start_bus(tmp_path, "--http", "off", "--grpc", each, "--offer", "tasks", **settings))
            for each in (first, second)
        ]
        plugin = Plugin("work", address=first)

        @plugin.tool
        async def report() -> str:
            """Writes a report."""
            await asyncio.sleep(300)
            return "never"

        await stack.enter_async_context(plugin)
        await within(plugin.ready())
        other = await stack.enter_async_context(Host(second, source="host"))
        async with Host(first, source="host") as host:
            task_id = (await within(host.call("report", {}, background_after=0.05))).unwrap()["task_id"]
            await within(until_status(other, task_id, "running"))
        buses[0].send(signal.SIGKILL)
        while (error := (await within(other.call("check_task", {"task_id": task_id}))).error) is None:
            await asyncio.sleep(0.05)  # the database sees a moment later that its connections have ended
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
        assert f"{socket.gethostname()} ({first})" in error.message
        assert "is away" in error.message
        for tool in ("await_task", "cancel_task"):
            error = (await within(other.call(tool, {"task_id": task_id}))).error
            assert error is not None
            assert error.code is Code.UNAVAILABLE
        stack.enter_context(start_bus(tmp_path, "--http", "off", "--grpc", first, "--offer", "tasks", **settings))
        await within(until_status(other, task_id, "failed"))  # its home is back, and knows that it ended


async def until_status(host: Host, task_id: str, status: str) -> None:
    """Waits for a state of a task, which is written a moment after it has come."""
    while True:
        answer = await host.call("check_task", {"task_id": task_id})
        if answer.output is not None and answer.output["status"] == status:
            return
        await asyncio.sleep(0.01)
