"""Records what was done on the bus and by whom, where the bus has an audit.

A part of the bus reports what happened and knows no files: without an audit every method does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from toolbus.bus.access.identity import OBSERVER, Principal
from toolbus.bus.access.quota import Quota
from toolbus.common.newest import NewestCache
from toolbus.errors import NotAudited, ToolBusError

Act = Literal[
    "start",
    "stop",
    "attach",
    "refuse",
    "end",
    "register",
    "withdraw",
    "denied",
    "rate",
    "drain",
    "call.cancel",
    "calls.record",
    "confirm",
    "permit",
    "grant",
    "revoke",
    "role",
    "identities",
    "key.renew",
    "key.revoke",
    "change",
    "approve",
    "mount.restart",
    "plugin.restart",
    "plugin.stop",
    "login",
    "log.level",
]
Outcome = Literal["ok", "begun", "failed", "refused"]

# Acts that any client can cause as often as it likes; those beyond the burst are counted, not written.
REFUSALS: frozenset[Act] = frozenset({"refuse", "denied", "rate"})
REFUSALS_PER_SECOND = 10
REFUSALS_BURST = 200
# Acts that a source does as often as it likes, each with a line; beyond a budget for each source they are counted only.
OWN_ACTS: frozenset[Act] = frozenset({"attach", "end", "register", "withdraw"})
OWN_ACTS_PER_SECOND = 10
OWN_ACTS_BURST = 2_000
MAX_BUDGETS = 10_000  # sources

BUS = Principal("toolbus")


@dataclass(slots=True, eq=False)
class AuditRecord:
    """One line to be written.

    Attributes:
        time: seconds since the epoch.
        fields: those of the line besides its place in the chain; texts are cut when it is written.
        urgent: whether it must be on disk at once.
        calls: with the act `calls`: records as the bus has them, and the offset of their times to the epoch.
        written: set when it is on disk, or cannot be; None: no act waits for it.
        error: why it could not be written.
    """

    time: float
    fields: Mapping[str, Any]
    urgent: bool = False
    calls: tuple[Sequence[tuple[Any, ...]], float] | None = None
    written: threading.Event | None = None
    error: str = field(default="", init=False)


class Writer(Protocol):
    """Writes lines, in order, on a thread of its own."""

    @property
    def head(self) -> tuple[int, str]:
        """The number and the hash of the newest line."""

    @property
    def lost(self) -> int:
        """How many lines could not be written."""

    @property
    def failing(self) -> bool:
        """Whether the last line could not be written."""

    def put(self, entry: AuditRecord) -> None:
        """Writes a line soon."""

    def put_now(self, entry: AuditRecord) -> None:
        """Writes a line, and waits until it is on disk.

        Raises:
            NotAudited: it could not be written.
        """

    def lose(self, lines: int, calls: int = 0) -> None:
        """Counts lines that are not written."""


class Audit:
    """The audit of one bus; `record` may be called from any thread, all else on the bus's loop."""

    def __init__(self) -> None:
        self._writer: Writer | None = None  # None: nothing is written
        self._required = False
        self._refusals = Quota(REFUSALS_PER_SECOND, burst_seconds=REFUSALS_BURST / REFUSALS_PER_SECOND)
        self._own_acts: NewestCache[str, Quota] = NewestCache(MAX_BUDGETS)  # by source
        self._lock = threading.Lock()  # of these

    def __repr__(self) -> str:
        return f"<Audit {self._writer or 'off'}>"

    def open(self, writer: Writer, *, required: bool) -> None:
        """Writes from now on.

        Args:
            required: whether a change is refused that cannot be recorded.
        """
        self._writer, self._required = writer, required

    def close(self) -> None:
        """Stops writing."""
        self._writer = None

    @property
    def head(self) -> tuple[int, str] | None:
        """The number and the hash of the newest line; None where nothing is written."""
        return self._writer.head if self._writer is not None else None

    @property
    def lost(self) -> int:
        """How many lines could not be written."""
        return self._writer.lost if self._writer is not None else 0

    def record(
        self,
        act: Act,
        principal: Principal = BUS,
        *,
        target: str = "",
        outcome: Outcome = "ok",
        why: str = "",
        **more: str | int,
    ) -> None:
        """Records an act; its line is written soon.

        Args:
            principal: who did it.
            target: the object of the act: a tool, a source, a key, a role.
            more: further fields of the line: `peer`, the session or address; `source`, where it is not the principal's;
                counts.
        """
        writer = self._writer
        if writer is None:
            return
        if self._has_budget(act, principal.source):
            writer.put(AuditRecord(time.time(), _fields(act, principal, target, outcome, why, more)))
        else:
            writer.lose(1)

    def refuse(self, peer: str, target: str, why: str) -> None:
        """Records that an unknown client was refused.

        Args:
            peer: the address.
            target: its request.
        """
        self.record("refuse", OBSERVER, target=target, outcome="refused", why=why, peer=peer, how="")

    def record_calls(self, calls: Sequence[tuple[Any, ...]], began: float) -> None:
        """Records calls that ended, many in one line.

        Args:
            calls: records of the bus; their contents are not written.
            began: as in `CallRecords`.
        """
        if self._writer is not None:
            self._writer.put(AuditRecord(time.time(), {"act": "calls", "count": len(calls)}, calls=(calls, began)))

    @contextmanager
    def operation(self, act: Act, principal: Principal = BUS, *, target: str = "", why: str = "") -> Iterator[None]:
        """Records an operator's act and how it ends; the lines are on disk at once.

        Where the audit is required, a line with the outcome `begun` is on disk before the body runs.

        Raises:
            NotAudited: the audit is required and cannot be written; the body has not run.
        """
        writer = self._writer
        if writer is None:
            yield
            return
        if self._required:
            try:
                writer.put_now(AuditRecord(time.time(), _fields(act, principal, target, "begun", why)))
            except NotAudited as error:
                raise _not_done(str(error)) from None
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, ToolBusError) else type(error).__name__
            writer.put(AuditRecord(time.time(), _fields(act, principal, target, "failed", why), urgent=True))
            raise
        writer.put(AuditRecord(time.time(), _fields(act, principal, target, "ok", why), urgent=True))

    def check(self) -> None:
        """Checks that an act of now can be recorded.

        Raises:
            NotAudited: the audit is required, and its last line could not be written.
        """
        if self._required and self._writer is not None and self._writer.failing:
            raise _not_done("the last line could not be written, the bus's log says why")

    def _has_budget(self, act: Act, source: str) -> bool:
        """Tells whether one more line may be written; where the audit is required, each act of a source has its own."""
        with self._lock:
            if act in REFUSALS:
                budget = self._refusals
            elif act not in OWN_ACTS or self._required:
                return True
            elif (known := self._own_acts.get(source)) is not None:
                budget = known
            else:
                seconds = OWN_ACTS_BURST / OWN_ACTS_PER_SECOND
                budget = self._own_acts[source] = Quota(OWN_ACTS_PER_SECOND, burst_seconds=seconds)
            return budget.take(1, time.monotonic())[0] == 1


def _fields(
    act: str, principal: Principal, target: str, outcome: str, why: str, more: Mapping[str, str | int] | None = None
) -> dict[str, Any]:
    identity = principal.identity
    fields: dict[str, Any] = {
        "act": act,
        "who": identity.name or principal.source,
        "key": identity.key,
        "how": identity.how if identity.name else "local",
        "source": principal.source,
        "target": target,
        "outcome": outcome,
        "why": why,
    }
    if more:
        fields.update(more)
    return fields


def _not_done(why: str) -> NotAudited:
    return NotAudited(
        f"this was not done, because the audit could not be written ({why}): make room on the disk and let the bus's "
        "user write to its data directory, or start the bus without audit_required"
    )
