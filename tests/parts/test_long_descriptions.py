"""A description that is too long is cut, with a warning, whichever way a tool comes: the tool is not lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bus.gateway.calling import client
from tests.parts.dropin.loaded_files import load_one
from tests.parts.dropin.script_cases import Load, load  # noqa: F401  # a fixture
from tests.parts.mcp.client.test_offer import declared, tool
from toolbus.protocol.tool import Tool
from toolbus.sdk import Plugin
from toolbus.testing import running_bus

LONG = pytest.mark.parametrize("text", ["x" * 20_000, "猫" * 6_000, "\U0001f408" * 5_000], ids=["x", "猫", "emoji"])
LIMIT = 16 * 1024


def check(offered: Tool, text: str, warned: str) -> None:
    assert offered.description.endswith("…")
    assert text.startswith(offered.description[:-1])
    assert LIMIT - 8 <= len(offered.description.encode()) <= LIMIT
    assert f"description_bytes = {LIMIT}" in warned


@LONG
async def test_of_the_sdk(text: str, caplog: pytest.LogCaptureFixture) -> None:
    plugin = Plugin("cats")

    @plugin.tool(description=text)
    def feed() -> str:
        return "fed"

    async with running_bus() as bus, Plugin("cats", address=bus.grpc_addresses[0]) as attached:
        attached.tool(description=text)(feed)
        await attached.ready()
        (listing,) = bus.list()
        assert (await bus.call("feed")).output == "fed"
    check(listing.tool, text, caplog.text)


@LONG
async def test_of_a_registration_over_http(text: str, caplog: pytest.LogCaptureFixture) -> None:
    body = {"name": "feed", "description": text, "callback_url": "http://127.0.0.1:9/"}
    async with running_bus(http="127.0.0.1:0") as bus, client(bus) as http:
        assert (await http.post("/api/tools/register", json=body)).json()["ok"]
        (listing,) = bus.list()
    check(listing.tool, text, caplog.text)


@LONG
def test_of_a_mounted_server(text: str, caplog: pytest.LogCaptureFixture) -> None:
    made = declared(tool("feed", description=text))
    (offered,) = made.tools
    check(offered, text, " ".join(made.notices["feed"]))


@LONG
def test_of_a_drop_in_file(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    definition = {"description": text}
    source = f"register_tool(name='feed', execute=lambda args, env: 'fed', definition={definition!r})\n"
    (spec,) = load_one(tmp_path, source).specs
    check(spec.tool, text, caplog.text)


@LONG
def test_of_a_script(load: Load, text: str, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    source = f"llm_tool_register({{ name: 'feed', execute: () => 'fed', def: {{ description: {text!r} }} }});"
    (spec,) = load({"feed.js": source}).specs
    check(spec.tool, text, caplog.text)
