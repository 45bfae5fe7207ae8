"""Searches for findings: one process of libFuzzer on one target, and what it wrote.

That process is ``python -m lab.fuzz.search TARGET PACKAGE [libFuzzer's options and folders]``: the branches of the
package lead the search; the target's own are left alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lab.commands import repeat_command
from lab.fuzz.target import load

ROOT = Path(__file__).parents[2]
HANGS_AFTER = 20  # seconds of one input; the slowest of ours takes a tenth of one
MEMORY_MB = 2048
GRACE_SECONDS = 300.0  # for imports, seeds and the last input on any machine, beside the time given
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_UNITS = re.compile(r"stat::new_units_added:\s*(\d+)")
_PULSE = re.compile(r"^#(\d+)\s", re.MULTILINE)
_RAISED = re.compile(r"=== Uncaught Python exception: ===\n(.*?)\n\s*Traceback", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a search.

    Attributes:
        runs: inputs that were run.
        units: inputs that reached something new, which the corpus keeps.
        seconds: how long it took, imports included.
        finding: the file with the input that broke something; empty where none did.
        repeat: the command that runs it again.
        why: what broke, in a line; empty where nothing did.
        log: everything that the process wrote.
    """

    target: str
    runs: int
    units: int
    seconds: float
    finding: str
    repeat: str
    why: str
    log: str


def search(
    name: str,
    folder: Path,
    *,
    seconds: float = 0.0,
    runs: int = 0,
    corpus: Path | None = None,
    max_seeds: int | None = None,
    package: str = "toolbus",
) -> Outcome:
    """Runs a target in a process until the time or the number of runs is over, or something breaks.

    Args:
        folder: where a finding is written, and the corpus unless it has a place of its own.
        seconds: 0 means no bound.
        runs: 0 means no bound.
        corpus: a folder that grows from search to search.
        max_seeds: None means all.
        package: whose branches lead the search.
    """
    units = (corpus or folder / "corpus") / name
    plant(name, units, max_seeds)
    findings = folder / "findings" / name
    findings.mkdir(parents=True, exist_ok=True)
    known = set(findings.iterdir())
    command = [sys.executable, "-m", "lab.fuzz.search", name, package, f"-artifact_prefix={findings}/"]
    command += [f"-timeout={HANGS_AFTER}", f"-rss_limit_mb={MEMORY_MB}", "-print_final_stats=1"]
    command += [f"-max_total_time={max(1, round(seconds))}"] if seconds else []
    command += [f"-runs={runs}"] if runs else []
    began = time.monotonic()
    # libFuzzer ends the process, which then tidies nothing.
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=folder, ignore_cleanup_errors=True) as scratch:
        try:
            ended = subprocess.run(
                [*command, str(units)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": scratch},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds + GRACE_SECONDS if seconds else None,
                check=False,
            )
            log = ended.stdout.decode(errors="replace")
            why = _why(log, ended.returncode) if ended.returncode else "" if _runs(log) else "no input was run"
        except subprocess.TimeoutExpired as late:
            log, why = (late.stdout or b"").decode(errors="replace"), f"it ran on {GRACE_SECONDS:g} s after its time"
    finding = next((str(file) for file in sorted(findings.iterdir()) if file not in known), "")
    repeat = repeat_command("fuzz", {"--replay": finding}, name) if finding else ""
    return Outcome(name, _runs(log), _number(_UNITS, log), time.monotonic() - began, finding, repeat, why, log)


def plant(name: str, units: Path, max_seeds: int | None = None) -> None:
    units.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(islice(load(name).seeds(), max_seeds)):
        (units / f"seed-{number:03}").write_bytes(seed)


def _runs(log: str) -> int:
    return _number(_RUNS, log) or _number(_PULSE, log)  # of a process that was killed


def _number(pattern: re.Pattern[str], log: str) -> int:
    return max(map(int, pattern.findall(log)), default=0)


def _why(log: str, status: int) -> str:
    raised = _RAISED.search(log)
    if raised:
        return raised[1].strip().splitlines()[0]
    errors = [line for line in log.splitlines() if "ERROR: libFuzzer:" in line]
    last = errors[-1:] or [line for line in log.splitlines() if line.strip()][-1:]
    return " ".join([*last, f"(status {status})"])


def main() -> None:
    """Searches in this process until libFuzzer has had enough, which ends the process: with 0 where nothing broke."""
    import atheris

    name, package, *options = sys.argv[1:]
    with atheris.instrument_imports(include=[package]):
        target = load(name)
        # What a target brings into play later, inside a function, is imported now or would not be instrumented.
        for seed in target.seeds():
            target.run(seed)
    atheris.Setup([sys.argv[0], f"-max_len={target.max_bytes}", *options], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
