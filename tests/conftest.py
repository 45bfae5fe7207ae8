"""Sets up what holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import settings, strategies

from tests.support import worker_memory
from tests.support.examples import TIMES, examples
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

# Files whose few tests take long, most of it by waiting: they begin first, so that no process ends alone with one.
SLOW = {
    *("tests/docs/test_site.py", "tests/faults/test_true_time.py", "tests/bus/test_numbers.py"),
    *("tests/cli/test_bus_client.py", "tests/cli/test_run_command.py", "tests/clients/test_rest_host.py"),
    *("tests/examples/test_demo.py", "tests/docs/test_installing.py", "tests/faults/test_stopped_collector.py"),
    *("tests/faults/test_keys_under_load.py", "tests/faults/test_memory.py", "tests/faults/test_standstill.py"),
    *("tests/processes/test_supervisor.py", "tests/processes/test_forking_tools.py", "tests/test_suite.py"),
    *("tests/bus/streams/test_crowds_and_interceptors.py", "tests/protocol/test_session_model.py"),
    *("tests/parts/test_removed_parts.py", "tests/parts/mcp/official/test_official_client.py"),
    *("tests/parts/mcp/client/test_mount.py", "tests/parts/mcp/client/test_calls.py"),
    *("tests/parts/console/top/test_screen.py", "tests/parts/dropin/sandbox/test_sandboxed_plugin.py"),
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves property tests out where TOOLBUS_EXAMPLES is 0; puts slow files first, and then those with many tests."""
    if TIMES == 0:
        left_out = [item for item in items if item.get_closest_marker("hypothesis")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("hypothesis")]
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    order = sorted(range(len(items)), key=lambda at: (files[at] not in SLOW, -tests[files[at]], files[at], at))
    items[:] = [items[at] for at in order]


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
