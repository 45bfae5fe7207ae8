"""`toolbus dev` and `toolbus run --watch`: a saved file takes over, a broken one changes nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import Running, toolbus
from tests.support.served_bus import address_of, start_grpc_bus
from tests.support.waiting import until_sync

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are ended as Linux does it")

FILE = """
from toolbus import llm_tool
from words import WORD
@llm_tool
def greet(name: str) -> str:
    "Greets."
    return f"{WORD}, {name}"
"""


def _write(file: Path, text: str) -> None:
    """Writes a file as editors do: a new one takes its place."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


def _greets(address: str, text: str) -> bool:
    called = toolbus("call", "greet", "name=Ada", "--bus", address)
    return called.returncode == 0 and json.loads(called.stdout) == text


def test_dev_runs_a_bus_and_a_plugin_that_saving_replaces_and_a_broken_file_does_not(tmp_path: Path) -> None:
    file, words = tmp_path / "greeter.py", tmp_path / "words.py"
    file.write_text(FILE)
    words.write_text('WORD = "Hello"')
    with Running(tmp_path, "dev", file, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0") as dev:
        address = address_of(dev)
        assert "/console" in dev.out.splitlines()[0]
        dev.says("greeter * attached, 1 tool: greet")
        dev.says(f"try it: toolbus call greet name=TEXT --bus {address}")
        assert _greets(address, "Hello, Ada")
        _write(words, 'WORD = "Good morning"')  # a module beside it
        dev.says("greeter * reloaded, 1 tool: greet")
        until_sync(lambda: _greets(address, "Good morning, Ada"), "the answer of the new file")
        _write(file, FILE.replace('return f"', 'return f("'))
        dev.says("greeter * cannot start (the reason is above): the earlier one keeps running")
        assert "SyntaxError: '(' was never closed" in dev.out + dev.err
        assert _greets(address, "Good morning, Ada")
        _write(file, FILE.replace("{name}", "{name}!"))
        until_sync(lambda: _greets(address, "Good morning, Ada!"), "the answer of the corrected file")
        assert len(json.loads(toolbus("list", "--json", "--bus", address).stdout)["tools"]) == 1


def test_a_folder_that_is_away_for_a_while_is_watched_again_once_it_is_back(tmp_path: Path) -> None:
    folder, away = tmp_path / "plugins", tmp_path / "away"
    folder.mkdir()
    file = folder / "greeter.py"
    file.write_text(FILE)
    (folder / "words.py").write_text('WORD = "Hello"')
    with Running(tmp_path, "dev", file, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0") as dev:
        address = address_of(dev)
        dev.says("greeter * attached, 1 tool: greet")
        folder.rename(away)
        dev.says("the earlier one keeps running")
        (away / "words.py").write_text('WORD = "Good evening"')
        away.rename(folder)
        until_sync(lambda: _greets(address, "Good evening, Ada"), "the answer of the folder that is back")


def test_run_with_watch_waits_for_the_save_that_corrects_a_file_which_cannot_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "greeter.py"
    file.write_text("this is no Python")
    (tmp_path / "words.py").write_text('WORD = "Hello"')
    with start_grpc_bus(tmp_path, "--ephemeral") as serving:
        address = address_of(serving)
        with Running(tmp_path, "run", file, "--watch", "--bus", address) as running:
            running.says("nothing of it runs; save it again when it is corrected")
            _write(file, FILE)
            running.says("greeter * attached, 1 tool: greet")
            assert _greets(address, "Hello, Ada")


ANY = """
from toolbus import Plugin
plugin = Plugin("odd")
@plugin.tool(parameters={"type": "object", "properties": {"value": True}, "required": ["value", "more"]})
def keep(value: object, more: object) -> str:
    "Keeps anything."
    return "kept"
"""


def test_the_call_to_try_has_a_word_for_arguments_that_may_be_anything(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(ANY)
    with Running(tmp_path, "dev", file, "--grpc", "127.0.0.1:0", "--http", "off") as dev:
        dev.says(f"try it: toolbus call keep value=TEXT more=TEXT --bus {address_of(dev)}")
