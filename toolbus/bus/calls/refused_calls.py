"""Answers calls that are not sent: refused by a rule or a quota, or met by a fault of the bus.

Refusals are recorded, and reported to the watchers of denials and limits. refusals.py builds the errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from toolbus.bus.access.principal import Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.calls.call import Caller
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.call_observer import CallObserver
from toolbus.bus.calls.call_record import MAX_TEXT
from toolbus.bus.calls.refusals import Refused, identity_full, too_fast
from toolbus.errors import CallError, Code, Stage
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.calls")

OnDenied = Callable[[Principal, str, str], object]
OnLimited = Callable[[Principal, int, str], object]


class RefusedCalls:
    """The calls of one bus that are not sent."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer
        self._on_denied: OnDenied | None = None  # see watch
        self._on_limited: OnLimited | None = None

    def watch(self, on_denied: OnDenied, on_limited: OnLimited) -> None:
        """Sets who is notified of each denied call with its reason, and of calls that a quota refused."""
        self._on_denied, self._on_limited = on_denied, on_limited

    def refuse(self, caller: Caller, call: pb.ToolCall, refused: Refused, now: float) -> None:
        """Answers a call that is not sent, and records it, shortened: refused names may be of any length."""
        result = refused.result
        result.call_id = call.call_id
        caller.deliver_result(call.call_id, result)
        if refused.error.code == Code.PERMISSION_DENIED and self._on_denied is not None:
            self._on_denied(caller.principal, call.name[:MAX_TEXT], refused.error.message)
        self._observer.call_refused(caller, call, refused, now)

    def within_quota(
        self, caller: Caller, quota: Quota, calls: Iterable[pb.ToolCall], now: float
    ) -> Sequence[pb.ToolCall]:
        """Returns the calls that an identity may make now; answers the others."""
        calls = list(calls)
        free = quota.free
        if free is not None and len(calls) > free:
            self._refuse_rest(caller, calls, free, identity_full(caller, quota), now)
        passed, wait = quota.take(len(calls), now)
        if passed < len(calls):
            self._refuse_rest(caller, calls, passed, too_fast(caller, quota, wait), now)
        return calls

    def _refuse_rest(self, caller: Caller, calls: list[pb.ToolCall], first: int, refused: Refused, now: float) -> None:
        self._observer.identity_limited(caller.principal.identity, len(calls) - first)
        if self._on_limited is not None:
            self._on_limited(caller.principal, len(calls) - first, refused.error.message)
        for call in calls[first:]:
            self.refuse(caller, call, refused, now)
        del calls[first:]

    def fault(self, caller: Caller, call_id: str, name: str, fault: BaseException, now: float) -> None:
        """Answers a call that met a fault of the bus; panics of the validator do not derive from Exception."""
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise fault
        fields = call_fields(call_id, name, "", caller.principal)
        log.error("a fault of the bus in a call", exc_info=fault, extra=fields)
        error = CallError(Code.INTERNAL, "a fault of the bus; its log has the details", stage=Stage.NOT_DISPATCHED)
        caller.deliver_result(call_id, Result(call_id, is_error=True, error=error).to_wire())
        self._observer.call_failed(caller, call_id, name, error, now)
