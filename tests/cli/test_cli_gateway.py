"""The command line over the gateway: what a bus keeps, whom it offers its tools to, and how lists show it all."""

import io
import json
import logging
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bus.gateway.free_port import free_port
from tests.support.processes import Running, toolbus, until
from toolbus.bus import Bus, Config
from toolbus.bus.serve_settings import settle
from toolbus.cli import catalog_commands, serve_log, terminal
from toolbus.errors import SetupError
from toolbus.sdk.listing import ListedTool
from toolbus.tool import Tool

CALLBACK = "http://127.0.0.1:{}/run"


def _serving(folder: Path, *words: str, **env: str) -> Running:
    running = Running(folder, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *words, **env)
    running.says("ready")
    return running


def _addresses(running: Running) -> tuple[str, str]:
    grpc, http = re.findall(r"=(127\.0\.0\.1:\d+)", running.out)
    return grpc, http


def _post(http: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"http://{http}{path}", json=body, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _register(http: str, name: str, url: str) -> None:
    assert _post(http, "/api/tools/register", {"name": name, "callback_url": url, "source": "legacy"})["ok"]


def test_the_log_of_a_bus_has_no_line_for_each_request_to_a_sidecar() -> None:
    names = ("httpx", "uvicorn", "asyncio")
    before = [logging.getLogger(name).level for name in names]
    try:
        serve_log.log_to_stderr(settle({}, {}, None))
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    finally:
        for name, level in zip(names, before, strict=True):
            logging.getLogger(name).setLevel(level)


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A callback URL where no server listens."""
    with free_port() as port:
        yield CALLBACK.format(port)


def test_callback_tools_are_listed_with_their_url_and_offline_after_three_failures(
    tmp_path: Path, dead_url: str
) -> None:
    home = tmp_path / "home"
    with _serving(tmp_path, "--ephemeral", HOME=str(home), XDG_DATA_HOME=str(home / "share")) as serving:
        grpc, http = _addresses(serving)
        _register(http, "天気", dead_url)
        found = json.loads(toolbus("list", "--json", "--bus", grpc).stdout)["tools"]
        assert [(each["name"], each["state"], each["source"], each["callback_url"]) for each in found] == [
            ("天気", "live", "legacy", dead_url)
        ]
        assert found[0]["warnings"] == []
        for _ in range(3):
            _post(http, "/api/tools/invoke", {"name": "天気"})
        assert "天気" not in toolbus("list", "--bus", grpc).stdout
        lines = toolbus("list", "--all", "--bus", grpc).stdout.splitlines()
        assert lines[1].split()[:3] == ["天気", "offline", "legacy"]
        assert "accepts no connection" in lines[1]
    assert not home.exists()  # nothing was stored


def test_a_data_directory_keeps_callback_tools_over_a_kill_and_takes_one_bus_at_a_time(
    tmp_path: Path, dead_url: str
) -> None:
    folder = str(tmp_path / "data")
    with _serving(tmp_path, "--data-dir", folder) as serving:
        _register(_addresses(serving)[1], "kept", dead_url)
        second = toolbus("serve", "--grpc", "127.0.0.1:0", "--http", "off", "--data-dir", folder)
        assert (second.returncode, second.stdout) == (1, "")
        assert folder in second.stderr
        assert "--data-dir" in second.stderr or "--ephemeral" in second.stderr
        assert "Traceback" not in second.stderr
        serving.send(signal.SIGKILL)
        serving.code()
    with _serving(tmp_path, TOOLBUS_DATA_DIR=folder) as serving:
        found = json.loads(toolbus("list", "--all", "--json", "--bus", _addresses(serving)[0]).stdout)["tools"]
        assert [(each["name"], each["state"], each["callback_url"]) for each in found] == [
            ("kept", "offline", dead_url)
        ]


def test_upstream_offers_the_tools_to_a_main_server_and_a_refusal_is_a_warning(tmp_path: Path, dead_url: str) -> None:
    with (
        _serving(tmp_path, "--ephemeral") as main,  # a main server to the other one
        _serving(tmp_path, "--ephemeral", "--upstream", f"http://{_addresses(main)[1]}") as serving,
    ):
        grpc, http = _addresses(serving)
        _register(http, "first", dead_url)
        until(lambda: "first" in toolbus("list", "--bus", _addresses(main)[0]).stdout, "the tool upstream")
        _register(http, "..", dead_url)  # no URL can name it
        listed: list[dict[str, Any]] = []

        def warned() -> bool:
            listed[:] = json.loads(toolbus("list", "--json", "--bus", grpc).stdout)["tools"]
            return any(each["warnings"] for each in listed)

        until(warned, "the refusal upstream")
        assert [bool(each["warnings"]) for each in listed] == [False, True]
        lines = toolbus("list", "--bus", grpc).stdout.splitlines()
        assert "(warning: " not in lines[1]
        assert f"(warning: {listed[1]['warnings'][0]})" in lines[2]


def test_an_upstream_without_http_is_wrong_usage() -> None:
    words = ("--upstream", "http://127.0.0.1:1", "--http", "off")
    ended = toolbus("serve", "--ephemeral", "--grpc", "127.0.0.1:0", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "upstream needs http" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::ffff:127.0.0.1]"])
async def test_an_upstream_that_is_this_bus_is_refused(host: str) -> None:
    with free_port() as port:
        pass
    config = Config(grpc=("127.0.0.1:0",), http=f"127.0.0.1:{port}", upstream=f"http://{host}:{port}")
    with pytest.raises(SetupError, match="is this bus: name the main server, or choose another port with --http"):
        await Bus(config).start()
    socket.create_server(("127.0.0.1", port)).close()  # nothing is left listening


# -- without a bus -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _listed(**more: Any) -> ListedTool:
    return ListedTool(Tool("t", "Does it."), "s", "live", ("default",), "hash", sessions=1, **more)


def test_warnings_come_before_the_description_and_the_last_error() -> None:
    assert catalog_commands._row(_listed())[-1] == "Does it."
    assert catalog_commands._row(_listed(warnings=("a", "b")))[-1] == "(warning: a) (warning: b) Does it."
    assert catalog_commands._row(_listed(warnings=("a",), last_error="lost"))[-1] == "(warning: a) (lost) Does it."
    assert catalog_commands.as_record(_listed(warnings=("a",)))["warnings"] == ("a",)


def test_a_terminal_prints_warnings_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal.print_table(("NAME", "DESCRIPTION"), [("a", "fine"), ("b", "(warning: odd) fine")], {1})
    fine, odd = shown.getvalue().splitlines()[-2:]
    assert "\x1b[33m" not in fine
    assert "\x1b[33m(warning: odd) fine" in odd
