"""Sets up what holds for all tests."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings, strategies

from tests.support.examples import examples

# Before anything imports grpc: its C core would log every connection that a test breaks.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# No deadline for an example: machines may be busy.
settings.register_profile("toolbus", deadline=None, max_examples=examples())
settings.load_profile("toolbus")

# A shell starts what is put into the background with Ctrl-C ignored, which the programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects tests without the garbage collector, which would take a third of the time.

    Before, hypothesis writes down in a new checkout which characters there are. It takes 200 MB and 1.6 s for that: in
    the process that hands out the tests, and not in each that runs some.
    """
    if not hasattr(session.config, "workerinput"):
        strategies.text().validate()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Has the garbage collector look at what tests make, and not at thousands of tests each time.

    First it frees what collecting the tests has left: a first object of each coroutine test, and one of each function.
    """
    gc.collect()
    gc.freeze()


class _Memory:
    """Returns freed memory to the system after a test that took much, so that peaks do not add up.

    The C library keeps what tests of frames and results of megabytes have freed, in pieces between what lives on.
    """

    GROWTH_BYTES = 24 * 1024 * 1024  # since the last time

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


def pytest_sessionstart(session: pytest.Session) -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # not in every C library
        session.config.pluginmanager.register(_Memory(trim))
