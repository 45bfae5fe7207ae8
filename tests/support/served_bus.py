"""Starts buses and plugins for the tests of commands, as processes of their own; some fixtures share one.

A folder gets these fixtures by naming them in its `conftest.py`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.stage import free_ports
from tests.bus.gateway.free_port import free_port
from tests.support.processes import Running, toolbus
from tests.support.waiting import WAIT_SECONDS, until_sync

PLUGIN = '''
import asyncio
from toolbus.sdk import Plugin

plugin = Plugin("weather")

@plugin.tool
def get_weather(city: str, days: int = 1) -> dict:
    """Tells the weather
    of a city."""
    return {"city": city, "days": days}

@plugin.tool
def echo(value: object = None) -> object:
    """Returns what it got."""
    return value

@plugin.tool
async def nap(seconds: float) -> str:
    """Sleeps."""
    print("napping", flush=True)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
    return "rested"

@plugin.tool
def refuse(why: str = "not today") -> None:
    """Always fails."""
    raise ValueError(why)
'''

RECORDED_PLUGIN = '''
import asyncio
from toolbus.sdk import Plugin

plugin = Plugin("weather")
released = asyncio.Event()

@plugin.tool(name="get.weather")
def get_weather(city: str, api_key: str = "") -> dict:
    """Tells the weather of a city."""
    return {"city": city}

@plugin.tool
def forecast(城市: str) -> str:
    """Tells the weather of tomorrow."""
    return 城市

@plugin.tool
async def report(year: int) -> str:
    """Writes a report; goes on until it is released."""
    await released.wait()
    if year == 13:
        raise ValueError("no report of 13")
    return f"report of {year}"

@plugin.tool(min_level=50)
def restart() -> str:
    """Restarts the station."""
    return "restarted"

@plugin.tool
async def release(again: bool = False) -> None:
    """Lets reports end."""
    released.clear() if again else released.set()
'''

CALLBACK = "http://127.0.0.1:{}/run"


def start_bus(folder: Path, *words: str, **env: str) -> Running:
    """Starts a bus that stores nothing, with a short grace period."""
    running = Running(folder, "serve", "--ephemeral", *words, TOOLBUS_GRACE_SECONDS="0.2", **env)
    running.says("toolbus ready" if "--json" not in words else '"ready"')
    return running


def start_grpc_bus(folder: Path, *words: str | Path, **env: str) -> Running:
    """Starts a bus without HTTP."""
    running = Running(folder, "serve", "--grpc", "127.0.0.1:0", "--http", "off", *words, **env)
    running.says("toolbus ready" if "--json" not in words else '"ready"')
    return running


def start_http_bus(folder: Path, *words: str, **env: str) -> Running:
    """Starts a bus with gRPC and HTTP."""
    running = Running(folder, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *words, **env)
    running.says("toolbus ready" if "--json" not in words else '"ready"')
    return running


def address_of(running: Running) -> str:
    """Returns the gRPC address of a bus, once it has printed it."""
    until_sync(lambda: "\n" in running.out, "the line with the addresses")
    return str(re.findall(r"127\.0\.0\.1:\d+", running.out)[0])


def addresses_of(running: Running) -> tuple[str, str]:
    """Returns the gRPC and the HTTP address of a bus, once it has printed them."""
    until_sync(lambda: "\n" in running.out, "the line with the addresses")
    grpc, http = re.findall(r"=(127\.0\.0\.1:\d+)", running.out)
    return grpc, http


def post(http: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"http://{http}{path}", json=body, trust_env=False, verify=False, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def register(http: str, name: str, url: str) -> None:
    assert post(http, "/api/tools/register", {"name": name, "callback_url": url, "source": "legacy"})["ok"]


def run_json(bus: str, *words: str) -> Any:
    ended = toolbus(*words, "--json", "--bus", bus)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def in_flight(bus: str, name: str) -> int:
    tools = run_json(bus, "tools")["tools"]
    return sum(each["in_flight"] for each in tools if each["name"] == name)


@pytest.fixture(scope="session")
def bus_and_plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    """A bus's address, and the process of `PLUGIN`."""
    folder = tmp_path_factory.mktemp("bus")
    file = folder / "weather.py"
    file.write_text(PLUGIN)
    with (
        start_bus(folder, "--grpc", "127.0.0.1:0", "--http", "off") as serving,
        Running(folder, "run", file, TOOLBUS_ADDRESS=address_of(serving)) as plugin,
    ):
        until_sync(lambda: "refuse" in toolbus("list", "--bus", address_of(serving)).stdout, "the plugin's tools")
        yield address_of(serving), plugin


@pytest.fixture(scope="session")
def bus(bus_and_plugin: tuple[str, Running]) -> str:
    """The address of a bus with the tools of `PLUGIN`."""
    return bus_and_plugin[0]


@pytest.fixture(scope="session")
def recording_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bus that records contents, with the tools of `RECORDED_PLUGIN`."""
    folder = tmp_path_factory.mktemp("bus")
    (folder / "weather.py").write_text(RECORDED_PLUGIN, "utf-8")
    with (
        start_grpc_bus(folder, "--ephemeral", "--record-contents", "--offer", "tasks", "--offer", "search") as serving,
        Running(folder, "run", folder / "weather.py", TOOLBUS_ADDRESS=address_of(serving)) as plugin,
    ):
        plugin.says(", 5 tools: ")
        yield address_of(serving)


@pytest.fixture
def unused_address() -> str:
    """An address where no server listens."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A callback URL where no server listens."""
    with free_port() as port:
        yield CALLBACK.format(port)
