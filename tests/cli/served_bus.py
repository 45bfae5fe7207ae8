"""Starts buses and plugins for the tests of the command line, as processes of their own."""

import json
import re
from pathlib import Path
from typing import Any

import httpx

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
