"""Defines a task, its states, and the texts that describe it to callers and models.

Pure values. A task is a call, or any other work, that goes on after its soft deadline: its caller gets an envelope with
a `task_id` instead of a result, and fetches the result later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from toolbus.common.text import repair_utf8, shorten
from toolbus.errors import Code, PeerLost
from toolbus.functions.reply import dump_output
from toolbus.functions.runner import CallLost
from toolbus.protocol.tool import Progress, Result

_LIKE_A_SOURCE = re.compile(r"(?:user:)*source:")  # users may choose their own ids
_UNNAMED = re.compile(r"source:host:[0-9]+")  # a host that was given no source: the number is its process

MAX_REASON = 256
MAX_ERROR = 4096  # characters of an exception's text: a model needs a sentence, not a dump

ENDED_WITH_PROCESS = (
    "the program that ran it ended before it was done, so there is no result; it may have run, so it was not tried "
    "again: find out whether it has done its work before you call the tool again"
)
LOST = (
    "the program that called has no name, so once it has ended only `toolbus tasks --all` finds this task: give the "
    "program a name, Host(source=…), or the call a user"
)
CANCELLED = "cancelled: its work was stopped before it was done, so there is no result"


class Status(StrEnum):
    """The state of a task. One that requires input has not ended: it waits for answers to its questions."""

    RUNNING = "running"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def shown(self) -> str:
        """The state where there are three: one that was cancelled has failed, and its `error` says so."""
        return _SHOWN.get(self, self.value)


_SHOWN = {Status.INPUT_REQUIRED: Status.RUNNING.value, Status.CANCELLED: Status.FAILED.value}


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it is now; a later state is another record.

    Attributes:
        task_id: identifies the task; cannot be guessed.
        owner: who may fetch it where owners are checked: `owner_of`.
        started, ended: seconds since the epoch; `ended` is None while it runs.
        result: the result of the work; None while it runs, where it failed without one, and where it was dropped.
        error: why it failed, or why a completed task has no result any more; empty otherwise.
        channel_id, platform: where it was requested, as the caller states.
        progress: its last progress; None where it reported none, or has ended.
        updated: when its state last changed, seconds since the epoch; 0 where it has not changed.
        code, reason: of the error of a call that failed, as `CallError` has them, the code by name; empty otherwise.
        questions: those without an answer yet, by key; empty where it asks nothing.
    """

    task_id: str
    tool: str
    owner: str
    started: float
    status: Status = Status.RUNNING
    ended: float | None = None
    result: Result | None = None
    error: str = ""
    channel_id: str = ""
    platform: str = ""
    progress: Progress | None = None
    updated: float = 0.0
    code: str = ""
    reason: str = ""
    questions: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Task {self.task_id} {self.tool} {self.status}>"  # neither results nor owners belong in logs

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.ended is None

    @property
    def size(self) -> int:
        """The size of its result, in characters and bytes of content."""
        if self.result is None:
            return 0
        return len(self.result.output_json) + sum(block.ByteSize() for block in self.result.content)

    @property
    def text(self) -> str:
        """The text for a model: the output as it is, why it has none, or that it is still running."""
        if self.running:
            return still_running(self)
        output = "" if self.result is None else text_of(self.result)
        if not self.error:
            return output
        return self.error if output in ("", "null", self.error) else f"{self.error}\n{output}"

    def with_result(self, result: Result, now: float) -> Task:
        """Returns the task as it ended."""
        if not (result.is_error or result.error):
            return self._over(Status.COMPLETED, now, result=result)
        error = result.error.message or result.error.code.name if result.error else text_of(result)
        failed = self.with_error(error, now)
        cause = result.error
        code, reason = (cause.code.name, cause.reason) if cause is not None else (Code.TOOL.name, "")
        failed = dataclasses.replace(failed, code=code, reason=shorten(reason, MAX_REASON))
        if result.output_json in ("", "null") and not result.content:
            return failed
        # The message stands in `error` only.
        return dataclasses.replace(failed, result=dataclasses.replace(result, error=None, is_error=True))

    def with_error(self, error: str, now: float, status: Status = Status.FAILED) -> Task:
        """Returns the task as it failed, or was cancelled."""
        return self._over(status, now, error=shorten(repair_utf8(error), MAX_ERROR))

    def with_questions(self, questions: Mapping[str, Any], now: float) -> Task:
        """Returns the task as it asks something, or goes on where all is answered."""
        status = Status.INPUT_REQUIRED if questions else Status.RUNNING
        return dataclasses.replace(self, status=status, questions=questions, updated=now)

    def _over(self, status: Status, now: float, *, result: Result | None = None, error: str = "") -> Task:
        task = dataclasses.replace(self, status=status, ended=now, updated=now, progress=None, questions={})
        return dataclasses.replace(task, result=result, error=error)

    def without_result(self, reason: str) -> Task:
        """Returns the task without its result, and with the reason for that."""
        dropped = f"its result of {self.size} bytes was dropped: {reason}. Ask the tool for less"
        return dataclasses.replace(self, result=None, error=f"{self.error}; {dropped}" if self.error else dropped)

    def described(self, now: float) -> dict[str, Any]:
        """Returns the task as a task tool shows it, without the result itself."""
        fields: dict[str, Any] = {"task_id": self.task_id, "tool": self.tool, "status": self.status.shown}
        fields["seconds"] = round(max(0.0, (now if self.ended is None else self.ended) - self.started), 1)
        progress = self.progress
        if progress is not None:
            fields["progress"] = {"done": progress.progress, "total": progress.total, "message": progress.message}
        if self.error:
            fields["error"] = self.error
        return fields


