"""Sets up what holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings, strategies

from tests.support import file_units, process_state, worker_memory
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
    """Has hypothesis write down in a new checkout which characters there are, before anything is collected.

    It takes 200 MB and 1.6 s for that: in the process that hands out the tests, and not in each that runs some.
    """
    if not hasattr(session.config, "workerinput"):
        strategies.text().validate()
    with file_units.collecting():
        return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    file_units.register(session)
    worker_memory.register(session)
    session.config.pluginmanager.register(process_state.RestoredState())
