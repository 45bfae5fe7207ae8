"""Results that are sent on by themselves: to a function, or as a POST to a URL of this machine.

Posting has a thread of its own, made when it is first needed, so that it depends on nobody's loop. What it cannot
deliver is logged without the contents; the result is still there to be asked for.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from concurrent.futures import CancelledError, Future

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.tasks.task import Task, compact
from toolbus.bus.tasks.task_watchers import OnFinished, run_callback
from toolbus.functions.threads import LoopThread

log = logging.getLogger("toolbus.tasks")

MAX_TEXT = 9_000  # characters of a result that are posted
ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.5  # doubles with each attempt: a receiver may be away for 3.5 s
POST_SECONDS = 10.0  # for one attempt
POSTS_AT_ONCE = 8
MAX_WAITING = 1_000  # posts, running ones included

Target = OnFinished | CallbackUrl


class Delivery:
    """Sends finished tasks where they were redirected to; safe from any thread."""

    def __init__(self, attempts: int = ATTEMPTS, first_pause: float = FIRST_PAUSE_SECONDS) -> None:
        self._attempts = attempts
        self._first_pause = first_pause
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None  # None until something is posted, and once closed
        self._slots = asyncio.Semaphore(POSTS_AT_ONCE)  # belongs to the thread's loop
        self._posts: set[Future[None]] = set()  # running and waiting
        self._closed = False

    def __repr__(self) -> str:
        return f"<Delivery posts={len(self._posts)}{' closed' if self._closed else ''}>"

    def send(self, task: Task, target: Target) -> None:
        """Sends a finished task; posting goes on after this returns."""
        if not isinstance(target, CallbackUrl):
            run_callback(target, task)
            return
        with self._lock:
            if self._closed or len(self._posts) >= MAX_WAITING:
                why = "closed" if self._closed else f"{MAX_WAITING} others wait"
                log.warning("%r is not posted to %s: %s", task, target.shown, why)
                return
            if self._thread is None:
                self._thread = LoopThread("toolbus-tasks-delivery")
                self._thread.start()
            post = self._thread.ask(self._post(task, target))
            self._posts.add(post)
        post.add_done_callback(self._posted)

    def close(self) -> None:
        """Gives up what is not delivered; may be called again."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            left = len(self._posts)
        if left:
            log.warning("%d finished tasks were not posted: this program ends", left)
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
        body, shown, trouble = body_of(task), repr(task), ""
        del task  # its result may have megabytes, and a receiver may keep us waiting
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._first_pause * 2 ** (attempt - 1))
            async with self._slots:
                trouble = await _attempt(body, target)
            if not trouble:
                return
        log.warning("%s was not taken by %s in %d attempts: %s", shown, target.shown, self._attempts, trouble)


def target_of(target: object) -> Target:
    """Reads where results are to be sent.

    Raises:
        ValueError: a URL that does not lead to this machine.
        TypeError: neither a URL nor a plain function.
    """
    if isinstance(target, str):
        return parse_callback_url(target)
    if not callable(target) or inspect.iscoroutinefunction(target):
        raise TypeError(
            f"the target is {type(target).__name__} {getattr(target, '__name__', '')}: give a URL, or a plain function "
            "that takes the task (one that is async would have no loop to run on)"
        )
    return target


def body_of(task: Task) -> bytes:
    """Returns what is posted."""
    text = task.text
    truncated = len(text) > MAX_TEXT
    if truncated:
        mark = f"\n[cut: this is the beginning of {len(text)} characters, check_task has all]"
        text = text[: MAX_TEXT - len(mark)] + mark
    told = {"task_id": task.task_id, "tool": task.tool, "status": task.status.value}
    return compact({**told, "text": text, "truncated": truncated}).encode("utf-8", "replace")


async def _attempt(body: bytes, target: CallbackUrl) -> str:
    """Posts once. Returns what went wrong, empty where nothing did."""
    import aiohttp  # with the next line a tenth of a second, for programs that post nothing
    from yarl import URL

    from toolbus.bus.outbound import open_session

    url = URL(target.url, encoded=True)  # as it was given: parsing it anew would requote it
    try:
        async with (
            open_session(connections=1, seconds=POST_SECONDS, content_type="application/json") as session,
            session.post(url, data=body, headers=target.headers, allow_redirects=False) as response,
        ):
            return "" if 200 <= response.status < 300 else f"it answered {response.status}"
    except TimeoutError:
        return f"no answer within {POST_SECONDS:g} s"
    except (aiohttp.ClientError, OSError) as problem:
        return type(problem).__name__  # its text may hold what the other side sent
