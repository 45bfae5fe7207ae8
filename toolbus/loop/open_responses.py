"""Tracks the responses of a realtime session that are in progress or have unanswered calls.

Pure state: it knows which calls belong to which response and which responses can be answered; it sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from toolbus.dialects.conversation import Answered, ModelCall
from toolbus.dialects.export import Export
from toolbus.loop.round_calls import CallRunner, RoundCalls
from toolbus.loop.turn_reply import CallDone
from toolbus.tool import Result


@dataclass(slots=True)
class ResponseCall:
    """A call of a response.

    Attributes:
        round: the number of its response among those of the session, from 1.
        order: its place among the calls of the response, from 0.
        started: seconds since the epoch.
        result: None while it runs.
        task: None where the call was refused.
    """

    call: ModelCall
    round: int
    order: int
    started: float
    result: Result | None = None
    task: asyncio.Task[None] | None = None

    def done(self, result: Result, ended: float) -> CallDone:
        """Returns the record of the call's end, in seconds since the epoch."""
        return CallDone(self.call, result, self.round, self.order, self.started, ended)


@dataclass(slots=True)
class OpenResponse:
    """A response of the model and its unanswered calls.

    Attributes:
        number: among the responses of the session, from 1.
        export: the tools that were offered when it began.
        runner: runs its calls.
        over: whether no more calls will come.
        calls: by id, in their order.
    """

    number: int
    export: Export
    runner: RoundCalls
    over: bool
    calls: dict[str, ResponseCall] = field(default_factory=dict)

    def add(self, call: ModelCall, started: float) -> ResponseCall:
        """Adds a call, which the response must not have."""
        response_call = self.calls[call.id] = ResponseCall(call, self.number, len(self.calls), started)
        return response_call


class OpenResponses:
    """The open responses of one session, by id."""

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner
        self._open: dict[str, OpenResponse] = {}
        self._began = 0  # responses so far

    def get(self, response_id: str, export: Export, *, over: bool) -> OpenResponse:
        """Returns a response; a new one where the id is unknown.

        Args:
            over: for a new one. A response whose begin the provider did not report is over with each call.
        """
        response = self._open.get(response_id)
        if response is None:
            self._began += 1
            calls = RoundCalls(self._runner, export, self._began)
            response = self._open[response_id] = OpenResponse(self._began, export, calls, over)
        return response

    def end(self, response_id: str) -> None:
        """A response is over."""
        if response := self._open.get(response_id):
            response.over = True

    def clear(self) -> None:
        """Forgets all responses."""
        self._open.clear()

    @property
    def in_progress(self) -> bool:
        """Whether the model is still giving a response."""
        return any(not response.over for response in self._open.values())

    @property
    def running(self) -> int:
        """The number of calls without a result."""
        return sum(each.result is None for response in self._open.values() for each in response.calls.values())

    @property
    def call_ids(self) -> list[str]:
        """The ids of all unanswered calls."""
        return [call_id for response in self._open.values() for call_id in response.calls]

    def complete(self) -> list[str]:
        """Returns the ids of responses whose calls all have results: none while a response is in progress."""
        if self.in_progress:
            return []
        return [
            response_id
            for response_id, response in self._open.items()
            if all(each.result is not None for each in response.calls.values())
        ]

    def pop_calls(self, response_ids: Iterable[str]) -> list[ResponseCall]:
        """Removes responses. Returns their calls."""
        return [each for response_id in response_ids for each in self._open.pop(response_id).calls.values()]

    def pop_cancelled(self, call_ids: Iterable[str]) -> list[ResponseCall]:
        """Removes calls from their responses. Returns those that there were."""
        cancelled = frozenset(call_ids)
        return [
            response.calls.pop(call_id)
            for response in self._open.values()
            for call_id in tuple(response.calls)
            if call_id in cancelled
        ]


def answered(calls: Iterable[ResponseCall]) -> list[Answered]:
    """Returns calls with their results, as a dialect writes them."""
    return [Answered(each.call, each.result) for each in calls if each.result is not None]
