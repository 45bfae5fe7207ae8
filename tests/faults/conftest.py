"""A running bus, raw peers round it, a bystander who must not notice anything, and a watch for what is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.protocol.limits import Limits, Timings
from toolbus.testing import PATIENT
from toolbus.v1 import tool_pb2 as pb

BYSTANDER_SECONDS = 3.0  # the longest a bystander may wait for one answer, but for a processor
MAX_PAUSE = 0.05  # seconds between its calls, where a test mostly waits
# grpc has one queue a process, which may still have a word for the loop of a test that has ended.
LATE_WORDS = ("PollerCompletionQueue._handle_events", "Event loop is closed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: waits for the true intervals of the heartbeat")


class _Complaints(logging.Handler):
    """Keeps what asyncio, grpc and the bus log as errors: lost tasks, unread exceptions, faults of the bus."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({record.exc_info[1]!r})"
        if not all(word in text for word in LATE_WORDS):
            self.texts.append(f"{record.name}: {text}")


_LOGGERS = ("asyncio", "grpc", "toolbus")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Spares the collections after each test of a file the objects of the tests before it.

    Garbage that is frozen is never freed, so all of it is collected first.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Listens from before the loop opens until after it has closed."""
    complaints = _Complaints()
    item.stash[_COMPLAINTS] = complaints
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(complaints)
    try:
        return (yield)
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(complaints)


_COMPLAINTS = pytest.StashKey[_Complaints]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    outcome = yield
    gc.collect()  # a task that nobody holds complains when it is collected
    complaints = item.stash[_COMPLAINTS].texts
    if complaints:
        pytest.fail("left behind: " + "; ".join(complaints), pytrace=False)
    return outcome


@pytest.fixture
def complaints(request: pytest.FixtureRequest) -> list[str]:
    """What was logged as an error so far; a test that expects some takes them away."""
    texts: list[str] = request.node.stash[_COMPLAINTS].texts
    return texts


@pytest.fixture
def limits() -> Limits:
    """What the bus accepts; a test may give it other limits by parametrizing this."""
    return Limits()


@pytest.fixture
def grace_seconds() -> float:
    """How long offline tools stay."""
    return 0.3


@pytest.fixture
def timings() -> Timings:
    """The lengths of time of the bus that are not configuration; peers stand still with it: see `PATIENT`."""
    return PATIENT


@pytest.fixture
async def bus(limits: Limits, grace_seconds: float, timings: Timings) -> AsyncIterator[Bus]:
    """A bus of this process, whose end leaves no task behind."""
    before = asyncio.all_tasks()
    config = Config(grpc=("127.0.0.1:0",), http="off", limits=limits, grace_seconds=grace_seconds)
    async with Bus(config, timings=timings) as bus:
        bus.dispatcher.admission.settled_at = 0.0  # a bus that has just started calls unknown names UNAVAILABLE
        yield bus

    def left() -> set[asyncio.Task[object]]:
        return {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()}

    await until(lambda: not left(), "the bus's tasks to end")


@pytest.fixture
def address(bus: Bus) -> str:
    """Where the bus listens."""
    return bus.grpc_addresses[0]


Connect = Callable[..., Awaitable[RawPeer]]


async def stats(bus: Bus) -> dict[str, Any]:
    """What the bus has counted, as its own tool tells it."""
    result = await bus.call("toolbus:stats")
    counted: dict[str, Any] = result.unwrap()
    return counted


async def until_sessions(bus: Bus, number: int) -> None:
    """Waits until the bus has so many sessions."""
    async with asyncio.timeout(WAIT_SECONDS * 2):
        while (await stats(bus))["sessions"] != number:
            await asyncio.sleep(0.005)


@pytest.fixture
async def connect(address: str) -> AsyncIterator[Connect]:
    """Attaches raw peers; they are dropped when the test ends."""
    peers: list[RawPeer] = []

    async def connect(source: str, *tools: pb.Tool, **fields: object) -> RawPeer:
        ways = {key: fields.pop(key) for key in ("answer", "echoes", "reads") if key in fields}
        peer = RawPeer(address, **ways)  # type: ignore[arg-type]
        peers.append(peer)
        await peer.attach(source, *tools, **fields)
        return peer

    yield connect
    for peer in peers:
        await peer.close()


@pytest.fixture
async def stranger(address: str) -> AsyncIterator[RawPeer]:
    """A peer that has not opened its stream yet."""
    async with RawPeer(address) as peer:
        yield peer


def _seconds() -> float:
    """Returns a clock that stands still while this thread could run and others have the processors (on Linux)."""
    turns = Path("/proc/thread-self/schedstat")
    waited = int(turns.read_text().split()[1]) / 1e9 if turns.exists() else 0.0
    return time.monotonic() - waited


@pytest.fixture
async def bystander(connect: Connect) -> AsyncIterator[None]:
    """A host that keeps calling a plugin; every call must be answered, soon and well, whatever others do meanwhile."""
    await connect("bystander-plugin", tool("steady"), answer=echo)
    host = await connect("bystander-host")
    waits: list[float] = []

    async def keep_calling() -> None:
        while True:
            started = _seconds()
            result = await host.call("steady", {"n": len(waits)})
            waits.append(_seconds() - started)
            assert result.output_json == f'{{"n": {len(waits) - 1}}}', result
            await asyncio.sleep(min(0.005 * (1 + len(waits) // 20), MAX_PAUSE))

    calling = asyncio.create_task(keep_calling())
    await until(lambda: waits or calling.done(), "the bystander's first answer")
    yield
    answered = len(waits)
    await until(lambda: len(waits) > answered or calling.done(), "the bystander to be answered after it all")
    if calling.done():
        calling.result()
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    assert max(waits) < BYSTANDER_SECONDS, f"a bystander waited {max(waits):.2f} s"
