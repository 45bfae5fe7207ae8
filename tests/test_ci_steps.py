"""What CI does with a step that fails: a second try, and a report at the end where that passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]
REPORT = "== failed once, passed alone: each is a defect to find\n"
MAKEFILE = """
test:
\t@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -p xdist -q -c /dev/null --rootdir . $(MORE) $(ARGS)
"""
# Each fails at its first call, and passes at the next; `always` never passes.
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", [{names}])
def test_it(name):
    mark = Path(name)
    first = not mark.exists()
    mark.touch()
    assert name.startswith("good") or not first and name != "always", f"{{name}} is wrong"
"""
ONCE = "sh -c 'echo try; [ -e again ] || { touch again; echo a first output; exit 3; }'"


def _ci(folder: Path, *steps: str, names: str = "") -> tuple[str, int]:
    """Runs steps as `.ci/run` does; returns the output, and the exit code."""
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "test_names.py").write_text(TESTS.format(names=", ".join(map(repr, names.split()))))
    begin = f"set -euo pipefail; scratch=$(mktemp -d -p {folder}); . {ROOT}/.ci/steps; trap report_failed_once EXIT"
    run = subprocess.run(
        ["bash", "-c", "\n".join([begin, *steps, "echo all passed"])],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return run.stdout, run.returncode


def test_steps_that_pass_are_run_once_and_nothing_is_reported(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, "step echo one", 'tests "" test', names="good")
    assert (output.count("one\n"), output.count("1 passed"), code) == (1, 1, 0)
    assert "failed once" not in output


def test_a_program_that_fails_once_is_reported_at_the_end_with_its_first_output(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, f"step {ONCE}", "step echo the next")
    assert code == 0
    before, _, end = output.partition("all passed\n")
    assert "the next\n" in before
    first, _, names = end.partition(REPORT)
    assert "try\na first output\n" in first
    assert names.startswith("sh -c")


def test_a_program_that_fails_twice_ends_the_run(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, "step sh -c 'echo try; exit 3'", "step echo the next")
    assert (output.count("try\n"), code) == (2, 1)
    assert "the next" not in output
    assert REPORT not in output


def test_tests_that_fail_once_run_again_alone_and_are_reported_with_their_failures(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, 'tests "-n 2" test MORE=--tb=short', names="good1 a b c good2")
    assert code == 0
    assert "3 failed, 2 passed" in output
    assert "3 passed" in output  # without the two good ones
    first, _, names = output.partition("all passed\n")[2].partition(REPORT)
    assert all(f"{name} is wrong" in first for name in "abc")
    assert names.split() == [f"test_names.py::test_it[{name}]" for name in "abc"]


def test_a_test_that_fails_twice_ends_the_run(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, 'tests "" test', names="good a always")
    assert code == 1
    assert "1 failed, 1 passed" in output
    assert "all passed" not in output


def test_more_than_three_failing_tests_end_the_run_at_once(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, 'tests "" test', names="a b c d")
    assert (output.count("4 failed"), code) == (1, 1)
    assert "once more" not in output


def test_a_step_that_fails_without_a_failing_test_ends_the_run_at_once(tmp_path: Path) -> None:
    for options in ("MORE=--no-such-option", "MORE=absent.py"):
        output, code = _ci(tmp_path, f'tests "" test {options}')
        assert code == 1
        assert "once more" not in output


def test_workers_that_took_too_much_memory_get_no_second_try(tmp_path: Path) -> None:
    peak = "peak memory of the workers in MB: gw0 900: more than 600 is a failure"
    output, code = _ci(
        tmp_path, f"make() {{ command make \"$@\" && return; echo '{peak}'; return 1; }}", 'tests "" test', names="a"
    )
    assert (output.count(peak), code) == (1, 1)
    assert "once more" not in output


def test_an_earlier_failure_is_reported_where_a_later_step_ends_the_run(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, f"step {ONCE}", "step false")
    assert code == 1
    assert REPORT in output


def test_the_fourth_step_that_fails_ends_the_run(tmp_path: Path) -> None:
    once = "step sh -c '[ -e $0 ] || { touch $0; exit 1; }'"
    output, code = _ci(tmp_path, *(f"{once} {number}" for number in range(4)))
    assert code == 1
    assert output.count("== once more, since it failed") == 3
