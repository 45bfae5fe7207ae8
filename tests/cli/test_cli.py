"""The command line as scripts see it: what is printed where, and the exit codes. Real processes, one bus for most."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tests.support.processes import ROOT, Running, environment, toolbus, until
from toolbus.cli import terminal
from toolbus.cli.call_command import read_arguments

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
def refuse() -> None:
    """Always fails."""
    raise ValueError("not today")
'''
BUS_LOG = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} info toolbus\S*: ", re.MULTILINE)


def _serving(folder: Path, *words: str, **env: str) -> Running:
    running = Running(folder, "serve", "--ephemeral", *words, TOOLBUS_GRACE_SECONDS="0.2", **env)
    running.says("ready")
    return running


def _address(running: Running) -> str:
    return str(re.findall(r"127\.0\.0\.1:\d+", running.out)[0])


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bus on which the plugin above offers its tools."""
    folder = tmp_path_factory.mktemp("bus")
    file = folder / "weather.py"
    file.write_text(PLUGIN)
    with (
        _serving(folder, "--grpc", "127.0.0.1:0", "--http", "off") as serving,
        Running(folder, "run", file, TOOLBUS_ADDRESS=_address(serving)) as plugin,
    ):
        until(lambda: "refuse" in toolbus("list", "--bus", _address(serving)).stdout, "the plugin's tools")
        os.environ["TEST_PLUGIN_OUTPUT"] = str(plugin._out)
        yield _address(serving)
        del os.environ["TEST_PLUGIN_OUTPUT"]


# -- serve ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_one_line_and_ends_with_0_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    sock = tmp_path / "bus" / "bus.sock"
    with _serving(tmp_path, "--grpc", "127.0.0.1:0", "--grpc", f"unix:{sock}", "--http", "127.0.0.1:0") as serving:
        assert toolbus("list", "--bus", f"unix:{sock}").returncode == 0
        serving.send(number)
        assert serving.code() == 0
    assert re.fullmatch(rf"toolbus ready grpc=127\.0\.0\.1:\d+,unix:{sock} http=127\.0\.0\.1:\d+\n", serving.out)
    assert BUS_LOG.search(serving.err)


def test_a_signal_lets_calls_finish_and_a_second_one_ends_them(tmp_path: Path) -> None:
    file = tmp_path / "weather.py"
    file.write_text(PLUGIN)
    with (
        _serving(tmp_path, "--grpc", "127.0.0.1:0", "--http", "off", "--json") as serving,
        Running(tmp_path, "run", file, TOOLBUS_ADDRESS=_address(serving)) as plugin,
    ):
        plugin.says("with 4 tools")
        with Running(tmp_path, "call", "nap", "seconds=60", "--json", TOOLBUS_ADDRESS=_address(serving)) as calling:
            plugin.says("napping")
            serving.send(signal.SIGTERM)
            serving.says("draining")
            assert calling.process.poll() is None
            serving.send(signal.SIGTERM)
            assert serving.code() == 0
            assert calling.code() == 1
            assert json.loads(calling.out)["error"]["code"] == "UNAVAILABLE"


def test_serve_prints_events_and_log_as_json_lines_on_request(tmp_path: Path) -> None:
    words = ("--ephemeral", "--grpc", "127.0.0.1:0", "--http", "off", "--json", "--log-json")
    with Running(tmp_path, "serve", *words) as serving:
        serving.says('"ready"')
        assert toolbus("list", "--bus", json.loads(serving.out)["grpc"][0]).returncode == 0
        serving.send(signal.SIGTERM)
        assert serving.code() == 0
    assert [json.loads(line)["event"] for line in serving.out.splitlines()] == ["ready", "draining", "stopped"]
    logged = [json.loads(line) for line in serving.err.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(logged[0])


def test_a_port_in_use_is_an_error_text_and_exit_code_1(bus: str) -> None:
    ended = toolbus("serve", "--ephemeral", "--grpc", bus, "--http", "off")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert f"{bus} is taken" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_http_port_in_use_ends_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = toolbus("serve", "--ephemeral", "--grpc", "127.0.0.1:0", "--http", address)
    assert ended.returncode == 1
    assert address in ended.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--grpc", "0.0.0.0:1"), "is not on loopback"),
        (("--http", "everywhere"), "is not HOST:PORT or off"),
        (("--role", "a", "--no-roles"), "contradict"),
        (("--data-dir", "d", "--ephemeral"), "contradict"),
        (("--config", "/nowhere.toml"), "cannot read the configuration"),
        (("--log-level", "loud"), "must be one of debug"),
        (("--no-such-flag",), "No such option"),
    ],
)
def test_serve_refuses_invalid_settings_with_exit_code_2(words: tuple[str, ...], error: str) -> None:
    ended = toolbus("serve", *words)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert error in ended.stderr


