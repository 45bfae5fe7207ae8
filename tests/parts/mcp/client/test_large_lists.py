"""Servers that list very much, change their lists all the time, or write what nobody asked for."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.mcp.client.mount_cases import QUICK, House
from tests.parts.mcp.client.test_transport import Inbox
from tests.support.waiting import until
from toolbus.bus import Bus, Config
from toolbus.parts.mcp.client import offer
from toolbus.parts.mcp.client.mount import MountTimings
from toolbus.parts.mcp.client.offer import MountManifest
from toolbus.parts.mcp.client.transport import PAUSE, SLICE_SECONDS, StdioTransport
from toolbus.parts.mcp.server.room import McpServerRoom
from toolbus.protocol.limits import MIB, Limits

ROOM = 3 * MIB


def wide(name: str, properties: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"{name}_{each}": {"type": "string"} for each in range(properties)}}
    return {"name": name, "inputSchema": schema}


@pytest.fixture
async def house() -> AsyncIterator[House]:
    config = Config(grpc=("127.0.0.1:0",), http="off", limits=Limits(declared_bytes_per_source=ROOM))
    async with Bus(config, rooms=(McpServerRoom,)) as bus:
        house = House(bus, MountManifest(None), QUICK)
        yield house
        await house.mounts.stop()


def write(file: Path, *tools: dict[str, Any]) -> str:
    file.write_text(json.dumps(tools))
    return f"file={file}"


async def test_tools_that_would_take_too_much_memory_are_named_and_the_others_offered(
    house: House, tmp_path: Path
) -> None:
    tools = [wide("first", 1), *(wide(f"wide{number}", 1000) for number in range(4)), wide("last", 1)]
    mount = await house.live(write(tmp_path / "tools", *tools))
    offered = {name.removeprefix("small:") for name in house.names()}
    assert {"first", "wide0", "last"} <= offered
    assert {each.name for each in mount.offer.declared.left} == {each["name"] for each in tools} - offered
    assert f"declared_bytes_per_source = {ROOM}" in mount.offer.why_degraded


async def test_tools_of_a_list_are_compiled_in_a_part_of_the_time_and_without_room_not_at_all(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, accounts, compile_one = list[str](), list[str](), offer._compile
    budgets = house.bus.core.calls.dispatcher.seams.budgets
    beside = budgets.compile

    def note(entry: Any, declaration: Any, name: str, limits: Limits) -> Any:
        compiled.append(name)
        return compile_one(entry, declaration, name, limits)

    async def count(account: str, work: Any) -> Any:
        accounts.append(account)
        return await beside(account, work)

    monkeypatch.setattr(offer, "_compile", note)
    monkeypatch.setattr(budgets, "compile", count)
    tools = [*(wide(f"wide{number}", 1000) for number in range(4)), wide("last", 1)]
    await house.live(write(tmp_path / "tools", *tools))
    assert {*compiled} == {name.removeprefix("small:") for name in house.names()} < {each["name"] for each in tools}
    assert accounts == ["mount small"] * len(tools)


async def test_a_tool_that_has_not_changed_is_not_read_again(house: House, tmp_path: Path) -> None:
    file = tmp_path / "tools"
    mount = await house.live(write(file, wide("a", 300), wide("b", 1)))
    before = {each.tool.name: each for each in mount.offer.declared.compiled}
    write(file, wide("b", 2), wide("a", 300))
    mount.relist("tools")
    await until(lambda: mount.offer.declared.compiled[0].tool.name == "b")
    after = {each.tool.name: each for each in mount.offer.declared.compiled}
    assert after["a"] is before["a"]
    assert after["b"] is not before["b"]


async def test_a_server_whose_lists_change_all_the_time_is_read_less_and_less_often(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = await house.live()
    monkeypatch.setattr(mount, "_timings", MountTimings(relist_seconds=0.05))
    began = time.monotonic()
    for _ in range(4):
        mount.relist("tools")
        await until(lambda: mount._relisting is None, "the list")
    assert time.monotonic() - began > 0.05 + 0.1 + 0.2 + 0.4


class Unasked(Inbox):
    """Takes a while for each line, which nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def received(self, data: bytes, stream: str = "") -> bool:
        self.times.append(time.monotonic())
        time.sleep(2 * SLICE_SECONDS)
        return True


async def test_lines_that_nobody_asked_for_take_a_part_of_the_loop_only() -> None:
    class Process:
        def __init__(self) -> None:
            self.held: list[bool] = []

        def hold_output(self, held: bool) -> None:
            self.held.append(held)

    transport, inbox = StdioTransport("loud", lambda: None, lambda: None), Unasked()  # type: ignore[arg-type,return-value]
    process = Process()
    transport._process, transport._receiver = process, inbox  # type: ignore[assignment]
    transport._take(b"x\n" * 5)
    await until(lambda: len(inbox.times) == 5, "all lines")
    pauses = [after - before for before, after in zip(inbox.times, inbox.times[1:], strict=False)]
    assert min(pauses) > PAUSE * SLICE_SECONDS
    await until(lambda: not process.held[-1], "the end of the pause")


async def test_what_is_no_tool_in_a_list_is_named_and_its_neighbours_are_offered(house: House, tmp_path: Path) -> None:
    file = tmp_path / "tools"
    file.write_text(json.dumps([wide("first", 1), None, 5, "text", [], {}, {"name": 7}, wide("last", 1)]))
    mount = await house.live(f"file={file}")
    assert {name.removeprefix("small:") for name in house.names()} == {"first", "last"}
    assert len(mount.offer.declared.left) == 6
