"""All commands: help, wrong usage, imports and the environment."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.support.processes import ROOT, environment, toolbus
from toolbus.cli.command_line import app


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the words of a command and of all commands below it."""
    yield " ".join(words)
    for name, each in getattr(command, "commands", {}).items():
        yield from _commands(each, (*words, name))


@pytest.mark.parametrize("command", [*_commands(get_command(app))])
def test_help_shows_examples_and_exit_codes(command: str) -> None:
    shown = toolbus(*command.split(), "--help").stdout
    assert "Examples" in shown
    assert "Exit codes:" in shown
    assert f"toolbus {command}".removesuffix("mounts show").strip() in shown.partition("Examples")[2]
    assert "--json" in shown or command in ("", "mcp")


@pytest.mark.parametrize("command", ["list", "calls", "health"])
def test_help_names_where_an_operator_sees_more(command: str) -> None:
    shown = " ".join(toolbus(command, "--help").stdout.split())
    assert "toolbus top" in shown
    assert "toolbus console" in shown


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
    assert not modules & {"grpc", "google.protobuf", "toolbus.protocol.tool", "toolbus.bus", "uvloop", "textual"}
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
    variables = {key: value for key, value in environment(env).items() if key != "GRPC_EXPERIMENTS" or key in env}
    ended = subprocess.run(
        [sys.executable, "-m", "toolbus.cli", "run", str(file)],
        capture_output=True,
        text=True,
        timeout=30,
        env=variables,
        cwd=ROOT,
        check=True,
    )
    assert ended.stdout == f"asks | {expected}\n"


def test_completion_scripts_are_offered() -> None:
    shown = toolbus("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete" in shown.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("tasks", "check"), "check needs the ID of a task"),
        (("tasks", "--timeout", "1"), "--timeout needs await"),
        (("tasks", "await", "x", "--timeout", "nan"), "a number of seconds above 0"),
        (("tasks", "forget", "x"), "forget"),
        (("call", "x", "--background-after", "0"), "--background-after is 0"),
        (("call", "x", "--user", "a", "--context", "user_id=b"), "set the same field"),
        (("permit", "tools", "x"), "use exactly one of --user"),
        (("permit", "tools", "x", "--user", "a", "--nobody"), "use exactly one of --user"),
        (("permit", "tools", "x", "--user", ""), "--user is empty"),
        (("permit", "tools", "", "--nobody"), "NAME is empty"),
        (("permit", "doors", "x", "--nobody"), "doors"),
    ],
)
def test_contradicting_or_invalid_options_are_wrong_usage(
    words: tuple[str, ...], error: str, unused_address: str
) -> None:
    ended = toolbus(*words, "--bus", unused_address)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert error in ended.stderr