def test_roles_come_from_flags(tmp_path: Path) -> None:
    with _serving(tmp_path, "--grpc", "127.0.0.1:0", "--http", "off", "--role", "Yui", "--role", "Ran") as serving:
        address = _address(serving)
        assert json.loads(toolbus("call", "toolbus:stats", "--bus", address).stdout)["roles"] == ["Yui", "Ran"]
        refused = toolbus("list", "--role", "Nobody", "--bus", address)
        assert (refused.returncode, refused.stderr) == (1, "toolbus: unknown role: Nobody\n")


# -- list, watch, tools ----------------------------------------------------------------------------------------------


def test_list_prints_an_aligned_table_outside_of_a_terminal(bus: str) -> None:
    lines = toolbus("list", "get_weather", "nap", "--bus", bus).stdout.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "SOURCE", "ROLES", "SESSIONS", "IN", "FLIGHT", "DESCRIPTION"]
    assert lines[1].split()[:6] == ["get_weather", "live", "weather", "default", "1", "0"]
    assert lines[1].endswith("Tells the weather of a city.")
    assert lines[2].startswith("nap          live   weather")


def test_list_prints_one_json_document(bus: str) -> None:
    found = json.loads(toolbus("list", "--source", "weather", "--json", TOOLBUS_ADDRESS=bus).stdout)
    assert found["revision"] > 0
    first = found["tools"][0]
    assert (first["name"], first["state"], first["source"]) == ("get_weather", "live", "weather")
    assert first["parameters"]["required"] == ["city"]
    assert toolbus("list", "--source", "nobody", "--json", "--bus", bus).stdout.count('"name"') == 0


def test_only_tools_lists_the_buss_own_tools(bus: str) -> None:
    names = [tool["name"] for tool in json.loads(toolbus("tools", "--json", "--bus", bus).stdout)["tools"]]
    assert "toolbus:drain" in names
    assert "toolbus:" not in toolbus("list", "--all", "--bus", bus).stdout


def test_watch_prints_all_tools_and_then_changes_until_ctrl_c(bus: str, tmp_path: Path) -> None:
    file = tmp_path / "more.py"
    file.write_text("from toolbus.sdk import llm_tool\n@llm_tool(description='')\ndef more() -> int:\n    return 1\n")
    with Running(tmp_path, "watch", "--bus", bus) as people, Running(tmp_path, "watch", "--json", "--bus", bus) as pipe:
        people.says("+ get_weather live weather\n")
        pipe.says('"full":true')
        with Running(tmp_path, "run", file, "--bus", bus):
            people.says("+ more live plugin:more\n")
        people.says("- more gone plugin:more\n")
        until(lambda: '"removed":[{"name":"more"' in pipe.out, "the last change")
        for watching in (people, pipe):
            watching.send(signal.SIGINT)
            assert watching.code() == 130
            assert watching.err == ""
    changes = [json.loads(line) for line in pipe.out.splitlines()]
    assert [change["full"] for change in changes] == [True, *[False] * (len(changes) - 1)]


# -- call ------------------------------------------------------------------------------------------------------------


def test_call_prints_the_output_as_json(bus: str) -> None:
    ended = toolbus("call", "get_weather", "city=Paris", "days=3", "--bus", bus)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == '{\n  "city": "Paris",\n  "days": 3\n}\n'


