"""Makes the calls of this peer, its own and the nested ones of its handlers: each ends in exactly one result.

A call waits here for a stream and for room on it, and is sent again where that is safe, until its deadline. Once it is
with the bus, the bus measures its time; a second later it ends here, in case the bus hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable
from typing import Any

from call import failure, to_json
from link import LATE_SECONDS, SLACK_SECONDS, Ask, Link, OnProgress

from toolbus.v1 import tool_pb2 as pb

logger = logging.getLogger("toolbus.peer")

PROMPT_SECONDS = 0.005  # a call that is sent within this time states the caller's own timeout
FIRST_PAUSE, MAX_PAUSE = 0.01, 1.0  # before a refused call is sent again, in seconds: the upper ends
RETRIED = (pb.ERROR_CODE_UNAVAILABLE, pb.ERROR_CODE_OVERLOADED)
NOT_DISPATCHED = pb.CALL_STAGE_NOT_DISPATCHED


class Calls:
    """All calls of one peer, on whatever stream it has."""

    def __init__(self) -> None:
        self._link: Link | None = None  # the stream that takes calls; None without one
        self._waiting: dict[Ask, None] = {}  # for a stream or for room, oldest first; nested ones wait at their link
        self._closed = ""  # why calls are no longer sent; empty while they are

    async def call(
        self,
        name: str,
        arguments: Any,
        *,
        timeout: float = 0.0,
        on_progress: OnProgress | None = None,
        parent: Link | None = None,
        parent_id: str = "",
        **fields: Any,
    ) -> pb.ToolResult:
        """Calls a tool. A failure is a result with `error` set. Cancelling the task that waits cancels the call.

        Args:
            arguments: a value for JSON, or JSON text.
            timeout: in seconds; 0 means the tool's own.
            on_progress: takes each progress, with its chunk and content.
            parent: the stream of the call that this one is part of, whose id is `parent_id`.
            fields: further ones of `pb.ToolCall`: role, context, schema_hash, background_after_seconds.

        Raises:
            ValueError, TypeError: JSON cannot hold the arguments, or the timeout is negative.
        """
        if not timeout >= 0:
            raise ValueError(f"timeout is {timeout} s, it must be 0 or more; 0 means the tool's own")
        text = arguments if isinstance(arguments, str) else to_json(arguments)
        try:
            message = pb.ToolCall(
                name=name, arguments_json=text, timeout_seconds=timeout, parent_call_id=parent_id, **fields
            )
        except UnicodeEncodeError as error:
            return failure(pb.ERROR_CODE_INVALID_ARGUMENTS, NOT_DISPATCHED, f"a text is not valid UTF-8: {error}")
        ask = Ask(message, parent, on_progress)
        try:
            return await self._attempts(ask)
        except asyncio.CancelledError:
            self._take_back(ask, "cancelled")
            raise
        finally:
            if ask.timer is not None:
                ask.timer.cancel()

    async def _attempts(self, ask: Ask) -> pb.ToolResult:
        """Sends a call, and again for as long as it is refused and that is safe."""
        loop = asyncio.get_running_loop()
        for attempt in itertools.count():
            if attempt:
                ask.outcome, ask.sent_on = loop.create_future(), None
            self._submit(ask)
            result = await ask.outcome
            error = result.error
            if not (result.HasField("error") and error.retry_safe and error.code in RETRIED):
                return result
            longest = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 10))
            pause = max(random.uniform(0.0, longest), error.retry_after_seconds)
            if loop.time() + pause >= ask.deadline or self._closed:
                return result
            ask.refusal = result
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    # -- for the peer ------------------------------------------------------------------------------------------------

    def open(self, link: Link) -> None:
        """Takes a stream on which the bus has accepted this peer."""
        self._link = link
        self.send_waiting(link)

    def pause(self) -> None:
        """Holds new calls from now on, except for nested ones: the stream drains."""
        self._link = None

    def close(self, reason: str) -> None:
        """Ends the calls that were not sent, and those that are made later; the first reason stays."""
        self._closed = self._closed or reason
        self._link = None
        for ask in self._waiting:
            self._refuse(ask)
        self._waiting.clear()

    def progress(self, items: Iterable[pb.ToolProgress], link: Link) -> None:
        """Delivers progress; that of an unknown call is ignored."""
        for item in items:
            ask = link.pending.get(item.call_id)
            if ask is None or ask.outcome.done():
                continue
            ask.accepted = True
            if ask.on_progress is not None:
                try:
                    ask.on_progress(item)
                except Exception:  # of the application; the stream and the other calls go on
                    logger.exception("on_progress of %r failed", ask.message.name)

    def results(self, results: Iterable[pb.ToolResult], link: Link) -> None:
        """Delivers results; one for an unknown call is ignored."""
        for result in results:
            ask = link.pending.pop(result.call_id, None)
            if ask is not None:
                result.is_error = result.is_error or result.HasField("error")  # either makes it a failure
                ask.finish(result)
        self.send_waiting(link)

    def lost(self, link: Link, *, all_read: bool) -> None:
        """Handles the end of a stream: calls that the bus cannot have read are sent on the next one, the others fail.

        Args:
            all_read: whether the bus answered everything that it read, as it does before a graceful shutdown.
        """
        self.pause()
        broke = "the connection to the bus broke"
        unwritten, again = link.outbox.unwritten_calls(), []
        for call_id, ask in link.pending.items():
            unread = all_read or call_id in unwritten
            if ask.outcome.done():
                continue
            if unread and ask.parent is None:
                ask.sent_on = None
                if asyncio.get_running_loop().time() < ask.deadline:
                    again.append(ask)
                else:
                    self._refuse(ask)
                continue
            stage = pb.CALL_STAGE_ACCEPTED if ask.accepted else pb.CALL_STAGE_UNKNOWN
            ask.fail(pb.ERROR_CODE_UNAVAILABLE, NOT_DISPATCHED if unread else stage, broke)
        for ask in link.waiting:
            ask.fail(pb.ERROR_CODE_UNAVAILABLE, NOT_DISPATCHED, broke)
        link.pending.clear()
        link.waiting.clear()
        self._waiting = {**dict.fromkeys(again), **self._waiting}

    def send_waiting(self, link: Link) -> None:
        """Sends waiting calls while there is room, nested ones first."""
        while link.waiting and _has_room(link):
            self._send(_first(link.waiting), link)
        while self._waiting and link is self._link and _has_room(link):
            self._send(_first(self._waiting), link)

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _submit(self, ask: Ask) -> None:
        """Sends a call now, or puts it into a queue."""
        link = ask.parent or self._link
        if ask.parent is not None and ask.parent.outbox.closed:
            text = "the stream of the call that made this one has ended, and with it that call"
            ask.fail(pb.ERROR_CODE_UNAVAILABLE, NOT_DISPATCHED, text)
        elif ask.parent is None and self._closed:
            self._refuse(ask)
        else:
            queue = self._waiting if ask.parent is None else ask.parent.waiting
            if link is not None and not queue and _has_room(link):
                self._send(ask, link)
            else:
                queue[ask] = None
            self._watch(ask, ask.deadline)

    def _send(self, ask: Ask, link: Link) -> None:
        message = ask.message
        waited = asyncio.get_running_loop().time() - ask.started
        if waited > PROMPT_SECONDS:
            if ask.timeout:
                message.timeout_seconds = max(0.001, ask.timeout - waited)
            if ask.background_after:
                message.background_after_seconds = max(0.001, ask.background_after - waited)
        if (too_large := _too_large(message, link)) is not None:
            ask.finish(too_large)
            return
        message.call_id = link.next_id()
        link.pending[message.call_id] = ask
        ask.sent_on = link
        link.outbox.put("calls", message)

    def _take_back(self, ask: Ask, reason: str) -> None:
        """Cancels a call that its caller gave up. It counts as in flight until the bus has answered."""
        ask.outcome.cancel()
        self._waiting.pop(ask, None)
        if ask.parent is not None:
            ask.parent.waiting.pop(ask, None)
            ask.parent.when_idle()
        if ask.sent_on is not None and ask.message.call_id in ask.sent_on.pending:
            ask.sent_on.outbox.put("cancels", pb.ToolCancel(call_id=ask.message.call_id, reason=reason))

    def _watch(self, ask: Ask, moment: float) -> None:
        if ask.timer is not None:
            ask.timer.cancel()
        ask.timer = asyncio.get_running_loop().call_at(moment, self._expire, ask, moment)

    def _expire(self, ask: Ask, moment: float) -> None:
        now = asyncio.get_running_loop().time()
        if ask.outcome.done():
            return
        if now - moment > LATE_SECONDS:  # this process stood still: the result may wait in the socket, so read first
            self._watch(ask, now + SLACK_SECONDS)
        elif ask.sent_on is None:
            self._waiting.pop(ask, None)
            if ask.parent is not None:
                ask.parent.waiting.pop(ask, None)
            self._refuse(ask)
        elif now < ask.last_moment:
            self._watch(ask, ask.last_moment)
        else:
            seconds = ask.last_moment - SLACK_SECONDS - ask.started
            stage = pb.CALL_STAGE_ACCEPTED if ask.accepted else pb.CALL_STAGE_UNKNOWN
            text = f"the bus gave no answer within {seconds:g} s: it hangs"
            late = failure(pb.ERROR_CODE_DEADLINE_EXCEEDED, stage, text)
            late.error.limit.name, late.error.limit.value = "timeout_seconds", seconds
            ask.finish(late)
            self._take_back(ask, "timeout_seconds")

    def _refuse(self, ask: Ask) -> None:
        """Ends a call that was not sent: with the last refusal, or because there is no bus."""
        if ask.refusal is not None:
            ask.finish(ask.refusal)
            return
        result = failure(pb.ERROR_CODE_UNAVAILABLE, NOT_DISPATCHED, self._closed or "no bus took the call in time")
        result.error.retry_safe = not self._closed and ask.parent is None
        ask.finish(result)


def _has_room(link: Link) -> bool:
    return len(link.pending) < link.calls_in_flight


def _first(waiting: dict[Ask, None]) -> Ask:
    ask = next(iter(waiting))
    del waiting[ask]
    return ask


def _too_large(message: pb.ToolCall, link: Link) -> pb.ToolResult | None:
    """Returns the refusal of a call that breaks a limit of the bus; None for all others."""
    size, name, limit = len(message.arguments_json), "arguments_bytes", link.arguments_bytes
    if size * 4 > limit:  # a character has at most 4 bytes
        size = len(message.arguments_json.encode())
    if size <= limit:
        size, name, limit = message.ByteSize(), "message_bytes", link.outbox.largest_item
    if size <= limit:
        return None
    text = f"the call has {size} bytes, more than the limit {name} = {limit}: send less"
    refusal = failure(pb.ERROR_CODE_INVALID_ARGUMENTS, NOT_DISPATCHED, text)
    refusal.error.limit.name, refusal.error.limit.value = name, limit
    return refusal
