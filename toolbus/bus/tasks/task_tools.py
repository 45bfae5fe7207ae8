"""The tools by which a model comes back to its tasks.

They are for everybody who is answered with an envelope, so a task is always looked for among those of the caller's
owner: a foreign one is answered like one that never was. The descriptions are for small models: what, when, when not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from toolbus.bus.tasks.task import Task, envelope, owner_of
from toolbus.bus.tasks.task_manager import TaskManager
from toolbus.functions.declaration import llm_tool
from toolbus.functions.reply import Err, Reply
from toolbus.functions.scope import ToolScope
from toolbus.tool import MAX_TIMEOUT_SECONDS

MAX_LISTED = 50  # a model that has more wants one of the newest
ANSWER_SECONDS = 1.0  # before the deadline of await_task's own call, so that its caller hears what it found
MAX_SHOWN = 80  # characters of an unknown id that its error repeats

TaskId = Annotated[str, "The task_id that the tool answered with, such as task_0123456789abcdef."]
Seconds = Annotated[float, "How many seconds to wait at most. More than 300 counts as 300."]
OneStatus = Annotated[Literal["", "running", "completed", "failed"], "Only tasks of this status; empty for all."]


class TaskTools:
    """Checking, awaiting, listing and cancelling the tasks of one TaskManager."""

    def __init__(self, tasks: TaskManager) -> None:
        self._tasks = tasks

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        return [self.check_task, self.await_task, self.list_tasks, self.cancel_task]

    @llm_tool(
        description="Looks at once whether a background task is done. Answers its status (running, completed or "
        "failed) and, when it is completed, its result. Use it when a tool answered with a task_id and you do "
        "something else meanwhile. Do not use it again and again to wait: call await_task for that.",
        read_only=True,
        allow_repeat=True,
    )
    async def check_task(self, task_id: TaskId, scope: ToolScope) -> Any:
        """Answers how a task is."""
        task = self._tasks.get_result(task_id, owner_of_scope(scope))
        return _unknown(task_id) if task is None else self._told(task)

    @llm_tool(
        description="Waits until a background task is done and answers its result. Use it when a tool answered with "
        "a task_id and you cannot go on without the result. When the time is over first, it answers an error and the "
        "task goes on: call await_task once more, or tell the user that it takes longer. Do not use it for a tool "
        "that answered with a result.",
        timeout=MAX_TIMEOUT_SECONDS,
        read_only=True,
        no_background=True,
        allow_repeat=True,
    )
    async def await_task(self, task_id: TaskId, scope: ToolScope, timeout: Seconds = MAX_TIMEOUT_SECONDS) -> Any:
        """Answers a task's result as soon as it is there."""
        patience = min(timeout, scope.time_left() - ANSWER_SECONDS)
        task = await self._tasks.await_result(task_id, patience, owner_of_scope(scope))
        if task is None:
            return _unknown(task_id)
        if task.running:
            words = f"{task.task_id} was not done in time. It goes on: call await_task once more, or do something else"
            return Reply(output=envelope(task), error=words)
        return self._told(task)

    @llm_tool(
        description="Lists your background tasks, newest first: task_id, tool, status, seconds. Use it when you "
        "do not know a task_id any more, or when the user asks what is still going on. It shows no results: call "
        "check_task for one.",
        read_only=True,
    )
    async def list_tasks(self, scope: ToolScope, status: OneStatus = "") -> Any:
        """Answers which tasks there are."""
        found = [task for task in self._tasks.list_tasks(owner_of_scope(scope)) if status in ("", task.status)]
        now = self._tasks.now()
        answer: dict[str, Any] = {"count": len(found), "tasks": [task.described(now) for task in found[:MAX_LISTED]]}
        if not found:
            answer["note"] = f"You have no {status} tasks." if status else "You have no background tasks."
        elif len(found) > MAX_LISTED:
            answer["note"] = f"Only the newest {MAX_LISTED} are shown."
        return answer

    @llm_tool(
        description="Ends a background task that is still running; its result is lost. Use it only when the user "
        "asks for that, or when nobody needs the result any more. It undoes nothing that the tool has already done.",
        idempotent=True,
    )
    async def cancel_task(self, task_id: TaskId, scope: ToolScope) -> Any:
        """Ends a task."""
        owner = owner_of_scope(scope)
        cancelled = self._tasks.cancel(task_id, owner)
        task = self._tasks.get_result(task_id, owner)
        if cancelled:
            return {"task_id": task_id, "cancelled": True}
        if task is None:
            return _unknown(task_id)
        note = f"It was not running any more: it is {task.status.value}."
        return {"task_id": task_id, "cancelled": False, "status": task.status.value, "note": note}

    def _told(self, task: Task) -> Any:
        """Returns what a task has come to; parts of its result that JSON cannot hold stand beside it."""
        answer = task.described(self._tasks.now())
        if task.running:
            return {**answer, "message": envelope(task)["message"]}
        if task.result is None:
            return answer
        try:
            answer["result"] = task.result.output
        except ValueError:  # it is no JSON: shown as it came
            answer["result"] = task.result.output_json
        return Reply(output=answer, content=task.result.content)


def owner_of_scope(scope: ToolScope) -> str:
    """Returns whose tasks the caller of a tool may see: those of the user it calls for, else of its own program."""
    return owner_of(scope.context.user_id, getattr(scope, "caller_source", ""))


def _unknown(task_id: str) -> Err:
    shown = task_id if len(task_id) <= MAX_SHOWN else task_id[: MAX_SHOWN - 1] + "…"
    return Err(
        f"you have no task {shown!r}: call list_tasks to see which there are. Finished ones are kept for a while"
    )
