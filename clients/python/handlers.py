"""Answers the calls of this peer's tools: each by a task of its own, and with exactly one result."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from call import Call, MakeCall, failure, result_of
from link import Link

from toolbus.v1 import tool_pb2 as pb

Handler = Callable[[dict[str, Any], Call], Coroutine[Any, Any, Any]]


class Tools:
    """The tools that this peer offers, and their calls.

    Args:
        make_call: makes the nested calls of handlers.

    Attributes:
        version: rises with every change of the tools.
    """

    def __init__(self, make_call: MakeCall) -> None:
        self.version = 0
        self._make_call = make_call
        self._tools: dict[str, tuple[pb.Tool, Handler]] = {}

    def add(self, tool: pb.Tool, handler: Handler) -> None:
        """Offers a tool, or changes the one of that name.

        Raises:
            TypeError: the handler is not an async function.
        """
        if not inspect.iscoroutinefunction(handler):
            raise TypeError(f"the handler of {tool.name!r} is {handler!r}, it must be an async function")
        self._tools[tool.name] = tool, handler
        self.version += 1

    def remove(self, name: str) -> None:
        """Withdraws a tool; its calls in flight are finished."""
        del self._tools[name]
        self.version += 1

    def declarations(self) -> list[pb.Tool]:
        """Returns what an attach declares."""
        return [tool for tool, _ in self._tools.values()]

    def begin(self, calls: Iterable[pb.ToolCall], link: Link) -> None:
        """Starts the handlers of calls that came in one message, and does not wait for them."""
        calls = list(calls)
        together = [len(calls)]
        make_call = partial(self._make_call, parent=link)
        for message in calls:
            if link.standstill.holding:
                link.standstill.held[message.call_id] = message
                together[0] -= 1
                continue
            call = Call(message, link.outbox, together, make_call)
            tool, arguments = self._tools.get(message.name), _object(message.arguments_json)
            if tool is None:
                self._answer(call, link, self._not_found(message.name))
            elif arguments is None:
                text = f"the arguments must be the JSON text of an object, they are {message.arguments_json[:80]!r}"
                refusal = failure(pb.ERROR_CODE_INVALID_ARGUMENTS, pb.CALL_STAGE_NOT_DISPATCHED, text)
                self._answer(call, link, refusal)
            else:
                _, handler = tool
                call.task = asyncio.create_task(handler(arguments, call))
                link.running[call.call_id] = call
                # By callback, not in the task: a call cancelled before its task first ran still gets its one result.
                call.task.add_done_callback(partial(self._finish, call, link))

    def cancel(self, call_id: str, link: Link) -> None:
        """Stops a handler; its result follows. An unknown id is ignored."""
        call = link.running.get(call_id)
        if call is not None and call.task is not None:
            call.task.cancel()
        elif link.standstill.held.pop(call_id, None) is not None:
            text = "the call was cancelled before it began"
            refusal = failure(pb.ERROR_CODE_CANCELLED, pb.CALL_STAGE_NOT_DISPATCHED, text)
            refusal.call_id = call_id
            link.outbox.put("results", refusal)

    def lost(self, link: Link) -> None:
        """Stops the handlers of a stream that is over: no caller waits for their results."""
        link.standstill.held.clear()
        for call in link.running.values():
            call.ended = True
            if call.task is not None:
                call.task.cancel()

    def _not_found(self, name: str) -> pb.ToolResult:
        text = f"this plugin has no tool {name!r}; it has: {', '.join(self._tools)}"
        return failure(pb.ERROR_CODE_NOT_FOUND, pb.CALL_STAGE_NOT_DISPATCHED, text)

    def _finish(self, call: Call, link: Link, task: asyncio.Task[Any]) -> None:
        link.running.pop(call.call_id, None)
        self._answer(call, link, result_of(task, link.outbox))
        link.when_idle()

    def _answer(self, call: Call, link: Link, result: pb.ToolResult) -> None:
        """Sends the result of a call; it may wait a short time for the other results of its message."""
        call.ended = True
        call.together[0] -= 1
        result.call_id = call.call_id
        link.outbox.put("results", result, hold=call.together[0] > 0)


def _object(text: str) -> dict[str, Any] | None:
    """Returns the object of a JSON text, {} for an empty one; None for anything else."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
