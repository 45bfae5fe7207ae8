"""Runs the calls of one round, in parallel or in order; every call gets a result, whatever fails."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.text import dump_json, escape_surrogates, parse_json, quote
from toolbus.errors import Code, Stage, ToolBusError
from toolbus.functions.call_context import NO_CONTEXT, CallContext
from toolbus.parts.models.dialects.conversation import ModelCall
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.loop.approval import Approval, ApprovalRequest, Key, RepeatGuard
from toolbus.parts.models.loop.loop_events import CallEnded, CallEvent, CallProgress, CallStarted
from toolbus.parts.models.loop.loop_settings import LoopSettings
from toolbus.parts.models.loop.loop_tools import LoopTools
from toolbus.parts.models.loop.tool_source import ToolSource
from toolbus.parts.models.loop.turn_reply import CallDone, refusal
from toolbus.protocol.tool import Result

log = logging.getLogger("toolbus.loop")

MAX_ARGUMENTS_SHOWN = 200  # characters of arguments that are not JSON
MAX_SIMILAR_NAMES = 5  # for a model that invented a name


@dataclass(frozen=True, slots=True)
class CallRunner:
    """The common part of all calls of one turn, or of one realtime session.

    Attributes:
        context: the context of the calls; round and order of each call are added to it.
        loop_tools: answers the loop's own tools.
        notify: receives the events; None: no receiver.
        approval: asks the program before calls; None: calls need no approval.
    """

    source: ToolSource
    settings: LoopSettings
    context: CallContext | None
    loop_tools: LoopTools
    guard: RepeatGuard
    notify: Callable[[CallEvent], object] | None = None
    approval: Approval | None = None

    async def run(
        self, calls: Sequence[ModelCall], export: Export | None, number: int, earlier: Sequence[Export] = ()
    ) -> list[CallDone]:
        """Runs the calls of one round. Returns their ends, in the order of the calls.

        Cancelling it cancels the calls and waits for their end.

        Args:
            export: the offered tools; None: no tools.
            number: of the round.
            earlier: the exports of earlier rounds of the turn, the newest first.
        """
        round_calls = RoundCalls(self, export, number, earlier)
        if len(calls) == 1:
            return [await round_calls.run(calls[0], 0)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(round_calls.run(call, order)) for order, call in enumerate(calls)]
        return [task.result() for task in tasks]


class RoundCalls:
    """The calls of one round while they run."""

    def __init__(self, runner: CallRunner, export: Export | None, number: int, earlier: Sequence[Export] = ()) -> None:
        self._runner = runner
        self._notify = runner.notify
        self._export = export
        self._earlier = earlier
        self._number = number  # of the round
        self._slots = asyncio.Semaphore(runner.settings.max_parallel)
        # Identical calls run one after another, so that the guard knows the result of the previous one.
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._edited: dict[int, str] = {}  # arguments that an approval changed, as JSON, by the order of their call

    async def run(self, call: ModelCall, order: int) -> CallDone:
        """Runs one call to its end."""
        async with self._slots:
            if self._notify is not None:
                self._notify(CallStarted(call, self._number, order))
            started, clock = time.time(), time.perf_counter()
            try:
                result = await self._result(call, order)
            except asyncio.CancelledError:
                if is_being_cancelled():
                    raise
                text = f"the call of {quote_name(call)} was cancelled before it ended"
                result = refusal(Code.CANCELLED, text, Stage.UNKNOWN)
            except ToolBusError as error:
                result = refusal(Code.UNAVAILABLE, str(error), Stage.UNKNOWN)
            except Exception as error:  # a provider refuses a turn with an unanswered call, so every error is a result
                log.exception("calling %s failed", quote_name(call))
                text = f"the call of {quote_name(call)} failed before it ended: {type(error).__name__}"
                result = refusal(Code.INTERNAL, text, Stage.UNKNOWN)
            ended = started + time.perf_counter() - clock
            done = CallDone(call, result, self._number, order, started, ended, self._edited.pop(order, ""))
            if self._notify is not None:
                self._notify(CallEnded(done))
            return done

    async def _result(self, call: ModelCall, order: int) -> Result:
        if order >= self._runner.settings.max_calls:
            limit = self._runner.settings.max_calls
            return refusal(Code.OVERLOADED, f"only the first {limit} calls of an answer are run: make fewer at once")
        if call.fault:
            return refusal(Code.INVALID_ARGUMENTS, f"the call of {quote_name(call)} was not made: {call.fault}")
        if not call.whole:
            return refusal(
                Code.INVALID_ARGUMENTS,
                f"the call of {quote_name(call)} was not made: its arguments end after "
                f"{len(call.arguments_json)} characters, because your answer became too long. Call it again with less "
                "in its arguments, or in several calls.",
            )
        export = self._export
        if export is not None and call.known and call.name in export.kept:
            return await self._checked_call(call, order, export)
        for earlier in self._earlier:
            name = earlier.names.to_bus.get(call.wire_name or call.name)
            if name is not None:  # its plugin may be reconnecting: the source knows, and may wait for it
                result = await self._checked_call(dataclasses.replace(call, name=name), order, earlier)
                if result.error is None or result.error.code is not Code.NOT_FOUND:
                    return result
                break
        return unknown_tool(call, export)

    async def _checked_call(self, call: ModelCall, order: int, export: Export) -> Result:
        """Makes a call of an offered tool, if its arguments are JSON and it repeats no other call."""
        tool, guard = export.kept[call.name], self._runner.guard
        try:
            arguments_json, arguments = parse_arguments(call.arguments_json)
            meant = export.without_added_nulls(call.name, arguments)
            if meant is not arguments:
                arguments_json, arguments = escape_surrogates(dump_json(meant)), meant
            key = guard.key(tool, arguments)
        except (ValueError, RecursionError) as error:
            return refusal(
                Code.INVALID_ARGUMENTS,
                f"the arguments of {quote_name(call)} are not JSON: {error}. You wrote "
                f"{_excerpt(call.arguments_json.strip(), getattr(error, 'pos', 0))}. "
                "Send one JSON object that follows the tool's parameters.",
            )
        own_result = await self._runner.loop_tools.answer(call.name, arguments_json)
        if own_result is not None:
            return own_result
        request = ApprovalRequest(tool, call, arguments, self._number, order, self._runner.context)
        if key is None:
            return await self._approved_call(request, arguments_json, export)
        async with self._locks[key]:
            result = guard.refusal(key)
            if result is None:
                result = await self._approved_call(request, arguments_json, export)
                guard.ended(key, result)
            return result

    async def _approved_call(self, request: ApprovalRequest, arguments_json: str, export: Export) -> Result:
        """Makes a call, after its approval if it needs one."""
        approval = self._runner.approval
        if approval is not None and approval.needs(request.tool):
            outcome = await approval.decide(request)
            if isinstance(outcome, Result):
                return outcome
            arguments_json = outcome.arguments_json
            if outcome.edited:
                self._edited[request.order] = arguments_json
        call, notify, place = request.call, self._notify, (self._number, request.order)
        context = self._runner.context or NO_CONTEXT
        attributes = {**context.attributes, "round": str(self._number), "order": str(request.order)}
        return await self._runner.source.call(
            call.name,
            arguments_json,
            context=dataclasses.replace(context, attributes=attributes),
            schema_hash=export.hashes.get(call.name, ""),
            timeout=self._runner.settings.call_timeout,
            on_progress=None if notify is None else lambda each: notify(CallProgress(call, each, *place)),
        )


def parse_arguments(arguments_json: str) -> tuple[str, Any]:
    """Returns a model's arguments, as text for the bus and as values. Empty text and null mean no arguments.

    Raises:
        ValueError, RecursionError: the text is not JSON.
    """
    text = arguments_json.strip()
    if text in ("", "null"):
        return "{}", {}
    return text, parse_json(text)


def _excerpt(text: str, place: int) -> str:
    """Quotes the text of a model around a place, so that it sees its own mistake."""
    start = max(0, min(place - MAX_ARGUMENTS_SHOWN // 2, len(text) - MAX_ARGUMENTS_SHOWN))
    shown = quote(text[start : start + MAX_ARGUMENTS_SHOWN], MAX_ARGUMENTS_SHOWN)
    return ("… " if start else "") + shown + (" …" if start + MAX_ARGUMENTS_SHOWN < len(text) else "")


def unknown_tool(call: ModelCall, export: Export | None) -> Result:
    """Returns the answer to a call of a tool that was not offered, with the similar names that were."""
    names = [] if export is None else list(export.names.to_bus)
    if not names:
        return refusal(Code.NOT_FOUND, f"there is no tool {quote_name(call)}, and no other tool now: answer in text")
    similar = difflib.get_close_matches(call.wire_name or call.name, names, MAX_SIMILAR_NAMES, cutoff=0.5)
    listed = similar or names[:MAX_SIMILAR_NAMES]
    more = ", …" if len(names) > len(listed) else ""
    return refusal(
        Code.NOT_FOUND, f"there is no tool {quote_name(call)}. Call one that is offered: {', '.join(listed)}{more}"
    )


def quote_name(call: ModelCall) -> str:
    """Quotes the name that a model wrote, shortened so that an invented name cannot flood the conversation."""
    return quote(call.wire_name or call.name)
