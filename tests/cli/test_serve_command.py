"""``toolbus serve``: its one line, signals, settings, data directory and upstream."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.bus.gateway.free_port import free_port
from tests.support.commands import find_command
from tests.support.processes import Running, environment, toolbus
from tests.support.served_bus import PLUGIN, address_of, addresses_of, register, start_bus, start_http_bus
from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.bus import Bus, Config
from toolbus.cli.command_line import app
from toolbus.cli.serve_command import read_flags
from toolbus.errors import SetupError

BUS_LOG = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} info toolbus\S*: ", re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_one_line_and_ends_with_0_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    sock = tmp_path / "bus" / "bus.sock"
    with start_bus(tmp_path, "--grpc", "127.0.0.1:0", "--grpc", f"unix:{sock}", "--http", "127.0.0.1:0") as serving:
        assert toolbus("list", "--bus", f"unix:{sock}").returncode == 0
        serving.send(number)
        assert serving.code() == 0
    assert re.fullmatch(rf"toolbus ready grpc=127\.0\.0\.1:\d+,unix:{sock} http=127\.0\.0\.1:\d+\n", serving.out)
    assert BUS_LOG.search(serving.err)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "grpc://collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:pass@:4318"),
    ],
)
def test_serve_warns_of_a_variable_of_other_programs_that_it_cannot_use(tmp_path: Path, name: str, value: str) -> None:
    words = ("--grpc", "127.0.0.1:0", "--http", "off")
    with Running(tmp_path, "serve", "--ephemeral", *words, **{name: value}) as serving:
        serving.says_or_ends("toolbus ready")
        serving.send(signal.SIGTERM)
        assert serving.code() == 0
    warned = [line for line in serving.err.splitlines() if name in line]
    assert len(warned) == 1, serving.err
    assert value.replace("pass", "***") in warned[0] or "***" in warned[0]
    assert "warning" in warned[0].lower()
    assert "pass" not in warned[0].replace("password", "")


def test_a_log_that_nobody_reads_does_not_stop_the_bus() -> None:
    reader, stuck = os.pipe()
    os.set_blocking(stuck, False)
    with suppress(BlockingIOError):  # the pipe is full
        while os.write(stuck, b"x" * 4096):
            pass
    os.set_blocking(stuck, True)
    words = [sys.executable, "-m", "toolbus.cli", *["serve", "--ephemeral", "--grpc", "127.0.0.1:0", "--http", "off"]]
    try:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stuck, env=environment({})) as serving:
            try:
                assert serving.stdout is not None
                assert serving.stdout.readline().startswith(b"toolbus ready ")
                serving.terminate()
                assert serving.wait(WAIT_SECONDS) == 0
            finally:
                serving.kill()
    finally:
        os.close(reader)
        os.close(stuck)


def test_a_signal_lets_calls_finish_and_a_second_one_ends_them(tmp_path: Path) -> None:
    file = tmp_path / "weather.py"
    file.write_text(PLUGIN)
    with (
        start_bus(tmp_path, "--grpc", "127.0.0.1:0", "--http", "off", "--json") as serving,
        Running(tmp_path, "run", file, TOOLBUS_ADDRESS=address_of(serving)) as plugin,
    ):
        plugin.says(", 4 tools: ")
        with Running(tmp_path, "call", "nap", "seconds=60", "--json", TOOLBUS_ADDRESS=address_of(serving)) as calling:
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
        (("--tools-dir", "a", "--tools-dir", "b"), "copy the tools into one folder"),
        (("--config", "/nowhere.toml"), "cannot read the configuration"),
        (("--log-level", "loud"), "must be one of debug"),
        (("--heartbeat-seconds", "0"), "heartbeat_seconds is 0, it must be from 0.1"),
        (("--missed-heartbeats", "0"), "missed_heartbeats is 0, it must be at least 1"),
        (("--missed-heartbeats", "few"), "Invalid value for '--missed-heartbeats'"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_serve_refuses_invalid_settings_with_exit_code_2(words: tuple[str, ...], error: str) -> None:
    ended = toolbus("serve", *words)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert error in ended.stderr


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ((), {}),
        (("--role", "a", "--role", "b"), {"roles": ("a", "b")}),
        (("--no-roles", "--ephemeral"), {"roles": (), "data_dir": None}),
        (("--no-repair", "--require-manifest"), {"repair_arguments": False, "require_manifest": True}),
        (("--offer", "tasks", "--grpc", "127.0.0.1:0"), {"grpc": ("127.0.0.1:0",), "offered": ("tasks",)}),
        (("--heartbeat-seconds", "2", "--missed-heartbeats", "3"), {"heartbeat_seconds": 2.0, "missed_heartbeats": 3}),
    ],
)
def test_options_set_the_settings_that_declare_them(words: tuple[str, ...], changed: dict[str, Any]) -> None:
    assert read_flags(find_command("serve").make_context("serve", list(words)).params) == changed


def test_a_start_that_fails_leaves_the_garbage_collector_on() -> None:
    ended = CliRunner().invoke(app, ["serve", "--role", "a", "--no-roles"])
    assert ended.exit_code == 2
    assert gc.isenabled()


def test_a_disk_that_fills_during_the_start_is_an_error_text(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_960, resource.RLIM_INFINITY))"
    program = f"{limit}; from toolbus.cli import main; main()"  # the file of the database fits, its log does not
    command = [sys.executable, "-c", program, "serve", "--http", "off", "--grpc", "127.0.0.1:0", "--data-dir"]
    ended = subprocess.run(
        [*command, tmp_path / "data"], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(r"toolbus: .*cannot be (written|used).* another --data-dir\n", ended.stderr)


def test_roles_come_from_flags(tmp_path: Path) -> None:
    with start_bus(tmp_path, "--grpc", "127.0.0.1:0", "--http", "off", "--role", "Yui", "--role", "Ran") as serving:
        address = address_of(serving)
        assert json.loads(toolbus("call", "toolbus:stats", "--bus", address).stdout)["roles"] == ["Yui", "Ran"]
        refused = toolbus("list", "--role", "Nobody", "--bus", address)
        assert (refused.returncode, refused.stderr) == (1, "toolbus: unknown role: Nobody\n")


def test_an_unknown_group_of_tools_is_wrong_usage() -> None:
    ended = toolbus("serve", "--ephemeral", "--offer", "drain")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'drain'" in ended.stderr
    assert "tasks and search" in ended.stderr


def test_a_data_directory_keeps_callback_tools_over_a_kill_and_takes_one_bus_at_a_time(
    tmp_path: Path, dead_url: str
) -> None:
    folder = str(tmp_path / "data")
    with start_http_bus(tmp_path, "--data-dir", folder) as serving:
        register(addresses_of(serving)[1], "kept", dead_url)
        second = toolbus("serve", "--grpc", "127.0.0.1:0", "--http", "off", "--data-dir", folder)
        assert (second.returncode, second.stdout) == (1, "")
        assert folder in second.stderr
        assert "--data-dir" in second.stderr or "--ephemeral" in second.stderr
        assert "Traceback" not in second.stderr
        serving.send(signal.SIGKILL)
        serving.code()
    with start_http_bus(tmp_path, TOOLBUS_DATA_DIR=folder) as serving:
        found = json.loads(toolbus("list", "--all", "--json", "--bus", addresses_of(serving)[0]).stdout)["tools"]
        assert [(each["name"], each["state"], each["callback_url"]) for each in found] == [
            ("kept", "unconfirmed", dead_url)
        ]
        refused = toolbus("confirm", "nobody", "--bus", addresses_of(serving)[0])
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "source 'nobody' has no unconfirmed tool" in refused.stderr
        confirmed = toolbus("confirm", found[0]["source"], "--bus", addresses_of(serving)[0])
        assert (confirmed.returncode, confirmed.stdout) == (0, "confirmed kept\n")
        (listed,) = json.loads(toolbus("list", "--all", "--json", "--bus", addresses_of(serving)[0]).stdout)["tools"]
        assert listed["state"] == "live"


def test_upstream_offers_the_tools_to_a_main_server_and_a_refusal_is_a_warning(tmp_path: Path, dead_url: str) -> None:
    with (
        start_http_bus(tmp_path, "--ephemeral") as main,  # a main server to the other one
        start_http_bus(tmp_path, "--ephemeral", "--upstream", f"http://{addresses_of(main)[1]}") as serving,
    ):
        grpc, http = addresses_of(serving)
        register(http, "first", dead_url)
        until_sync(lambda: "first" in toolbus("list", "--bus", addresses_of(main)[0]).stdout, "the tool upstream")
        register(http, "..", dead_url)  # no URL can name it
        listed: list[dict[str, Any]] = []

        def warned() -> bool:
            listed[:] = json.loads(toolbus("list", "--json", "--bus", grpc).stdout)["tools"]
            return any(each["warnings"] for each in listed)

        until_sync(warned, "the refusal upstream")
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
