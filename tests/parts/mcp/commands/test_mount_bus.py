"""`toolbus mounts add NAME --bus ADDRESS`: another bus becomes a mount of a running one."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from lab.stage import free_ports
from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.processes import toolbus
from tests.support.waiting import until_sync
from toolbus.functions.tool_spec import llm_tool, spec_of


@llm_tool(name="weather", description="Returns the weather.")
async def weather() -> str:
    return "sunny"


def test_a_bus_is_mounted_explained_replaced_and_unmounted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with bus_on_thread(data_dir=data) as edge, bus_on_thread() as north:
        north.offer("sky", spec_of(weather))
        [here], [there] = edge.grpc_addresses, north.grpc_addresses

        def run(*words: str) -> CompletedProcess[str]:
            return toolbus(*words, TOOLBUS_ADDRESS=here)

        def shown() -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(run("mounts", "--json").stdout)
            return answer["mounts"][0] if answer["mounts"] else {}

        mounted = run("mount", "north", "--bus", there)
        assert mounted.returncode == 0, mounted.stderr
        assert ("north: live, bus" in mounted.stdout, "weather" in mounted.stdout) == (True, True)
        assert json.loads((data / "mcp.json").read_text())["mcpServers"] == {"north": {"bus": there}}
        assert run("call", "north:weather").stdout == '"sunny"\n'
        assert f"`toolbus access explain weather --bus {there}`" in run("explain", "north:weather").stdout
        assert (shown()["era"], shown()["target"], shown()["state"]) == ("bus", there, "live")
        again = run("mount", "north", "--bus", there)
        assert (again.returncode, "--replace" in again.stderr) == (1, True)
        replaced = run("mount", "north", "--bus", there, "--replace", "--deny", "weather")
        assert replaced.returncode == 0, replaced.stderr
        until_sync(lambda: shown()["hidden"] == 1)
        assert toolbus("unmount", "north", "--data-dir", data).returncode == 0
        until_sync(lambda: not shown())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--bus", "http://127.0.0.1:1"), "which is one for HTTP"),
        (("--bus", "mtls:127.0.0.1:1"), "--credential"),
        (("--bus", "mtls:127.0.0.1:1", "--credential", "/no/such.json"), "/no/such.json cannot be read"),
        (("--bus", "127.0.0.1:1", "--header", "a: b"), "do not go with a bus"),
        (("--url", "http://127.0.0.1/mcp", "--token", "x"), "go with --bus"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_written(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    result = toolbus("mount", "north", *words, "--data-dir", tmp_path / "data")
    assert result.returncode == 2
    assert text in " ".join(result.stderr.split())
    assert not (tmp_path / "data" / "mcp.json").exists()


def test_a_bus_that_is_away_is_mounted_all_the_same_and_the_command_says_so(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    result = toolbus("mount", "far", "--bus", f"127.0.0.1:{port}", "--data-dir", tmp_path / "data")
    assert result.returncode == 1
    assert "does not answer" in result.stdout
    assert "correct --bus with --replace" in result.stderr
    assert "far" in json.loads((tmp_path / "data" / "mcp.json").read_text())["mcpServers"]
