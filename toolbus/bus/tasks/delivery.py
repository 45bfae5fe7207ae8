"""Delivers the results of finished tasks to where they were redirected: a function, or a POST to a local URL.

Posting has a thread of its own, started when it is first needed, so that it depends on no caller's event loop. A failed
delivery is logged without the contents; the result can still be fetched.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from concurrent.futures import CancelledError, Future

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.tasks.task import Task
from toolbus.bus.tasks.task_watchers import OnFinished, run_callback
from toolbus.functions.threads import LoopThread
from toolbus.text import dump_json

log = logging.getLogger("toolbus.tasks")

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
        self._thread: LoopThread | None = None  # None until something is posted, and once closed
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
                self._thread = LoopThread("toolbus-tasks-delivery")
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
        try:
            post.result()
        except CancelledError:
            pass
        except Exception:
            log.exception("a fault in posting a task")

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
    """Returns the body that is posted."""
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
