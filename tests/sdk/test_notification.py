"""Tests how a plugin reads the answer to a notification, from a bus that a test plays."""

from __future__ import annotations

import pytest

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.waiting import within
from toolbus.errors import CallFailed, Code
from toolbus.sdk import Plugin
from toolbus.v1 import tool_pb2 as pb


@pytest.mark.parametrize("output", ["{}", "3", "null", '{"hosts": "many"}', "not JSON"])
async def test_an_answer_without_the_number_of_hosts_is_an_error(output: str) -> None:
    async def answer(stream: PlayedStream) -> None:
        await stream.accept()
        calls = (await stream.read_until("calls")).calls
        await stream.write(results=[pb.ToolResult(call_id=each.call_id, output_json=output) for each in calls])
        await stream.read()

    async with played_bus(answer) as bus, Plugin("kitchen", address=bus.address) as plugin:
        with pytest.raises(CallFailed, match=f"toolbus:notify with {output}, ") as caught:
            await within(plugin.notify("ann", "The timer has ended."))
    assert caught.value.error.code is Code.INTERNAL
