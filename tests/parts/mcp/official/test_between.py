"""MCP clients of a bus and a server that it mounts, of different eras: each is asked in the way of its own."""

from __future__ import annotations

import sys

import pytest

from tests.parts.mcp.server.asking import FORM, Channel, Json, accepted, mcp_bench
from tests.support.mcp_server import __file__ as SERVER
from tests.support.waiting import until
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.mounts import Mounts
from toolbus.parts.mcp.client.offer import MountManifest


@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_a_legacy_client_is_asked_what_a_mounted_server_of_either_era_asks(era: str) -> None:
    async with mcp_bench() as bench:
        mounts = Mounts(bench.bus.core, MountManifest(None), lambda entry: pytest.fail("no remote server here"))
        try:
            arguments = ("-I", "-S", SERVER, era)
            await mounts.apply({"small": MountEntry("small", command=sys.executable, args=arguments)})
            await until(lambda: bench.bus.list())
            [name] = [each["name"] for each in (await bench.ask("tools/list"))["tools"] if each["name"].endswith("ask")]
            asked: list[Json] = []

            def reply(method: str, params: Json) -> Json:
                asked.append({"method": method, **params})
                return {"result": accepted()}

            result = await bench.call(name, session=bench.session(FORM), channel=Channel(reply))
        finally:
            await mounts.stop()
    assert [(each["method"], each["message"]) for each in asked] == [("elicitation/create", "Who?")]
    assert '"accept"' in result["content"][0]["text"]
