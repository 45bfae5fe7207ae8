"""Delivers the results of finished tasks to where they were redirected: a function, or a POST to a local URL.

Posting has a thread of its own, started when it is first needed, so that it depends on no caller's event loop. A failed
delivery is logged without the contents; the result can still be fetched.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.common.mailbox import Mailbox
from toolbus.common.text import dump_json
from toolbus.errors import PeerLost
from toolbus.parts.tasks.task import Task, owner_of
from toolbus.protocol.tool import TASK_SECONDS, Progress, Result
from toolbus.sdk.shared_loop import SharedLoop
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.bus.calls.call import ArgumentBudget, Call
    from toolbus.bus.catalog.entry import Entry


log = logging.getLogger("toolbus.tasks")

OnFinished = Callable[[Task], object]

MAX_WAITING = 1_000  # finished tasks that a stream holds for a slow reader; as many as may run


class TaskWatchers:
    """Callbacks for finished tasks; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, tuple[OnFinished, str | None]] = {}  # with the owner; None: all owners

    def add(self, callback: OnFinished, owner: str | None) -> Callable[[], None]:
        """Calls a callback for each task that ends from now on. Returns the function that unsubscribes it."""
        key = object()  # the same callback may be subscribed twice
        with self._lock:
            self._callbacks[key] = (callback, owner)

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return remove

    def notify(self, task: Task) -> None:
        """Calls the callbacks that follow this task's owner, or all owners."""
        with self._lock:
            callbacks = [callback for callback, owner in self._callbacks.values() if owner in (None, task.owner)]
        for callback in callbacks:
            run_callback(callback, task)


class TaskEvents(Mailbox[Task]):
    """Finished tasks as they come: `async for task in events`. Belongs to the loop that it was made on.

    It holds tasks from the moment it is made, and ends when it is closed or the TaskManager is. A reader that falls
    behind by `MAX_WAITING` tasks loses the oldest.
    """

    def __init__(self, on_close: Callable[[], object]) -> None:
        super().__init__(MAX_WAITING, on_close=on_close)


def run_callback(callback: OnFinished, task: Task) -> None:
    """Calls one callback; an exception is logged, so that the other callbacks still run."""
    try:
        callback(task)
    except Exception:
        log.exception("a callback failed for %r", task)


MAX_TEXT = 9_000  # characters of a result that are posted
ATTEMPTS = 4
FIRST_BACKOFF_SECONDS = 0.5  # doubles with each attempt: a receiver may be down for 3.5 s
POST_SECONDS = 10.0  # timeout of one attempt
MAX_PARALLEL_POSTS = 8
MAX_POSTS = 1_000  # running and waiting

Target = OnFinished | CallbackUrl


class Delivery:
    """Delivers finished tasks; safe from any thread.

    Args:
        first_backoff: seconds before the second attempt; doubles with each further one.
    """

    def __init__(self, attempts: int = ATTEMPTS, first_backoff: float = FIRST_BACKOFF_SECONDS) -> None:
        self._attempts = attempts
        self._first_backoff = first_backoff
        self._lock = threading.Lock()
        self._thread: SharedLoop | None = None  # None until something is posted, and once closed
        self._slots = asyncio.Semaphore(MAX_PARALLEL_POSTS)  # belongs to the thread's loop
        self._posts: set[Future[None]] = set()  # running and waiting
        self._closed = False

    def __repr__(self) -> str:
        return f"<Delivery posts={len(self._posts)}{' closed' if self._closed else ''}>"

    def send(self, task: Task, target: Target) -> None:
        """Delivers a finished task; a POST goes on after this returns."""
        if not isinstance(target, CallbackUrl):
            run_callback(target, task)
            return
        with self._lock:
            if self._closed or len(self._posts) >= MAX_POSTS:
                reason = "this program ends" if self._closed else f"{MAX_POSTS} others wait"
                log.warning("%r is not posted to %s: %s", task, target.shown, reason)
                return
            if self._thread is None:
                self._thread = SharedLoop("toolbus-tasks-delivery")
                self._thread.start()
            post = self._thread.submit(self._post(task, target))
            self._posts.add(post)
        post.add_done_callback(self._posted)

    def close(self) -> None:
        """Cancels what is not delivered; may be called again."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            count = len(self._posts)
        if count:
            log.warning("%d finished tasks were not posted: this program ends", count)
        if thread is not None:
            thread.stop()

    def _posted(self, post: Future[None]) -> None:
        with self._lock:
            self._posts.discard(post)
        if not post.cancelled() and (fault := post.exception()) is not None and not isinstance(fault, PeerLost):
            log.error("a fault in posting a task", exc_info=fault)  # PeerLost: `close` has cut it off

    async def _post(self, task: Task, target: CallbackUrl) -> None:
        body, shown, failure = body_of(task), repr(task), ""
        del task  # its result may have megabytes, and a receiver may be slow
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._first_backoff * 2 ** (attempt - 1))
            async with self._slots:
                failure = await _attempt(body, target)
            if not failure:
                return
        log.warning("%s was not posted to %s in %d attempts: %s", shown, target.shown, self._attempts, failure)


def target_of(target: object) -> Target:
    """Checks the target of a delivery.

    Raises:
        ValueError: a URL that does not lead to this machine.
        TypeError: neither a URL nor a plain function.
    """
    if isinstance(target, str):
        return parse_callback_url(target)
    if not callable(target) or inspect.iscoroutinefunction(target):
        raise TypeError(
            f"the target is {type(target).__name__} {getattr(target, '__name__', '')}: give a URL, or a plain function "
            "that takes the task (an async function would have no event loop to run on)"
        )
    return target


def body_of(task: Task) -> bytes:
    text = task.text
    truncated = len(text) > MAX_TEXT
    if truncated:
        mark = f"\n[cut: this is the beginning of {len(text)} characters, check_task has all]"
        text = text[: MAX_TEXT - len(mark)] + mark
    fields = {"task_id": task.task_id, "tool": task.tool, "status": task.status.shown}
    return dump_json({**fields, "text": text, "truncated": truncated}).encode("utf-8", "replace")


async def _attempt(body: bytes, target: CallbackUrl) -> str:
    """Posts once. Returns the failure, empty where the receiver accepted it."""
    import aiohttp  # with the next line a tenth of a second, for programs that post nothing
    from yarl import URL

    from toolbus.bus.outbound import open_session

    url = URL(target.url, encoded=True)  # as it is: parsing it again would requote it
    try:
        async with (
            open_session(connections=1, seconds=POST_SECONDS, content_type="application/json") as session,
            session.post(url, data=body, headers=target.headers, allow_redirects=False) as response,
        ):
            return "" if 200 <= response.status < 300 else f"it answered {response.status}"
    except TimeoutError:
        return f"no response within {POST_SECONDS:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return type(error).__name__  # its text may hold what the other side sent


# To the dispatcher it is a caller like any other, but one that makes no calls itself, except the same one again where
# it ended with questions that were answered. Each task has its own, because a call is still charged to the budget of
# the source that made it, and listed under its name.

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
