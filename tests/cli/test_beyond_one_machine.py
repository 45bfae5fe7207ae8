"""From nothing to a host and a plugin over mTLS, with the commands of the page; and how revocation ends them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bus.gateway.free_port import free_port
from tests.cli.served_bus import start_grpc_bus
from tests.support.processes import Running, toolbus
from tests.support.waiting import until_sync

PLUGIN = '''
from toolbus.sdk import Plugin

plugin = Plugin("weather")

@plugin.tool
def get_weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"
'''


class Team:
    """A folder with keys and credentials, and a bus that serves them."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.keys("init", "--name", "localhost", "--address", f"mtls:localhost:{port}")
        self.keys("add", "bot", "--host", "-o", folder / "bot.toolbus")
        self.keys("add", "weather", "--plugin", "weather*", "-o", folder / "weather.toolbus")

    def keys(self, *words: str | Path) -> str:
        ended = toolbus("keys", *words, "--data-dir", self.data)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def variables(self, name: str) -> dict[str, str]:
        return {"TOOLBUS_CREDENTIAL": str(self.folder / f"{name}.toolbus")}


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with free_port() as port:
        team = Team(tmp_path, port)
    with start_grpc_bus(tmp_path, "--grpc", f"mtls:localhost:{port}", "--data-dir", team.data) as serving:
        yield team
        serving.send(signal.SIGTERM)
        assert serving.code() == 0


def test_a_plugin_and_a_host_meet_over_mtls_until_they_are_revoked(team: Team, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    with Running(tmp_path, "run", file, "--credential", tmp_path / "weather.toolbus") as plugin:
        plugin.says("with 1 tool")
        listed = toolbus("list", **team.variables("bot"))
        assert "get_weather" in listed.stdout
        called = toolbus("call", "get_weather", "city=Oslo", **team.variables("bot"))
        assert (called.returncode, called.stdout) == (0, '"sunny in Oslo"\n')
        drained = toolbus("drain", **team.variables("bot"))
        assert drained.returncode == 1
        assert "may not use toolbus:drain" in drained.stderr

        team.keys("revoke", "weather")
        until_sync(
            lambda: "get_weather" not in toolbus("list", "--all", **team.variables("bot")).stdout,
            "the tool is withdrawn",
        )
        plugin.says("was revoked on 2")
    team.keys("revoke", "bot")
    until_sync(lambda: toolbus("list", **team.variables("bot")).returncode, "the bus has taken it over")
    refused = toolbus("list", **team.variables("bot"))
    assert refused.returncode == 1
    assert "of identity 'bot' was revoked on 2" in refused.stderr
    assert "toolbus keys renew bot" in refused.stderr
    team.keys("renew", "bot", "-o", tmp_path / "bot.toolbus")
    assert toolbus("list", **team.variables("bot")).returncode == 0


def test_a_bus_with_such_an_address_and_without_keys_says_how_to_make_them(tmp_path: Path) -> None:
    ended = toolbus("serve", "--grpc", "mtls:localhost:0", "--http", "off", "--data-dir", tmp_path / "data")
    assert ended.returncode == 1
    assert "make keys with `toolbus keys init --name HOST`" in ended.stderr
