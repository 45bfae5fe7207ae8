"""Runs the calls of one answer of a model, side by side or in order, and answers each of them whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import functools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolbus.dialects.conversation import ModelCall
from toolbus.dialects.export import Export
from toolbus.errors import Code, Stage, ToolBusError
from toolbus.functions.call_context import NO_CONTEXT, CallContext
from toolbus.loop.loop_events import CallEnded, CallEvent, CallProgress, CallStarted
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.loop_tools import OwnTools
from toolbus.loop.repeat_guard import Key, RepeatGuard
from toolbus.loop.tool_source import ToolSource
from toolbus.loop.turn_reply import CallDone, refused
from toolbus.tool import CallError, Progress, Result

log = logging.getLogger("toolbus.loop")

NAMES_SHOWN = 5  # to a model that invented one


def _no_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)  # making one takes longer than decoding arguments


@dataclass(frozen=True, slots=True)
class Caller:
    """What the calls of one run have in common.

    Attributes:
        context: what tools may know about the circumstances; round and order of each call are added to it.
        own: answers the loop's own tools.
        say: hears what happens; None where nobody wants to know.
    """

    source: ToolSource
    settings: LoopSettings
    context: CallContext | None
    own: OwnTools
    guard: RepeatGuard
    say: Callable[[CallEvent], object] | None = None

    async def run(self, calls: Sequence[ModelCall], export: Export | None, number: int) -> list[CallDone]:
        """Runs the calls of one round. Returns how they ended, in their order.

        Cancelling it cancels the calls and waits for their end.

        Args:
            export: what the model was offered; None: nothing.
        """
        answer = Answer(self, export, number)
        if len(calls) == 1:
            return [await answer.run(calls[0], 0)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer.run(call, order)) for order, call in enumerate(calls)]
        return [task.result() for task in tasks]


class Answer:
    """The calls of one answer while they run."""

    def __init__(self, caller: Caller, export: Export | None, number: int) -> None:
        self._caller = caller
        self._say = caller.say
        self._export = export
        self._number = number  # of the round
        self._gate = asyncio.Semaphore(caller.settings.max_parallel)
        # Calls that are the same run one after another, so that the guard knows how the one before has ended.
        self._same: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, call: ModelCall, order: int) -> CallDone:
        """Runs one call to its end."""
        async with self._gate:
            if self._say is not None:
                self._say(CallStarted(call, self._number, order))
            started, clock = time.time(), time.perf_counter()
            try:
                result = await self._result(call, order)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                result = _lost(Code.CANCELLED, f"the call of {shown(call)} was cancelled on its way")
            except ToolBusError as problem:
                result = _lost(Code.UNAVAILABLE, str(problem))
            except Exception as problem:  # whatever goes wrong, a provider refuses a turn with a call unanswered
                log.exception("calling %s failed", shown(call))
                result = _lost(Code.INTERNAL, f"the call of {shown(call)} failed on its way: {type(problem).__name__}")
            done = CallDone(call, result, self._number, order, started, started + time.perf_counter() - clock)
            if self._say is not None:
                self._say(CallEnded(done))
            return done

    async def _result(self, call: ModelCall, order: int) -> Result:
        if order >= self._caller.settings.max_calls:
            most = self._caller.settings.max_calls
            return refused(Code.OVERLOADED, f"only the first {most} calls of an answer are run: make fewer at once")
        export = self._export
        tool = export.kept.get(call.name) if call.known and export is not None else None
        if tool is None or export is None:
            return unknown(call, export)
        guard = self._caller.guard
        try:
            arguments_json, arguments = parsed(call.arguments_json)
            key = guard.key(tool, arguments)
        except (ValueError, RecursionError) as problem:
            return refused(
                Code.INVALID_ARGUMENTS,
                f"the arguments of {shown(call)} are no JSON: {problem}. "
                "Send one JSON object that follows the tool's parameters.",
            )
        own = self._caller.own.answer(call.name, arguments_json)
        if own is not None:
            return own
        if key is None:
            return await self._call(call, order, arguments_json, export)
        async with self._same[key]:
            result = guard.refusal(key)
            if result is None:
                result = await self._call(call, order, arguments_json, export)
                guard.ended(key, result)
            return result

    async def _call(self, call: ModelCall, order: int, arguments_json: str, export: Export) -> Result:
        return await self._caller.source.call(
            call.name,
            arguments_json,
            context=_placed(self._caller.context, self._number, order),
            schema_hash=export.hashes.get(call.name, ""),
            timeout=self._caller.settings.call_timeout,
            on_progress=None if self._say is None else functools.partial(self._progress, self._say, call, order),
        )

    def _progress(self, say: Callable[[CallEvent], object], call: ModelCall, order: int, progress: Progress) -> None:
        say(CallProgress(call, progress, self._number, order))


def parsed(arguments_json: str) -> tuple[str, Any]:
    """Returns what a model wrote as arguments, as text for the bus and as values. Nothing, or null, is no arguments.

    Raises:
        ValueError, RecursionError: it is no JSON.
    """
    text = arguments_json.strip()
    if text in ("", "null"):
        return "{}", {}
    return text, _DECODER.decode(text)


def unknown(call: ModelCall, export: Export | None) -> Result:
    """Returns the answer to a call of a tool that the model was not offered, with names that it was."""
    names = [] if export is None else list(export.names.to_bus)
    if not names:
        return refused(Code.NOT_FOUND, f"there is no tool {shown(call)}, and no other one now: answer in words")
    near = difflib.get_close_matches(call.wire_name or call.name, names, NAMES_SHOWN, cutoff=0.5) or names[:NAMES_SHOWN]
    more = ", …" if len(names) > len(near) else ""
    return refused(Code.NOT_FOUND, f"there is no tool {shown(call)}. Call one that is offered: {', '.join(near)}{more}")


def shown(call: ModelCall) -> str:
    """Quotes the name that a model wrote, cut so that an invented one cannot flood the conversation."""
    name = call.wire_name or call.name
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _placed(context: CallContext | None, number: int, order: int) -> CallContext:
    """Returns the context of one call: the given one, and where in the turn the call stands."""
    context = context or NO_CONTEXT
    return dataclasses.replace(context, attributes={**context.attributes, "round": str(number), "order": str(order)})


def _lost(code: Code, sentence: str) -> Result:
    return Result(is_error=True, error=CallError(code, sentence, Stage.UNKNOWN))
