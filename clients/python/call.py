"""Defines a call that this peer answers, as its handler sees it, and makes its result from the end of the handler."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from outbox import Outbox

from toolbus.v1 import tool_pb2 as pb

logger = logging.getLogger("toolbus.peer")

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # one: `json.dumps` makes another for each call
ERROR_CHARACTERS = 16_384  # of the text of an exception

MakeCall = Callable[..., Awaitable[pb.ToolResult]]  # `Calls.call`; for a nested call, of the stream of its parent


class Call:
    """A call that this peer answers.

    Attributes:
        call_id: the bus's.
        message: the bus's: id, name, context, remaining time …
        together: how many calls of its message have no result yet; one list of one number for all of them.
        task: runs the handler; None before it is started.
        ended: whether its result was made.
    """

    __slots__ = ("_make_call", "_outbox", "call_id", "ended", "message", "task", "together")

    def __init__(self, message: pb.ToolCall, outbox: Outbox, together: list[int], make_call: MakeCall) -> None:
        self.call_id = message.call_id
        self.message = message
        self.together = together
        self.task: asyncio.Task[Any] | None = None
        self.ended = False
        self._outbox = outbox
        self._make_call = make_call

    @property
    def context(self) -> pb.CallContext:
        """The user and the conversation, as the host states them."""
        return self.message.context

    @property
    def answers(self) -> dict[str, Any]:
        """The answers to the questions with which this tool ended the call before, by their keys."""
        answers: dict[str, Any] = json.loads(self.message.input_responses_json or "{}")
        return answers

    def progress(
        self,
        done: float = 0.0,
        total: float = 0.0,
        message: str = "",
        *,
        chunk: str = "",
        content: Iterable[pb.ContentBlock] = (),
    ) -> None:
        """Reports progress. It is left out after the result, and if it is too large for the stream.

        Args:
            chunk: the next piece of the output.
            content: parts that are ready before the result.
        """
        if self.ended:
            return
        try:
            item = pb.ToolProgress(
                call_id=self.call_id, progress=done, total=total, message=message, output_chunk=chunk, content=content
            )
        except UnicodeEncodeError as error:
            logger.warning("progress of %r is left out: %s", self.message.name, error)
            return
        largest = min(self._outbox.result_bytes, self._outbox.largest_item)
        if (size := item.ByteSize()) > largest:
            logger.warning("progress of %r is left out: it has %d bytes, at most %d", self.message.name, size, largest)
            return
        self._outbox.put("progress", item)

    def chunk(self, text: str) -> None:
        """Sends the next piece of the output. The result still has the whole output."""
        self.progress(chunk=text)

    async def invoke(self, name: str, arguments: Any, *, timeout: float = 0.0) -> pb.ToolResult:
        """Calls another tool as part of this call: it has the same context and ends no later.

        It is sent on the stream of this call only: on another stream its parent's id could be the id of another user's
        call. This peer makes no span of its own, so the parent of the call's span is the bus's.
        """
        trace = {"traceparent": self.message.traceparent, "tracestate": self.message.tracestate}
        return await self._make_call(name, arguments, timeout=timeout, **trace, parent_id=self.call_id)


def result_of(task: asyncio.Task[Any], outbox: Outbox) -> pb.ToolResult:
    """Makes the result of a call from the end of its handler."""
    if task.cancelled():
        return failure(pb.ERROR_CODE_CANCELLED, pb.CALL_STAGE_ACCEPTED, "the call was cancelled")
    try:
        output = task.result()
        if isinstance(output, pb.ToolResult):
            return _checked(output, outbox)
        text = to_json(output)
        result = pb.ToolResult(output_json=text)
    except Exception as error:  # the handler's own, or an output that JSON or UTF-8 cannot hold
        return _failure_of(error)
    small = len(text) * 4 < min(outbox.result_bytes, outbox.largest_item)  # a character has at most 4 bytes
    return result if small else _checked(result, outbox)


def questions(by_key: dict[str, Any], state: str = "") -> pb.ToolResult:
    """Returns the result of a handler that has questions first; the call comes again with the answers and the state.

    Args:
        by_key: for each key an object with method and params.
    """
    return pb.ToolResult(input_requests_json=to_json(by_key), request_state=state)


def failure(
    code: pb.ErrorCode.ValueType, stage: pb.CallStage.ValueType, message: str, reason: str = ""
) -> pb.ToolResult:
    """Returns a result that is a failure."""
    message = message.encode("utf-8", "backslashreplace").decode()
    error = pb.CallError(code=code, stage=stage, message=message, reason=reason)
    return pb.ToolResult(is_error=True, error=error)


def to_json(value: Any) -> str:
    """Returns JSON text."""
    return ENCODER.encode(value)


def _failure_of(error: BaseException) -> pb.ToolResult:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # a fault in the handler's own exception
        text = ""
    return failure(pb.ERROR_CODE_TOOL, pb.CALL_STAGE_ACCEPTED, text[:ERROR_CHARACTERS] or kind, kind)


def _checked(result: pb.ToolResult, outbox: Outbox) -> pb.ToolResult:
    """Returns the result, or a failure in place of one that breaks a limit and so would end the stream."""
    size, largest = result.ByteSize(), outbox.largest_item
    payload = len(result.output_json.encode()) + sum(part.ByteSize() for part in result.content)
    payload += len(result.input_requests_json.encode()) + len(result.request_state.encode())
    if payload <= outbox.result_bytes and size <= largest:
        return result
    text = f"the result has {payload} bytes, more than the limit result_bytes = {outbox.result_bytes}: ask for less"
    too_large = failure(pb.ERROR_CODE_RESULT_TOO_LARGE, pb.CALL_STAGE_ACCEPTED, text)
    too_large.error.limit.name, too_large.error.limit.value = "result_bytes", outbox.result_bytes
    return too_large
