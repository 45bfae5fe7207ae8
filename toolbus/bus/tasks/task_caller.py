"""Receives the results of calls that became tasks, in place of the callers that made them.

To the dispatcher it is a caller like any other, but one that makes no calls itself, except the same one again where
it ended with questions that were answered. Each task has its own, because a call is still charged to the budget of the
source that made it, and listed under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolbus.bus.access.principal import Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.tasks.task import owner_of
from toolbus.tool import TASK_SECONDS, Progress, Result
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:  # at run time it would bring the whole core along
    from toolbus.bus.calls.call import ArgumentBudget, Call
    from toolbus.bus.catalog.entry import Entry

MAX_MESSAGE = 1_024  # characters of a progress message: 1,000 tasks may run, and models read it


class TaskCaller:
    """Receives the result of one call, whose ``call_id`` is now its ``task_id``.

    Args:
        principal: who made the call; ``budget`` is the one that its source shares, ``quota`` that of its identity.
        ended: called with the result, in the middle of the handler's frame; again where the call is made again.
        may_set_context: whether the caller could; a call that is made again states its context again.

    Attributes:
        latest: the last progress; None before the first.
    """

    __slots__ = (
        *("_ended", "allowed", "allowed_at", "in_flight", "budget", "latest", "longest_timeout", "quota"),
        *("__weakref__", "max_in_flight", "max_item_bytes", "pending", "source", "principal", "may_set_context"),
    )

    def __init__(
        self,
        principal: Principal,
        budget: ArgumentBudget,
        ended: Callable[[str, Result], object],
        quota: Quota | None = None,
        *,
        may_set_context: bool = False,
    ) -> None:
        self.source = principal.source
        self.budget = budget
        self.quota = quota
        if quota is not None:
            quota.callers.add(self)  # the call goes on
        self.in_flight: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}  # it runs no calls
        self.allowed: set[Entry] = set()  # it calls no other tools
        self.allowed_at = 0
        self.max_in_flight = 1
        self.max_item_bytes = 1 << 62  # nothing is sent anywhere
        self.longest_timeout = TASK_SECONDS
        self.principal = replace(principal, is_admin=False)
        self.may_set_context = may_set_context
        self.latest: Progress | None = None
        self._ended = ended

    def __repr__(self) -> str:
        return f"<TaskCaller {', '.join(self.in_flight) or 'done'} of {self.source!r}>"

    def deliver(self, results: Sequence[tuple[str, str]]) -> None:
        """Receives plain results."""
        for call_id, output_json in results:
            self._ended(call_id, Result(call_id, output_json or "null"))

    def deliver_result(self, call_id: str, result: pb.ToolResult) -> None:
        """Receives any other result."""
        self._ended(call_id, Result.from_wire(result))

    def progress(self, call_id: str, progress: pb.ToolProgress) -> None:
        """Stores the progress; chunks of the output are ignored, since they come again with the result."""
        if progress.progress or progress.message:
            # A plugin may send any number, and JSON has no NaN.
            done, total = (each if math.isfinite(each) else 0.0 for each in (progress.progress, progress.total))
            self.latest = Progress(done, total, progress.message[:MAX_MESSAGE])


def owner_of_call(call: Call) -> str:
    """Returns the owner of the task that a call becomes: its user, else who made the outermost call."""
    return owner_of(call.context.user_id if call.context is not None else "", call.root.caller.principal.account)
