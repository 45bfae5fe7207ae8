"""Processes that are stopped and go on: what was given up meanwhile does not run, and what is waited for does."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.faults.processes import run
from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.waiting import within
from toolbus.errors import Code, Stage
from toolbus.sdk.host import Host
from toolbus.v1 import tool_pb2 as pb

CALLS = 100


@pytest.fixture
def socket(tmp_path: Path) -> str:
    """An address for a bus in another process."""
    tmp_path.chmod(0o700)
    return f"unix:{tmp_path}/bus"


async def test_a_bus_that_goes_on_runs_no_call_that_its_caller_gave_up_and_every_other(socket: str) -> None:
    async with (
        run("run_bus.py", socket) as bus,
        RawPeer(socket, answer=echo) as plugin,
        RawPeer(socket) as cancels,
        RawPeer(socket) as leaves,
        RawPeer(socket) as waits,
    ):
        await bus.says("ready")
        await plugin.attach("plugin", tool("t"))
        for raw in (cancels, leaves, waits):
            await raw.attach("raw")
        async with Host(socket) as host:
            assert (await within(host.call("t", {"who": "before"}))).error is None
            bus.send(signal.SIGSTOP)
            given_up = [asyncio.create_task(host.call("t", {"who": "gives up"}, timeout=0.3)) for _ in range(CALLS)]
            patient = asyncio.create_task(host.call("t", {"who": "is patient"}, timeout=60))
            cancelled = cancels.ask("t", {"who": "cancels"})
            (outcome,) = await cancels.start(cancelled)
            await leaves.start(leaves.ask("t", {"who": "leaves"}))
            (waited,) = await waits.start(waits.ask("t", {"who": "waits"}))
            results = await within(asyncio.gather(*given_up))  # after 1.3 s, by the clock of the host
            await cancels.send(cancels=[pb.ToolCancel(call_id=cancelled.call_id)])
            await leaves.close()
            bus.send(signal.SIGCONT)
            assert (await within(patient)).error is None
            assert (await within(waited)).error.code == 0
            assert (await within(outcome)).error.code == pb.ERROR_CODE_CANCELLED
            assert (await within(host.call("t", {"who": "after"}))).error is None
        assert {result.error and result.error.code for result in results} == {Code.DEADLINE_EXCEEDED}
        assert {result.error and result.error.stage for result in results} == {Stage.UNKNOWN}
        ran = sorted(json.loads(call.arguments_json)["who"] for call in plugin.calls)
        assert ran == ["after", "before", "is patient", "waits"]
