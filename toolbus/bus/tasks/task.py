"""What a task is, and the words in which it is told: to the caller who gets an envelope instead of a result, and later.

Pure values. A task is a call, or any other work, that outlived its caller's patience: it goes on, and its result is
asked for by `task_id`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from toolbus.functions.reply import dump_output
from toolbus.tool import Progress, Result

_LIKE_A_SOURCE = re.compile(r"(?:user:)*source:")  # users may choose their own ids

MAX_ERROR = 4096  # characters of an exception's text that are kept: a model needs a sentence, not a dump

ENDED_WITH_PROCESS = (
    "the program that ran it ended before it was done, so there is no result; it may have run, so it was not tried "
    "again: find out whether it has done its work before you call the tool again"
)
CANCELLED = "cancelled: it was taken back before it was done, so there is no result"


class Status(StrEnum):
    """How far a task is. One that was cancelled has failed; its `error` says so."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it is now; a later state is another record.

    Attributes:
        task_id: names the task; not to be guessed.
        owner: who may ask for it where owners are checked: `owner_of`.
        started, ended: seconds since the epoch; `ended` is None while it runs.
        result: what the work came to; None while it runs, where it failed without one, and where it is lost.
        error: why it failed, or why a completed task has no result any more; empty otherwise.
        channel_id, platform: where it was asked for, as the caller said.
        progress: its last sign of life; None where there was none, or it has ended.
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

    def __repr__(self) -> str:
        return f"<Task {self.task_id} {self.tool} {self.status}>"  # neither results nor owners belong into logs

    @property
    def running(self) -> bool:
        """Whether there is something to wait for."""
        return self.status is Status.RUNNING

    @property
    def size(self) -> int:
        """What its result takes, in characters and bytes of content."""
        if self.result is None:
            return 0
        return len(self.result.output_json) + sum(block.ByteSize() for block in self.result.content)

    @property
    def text(self) -> str:
        """What a model is told: the output as it is, why there is none, or that it is not there yet."""
        if self.running:
            return still_running(self)
        output = "" if self.result is None else text_of(self.result)
        if not self.error:
            return output
        return self.error if output in ("", "null", self.error) else f"{self.error}\n{output}"

    def with_result(self, result: Result, now: float) -> Task:
        """Returns the task as it ended."""
        if not (result.is_error or result.error):
            return dataclasses.replace(self, status=Status.COMPLETED, ended=now, result=result, progress=None)
        told = result.error.message or result.error.code.name if result.error else text_of(result)
        failed = self.with_error(told, now)
        if result.output_json in ("", "null") and not result.content:
            return failed
        # Its sentence stands in `error`, once.
        return dataclasses.replace(failed, result=dataclasses.replace(result, error=None, is_error=True))

    def with_error(self, error: str, now: float) -> Task:
        """Returns the task as it failed."""
        return dataclasses.replace(self, status=Status.FAILED, ended=now, error=cut(error), progress=None)

    def without_result(self, why: str) -> Task:
        """Returns the task without its result, and with the reason for that."""
        lost = f"its result of {self.size} bytes is not there any more: {why}. Ask the tool for less"
        return dataclasses.replace(self, result=None, error=f"{self.error}; {lost}" if self.error else lost)

    def described(self, now: float) -> dict[str, Any]:
        """Returns what a task tool answers, without the result itself."""
        told: dict[str, Any] = {"task_id": self.task_id, "tool": self.tool, "status": self.status.value}
        told["seconds"] = round(max(0.0, (now if self.ended is None else self.ended) - self.started), 1)
        sign = self.progress
        if sign is not None:
            told["progress"] = {"done": sign.progress, "total": sign.total, "message": sign.message}
        if self.error:
            told["error"] = self.error
        return told


def new_id() -> str:
    """Returns an id that nobody can guess, short enough for a model to repeat."""
    return f"task_{secrets.token_hex(8)}"


def owner_of(user_id: str, source: str) -> str:
    """Returns who owns the tasks of a call: its user, else the program that asked; never the same for both."""
    if not user_id:
        return f"source:{source}"
    return f"user:{user_id}" if _LIKE_A_SOURCE.match(user_id) else user_id


def envelope(task: Task) -> dict[str, str]:
    """Returns what the caller gets instead of a result."""
    return {
        "status": task.status.value,
        "task_id": task.task_id,
        "tool": task.tool,
        "message": still_running(task),
    }


def still_running(task: Task) -> str:
    """Says to a model what to do about a task that is not done."""
    return (
        f"{task.tool} is still running in the background as {task.task_id}; there is no result yet. "
        f"Do not call {task.tool} again for this. Call await_task with task_id={task.task_id!r} to wait for the "
        "result, or check_task with the same task_id to look whether it is done. If you have no such tool, tell the "
        "user that it takes longer."
    )


def result_of(value: object) -> Result:
    """Returns what some work came to as a result.

    Raises:
        TypeError: JSON cannot hold it; says where and what to do.
    """
    if isinstance(value, Result):
        return value
    if isinstance(value, str):  # lone surrogates, which models do write, must not cost the whole text
        value = value.encode("utf-8", "backslashreplace").decode()
    return Result(output_json=dump_output(value))


def text_of(result: Result) -> str:
    """Returns a result as text: an output that is a text as it is, all else as `Result.text`."""
    if result.error is None and result.output_json.startswith('"'):
        try:
            return str(result.output)
        except ValueError:  # it is no JSON: shown as it came
            pass
    return result.text


def compact(value: object) -> str:
    """Returns JSON text of a value of our own."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def sentence(problem: BaseException) -> str:
    """Says what an exception says."""
    try:
        told = str(problem)
    except Exception:  # an exception whose own text raises
        told = ""
    return cut(f"{type(problem).__name__}: {told}" if told else type(problem).__name__)


def cut(text: str) -> str:
    """Returns an error's text in a length, and of characters, that can be kept."""
    clean = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_ERROR else clean[: MAX_ERROR - 1] + "…"
