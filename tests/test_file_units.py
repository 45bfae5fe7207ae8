"""What `make test` adds to pytest: files as units of work, a process as it was after each, a bound of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.file_units import LONG_FILES, PROVIDERS_FILES, VARIABLE
from tests.support.waiting import HANG_SECONDS
from tests.support.worker_memory import MAX_VARIABLE

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.support import file_units, process_state, worker_memory
def pytest_sessionstart(session):
    file_units.register(session)
    worker_memory.register(session)
    session.config.pluginmanager.register(process_state.RestoredState())
"""
FILES = {
    "test_passing.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_failing.py": "def test_before(): pass\ndef test_failing(): assert False\ndef test_after(): pass\n",
    "test_broken.py": "import a_module_that_does_not_exist\n",
    "test_without_tests.py": "",
}
LEAVING = {
    "test_a.py": """
import os
def test_leaves_a_variable(): os.environ["LEFT_BEHIND"] = "1"
def test_finds_it_in_the_same_file(): assert os.environ["LEFT_BEHIND"] == "1"
""",
    "test_b.py": "import os\ndef test_finds_nothing(): assert 'LEFT_BEHIND' not in os.environ\n",
}


def _summary(folder: Path, *options: str, files: Mapping[str, str] = FILES, **env: str) -> tuple[str, int]:
    """Returns the last line of a run without its seconds, and the exit code."""
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        (folder / name).write_text(text)
    # No other plugins: loading them would take most of the time.
    plugins = ("-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *plugins, "--rootdir", str(folder)]
    run = subprocess.run(
        [*command, *(option.format(folder=folder) for option in options), str(folder)],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, VARIABLE: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return (run.stdout.strip() or run.stderr.strip()).splitlines()[-1].split(" in ")[0], run.returncode


@pytest.mark.parametrize(
    ("options", "summary", "code"),
    [
        ([], "1 failed, 4 passed, 1 error", 1),
        (["-k", "test_before", "--continue-on-collection-errors"], "1 passed, 1 error", 1),
        (["--ignore={folder}/test_broken.py", "-k", "nosuch"], "no tests ran", 5),
    ],
    ids=["everything", "one test", "no test"],
)
def test_a_run_reports_every_test_and_error_of_every_file(
    tmp_path: Path, options: list[str], summary: str, code: int
) -> None:
    assert _summary(tmp_path, "-n", "2", "--dist", "loadfile", *options) == (summary, code)


@pytest.mark.parametrize("option", ["-k", "-m"])
def test_a_wrong_expression_is_a_usage_error_before_workers_start(tmp_path: Path, option: str) -> None:
    text, code = _summary(tmp_path, "-n", "2", "--dist", "loadfile", option, "one and")
    assert (code, f"Wrong expression passed to '{option}'" in text) == (pytest.ExitCode.USAGE_ERROR, True)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_next_file_finds_nothing_of_what_a_file_has_left(tmp_path: Path, workers: str) -> None:
    options = ("-n", workers, "--dist", "loadfile") if workers != "0" else ()
    assert _summary(tmp_path, *options, files=LEAVING) == ("3 passed", 0)


@pytest.mark.parametrize(("megabytes", "code"), [("1", pytest.ExitCode.TESTS_FAILED), ("9999", pytest.ExitCode.OK)])
def test_a_worker_that_takes_more_than_it_may_fails_the_run(tmp_path: Path, megabytes: str, code: int) -> None:
    options = ("-n", "1", "--dist", "loadfile")
    assert _summary(tmp_path, *options, files=LEAVING, **{MAX_VARIABLE: megabytes}) == ("3 passed", code)


@pytest.mark.parametrize("name", [*LONG_FILES, *PROVIDERS_FILES])
def test_each_file_with_a_place_of_its_own_exists(name: str) -> None:
    assert (ROOT / name).exists()
