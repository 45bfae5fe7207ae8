"""Sets up what holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings, strategies

from tests.support import worker_memory
from tests.support.examples import examples
from tests.support.process_state import restored_state

__all__ = ["restored_state"]  # a fixture of every file

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
    """Collects the tests without the garbage collector, which would take a third of the time.

    It then looks only at what tests make, not at thousands of tests each time. Before that, hypothesis writes down in a
    new checkout which characters there are: it takes 200 MB and 1.6 s, here in the process that hands out the tests and
    not in each that runs some.
    """
    if not hasattr(session.config, "workerinput"):
        strategies.text().validate()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    worker_memory.register(session)
