"""Rooms come and go with their line: a bus works without any one of them, and says what it is missing."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from tests.support.waiting import WAIT_SECONDS
from toolbus import Host, Plugin
from toolbus.bus import Bus, Config
from toolbus.bus.core import Room
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.bus.rooms.operators_room import OperatorsRoom
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.bus.wiring import all_rooms
from toolbus.errors import SetupError
from toolbus.parts.council.room import CouncilRoom


async def _over_http(bus: Bus) -> dict[str, int]:
    """Returns the status of one endpoint of each kind."""
    asked: dict[str, tuple[str, str, Any]] = {
        "ready": ("GET", "/readyz", None),
        "list": ("GET", "/api/tools", None),
        "call": ("POST", "/api/tools/invoke", {"name": "add", "arguments": {"a": 1, "b": 2}}),
        "register": ("POST", "/api/tools/register", {"name": "x", "callback_url": "http://127.0.0.1:9/x"}),
        "clear": ("POST", "/api/tools/clear", {"source": "external"}),
        "tasks": ("GET", "/api/tasks", None),
        "council": ("GET", "/api/council", None),
    }
    async with httpx.AsyncClient(base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS) as http:
        return {
            name: (await http.request(how, path, json=body)).status_code for name, (how, path, body) in asked.items()
        }


@pytest.mark.parametrize("missing", all_rooms(), ids=lambda room: room.__name__)
async def test_a_bus_works_without_any_one_of_its_rooms(missing: type[Room], tmp_path: Path) -> None:
    rooms = [room for room in all_rooms() if room is not missing]
    config = Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", data_dir=tmp_path, offered=("search", "tasks"))
    async with Bus(config, rooms=rooms) as bus:

        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b

        assert (await bus.call("add", {"a": 1, "b": 2})).output == 3
        assert bool(bus.grpc_addresses) == (missing is not StreamsRoom)
        assert bool(bus.http_address) == (missing is not GatewayRoom)
        assert ((await bus.call("toolbus:stats")).error is None) == (missing is not OperatorsRoom)
        if bus.grpc_addresses:
            async with Host(bus.grpc_addresses[0]) as host:
                assert (await host.call("add", {"a": 2, "b": 2})).output == 4
        if bus.http_address:
            answers = await _over_http(bus)
            expected = {**dict.fromkeys(answers, 200)}
            expected |= {
                "CallbacksRoom": {"register": 501},
                "CouncilRoom": {"council": 404},
                "TasksRoom": {"tasks": 404},
            }.get(missing.__name__, {})
            assert answers == expected


async def test_what_a_missing_room_would_do_is_refused_by_name() -> None:
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off"), rooms=[StreamsRoom]) as bus:
        with pytest.raises(SetupError, match="made without OperatorsRoom"):
            bus.revoke("somebody")


@pytest.mark.parametrize(
    ("settings", "room"),
    [({"pins": {"weather": "block"}}, "PinsRoom"), ({"audit_required": True}, "AuditRoom")],
    ids=["pins", "audit"],
)
def test_a_bus_without_the_room_of_a_protection_that_is_configured_is_refused(
    settings: dict[str, Any], room: str, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match=f"the configuration needs {room}, and this bus was made without it"):
        Bus(Config(http="off", data_dir=tmp_path, **settings), rooms=[StreamsRoom])


class _Recorder(Room):
    """Notes the steps of its life."""

    steps: list[str]

    async def open(self) -> None:
        self.steps.append(f"open {type(self).__name__}")

    async def start(self) -> None:
        self.steps.append(f"start {type(self).__name__}")

    async def drain(self) -> None:
        self.steps.append(f"drain {type(self).__name__}")

    async def stop(self) -> None:
        self.steps.append(f"stop {type(self).__name__}")


def _recorders() -> tuple[list[str], Sequence[type[_Recorder]]]:
    steps: list[str] = []
    return steps, [type(name, (_Recorder,), {"steps": steps}) for name in ("A", "B")]


async def test_rooms_open_before_any_starts_and_stop_in_reverse_order() -> None:
    steps, rooms = _recorders()
    async with Bus(Config(http="off"), rooms=rooms) as bus:
        await bus.drain(0.1)
    assert steps == ["open A", "open B", "start A", "start B", "drain A", "drain B", "stop B", "stop A"]


async def test_a_room_that_cannot_open_stops_those_before_it_and_is_stopped_itself() -> None:
    steps, (first, second) = _recorders()

    class Broken(second):  # type: ignore[misc, valid-type]
        async def open(self) -> None:
            raise SetupError("no such place")

    with pytest.raises(SetupError, match="no such place"):
        await Bus(Config(http="off"), rooms=[first, Broken, second]).start()
    assert steps == ["open A", "stop Broken", "stop A"]


async def test_a_stopped_bus_leaves_no_routes_of_its_application_in_memory() -> None:
    async def routes() -> int:
        async with Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0")) as bus:
            assert bus.http_address is not None
        del bus
        gc.collect()
        return sum(isinstance(each, APIRoute) for each in gc.get_objects())

    before = await routes()
    assert before == await routes() == await routes()


async def test_buses_of_one_process_answer_over_http_each_for_itself() -> None:
    async def ping() -> str:
        """Answers."""
        return "pong"

    config = Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0")
    async with (
        Bus(config) as first,
        Bus(config) as second,
        httpx.AsyncClient(verify=False, timeout=WAIT_SECONDS) as client,
    ):
        first.tool(ping)
        for bus in (first, second, first):
            base = f"http://{bus.http_address}/api/tools"
            listed = (await client.get(base)).json()["tools_by_role"]["default"]
            exported = (await client.get(f"{base}/export?dialect=openai")).json()["names"]
            found = (await client.get(f"{base}/search?q=ping")).json()["results"]
            assert len(listed) == len(exported) == len(found) == (1 if bus is first else 0)


async def test_sources_and_health_are_what_the_rooms_say_together() -> None:
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off")) as bus:
        plugin = Plugin("weather", address=bus.grpc_addresses[0])

        @plugin.tool
        def sun() -> str:
            return "yes"

        async with plugin:
            await plugin.ready()
            assert bus.core.rooms.sources() == ["weather"]
            assert bus.core.rooms.serving("weather") is True
            assert bus.core.rooms.serving("nothing") is None
            assert bus.core.rooms.find(CouncilRoom) is not None
