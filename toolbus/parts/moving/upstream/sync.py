"""Synchronizes the tools of the bus to a main server: registers them there, to be called back through our gateway.

A loop lists the tools of the main server, at every change of the catalog and every two seconds, and sends what is
missing (`sync_state`). So a server that restarts, loses registrations or starts late needs no operator (REST-53). A
refusal is shown as a warning of the tool and in the log, and is retried. The main server is not trusted: the loop
goes on after any response.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp

from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.gateway.callback import accepts_connections
from toolbus.bus.outbound import open_session
from toolbus.common.text import list_names
from toolbus.parts.moving.upstream.ownership import Ownership, StoredOwnership
from toolbus.parts.moving.upstream.plan import CALLBACK_PATH, UpstreamPlan, make_plan
from toolbus.parts.moving.upstream.sync_state import (
    DEFAULT_TIMINGS,
    ClearStep,
    RegisterStep,
    Step,
    SyncState,
    UnregisterStep,
    UpstreamTimings,
)
from toolbus.parts.moving.upstream.upstream_responses import (
    ChangeResponse,
    UpstreamError,
    UpstreamListing,
    clean,
    read_change_response,
    read_listing,
)
from toolbus.protocol.limits import MIB

MAX_RESPONSE_BYTES = 8 * MIB  # 20,000 listed tools with long descriptions
CONNECTIONS = 8


class UpstreamClient:
    """The HTTP client of one main server. Belongs to the loop that it was made on.

    Args:
        timeout: seconds for a whole exchange.
        max_response_bytes: a longer response is cut off, and its request has failed.
    """

    def __init__(self, url: str, timeout: float, max_response_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._max_response_bytes = max_response_bytes
        self._session = open_session(connections=CONNECTIONS, seconds=timeout)

    async def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Sends one request.

        Returns:
            Status and body.

        Raises:
            UpstreamError: no response, or none within the limits.
        """
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(
                method, f"{self._url}{path}", data=body, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await self._read(response)
        except TimeoutError:
            raise UpstreamError(f"{method} {path} was not answered within {self._timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(f"no connection: {clean(error.os_error.strerror or error.os_error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UpstreamError(f"the connection broke during {method} {path}: {clean(text)}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, limit = bytearray(), self._max_response_bytes
        async for chunk in response.content.iter_any():
            chunks += chunk
            if len(chunks) > limit:
                response.close()
                raise UpstreamError(f"a response has more than {limit} bytes")
        return bytes(chunks)

    async def close(self) -> None:
        await self._session.close()


log = logging.getLogger("toolbus.upstream")

MAX_PASSES = 2  # of listing and steps in one round; the second one confirms the steps of the first
MAX_FAILURES_IN_A_ROW = 3  # requests without a response, before the server is listed again
TOPIC = "upstream"  # of the warnings that are set on tools


class Upstream:
    """Offers the tools of a registry to one main server.

    Args:
        url: ``http://HOST:PORT`` of the main server, on loopback.
        view: of the registry: tools that need a user are not offered, since a main server names no user.
        callback_base: ``http://127.0.0.1:PORT`` of our own gateway.
        bus_id: sent with every registration, so that buses detect tools that came from a bus.
        changed: yields any value at once and after every change of the catalog.
        on_warning: called after warnings of tools have changed.
        on_roles: called with the roles of the main server whenever it has listed them.
        ownership_file: persists our registrations there; None: they are not persisted.
        max_response_bytes: a longer response of the main server is cut off, and its request has failed.
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
        on_roles: Callable[[Sequence[str]], object] = lambda roles: None,
        ownership_file: StoredOwnership | None = None,
        timings: UpstreamTimings = DEFAULT_TIMINGS,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._url = url
        self._registry = registry
        self._view = view
        self._callback_base = callback_base
        self._bus_id = bus_id
        self._changed = changed
        self._on_warning = on_warning
        self._on_roles = on_roles
        self._timings = timings
        self._max_response_bytes = max_response_bytes
        self._file = ownership_file
        self._ownership = Ownership(ownership_file.earlier if ownership_file is not None else None)
        self._saving: asyncio.Future[None] | None = None  # the current or last write; None before the first
        self._sync_state = SyncState(self._ownership, timings=timings)
        self._unknown: list[str] = []  # tools with a callback URL of ours that were logged as not registered by us
        self._planned_revision = -1  # of the catalog that the plan shows
        self._warnings: dict[Entry, str] = {}  # that are set on tools now
        self._client: UpstreamClient | None = None  # None until started, and after the stop
        self._tasks: list[asyncio.Task[None]] = []  # the loop first; empty until started
        self._wake = asyncio.Event()  # something changed
        self._stopping = asyncio.Event()  # no further request is sent
        self._connected = False  # whether the last round succeeded
        self._lost_at = 0.0  # when the outage began, by the monotonic clock; 0: no outage
        self._state = "not started"

    def __repr__(self) -> str:
        state = self._sync_state
        return (
            f"<Upstream {self._url} {self._state}: planned={len(state.plan.tools)} "
            f"registered={state.registered} warnings={len(self._warnings)}>"
        )

    @property
    def state(self) -> str:
        """The state of the connection, as a text for operators."""
        return self._state

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts to offer the tools. Never waits for the main server."""
        self._state = "connecting"
        settled_at = time.monotonic() + self._registry.grace_seconds
        self._sync_state = SyncState(self._ownership, settled_at, self._timings)
        self._client = UpstreamClient(self._url, self._timings.request_seconds, self._max_response_bytes)
        self._tasks = [
            asyncio.create_task(self._synchronize(), name="toolbus upstream"),
            asyncio.create_task(self._follow_changes(), name="toolbus upstream changes"),
        ]

    async def stop(self, timeout: float = 2.0) -> None:
        """Withdraws our tools at the main server, and no others, and ends.

        Args:
            timeout: seconds, in all, for a server that responds slowly.
        """
        client, self._client = self._client, None
        if client is None:
            return
        deadline = asyncio.get_running_loop().time() + timeout
        self._stopping.set()
        self._wake.set()
        try:
            # A request in flight may finish: cancelled, it could still arrive at the server after the others.
            _, cut = await asyncio.wait(self._tasks[:1], timeout=timeout / 2)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            async with asyncio.timeout_at(deadline):
                if self._ownership.registrations and await self._withdraw_all(client) and not cut:
                    self._ownership.clear()
        except TimeoutError:
            log.info("upstream %s did not respond in %g s: it may still list tools of this bus", self._url, timeout)
        finally:
            self._state = "stopped"
            await client.close()
            await self._save()

    async def _withdraw_all(self, client: UpstreamClient) -> bool:
        """Withdraws our tools that the main server lists. Returns whether all were withdrawn."""
        try:
            listing = read_listing(*await client.send("GET", "/api/tools"))
        except UpstreamError as error:
            log.info("upstream %s may still list tools of this bus: %s", self._url, error)
            return False
        return all(await asyncio.gather(*(_withdraw(client, step) for step in self._sync_state.closing(listing))))

    async def _save(self) -> None:
        """Persists our registrations, if they have changed."""
        if self._saving is not None:
            await asyncio.shield(self._saving)
        if self._file is not None and self._ownership.take_changes():
            saving = asyncio.to_thread(self._file.save, self._ownership.registrations)
            self._saving = asyncio.ensure_future(saving)
            await asyncio.shield(self._saving)

    async def _follow_changes(self) -> None:
        while True:
            try:
                async for _ in self._changed():
                    self._wake.set()
            except Exception:
                log.exception("a fault of the bus in the watch of the catalog for its upstream")
            await asyncio.sleep(self._timings.poll_seconds)

    async def _synchronize(self) -> None:
        assert self._client is not None  # until `stop`, which ends this task
        client, failures = self._client, 0
        await self._ownership.check_earlier(self._callback_base, lambda at: accepts_connections(at, lambda uid: True))
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                await self._round(client)
            except UpstreamError as error:
                self._note_outage(str(error))
                # Not cut short by changes: an unreachable server gets no more requests because plugins connect.
                pause = self._timings.first_backoff_seconds * 2.0 ** min(failures, 10)
                pause = min(self._timings.max_backoff_seconds, pause) * random.uniform(0.5, 1.0)
                await _within(self._stopping, pause)
                failures += 1
                continue
            except Exception:
                log.exception("a fault of the bus in the loop of its upstream")
                await _within(self._stopping, self._timings.poll_seconds)
                continue
            failures = 0
            self._note_connected()
            if await _within(self._wake, self._timings.poll_seconds):
                await _within(self._stopping, self._timings.debounce_seconds)

    def _note_outage(self, reason: str) -> None:
        self._connected = False
        if not self._lost_at:
            self._lost_at = time.monotonic()
            self._sync_state.retry_all()
            log.warning("upstream %s unreachable: %s; the bus retries until it responds", self._url, reason)
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - self._lost_at)))
        self._state = f"unreachable since {since}: {reason}"

    def _note_connected(self) -> None:
        if self._connected:
            return
        count = self._sync_state.registered
        if self._lost_at:
            outage = time.monotonic() - self._lost_at
            log.info("upstream %s is back after %.1f s, tools=%d", self._url, outage, count)
        else:
            log.info("upstream %s connected, tools=%d", self._url, count)
        self._connected, self._lost_at, self._state = True, 0.0, "connected"

    # -- one round -----------------------------------------------------------------------------------------------

    async def _round(self, client: UpstreamClient) -> None:
        """Lists the tools of the main server and sends what is missing.

        Raises:
            UpstreamError: it is unreachable.
        """
        self._sync_state.plan = self._plan()
        listing = read_listing(*await client.send("GET", "/api/tools"))
        self._on_roles(listing.roles)  # what changes with them follows in the next round, at once
        steps = self._sync_state.decide(listing, time.monotonic())
        for _ in range(MAX_PASSES):
            if not steps or self._stopping.is_set():
                break
            failed = await self._send_steps(client, steps, listing)
            before, listing = listing, read_listing(*await client.send("GET", "/api/tools"))
            for step, error in failed:  # noted only now: an unreachable server has refused nothing
                self._sync_state.note_refused(step, before, error, time.monotonic(), no_response=True)
            steps = self._sync_state.decide(listing, time.monotonic())
        await self._save()
        self._warn()
        self._log_unknown(listing)

    def _plan(self) -> UpstreamPlan:
        view = self._view
        if self._planned_revision == view.revision:
            return self._sync_state.plan
        revision = view.revision
        # Role by role: a listing of all roles joins what a source declared for several roles under one of them.
        listings = [
            listing for role in self._registry.roles or (None,) for listing in view.listings(role, include_offline=True)
        ]
        listings.sort(key=lambda listing: listing.entry.place)
        plan = make_plan(listings, self._callback_base, self._url)
        self._planned_revision = revision
        return plan

    async def _send_steps(
        self, client: UpstreamClient, steps: Sequence[Step], listing: UpstreamListing
    ) -> list[tuple[RegisterStep, str]]:
        """Sends the steps one by one, so that the order there is ours. Returns registrations without a response."""
        failed: list[tuple[RegisterStep, str]] = []
        in_a_row = 0
        self._sync_state.note_sending(steps, time.monotonic())
        await self._save()  # first: without a response, or after a kill, a tool may be registered nevertheless
        for step in steps:
            if self._stopping.is_set():
                break
            try:
                if isinstance(step, RegisterStep):
                    await self._register(client, step, listing)
                else:
                    await self._unregister(client, step)
                in_a_row = 0
            except UpstreamError as error:
                in_a_row += 1
                if isinstance(step, RegisterStep):
                    failed.append((step, str(error)))
                if in_a_row >= MAX_FAILURES_IN_A_ROW:
                    break  # the next listing tells whether the server is down; if not, the other steps follow then
        return failed

    async def _register(self, client: UpstreamClient, step: RegisterStep, listing: UpstreamListing) -> None:
        planned = step.planned
        response = await _change(client, "register", planned.body(step.role, self._bus_id))
        if response.ok:
            self._sync_state.note_accepted(step, listing, response.failed, response.problem, time.monotonic())
        else:
            self._sync_state.note_refused(step, listing, response.problem, time.monotonic())

    async def _unregister(self, client: UpstreamClient, step: UnregisterStep) -> None:
        first = self._sync_state.note_unregister(step, time.monotonic())
        response = await _change(client, "unregister", _unregister_body(step))
        if response.problem and first:
            log.warning("upstream %s does not unregister tool=%r: %s", self._url, step.name, response.problem)

    def _warn(self) -> None:
        """Sets the warnings of tools, and logs each once for each tool and reason."""
        state = self._sync_state
        warnings = {entry: f"not offered upstream: {reason}" for entry, reason in state.plan.refused.items()}
        for key, problem in state.problems.items():
            warnings |= dict.fromkeys(state.plan.tools[key].entries, f"upstream {self._url}: {problem}")
        logged: set[tuple[str, str]] = set()  # one line for all roles
        changed = False
        for entry in {**self._warnings, **warnings}:
            text = warnings.get(entry, "")
            if entry.warnings.get(TOPIC, "") == text or entry.table.entries.get(entry.name) is not entry:
                continue
            changed = True
            self._registry.warn(entry, TOPIC, text)
            if text and (entry.name, text) not in logged:
                logged.add((entry.name, text))
                log.warning("upstream tool=%r source=%r: %s", entry.name, entry.source, text)
        self._warnings = warnings
        if changed:
            self._on_warning()

    def _log_unknown(self, listing: UpstreamListing) -> None:
        """Logs once which tools lead to this bus although it has not registered them: they are left alone."""
        prefix = self._callback_base.rstrip("/") + CALLBACK_PATH
        names = self._sync_state.unknown_callbacks(listing, prefix, time.monotonic())
        if names and names != self._unknown:
            log.warning(
                "upstream %s lists tools=%s with a callback URL of this bus, which has not registered them: they are "
                "left alone; if a run without a data directory left them there, unregister them there",
                self._url, list_names(names),
            )  # fmt: skip
        self._unknown = names


async def _change(client: UpstreamClient, verb: str, body: bytes) -> ChangeResponse:
    return read_change_response(*await client.send("POST", f"/api/tools/{verb}", body))


async def _withdraw(client: UpstreamClient, step: UnregisterStep | ClearStep) -> bool:
    """Withdraws one tool, or a source as a plugin that stops should (REST-52). Returns whether it was done."""
    try:
        if isinstance(step, ClearStep):
            problem = (await _change(client, "clear", json.dumps({"source": step.source}).encode())).problem
        else:
            problem = (await _change(client, "unregister", _unregister_body(step))).problem
    except UpstreamError as error:
        problem = str(error)
    if problem:
        log.info("upstream did not withdraw %s: %s", step, problem)
    return not problem


def _unregister_body(step: UnregisterStep) -> bytes:
    return json.dumps({"name": step.name, "role": step.role}).encode()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event. Returns whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
