"""Collects a test file in the worker that runs it, instead of every file in every worker.

pytest-xdist numbers the tests that a worker has collected and sends it these numbers. So every worker would collect
all tests: 13 s of processor time and 250 MB in each of them. Here a worker collects one item for each file and imports
nothing; running this item collects the tests of the file and runs them. Long files are first in the queue, so that no
worker is still busy with one when the others have finished.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator, Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

VARIABLE = "TOOLBUS_TEST_FILE_UNITS"  # set by `make test` and `make coverage`; the others choose few files

# After so many more files a worker frees what `collecting` froze of earlier ones, which takes half a second.
FILES_UNTIL_UNFROZEN = 40

# One worker runs them all and nothing else, so that one process loads the client libraries of the providers: 170 MB.
PROVIDERS_FILES = (
    "tests/parts/models/dialects/",
    "tests/docs/test_snippets.py",
    "tests/parts/models/loop/test_endpoint.py",
    "tests/parts/models/loop/test_official_clients.py",
    "tests/parts/council/test_endpoint_options.py",
    "tests/parts/council/test_sidecar.py",
)
_PROVIDERS = "providers"  # the name of this unit
# Files that take long for other reasons than their size, the longest first.
LONG_FILES = (
    "tests/contract/test_callers.py",
    "tests/parts/dropin/sandbox/test_breakouts.py",
    "tests/docs/test_snippets.py",
    "tests/bus/calls/test_tripwire.py",
    "tests/contract/test_handler_life.py",
    "tests/parts/models/loop/test_official_clients.py",
    "tests/cli/test_keys_command.py",
    "tests/parts/dropin/test_tool_folder_processes.py",
    "tests/bus/gateway/test_openapi.py",
    "tests/bus/calls/test_fairness.py",
    "tests/contract/test_handlers.py",
    "tests/bus/keys/test_key_store.py",
    "tests/bus/test_doors.py",
    "tests/cli/test_command_line.py",
    "tests/parts/models/dialects/schemas/test_hostile_schemas.py",
    "tests/faults/test_opening.py",
    "tests/cli/test_serve_command.py",
    "tests/parts/council/test_sidecar.py",
    "tests/parts/dropin/test_tool_folder_commands.py",
    "tests/bus/test_room.py",
    "tests/test_layout.py",
)


@contextlib.contextmanager
def collecting() -> Generator[None]:
    """Collects tests without the garbage collector, which would take a third of the time.

    Then it frees what collecting has left, such as a first object of each coroutine test, and looks only at what tests
    make, not at thousands of tests each time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


class _FileItem(pytest.Item):
    """All tests of a file, as one unit of work for a worker."""

    def runtest(self) -> None:
        raise NotImplementedError("its tests are run instead")

    def collect_tests(self) -> list[pytest.Item]:
        """Imports the file and returns the tests that the options choose; an error is reported as one of collection."""
        assert self.parent is not None
        module = pytest.Module.from_parent(self.parent.parent, path=self.path)
        with collecting():
            tests = list(self.session.genitems(module))
            self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=tests)
        return tests


class _UnreadFile(pytest.File):
    def collect(self) -> Iterator[_FileItem]:
        item: _FileItem = _FileItem.from_parent(self, name="whole file")
        item.add_marker(pytest.mark.timeout(0))  # each of its tests has a timeout of its own
        yield item


class WorkerFiles:
    """The plugin of a worker."""

    def __init__(self) -> None:
        self._files = 0  # that it has run

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector:
        return _UnreadFile.from_parent(parent, path=module_path)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
        """Leaves options like -k and -m to the tests of a file: they would deselect its item."""
        files = [item for item in items if isinstance(item, _FileItem)]
        yield
        if files:
            root = config.rootpath
            ranks = {root / name: rank for rank, name in enumerate(LONG_FILES)}
            items[:] = sorted(files, key=lambda file: (ranks.get(file.path, len(ranks)), -file.path.stat().st_size))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, _FileItem):
            return None
        session = item.session
        place = session.items.index(item)
        tests = item.collect_tests()
        for test, next_test in zip_longest(tests, tests[1:]):
            session.items[place] = test  # xdist compares the item that it sent with the one that is reported
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=next_test or nextitem)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = item
        if not tests:  # the file before was torn down only up to what this file would have shared with it
            session._setupstate.teardown_exact(nextitem)
        self._forget(session)
        return True

    def _forget(self, session: pytest.Session) -> None:
        """Drops what pytest retains of the tests of a file: their reports, which the controller has, and themselves."""
        session._collection_cache.clear()
        reporter: pytest.TerminalReporter | None = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.stats.clear()
        self._files += 1
        if self._files % FILES_UNTIL_UNFROZEN == 0:
            gc.unfreeze()


class _Scheduling(LoadFileScheduling):  # type: ignore[misc]  # without annotations
    """Hands out files, and some of them together: the worker that gets these ends after them."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _PROVIDERS if file.startswith(PROVIDERS_FILES) else file

    def _reschedule(self, node: WorkerController) -> None:
        if _PROVIDERS not in self.assigned_work[node] or len(self.nodes) == 1:
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()


class ControllerFiles:
    """The plugin of the process that hands out the files, which it takes for tests: corrects its count of them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._all = 0  # files, until the workers have collected them
        self._begun: set[str] = set()
        self._tests = 0  # that have been run

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> _Scheduling:
        return _Scheduling(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._all = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Estimates the number of all tests, so that the progress shown is that of the files."""
        self._begun.add(nodeid.split("::")[0])
        self._tests += 1
        self._session.testscollected = self._tests * self._all // len(self._begun)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        outcome = yield
        self._session.testscollected = self._tests  # no test at all is an error
        return outcome


def register(session: pytest.Session) -> None:
    """Makes files the units of work where the variable asks for it, unless tests are named or run in this process."""
    config = session.config
    if VARIABLE not in os.environ or any("::" in argument for argument in config.args):
        return
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(WorkerFiles())
    elif config.getoption("dist", "no") != "no":
        # Parses -k and -m here, where an error is one of usage: in a worker it would end xdist in an INTERNALERROR.
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=[])
        config.pluginmanager.register(ControllerFiles(session))
