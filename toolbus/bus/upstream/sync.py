"""Keeps another main server in step with the bus: its tools are registered there and called back through our gateway.

A loop looks at what the other side lists, at every change of the catalog and every two seconds, and does what is
missing (`ledger`). So a server that restarts, forgets or was not up yet needs nobody's attention (REST-53). What it
refuses is shown as a warning of the tool and in the log, and tried again. The other side is a stranger: whatever it
answers, the loop goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.upstream.plan import UpstreamPlan, make_plan
from toolbus.bus.upstream.sync_state import Register, Step, SyncState, Unregister
from toolbus.bus.upstream.upstream_answers import Taken, Theirs, Trouble, read_change, read_listing
from toolbus.bus.upstream.upstream_client import Client

log = logging.getLogger("toolbus.upstream")

POLL_SECONDS = 2.0  # between two looks at a quiet server: what it forgot is back after that
DEBOUNCE_SECONDS = 0.05  # a plugin that registers one by one causes few looks
BACKOFF_SECONDS = (0.25, 5.0)  # first and longest wait before an unreachable server is asked again
LOOKS = 2  # a second look in the same round is the proof of the first one's steps
TROUBLES_IN_A_ROW = 3  # requests that broke off, before the server is looked at again
ABOUT = "upstream"  # who says our warnings


class Upstream:
    """Offers the tools of a registry to one main server.

    Args:
        url: ``http://HOST:PORT`` of the main server, on loopback.
        view: of the registry: only what a call that names no user may call is offered, since its calls name none.
        callback_base: ``http://127.0.0.1:PORT`` of our own gateway.
        bus_id: sent with every registration, so that buses see what came from a bus.
        changed: yields at once and after every change of the catalog; what it yields does not matter.
        on_warning: called after warnings of tools have changed.
    """

    def __init__(
        self,
        url: str,
        registry: Registry,
        view: CatalogView,
        *,
        callback_base: str,
        bus_id: str,
        changed: Callable[[], AsyncIterator[object]],
        on_warning: Callable[[], None],
    ) -> None:
        self._url = url
        self._registry = registry
        self._view = view
        self._callback_base = callback_base
        self._bus_id = bus_id
        self._changed = changed
        self._on_warning = on_warning
        self._sync_state = SyncState(callback_base)
        self._planned_at = -1  # the revision that the plan shows
        self._warned: dict[Entry, str] = {}  # what tools are said to have now
        self._client: Client | None = None  # None until started, and after the stop
        self._tasks: list[asyncio.Task[None]] = []  # the loop first; empty until started
        self._wake = asyncio.Event()  # something changed
        self._halt = asyncio.Event()  # nothing new is begun
        self._connected = False  # whether the last round went well
        self._lost_at = 0.0  # when the outage began, by the monotonic clock; 0: there is none
        self._state = "not started"

    def __repr__(self) -> str:
        ledger = self._sync_state
        return (
            f"<Upstream {self._url} {self._state}: wanted={len(ledger.plan.wanted)} "
            f"registered={ledger.registered} warned={len(self._warned)}>"
        )

    @property
    def state(self) -> str:
        """How it stands, for people."""
        return self._state

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts to offer. Never waits for the other side."""
        self._state = "connecting"
        self._sync_state = SyncState(self._callback_base, time.monotonic() + self._registry.grace_seconds)
        self._client = Client(self._url)
        self._tasks = [
            asyncio.create_task(self._keep_in_step(), name="toolbus upstream"),
            asyncio.create_task(self._listen(), name="toolbus upstream changes"),
        ]

    async def stop(self, patience: float = 2.0) -> None:
        """Takes everything back and ends.

        Args:
            patience: seconds, in all, for a server that answers slowly.
        """
        client, self._client = self._client, None
        if client is None:
            return
        until = asyncio.get_running_loop().time() + patience
        self._halt.set()
        self._wake.set()
        try:
            # A request on its way is let finish: cancelled, it may still arrive there after the clear.
            await asyncio.wait(self._tasks[:1], timeout=patience / 2)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            async with asyncio.timeout_at(until):
                await asyncio.gather(*(_clear(client, source) for source in sorted(self._sync_state.sources)))
        except TimeoutError:
            log.info("upstream %s did not answer in %g s: it may list tools of a bus that is gone", self._url, patience)
        finally:
            self._state = "stopped"
            await client.close()

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._changed():
                    self._wake.set()
            except Exception:
                log.exception("a fault of the bus in what tells its upstream of changes")
            await asyncio.sleep(POLL_SECONDS)

    async def _keep_in_step(self) -> None:
        assert self._client is not None  # it is there until this task is asked to end
        client, failures = self._client, 0
        while not self._halt.is_set():
            self._wake.clear()
            try:
                await self._round(client)
            except Trouble as trouble:
                self._lost(str(trouble))
                # Not cut short by changes: a server that is down is not asked more often because plugins come.
                await _within(self._halt, _backoff(failures))
                failures += 1
                continue
            except Exception:
                log.exception("a fault of the bus in its upstream's loop")
                await _within(self._halt, POLL_SECONDS)
                continue
            failures = 0
            self._found()
            if await _within(self._wake, POLL_SECONDS):
                await _within(self._halt, DEBOUNCE_SECONDS)

    def _lost(self, why: str) -> None:
        self._connected = False
        if not self._lost_at:
            self._lost_at = time.monotonic()
            self._sync_state.start_anew()
            log.warning("upstream %s unreachable: %s; it is tried again until it answers", self._url, why)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - self._lost_at)))
        self._state = f"unreachable since {since}: {why}"

    def _found(self) -> None:
        if self._connected:
            return
        count = self._sync_state.registered
        if self._lost_at:
            away = time.monotonic() - self._lost_at
            log.info("upstream %s is back after %.1f s, tools=%d", self._url, away, count)
        else:
            log.info("upstream %s connected, tools=%d", self._url, count)
        self._connected, self._lost_at, self._state = True, 0.0, "connected"

    # -- one round -----------------------------------------------------------------------------------------------

    async def _round(self, client: Client) -> None:
        """Looks at what the other side has and makes it what it should be.

        Raises:
            Trouble: it cannot be asked.
        """
        self._sync_state.plan = self._plan()
        theirs = read_listing(*await client.ask("GET", "/api/tools"))
        steps = self._sync_state.decide(theirs, time.monotonic())
        for _ in range(LOOKS):
            if not steps or self._halt.is_set():
                break
            broken = await self._take(client, steps, theirs)
            before, theirs = theirs, read_listing(*await client.ask("GET", "/api/tools"))
            for step, why in broken:  # noted only now: a server that is down has refused nothing
                self._sync_state.refused(step, before, why, time.monotonic(), broke_off=True)
            steps = self._sync_state.decide(theirs, time.monotonic())
        self._show()

    def _plan(self) -> UpstreamPlan:
        view = self._view
        if self._planned_at == view.revision:
            return self._sync_state.plan
        revision = view.revision
        # Role by role: a listing of all roles joins what a source declared for several roles under one of them.
        listings = [
            listing for role in self._registry.roles or (None,) for listing in view.listings(role, include_offline=True)
        ]
        listings.sort(key=lambda listing: listing.entry.place)
        plan = make_plan(listings, self._callback_base, self._url)
        self._planned_at = revision
        return plan

    async def _take(self, client: Client, steps: Sequence[Step], theirs: Theirs) -> list[tuple[Register, str]]:
        """Takes steps one after another, so that places there follow ours. Returns registrations that broke off."""
        broken: list[tuple[Register, str]] = []
        in_a_row = 0
        for step in steps:
            if self._halt.is_set():
                break
            try:
                if isinstance(step, Register):
                    await self._register(client, step, theirs)
                else:
                    await self._unregister(client, step)
                in_a_row = 0
            except Trouble as trouble:
                in_a_row += 1
                if isinstance(step, Register):
                    broken.append((step, str(trouble)))
                if in_a_row >= TROUBLES_IN_A_ROW:
                    break  # the next look tells whether the server is down; if not, the others have their turn then
        return broken

    async def _register(self, client: Client, step: Register, theirs: Theirs) -> None:
        wanted = step.wanted
        self._sync_state.sources.add(wanted.source)  # before: without an answer, it may be there all the same
        taken = await _change(client, "register", wanted.body(step.role, self._bus_id))
        if taken.ok:
            self._sync_state.took(step, theirs, taken.failed, taken.problem, time.monotonic())
        else:
            self._sync_state.refused(step, theirs, taken.problem, time.monotonic())

    async def _unregister(self, client: Client, step: Unregister) -> None:
        first = self._sync_state.asked_to_withdraw(step, time.monotonic())
        taken = await _change(client, "unregister", json.dumps({"name": step.name, "role": step.role}).encode())
        if taken.problem and first:
            log.warning("upstream %s does not unregister tool=%r: %s", self._url, step.name, taken.problem)

    def _show(self) -> None:
        """Tells operators what is wrong, once for each tool and reason."""
        ledger = self._sync_state
        said = {entry: f"not offered upstream: {why}" for entry, why in ledger.plan.refused.items()}
        for key, problem in ledger.problems.items():
            said |= dict.fromkeys(ledger.plan.wanted[key].entries, f"upstream {self._url}: {problem}")
        logged: set[tuple[str, str]] = set()  # of several roles one line
        changed = False
        for entry in {**self._warned, **said}:
            text = said.get(entry, "")
            if entry.warnings.get(ABOUT, "") == text or entry.table.entries.get(entry.name) is not entry:
                continue
            changed = True
            self._registry.warn(entry, ABOUT, text)
            if text and (entry.name, text) not in logged:
                logged.add((entry.name, text))
                log.warning("upstream tool=%r source=%r: %s", entry.name, entry.source, text)
        self._warned = said
        if changed:
            self._on_warning()


async def _change(client: Client, verb: str, body: bytes) -> Taken:
    return read_change(*await client.ask("POST", f"/api/tools/{verb}", body))


async def _clear(client: Client, source: str) -> None:
    """Clears one source, as a plugin that stops should (REST-52)."""
    try:
        taken = await _change(client, "clear", json.dumps({"source": source}).encode())
        problem = taken.problem
    except Trouble as trouble:
        problem = str(trouble)
    if problem:
        log.info("upstream did not clear source=%r: %s", source, problem)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event. Returns whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _backoff(failures: int) -> float:
    first, longest = BACKOFF_SECONDS
    return min(longest, first * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)
