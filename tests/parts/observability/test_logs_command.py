"""`toolbus logs`: what plugins of a real supervisor have printed, shown and followed over a real bus."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from tests.support.processes import Running, toolbus
from tests.support.served_bus import address_of, start_grpc_bus
from tests.support.waiting import until_sync
from toolbus.errors import Code, Stage
from toolbus.parts.observability.logs_command import follow_output, print_plugins
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk import Host

CHATTY = r"""
import threading
from toolbus import llm_tool
@llm_tool
def speak(text: str) -> None:
    "Prints."
    print(text, flush=True)
print("\x1b]0;owned\x07up \x1b[31mred\x1b[2J\u202e", flush=True)
"""


def test_output_of_a_supervised_plugin_is_shown_followed_and_survives_a_restart(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    with start_grpc_bus(tmp_path) as bus:
        address = address_of(bus)
        with Running(tmp_path, "run", tmp_path / "chatty.py", "--bus", address) as run:
            run.says("up")
            bus.says("attached source=run.")
            shown = toolbus("logs", "chatty", "--bus", address)
            assert shown.returncode == 0
            assert "up red\n" in shown.stdout
            with Following(tmp_path, "logs", "chatty", "-f", "--json", "--bus", address) as following:
                following.says("up")
                assert toolbus("call", "speak", "text=hello there", "--bus", address).returncode == 0
                following.says("hello there")
                restarted = toolbus("call", "toolbus:plugin_restart", "plugin=chatty", "--bus", address)
                assert restarted.returncode == 0
                following.says("as an operator asked")
                until_sync(lambda: following.out.count("up ") == 2, "the output of the new process")
            (row,) = json.loads(toolbus("logs", "--json", "--bus", address).stdout)["plugins"]
            assert (row["plugin"], row["state"], row["restarts"]) == ("chatty", "running", 1)


def test_to_follow_needs_a_plugin() -> None:
    assert toolbus("logs", "-f").returncode == 2


class ScriptedHost:
    """A host whose calls end in results of a script; then following ends."""

    def __init__(self, *results: Result) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self._results = list(results)

    async def call(self, name: str, arguments: Any = None, **options: Any) -> Result:
        if not self._results:
            raise EOFError
        self.requests.append(arguments)
        return self._results.pop(0)


def answer(source: str, *texts: str, following: int = 0, lost: int = 0) -> Result:
    """Returns the result of `plugin_logs` with lines of output."""
    lines = [{"stream": "stdout", "text": text} for text in texts]
    return Result(output_json=json.dumps({"source": source, "next": following, "lines": lines, "lost": lost}))


UNAVAILABLE = Result(is_error=True, error=CallError(Code.UNAVAILABLE, "run.a is offline", Stage.NOT_DISPATCHED))


@pytest.mark.parametrize("as_json", [False, True])
async def test_lines_are_followed_to_the_source_where_the_plugin_runs_next(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ScriptedHost(
        answer("run.a", "one", following=7),
        UNAVAILABLE,
        UNAVAILABLE,  # the plugin runs nowhere yet
        UNAVAILABLE,
        answer("run.b"),
        answer("run.b", "two", following=2, lost=3),
    )
    with pytest.raises(EOFError):
        await follow_output(cast(Host, host), {"plugin": "weather"}, as_json, retry_seconds=0.0)
    printed = capsys.readouterr()
    lines = ['{"stream":"stdout","text":"one"}', '{"lost":3}', '{"stream":"stdout","text":"two"}']
    assert printed.out.splitlines() == (lines if as_json else ["one", "two"])
    notes = printed.err.splitlines()
    assert notes[0] == "toolbus: run.a is offline (trying again)"
    assert notes[1:] == ([] if as_json else ["toolbus: 3 lines were overwritten before they could be printed"])
    places = [(each["source"], each["since"]) for each in host.requests if "since" in each]
    assert places == [("run.a", 7), ("run.a", 7), ("run.b", 0)]


async def test_a_plugin_that_is_unknown_at_the_start_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        await follow_output(cast(Host, ScriptedHost(UNAVAILABLE)), {"plugin": "weather"}, as_json=False)
    assert ended.value.exit_code == 1
    assert "run.a is offline" in capsys.readouterr().err


def test_the_table_shows_plugins_and_names_sources_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "plugin": "weather",
        "state": "running",
        "pid": 7,
        "restarts": 0,
        "since": 0.0,
        "lines": 3,
        "source": "run.a",
    }
    print_plugins({"plugins": [row], "errors": {"run.b": "no answer"}}, as_json=False)
    print_plugins({"plugins": [], "errors": {}}, as_json=False)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split() == ["weather", "running", "7", "0", "-", "3", "run.a", "-"]
    assert "no answer from run.b: no answer" in printed.err
    assert "no plugin has output here" in printed.err


class Following(Running):
    """A command that follows, as a process of its own."""
