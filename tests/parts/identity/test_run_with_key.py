"""`toolbus run` on another machine, with the key of a plugin: its output is for the operators of the bus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.processes import Running, toolbus
from tests.support.waiting import within
from toolbus import Plugin
from toolbus.errors import NotPermitted
from toolbus.testing import running_bus

PRINTS = """
from toolbus import Plugin

plugin = Plugin("weather")


@plugin.tool
def get_weather() -> str:
    print("looked out of the window", flush=True)
    return "sunny"
"""


def keys(folder: Path, *words: str | Path) -> None:
    """Runs `toolbus keys`."""
    done = toolbus("keys", *words, "--keys", folder / "data" / "keys")
    assert done.returncode == 0, done.stderr


async def test_the_key_of_a_plugin_serves_the_logs_of_its_own_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    keys(tmp_path, "init", "--name", "localhost", "--address", "mtls:localhost:48931")
    keys(tmp_path, "add", "weather", "--plugin", "weather*", "--out", tmp_path / "weather.toolbus")
    file = tmp_path / "weather.py"
    file.write_text(PRINTS, "utf-8")
    data = tmp_path / "data"
    async with running_bus(grpc=("127.0.0.1:0", "mtls:localhost:0"), data_dir=data) as bus:
        address = next(each for each in bus.grpc_addresses if each.startswith("mtls:"))
        words = ("run", file, "--bus", address, "--credential", tmp_path / "weather.toolbus")
        async with Running(tmp_path, *words) as run:
            await within(asyncio.to_thread(run.says, "attached to the bus"))

            async def rows() -> list[dict[str, object]]:
                found: list[dict[str, object]] = (await bus.call("toolbus:plugin_logs")).unwrap()["plugins"]
                return found

            while not (table := await rows()):
                await asyncio.sleep(0.05)
            assert (await bus.call("get_weather")).text == "sunny"
            (row,) = table
            assert (row["plugin"], str(row["source"])[:4]) == ("weather", "run.")

            async def lines() -> str:
                return (await bus.call("toolbus:plugin_logs", {"plugin": "weather"})).text

            while "looked out of the window" not in await lines():
                await asyncio.sleep(0.05)
            # The supervisor's source has a token: no other holder of such a key can answer in its place.
            with pytest.raises(NotPermitted, match="token"):
                async with Plugin(str(row["source"]), address=bus.grpc_addresses[0], qualified=True) as other:
                    await within(other.ready())