HOME_SECONDS = 60.0  # the hint when to ask again for a task whose bus is away
ID_DIGITS, HOME_DIGITS = 16, 4  # of an id, in hex: what cannot be guessed, and what names the bus


def new_id(home: str = "") -> str:
    """Returns an id that cannot be guessed, and is short enough for a model to repeat.

    Args:
        home: what `home_of` gives for the bus; "" where there is only one.
    """
    return f"task_{secrets.token_hex(ID_DIGITS // 2)}{home}"


def home_of(bus_id: str) -> str:
    """Returns the end of the ids of a bus's tasks: another bus sees by it that a task is not its own."""
    return hashlib.sha256(bus_id.encode()).hexdigest()[:HOME_DIGITS]


def is_of_another(task_id: str, home: str) -> bool:
    """Tells whether an id is of a task that another bus began."""
    digits = task_id.removeprefix("task_")
    formed = task_id.startswith("task_") and len(digits) == ID_DIGITS + HOME_DIGITS and bool(home)
    return formed and not set(digits) - set("0123456789abcdef") and not digits.endswith(home)


class HomeAway(PeerLost, CallLost):
    """The bus at which a task was begun is not there to tell how it is; its result may come when that is back."""

    def __init__(self, text: str) -> None:
        CallLost.__init__(self, text, ran=False, retry_after=HOME_SECONDS)


def owner_of(user_id: str, account: str) -> str:
    """Returns the owner of the tasks of a call: its user, else its caller; never the same text for both.

    Args:
        account: who calls, see `Principal.account`: sources of two identities may have one name.
    """
    if not user_id:
        return f"source:{account}"
    return f"user:{user_id}" if _LIKE_A_SOURCE.match(user_id) else user_id


def shown_owner(owner: str) -> dict[str, str]:
    """Returns whose a task is: `user`, or the `identity` or `source` of a program that named no user."""
    if not owner.startswith("source:"):
        return {"user": owner.removeprefix("user:") if _LIKE_A_SOURCE.match(owner) else owner}
    account = owner.removeprefix("source:")
    identity = account.removeprefix("identity ")
    return {"source": account} if identity == account else {"identity": identity}


def envelope(task: Task) -> dict[str, str]:
    """Returns the answer in place of a result; with a note if the caller might not find the task again."""
    answer = {"status": task.status.shown, "task_id": task.task_id, "tool": task.tool, "message": still_running(task)}
    if _UNNAMED.fullmatch(task.owner):
        answer["note"] = LOST
    return answer


def still_running(task: Task) -> str:
    """Returns the text that tells a model what to do about a running task."""
    return (
        f"{task.tool} is still running in the background as {task.task_id}; there is no result yet. "
        f"Do not call {task.tool} again for this. Call await_task with task_id={task.task_id!r} to wait for the "
        "result, or check_task with the same task_id to look whether it is done. If you have no such tool, tell the "
        "user that it takes longer."
    )


def result_of(value: object) -> Result:
    """Returns the return value of some work as a result.

    Raises:
        TypeError: JSON cannot hold it; the message says where, and how to fix it.
    """
    if isinstance(value, Result):
        return value
    if isinstance(value, str):  # half surrogate pairs, which models do write, must not cost the whole text
        value = value.encode("utf-8", "backslashreplace").decode()
    return Result(output_json=dump_output(value))


def text_of(result: Result) -> str:
    """Returns a result as text: an output that is a text as it is, else the error, then the output as it came."""
    if result.asks:
        return result.text
    if result.error is None and result.output_json.startswith('"'):
        try:
            return str(result.output)
        except ValueError:  # it is not JSON: shown as it came
            pass
    error = "" if result.error is None else result.error.message or result.error.code.name
    output = result.output_json if result.output_json != "null" else ""
    return "\n".join(filter(None, (error, output))) or "null"


def error_text(error: BaseException) -> str:
    """Returns the class and the message of an exception."""
    try:
        message = str(error)
    except Exception:  # an exception whose own text raises
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
