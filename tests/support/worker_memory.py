"""Bounds the memory of the processes that run the tests, and reports the peak of each.

Knows nothing of what the tests do: it reads what the system says of this process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MEGABYTE = 1024 * 1024
MAX_VARIABLE = "TOOLBUS_TEST_MAX_MB"  # set by `make test`


class FreedMemory:
    """Returns freed memory to the system after a test that took much, so that peaks do not add up.

    The C library keeps what tests of frames and results of megabytes have freed, in pieces between what lives on.
    """

    GROWTH_BYTES = 24 * MEGABYTE  # since the last time

    def __init__(self, trim: Callable[[int], object]) -> None:
        self._trim = trim
        self._resident = self._read()

    def pytest_runtest_logfinish(self) -> None:
        if self._read() > self._resident + self.GROWTH_BYTES:
            gc.collect()
            self._trim(0)
            self._resident = self._read()

    @staticmethod
    def _read() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class WorkerPeak:
    """Hands over the peak of a worker."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        session.config.workeroutput["peak_mb"] = peak // MEGABYTE  # type: ignore[attr-defined]  # of xdist


class Peaks:
    """Reports the peaks of all workers; a run in which one took more than the variable allows fails."""

    def __init__(self) -> None:
        self._max_mb = float(os.environ.get(MAX_VARIABLE, "inf"))
        self._peaks: dict[str, int] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """A worker that crashed has no output."""
        output: dict[str, int] = getattr(node, "workeroutput", {})
        if "peak_mb" in output:
            self._peaks[node.gateway.id] = output["peak_mb"]  # type: ignore[attr-defined]  # of xdist

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if max(self._peaks.values(), default=0) > self._max_mb:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._peaks:
            peaks = ", ".join(f"{worker} {peak}" for worker, peak in sorted(self._peaks.items()))
            much = [worker for worker, peak in self._peaks.items() if peak > self._max_mb]
            verdict = f": more than {self._max_mb:.0f} is a failure" if much else ""
            terminalreporter.write_line(f"peak memory of the workers in MB: {peaks}{verdict}")


def register(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # not in every C library
        plugins.register(FreedMemory(trim))
    plugins.register(WorkerPeak() if hasattr(session.config, "workerinput") else Peaks())
