"""What the suite adds to pytest: a process as it was after each file, a bound of memory, one test of each part."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import toolbus.tools
from tests.support.process_state import (
    restored_environment,
    restored_imports,
    restored_loggers,
    restored_signals,
)
from tests.support.waiting import HANG_SECONDS
from tests.support.worker_memory import MAX_VARIABLE
from toolbus.processes.loader import load_plugin

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.support import worker_memory
from tests.support.process_state import restored_state
def pytest_sessionstart(session): worker_memory.register(session)
"""
LEAVING = {
    "test_a.py": """
import os
def test_leaves_a_variable(): os.environ["LEFT_BEHIND"] = "1"
def test_finds_it_in_the_same_file(): assert os.environ["LEFT_BEHIND"] == "1"
""",
    "test_b.py": "import os\ndef test_finds_nothing(): assert 'LEFT_BEHIND' not in os.environ\n",
}


def _run(folder: Path, workers: int, env: Mapping[str, str] = {}) -> tuple[str, int]:
    """Returns the last line of a run of `LEAVING` without its seconds, and the exit code."""
    for name, text in {"conftest.py": CONFTEST, **LEAVING}.items():
        (folder / name).write_text(text)
    # No other plugins: loading them would take most of the time.
    plugins = ("-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *plugins, "--rootdir", str(folder)]
    run = subprocess.run(
        [*command, "-n", str(workers), "--dist", "loadfile", str(folder)],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return (run.stdout.strip() or run.stderr.strip()).splitlines()[-1].split(" in ")[0], run.returncode


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_file_finds_nothing_of_what_a_file_has_left(tmp_path: Path, workers: int) -> None:
    assert _run(tmp_path, workers) == ("3 passed", 0)


@pytest.mark.parametrize(("megabytes", "code"), [("1", pytest.ExitCode.TESTS_FAILED), ("9999", pytest.ExitCode.OK)])
def test_a_worker_that_takes_more_than_it_may_fails_the_run(tmp_path: Path, megabytes: str, code: int) -> None:
    assert _run(tmp_path, 1, {MAX_VARIABLE: megabytes}) == ("3 passed", code)


def test_make_test_has_a_smoke_test_of_each_part() -> None:
    choice = (ROOT / "Makefile").read_text().partition("SMOKE_TESTS := ")[2].partition("CORE_TESTS")[0]
    parts = {file.parent.name for file in (ROOT / "toolbus" / "parts").glob("*/__init__.py")}
    assert {word.rpartition(",")[2].split("/")[0] for word in choice.split() if word.endswith((".py", ".py)"))} == parts


def test_modules_from_elsewhere_and_other_names_of_toolbus_are_removed_and_libraries_stay(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "main.py").write_text("import neighbour\nfrom toolbus.sdk import Plugin\nplugin = Plugin('calc')\n")
    path, modules = list(sys.path), set(sys.modules)
    sys.modules.pop("colorsys", None)
    with restored_imports():
        load_plugin(tmp_path / "main.py")
        sys.modules["tools"] = toolbus.tools
        import colorsys  # noqa: F401 - a module of the path

        assert {"neighbour", "tools", "colorsys"} <= sys.modules.keys()
    assert sys.path == path
    assert {each for each in set(sys.modules) - modules if each.startswith("toolbus_plugin_")} == set()
    assert not {"neighbour", "tools"} & sys.modules.keys()
    assert "colorsys" in sys.modules


def test_variables_folder_loggers_and_signals_are_as_before(tmp_path: Path) -> None:
    folder, handler = Path.cwd(), signal.getsignal(signal.SIGTERM)
    old, root = logging.getLogger("toolbus.test_process_state"), logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with restored_environment(), restored_loggers(), restored_signals():
        os.environ["LEFT_BEHIND"] = "1"
        del os.environ["PATH"]
        os.chdir(tmp_path)
        old.propagate, old.disabled = False, True
        root.setLevel(level + 1)
        root.addHandler(logging.NullHandler())
        logging.getLogger("toolbus.test_process_state.new").setLevel(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert "LEFT_BEHIND" not in os.environ
    assert os.environ["PATH"]
    assert Path.cwd() == folder
    assert (old.propagate, old.disabled) == (True, False)
    assert (root.level, root.handlers) == (level, handlers)
    assert logging.getLogger("toolbus.test_process_state.new").level == logging.NOTSET
    assert signal.getsignal(signal.SIGTERM) is handler
