"""From nothing to a host and a plugin over mTLS, with the commands of the page; and how revocation ends them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bus.gateway.free_port import free_port
from tests.support.processes import Running, toolbus, toolbus_process
from tests.support.served_bus import start_grpc_bus
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
        plugin.says(", 1 tool: ")
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


def test_four_commands_lead_from_nothing_to_a_host_over_mtls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where `keys add` writes
    own = {"TOOLBUS_DATA_DIR": "data"}
    with free_port() as port:
        address = f"mtls:127.0.0.1:{port}"
    began_at = time.monotonic()
    made = toolbus_process("keys", "init", "--name", "localhost", "--address", address, **own)
    assert made.returncode == 0, made.stderr
    added = toolbus_process("keys", "add", "bot", "--host", **own)
    assert added.returncode == 0, added.stderr
    assert added.stdout.splitlines()[-1] == "use it with: TOOLBUS_CREDENTIAL=bot.toolbus toolbus list"
    with Running(tmp_path, "serve", "--grpc", address, "--http", "off", **own) as serving:
        serving.says(f"toolbus ready grpc={address}")
        listed = toolbus_process("list", TOOLBUS_CREDENTIAL="bot.toolbus")
        seconds = time.monotonic() - began_at
        assert (listed.returncode, listed.stderr) == (0, "")
        assert listed.stdout.startswith("NAME")
        without = toolbus("list", "--bus", address)
        assert without.returncode == 2
        assert "asks for a client certificate: name a credential file in TOOLBUS_CREDENTIAL" in without.stderr
    print(f"four commands from nothing took {seconds:.1f} s")


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "bus.example:1"])
def test_a_plain_address_beyond_this_machine_is_refused_with_the_command_that_makes_keys(address: str) -> None:
    ended = toolbus("serve", "--ephemeral", "--grpc", address)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "without a key" in ended.stderr
    assert f"mtls:{address} after `toolbus keys init`" in ended.stderr


@pytest.mark.parametrize("address", ["tls:0.0.0.0:0", "mtls:localhost:0", "https"])
def test_a_bus_without_keys_does_not_listen_where_they_are_asked_for_and_says_how_to_make_them(
    address: str, tmp_path: Path
) -> None:
    config = tmp_path / "toolbus.toml"
    config.write_text('https = "127.0.0.1:0"\n' if address == "https" else f'grpc = "{address}"\n')
    plain = ("--grpc", "127.0.0.1:0") if address == "https" else ()
    ended = toolbus("serve", "--config", config, "--data-dir", tmp_path / "data", "--http", "off", *plain)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "make keys with `toolbus keys init --name HOST`" in ended.stderr


def test_a_bus_without_a_data_directory_cannot_have_keys_and_says_what_it_needs() -> None:
    ended = toolbus("serve", "--ephemeral", "--grpc", "tls:127.0.0.1:0", "--http", "off")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "need keys" in ended.stderr
    assert "--data-dir, or name the directory of the keys with --keys" in ended.stderr