def test_call_takes_arguments_from_standard_input_and_files(bus: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('{"city": "Oslo"}')
    from_file = toolbus("call", "get_weather", f"@{tmp_path}/args.json", "days=2", "--bus", bus)
    assert json.loads(from_file.stdout) == {"city": "Oslo", "days": 2}
    big = toolbus("call", "echo", "-", "--bus", bus, stdin='{"value": 123456789012345678901234567890}')
    assert big.stdout == "123456789012345678901234567890\n"


def test_a_tool_that_raises_is_exit_code_1_with_its_error_text(bus: str) -> None:
    ended = toolbus("call", "refuse", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "not today" in ended.stderr
    assert "code=TOOL stage=ACCEPTED retry_safe=false" in ended.stderr


def test_a_failed_call_has_code_stage_and_limit_in_json(bus: str) -> None:
    ended = toolbus("call", "nap", "seconds=60", "--timeout", "0.2", "--json", "--bus", bus)
    assert ended.returncode == 1
    error = json.loads(ended.stdout)["error"]
    assert (error["code"], error["limit"]) == ("DEADLINE_EXCEEDED", {"name": "timeout_seconds", "value": 0.2})
    plain = toolbus("call", "nap", "seconds=60", "--timeout", "0.2", "--bus", bus)
    assert "limit=timeout_seconds=0.2" in plain.stderr


def test_an_unknown_tool_and_invalid_arguments_have_different_codes(bus: str) -> None:
    assert "code=NOT_FOUND stage=NOT_DISPATCHED" in toolbus("call", "nothing", "--bus", bus).stderr
    assert "code=INVALID_ARGUMENTS" in toolbus("call", "get_weather", "city=1", "--bus", bus).stderr


def test_ctrl_c_cancels_the_call(bus: str, tmp_path: Path) -> None:
    plugin = Path(os.environ["TEST_PLUGIN_OUTPUT"])
    napping = plugin.read_text().count("napping")
    with Running(tmp_path, "call", "nap", "seconds=60", "--bus", bus) as calling:
        until(lambda: plugin.read_text().count("napping") > napping, "the call")
        calling.send(signal.SIGINT)
        assert calling.code() == 130
        assert (calling.out, calling.err) == ("", "")
    until(lambda: plugin.read_text().rstrip().endswith("cancelled"), "the cancel")
    newest = json.loads(toolbus("calls", "--limit", "1", "--name", "nap", "--json", "--bus", bus).stdout)
    assert newest[0]["outcome"] == "CANCELLED"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "{}"),
        (("a=1", "b=x", "c=", 'd="2"', "e=[1]", "f=NaN", "g=a=b"), None),
        (('{"a": 1.0,  "b": 2}',), '{"a": 1.0,  "b": 2}'),
        (('{"a": 1}', "a=2"), '{"a": 2}'),
    ],
)
def test_words_of_the_command_line_become_arguments(words: tuple[str, ...], text: str | None) -> None:
    if text is not None:
        assert read_arguments(words) == text
    else:
        expected = {"a": 1, "b": "x", "c": "", "d": "2", "e": [1], "f": "NaN", "g": "a=b"}
        assert json.loads(read_arguments(words)) == expected


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("city",), "'city' is not KEY=VALUE"),
        (("=1",), "is not KEY=VALUE"),
        (("{a}",), "is not JSON: "),
        (('{"a": NaN}',), "JSON has no NaN"),
        (("a=1", '{"b": 1}'), "before all pairs"),
        (("@/nowhere",), "cannot read /nowhere"),
    ],
)
def test_words_that_are_not_arguments_are_wrong_usage(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        read_arguments(words)
    assert ended.value.exit_code == terminal.USAGE
    assert error in capsys.readouterr().err


# -- health, calls, drain --------------------------------------------------------------------------------------------


def test_health_lists_the_bus_and_its_sources(bus: str) -> None:
    ended = toolbus("health", "--json", "--bus", bus)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["toolbus.source.weather"] == "SERVING"
    assert "serving" in toolbus("health", "toolbus.source.weather", "--bus", bus).stdout


def test_health_of_an_unknown_service_is_exit_code_1(bus: str) -> None:
    ended = toolbus("health", "nobody", "--bus", bus)
    assert ended.returncode == 1
    assert "'nobody'" in ended.stderr


def test_health_watches_until_ctrl_c(bus: str, tmp_path: Path) -> None:
    with Running(tmp_path, "health", "--watch", "--json", "--bus", bus) as watching:
        watching.says('{"service":"","status":"SERVING"}\n')
        watching.send(signal.SIGINT)
        assert watching.code() == 130
        assert watching.err == ""


def test_calls_prints_the_newest_first(bus: str) -> None:
    toolbus("call", "echo", "value=1", "--bus", bus)
    lines = toolbus("calls", "--source", "weather", "--bus", bus).stdout.splitlines()
    assert lines[0].split() == ["OUTCOME", "MS", "SOURCE", "CALLER", "USER", "ROUND", "IN", "OUT", "CALL", "NAME"]
    assert lines[1].split()[0] == "ok"
    assert lines[1].split()[-1] == "echo"


def test_drain_ends_a_source_and_then_the_bus(tmp_path: Path) -> None:
    file = tmp_path / "weather.py"
    file.write_text(PLUGIN)
    with (
        _serving(tmp_path, "--grpc", "127.0.0.1:0", "--http", "off") as serving,
        Running(tmp_path, "run", file, "--bus", _address(serving)) as plugin,
    ):
        address = _address(serving)
        until(lambda: "refuse" in toolbus("list", "--bus", address).stdout, "the plugin's tools")
        unknown = toolbus("drain", "nobody", "--bus", address)
        assert unknown.returncode == 1
        assert "no session of source 'nobody'" in unknown.stderr
        drained = toolbus("drain", "weather", "--json", "--bus", address)
        assert json.loads(drained.stdout) == {"source": "weather", "sessions": 1}
        assert plugin.code() == 0
        assert toolbus("drain", "--bus", address).stdout.startswith("draining the bus")
        assert serving.code() == 0
        assert toolbus("list", "--bus", address).returncode == 3


# -- every command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("list",), ("watch",), ("tools",), ("call", "x"), ("health",), ("calls",), ("drain", "x")]
)
def test_no_bus_is_exit_code_3_with_how_to_start_one(words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ended = toolbus(*words, "--bus", f"127.0.0.1:{port}")
    assert ended.returncode == 3
    assert f"no bus at 127.0.0.1:{port}" in ended.stderr
    assert "toolbus serve" in ended.stderr
    assert toolbus(*words, "--bus", "unix:/nowhere.sock").returncode == 3


def test_an_invalid_address_is_wrong_usage() -> None:
    for address in ("localhost", "127.0.0.1:x", "unix:", "127.0.0.1:0"):
        ended = toolbus("list", "--bus", address)
        assert ended.returncode == 2
        assert repr(address) in ended.stderr


@pytest.mark.parametrize(
    "command", ["serve", "run", "list", "watch", "call", "health", "calls", "drain", "tools", "--help"]
)
def test_help_shows_examples_and_exit_codes(command: str) -> None:
    shown = toolbus(command, "--help").stdout
    assert "Examples" in shown
    assert "Exit codes:" in shown
    assert "--json" in shown or command == "--help"


def test_help_imports_neither_grpc_nor_protobuf_nor_the_bus() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "toolbus.cli", "call", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment({}),
        check=True,
    )
    modules = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert not modules & {"grpc", "google.protobuf", "toolbus.tool", "toolbus.bus", "uvloop"}
    assert "toolbus.cli.call_command" in modules


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "-event_engine_client,-event_engine_listener"),
        ({"GRPC_EXPERIMENTS": "mine"}, "mine"),
        ({"TOOLBUS_GRPC_EXPERIMENTS": "keep"}, "None"),
    ],
)
def test_the_grpc_experiments_are_set_unless_the_environment_prevents_it(
    env: dict[str, str], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "asks.py"
    file.write_text("import os\nprint(os.environ.get('GRPC_EXPERIMENTS'), flush=True)\nos._exit(0)\n")
    kept = {key: value for key, value in environment(env).items() if key != "GRPC_EXPERIMENTS" or key in env}
    ended = subprocess.run(
        [sys.executable, "-m", "toolbus.cli", "run", str(file)],
        capture_output=True,
        text=True,
        timeout=30,
        env=kept,
        cwd=ROOT,
        check=True,
    )
    assert ended.stdout == f"asks | {expected}\n"


def test_completion_scripts_are_offered() -> None:
    shown = toolbus("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete" in shown.stdout


def _run_in_terminal(*words: str, **env: str) -> str:
    """Returns what a command prints to a terminal of its own."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in environment(env).items() if key != "NO_COLOR" or key in env}
    with subprocess.Popen(
        [sys.executable, "-m", "toolbus.cli", *words],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "120"},
    ):
        os.close(theirs)
        shown = b""
        try:
            while read := os.read(ours, 65536):
                shown += read
        except OSError:  # how Linux reports that the other end is closed
            pass
    os.close(ours)
    return shown.decode()


def test_a_terminal_gets_a_coloured_table_unless_no_color_is_set(bus: str) -> None:
    coloured = _run_in_terminal("list", "--bus", bus)
    assert "\x1b[32mlive" in coloured
    assert "get_weather" in coloured
    assert "\x1b[3" not in _run_in_terminal("list", "--bus", bus, NO_COLOR="1")


def test_control_characters_are_replaced() -> None:
    bad = "\N{REPLACEMENT CHARACTER}"
    assert terminal.clean("a\x1b[31mb\r\n  c\u202ed\udc80") == f"a{bad}[31mb c{bad}d{bad}"
