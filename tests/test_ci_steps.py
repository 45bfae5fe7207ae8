"""What CI does with a step that fails: a second try, and a report at the end where that passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]
REPORT = "== failed once, passed alone: each is a defect to find\n"
# `fake` stands for a run of pytest, which takes half a second: each test named in NAMES fails at its first call, and
# `always` at each; as pytest does, it writes down what failed.
MAKEFILE = """
test:
\t@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -p xdist -q -c /dev/null --rootdir . $(ARGS)
fake:
\t@sh ./fake.sh $(ARGS)
"""
FAKE = """
for word; do case $word in cache_dir=*) cache=${word#cache_dir=}/v/cache;; esac; done
case "$*" in *last-failed*) echo "again: $*"; exec grep -vq always $cache/lastfailed;; esac
echo "first: $*"
[ "$NAMES" ] || exit 0
mkdir -p $cache
printf '{%s}' "$NAMES" >$cache/lastfailed
exit 1
"""
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", ["good", "b", "a"])
def test_it(name):
    mark = Path(name)
    first = not mark.exists()
    mark.touch()
    assert name == "good" or not first, f"{name} is wrong"
"""
ONCE = "sh -c 'echo try; [ -e again ] || { touch again; echo a first output; exit 3; }'"


def _ci(folder: Path, *steps: str, names: str = "") -> tuple[str, int]:
    """Runs steps as `.ci/run` does; returns the output, and the exit code."""
    for name, text in {"Makefile": MAKEFILE, "fake.sh": FAKE, "test_names.py": TESTS}.items():
        (folder / name).write_text(text)
    failed = ", ".join(f'"{name}": true' for name in names.split())
    begin = f"set -euo pipefail; scratch=$(mktemp -d -p {folder}); . {ROOT}/.ci/steps; trap report_failed_once EXIT"
    run = subprocess.run(
        ["bash", "-c", "\n".join([begin, *steps, "echo all passed"])],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "NAMES": failed, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return run.stdout, run.returncode


def test_steps_that_pass_are_run_once_and_nothing_is_reported(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, "step echo one", 'tests "-n 3 --x" fake')
    assert (output.count("one\n"), output.count("first: -n 3 --x -o cache_dir="), code) == (1, 1, 0)
    assert "again" not in output
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
    """With pytest itself."""
    output, code = _ci(tmp_path, 'tests "-n 2" test')
    assert code == 0, output
    assert (tmp_path / "good").exists()
    first, _, names = output.partition("all passed\n")[2].partition(REPORT)
    assert all(f"{name} is wrong" in first for name in "ab")
    assert names.split() == [f"test_names.py::test_it[{name}]" for name in "ab"]


def test_at_most_three_tests_get_a_second_try_and_one_that_fails_twice_ends_the_run(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, 'tests "" fake', names="a b c")
    output, _, _ = output.partition("all passed\n")
    assert (output.count("first: "), output.count("again: "), code) == (1, 1, 0)
    output, code = _ci(tmp_path, 'tests "" fake', names="a b c d")
    assert (output.count("first: "), output.count("again: "), code) == (1, 0, 1)
    output, code = _ci(tmp_path, 'tests "" fake', names="a always")
    assert (output.count("first: "), output.count("again: "), code) == (1, 1, 1)
    assert "all passed" not in output


def test_a_step_that_fails_without_a_failing_test_ends_the_run_at_once(tmp_path: Path) -> None:
    output, code = _ci(tmp_path, 'tests "" absent')
    assert code == 1
    assert "once more" not in output


def test_workers_that_took_too_much_memory_get_no_second_try(tmp_path: Path) -> None:
    peak = "peak memory of the workers in MB: gw0 900: more than 600 is a failure"
    make = f"make() {{ command make \"$@\" && return; echo '{peak}'; return 1; }}"
    output, code = _ci(tmp_path, make, 'tests "" fake', names="a")
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
