"""Serves the counts of the bus at ``/metrics``, and drops those of tools that left the catalog."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from toolbus.bus.core import Core, Room
from toolbus.bus.metrics.call_counts import CallCounts, Snapshot, outcome_of
from toolbus.bus.operators.admin_tools import ATTACHED, STATES, handlers_of, state_of
from toolbus.bus.web_paths import Message, Receive, Send, respond
from toolbus.common.version import VERSION
from toolbus.parts.observability.exposition import (
    BOUNDS,
    Durations,
    Exemplar,
    Family,
    Kind,
    Sample,
    content_type_for,
    write,
)
from toolbus.parts.observability.traces_room import TracesRoom

MAX_SOURCES = 1_000  # with series of their own; the rest is `other`
MAX_KEYS = 1_000  # identities whose keys are shown
MAX_CALLS = 20_000  # in flight, whose sources are looked up; the rest is `other`
OTHER = "other"

_NO_LABELS: Mapping[str, str] = {}


@runtime_checkable
class Counting(Protocol):
    """Has counters of its own."""

    def counters(self) -> Iterable[tuple[str, str, list[tuple[dict[str, str], int]]]]:
        """Yields the name of each, its help, and its numbers by labels."""


class BusMetrics:
    """The metrics of one bus.

    Args:
        dropped_spans: returns how many spans were not exported.
    """

    def __init__(self, core: Core, dropped_spans: Callable[[], int]) -> None:
        self._core = core
        self._dropped_spans = dropped_spans

    def families(self) -> list[Family]:
        """Returns all metrics as they are now."""
        own = (*self._calls(), *self._catalog(), *self._streams(), *self._loop(), *self._identities())
        return [*own, *self._of_rooms(), *_process()]

    def _of_rooms(self) -> Iterator[Family]:
        for room in self._core.rooms.providers(Counting):
            for name, text, numbers in room.counters():
                yield Family(name, "counter", text, [Sample(number, labels) for labels, number in numbers])

    # -- calls -------------------------------------------------------------------------------------------------------

    def _calls(self) -> Iterator[Family]:
        core, metrics = self._core, self._core.calls.metrics
        tools = metrics.with_series()
        shown: list[tuple[CallCounts, Snapshot]] = [(counts, counts.series) for counts in tools]
        shown += ((counts, counts) for counts in (metrics.others, metrics.unknown) if counts.calls)
        ended, durations = [], []
        for counts, values in shown:
            labels = {"source": counts.source, "tool": counts.name}
            ended += [Sample(number, labels | {"outcome": name}) for name, number in values.outcomes.items()]
            cumulative = values.cumulative(BOUNDS)
            if cumulative[-1]:
                examples = self._exemplars(counts)
                durations.append(Durations(labels, cumulative[:-1], cumulative[-1], values.seconds, examples))
        yield _counter("toolbus_calls", "Calls that ended, by tool and by how they ended.", ended)
        text = "How long callers waited for calls that were sent; sampled where many end in one message."
        yield Family("toolbus_call_duration_seconds", "histogram", text, durations)
        in_flight, stuck = core.calls.dispatcher.in_flight.count_by_source(MAX_CALLS)
        if rest := core.calls.dispatcher.in_flight.active - in_flight.total():
            in_flight[OTHER] += rest
        yield _gauge("toolbus_calls_in_flight", "Calls whose callers wait, by the tool's source.", _top(in_flight))
        text = "Calls that ended for their callers and that their handlers have not confirmed, by source."
        yield _gauge("toolbus_calls_stuck", text, _top(stuck))
        late = core.calls.records.late
        yield _counter("toolbus_late_results", "Results that came after their calls had ended.", late)
        refused = {outcome_of(code): number for code, number in sorted(metrics.refused.items())}
        yield _counter("toolbus_refused", "Calls that were not sent, by the code of the error.", _by("why", refused))

    def _exemplars(self, counts: CallCounts) -> dict[int, Exemplar] | None:
        if not counts.exemplars:
            return None
        began = self._core.calls.records.began
        exemplars: dict[int, Exemplar] = {}
        for trace_id, seconds, ended in sorted(counts.exemplars.values(), key=lambda each: each[2]):
            index = next((index for index, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))
            exemplars[index] = Exemplar(trace_id, round(seconds, 6), round(began + ended, 3))
        return exemplars

    # -- catalog and streams -----------------------------------------------------------------------------------------

    def _catalog(self) -> Iterator[Family]:
        core = self._core
        registry, presence = core.catalog.registry, core.sessions.presence
        states = Counter(dict.fromkeys(STATES, 0))
        states.update(map(state_of, presence.sessions.values()))
        yield _gauge("toolbus_sessions", "Sessions of peers, by state.", _by("state", states))
        if (age := core.program.store.age) is not None:
            text = "Since when changes of settings by other buses may be missing here."
            yield _gauge("toolbus_settings_age_seconds", text, round(age, 3))
        counts = registry.count_states()
        yield _gauge("toolbus_tools", "Tools in all roles, by state.", _by("state", counts))
        names = dict.fromkeys((*registry.sources(), *presence.lost))
        shown = itertools.islice(names, MAX_SOURCES)
        up = {name: float(state_of(*handlers_of(core, name)) == ATTACHED) for name in shown}
        yield _gauge("toolbus_source_up", "1 where the tools of a source can be called, else 0.", _by("source", up))

    def _streams(self) -> Iterator[Family]:
        core = self._core
        traffic, sessions = core.sessions.presence.traffic, core.sessions.presence.sessions
        frames = {"in": traffic.frames_in, "out": traffic.frames_out}
        yield _counter("toolbus_frames", "Messages on streams.", _by("direction", frames))
        items = {"in": traffic.items_in, "out": traffic.items_out}
        yield _counter("toolbus_frame_items", "Calls and results in the messages of streams.", _by("direction", items))
        held = core.calls.dispatcher.in_flight.held
        yield _gauge("toolbus_held_bytes", "Bytes of arguments of calls in flight.", held)
        pool = next((peer.outbox.pool for peer in sessions.values()), None)
        yield _gauge("toolbus_waiting_bytes", "Bytes that peers have not read yet.", pool.bytes if pool else 0)
        yield _gauge("toolbus_watchers", "Who follows changes of the catalog over HTTP.", core.signals.watching)

    # -- the bus itself ----------------------------------------------------------------------------------------------

    def _loop(self) -> Iterator[Family]:
        core = self._core
        yield Family("toolbus_build", "info", "The version of toolbus.", [Sample(1, {"version": VERSION})])
        yield _gauge("toolbus_loop_lag_seconds", "How late the bus's clock ticked last.", core.program.stalls.lag)
        text = "Time of the sweeps that end calls whose deadlines have passed."
        sweeps = core.calls.metrics.sweeps
        durations = [Durations(_NO_LABELS, (), sweeps.count, sweeps.seconds)]
        yield Family("toolbus_sweep_seconds", "summary", text, durations)
        newest = (core.audit.head or (0,))[0]
        yield _counter("toolbus_audit_lines", "The number of the newest line of the audit.", newest)
        yield _counter("toolbus_audit_lost", "Lines of the audit that were not written.", core.audit.lost)
        yield _counter("toolbus_spans_dropped", "Spans that no collector got.", self._dropped_spans())

    def _identities(self) -> Iterator[Family]:
        core = self._core
        calls, limited = core.calls.metrics.identity_calls, core.calls.metrics.identity_limited
        yield _counter("toolbus_identity_calls", "Calls that were sent for an identity.", _top(calls, "identity"))
        text = "Calls of an identity that its quota refused."
        yield _counter("toolbus_identity_limited", text, _top(limited, "identity"))
        if core.sessions.keyring is None:
            return
        now = time.time()
        left: dict[str, float] = {}  # of the key that lasts longest
        for key in core.sessions.keyring.keys.values():
            if not key.revoked:
                left[key.identity] = max(left.get(key.identity, 0.0), key.expires - now)
        finite = {name: round(max(0.0, seconds), 1) for name, seconds in left.items() if seconds < float("inf")}
        text = "Seconds until the last key of an identity expires; identities whose key never does are left out."
        shown = dict(itertools.islice(finite.items(), MAX_KEYS))
        yield _gauge("toolbus_key_expires_seconds", text, _by("identity", shown))


def _by(label: str, values: Mapping[str, float]) -> list[Sample]:
    return [Sample(value, {label: name}) for name, value in values.items()]


def _top(counts: Counter[str], label: str = "source") -> list[Sample]:
    most = counts.most_common(MAX_SOURCES)
    rest = counts.total() - sum(number for _, number in most)
    return _by(label, dict(most) | ({OTHER: rest} if rest else {}))


def _gauge(name: str, text: str, values: float | list[Sample], kind: Kind = "gauge") -> Family:
    return Family(name, kind, text, values if isinstance(values, list) else [Sample(values, _NO_LABELS)])


def _counter(name: str, text: str, values: float | list[Sample]) -> Family:
    return _gauge(name, text, values, "counter")


def _process() -> Iterator[Family]:
    """Yields the metrics of the process, under the names of Prometheus' clients."""
    times = os.times()
    cpu = round(times.user + times.system, 2)
    yield _counter("process_cpu_seconds", "Processor time of the bus, of users and of the system.", cpu)
    try:
        fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text("ascii").splitlines() if line.startswith("btime"))
        open_fds = len(os.listdir("/proc/self/fd"))
    except (OSError, StopIteration):
        return  # not Linux
    started = float(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    yield _gauge("process_start_time_seconds", "When the bus's process began, in seconds since the epoch.", started)
    yield _gauge("process_virtual_memory_bytes", "Virtual memory of the bus.", int(fields[20]))
    resident, max_fds = int(fields[21]) * resource.getpagesize(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield _gauge("process_resident_memory_bytes", "Resident memory of the bus.", resident)
    yield _gauge("process_open_fds", "Open file descriptors of the bus.", open_fds)
    yield _gauge("process_max_fds", "How many file descriptors the bus may open.", max_fds)


PATH = "/metrics"
FORGET_SECONDS = 5.0  # between two checks of some of the counted tools


class MetricsRoom(Room):
    """The metrics of one bus, unless the configuration turns them off."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._metrics = BusMetrics(core, self._dropped_spans)

    async def open(self) -> None:
        config = self.core.config
        if config.metrics and (config.http != "off" or config.https is not None):
            self.core.rooms.web.add(PATH, self._serve)

    async def start(self) -> None:
        """Begins to drop tools that left the catalog."""
        if self.core.config.metrics:
            self.repeat(FORGET_SECONDS, self._forget, "looked for tools that left the catalog")

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics and their content type.

        Args:
            accept: the header of that name; "" without one.
        """
        content_type = content_type_for(accept)
        return write(self._metrics.families(), content_type), content_type

    def _dropped_spans(self) -> int:
        traces = self.core.rooms.find(TracesRoom)
        return traces.dropped if traces is not None else 0

    def _forget(self) -> None:
        self.core.calls.metrics.forget(time.monotonic(), self.core.catalog.registry.has)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        common = [(b"cache-control", b"no-store"), (b"vary", b"Accept")]
        headers = [(b"content-type", b"text/plain; charset=utf-8"), *common]
        if scope["path"] != PATH:
            text = f"there is nothing at this path: metrics are at {PATH}\n"
            await respond(scope, send, 404, text.encode(), headers)
        elif scope["method"] not in ("GET", "HEAD"):
            text = f"{PATH} is read with GET\n"
            await respond(scope, send, 405, text.encode(), [*headers, (b"allow", b"GET, HEAD")])
        else:
            accept = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
            body, content_type = self.exposition(accept)
            await respond(scope, send, 200, body, [(b"content-type", content_type.encode("latin-1")), *common])
