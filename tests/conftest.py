"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

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
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without the garbage collector, which takes a third of the time and finds next to nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Has the garbage collector look at what tests make, and not at thousands of tests each time."""
    gc.collect()
    gc.freeze()
