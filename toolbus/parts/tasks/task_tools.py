"""Offers the tools by which a model checks, awaits, lists and cancels its background tasks.

Every caller that gets an envelope can use them, so a task is looked up among those of the caller's owner only: another
owner's task is answered like an unknown id. The descriptions are for small models: what, when, when not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from toolbus.bus.access.identity import principal_of
from toolbus.common.text import quote
from toolbus.functions.reply import Err, Reply
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.tasks.task import Task, envelope, owner_of
from toolbus.parts.tasks.task_manager import TaskManager
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS

MAX_LISTED = 50  # a model that has more wants one of the newest
ANSWER_SECONDS = 1.0  # before the deadline of await_task's own call, so that its caller still gets the answer

TaskId = Annotated[str, "The task_id that the tool answered with, such as task_0123456789abcdef."]
Seconds = Annotated[float, "How many seconds to wait at most. More than 300 counts as 300."]
OneStatus = Annotated[Literal["", "running", "completed", "failed"], "Only tasks of this status; empty for all."]


class TaskTools:
    """The tools for the tasks of one TaskManager."""

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
        """Answers the status of a task."""
        task = await self._tasks.find(task_id, owner_of_scope(scope))
        return self._unknown(task_id) if task is None else self._answer(task)

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
        """Answers a task's result as soon as it has ended."""
        timeout = min(timeout, scope.time_left() - ANSWER_SECONDS)
        task = await self._tasks.await_result(task_id, timeout, owner_of_scope(scope))
        if task is None:
            return self._unknown(task_id)
        if task.running:
            error = f"{task.task_id} was not done in time. It goes on: call await_task once more, or do something else"
            return Reply(output=envelope(task), error=error)
        return self._answer(task)

    @llm_tool(
        description="Lists your background tasks, newest first: task_id, tool, status, seconds. Use it when you "
        "do not know a task_id any more, or when the user asks what is still going on. It shows no results: call "
        "check_task for one.",
        read_only=True,
    )
    async def list_tasks(self, scope: ToolScope, status: OneStatus = "") -> Any:
        """Answers the list of tasks."""
        tasks = [task for task in self._tasks.list_tasks(owner_of_scope(scope)) if status in ("", task.status.shown)]
        now = self._tasks.now()
        answer: dict[str, Any] = {"count": len(tasks), "tasks": [task.described(now) for task in tasks[:MAX_LISTED]]}
        if not tasks:
            answer["note"] = f"You have no {status} tasks." if status else "You have no background tasks."
        elif len(tasks) > MAX_LISTED:
            answer["note"] = f"Only the newest {MAX_LISTED} are shown."
        return answer

    @llm_tool(
        description="Ends a background task that is still running; its result is lost. Use it only when the user "
        "asks for that, or when the result is not needed any more. It undoes nothing that the tool has already done.",
        idempotent=True,
    )
    async def cancel_task(self, task_id: TaskId, scope: ToolScope) -> Any:
        """Ends a task."""
        owner = owner_of_scope(scope)
        cancelled = self._tasks.cancel(task_id, owner)
        if cancelled:
            return {"task_id": task_id, "cancelled": True}
        task = await self._tasks.find(task_id, owner)
        if task is None:
            return self._unknown(task_id)
        note = f"It was not running any more: it is {task.status.shown}."
        return {"task_id": task_id, "cancelled": False, "status": task.status.shown, "note": note}

    def _unknown(self, task_id: str) -> Err:
        return Err(
            f"you have no task {quote(task_id)}: call list_tasks to see your tasks. A finished task expires later"
        )

    def _answer(self, task: Task) -> Any:
        """Returns a task with its result; content blocks, which JSON cannot hold, stand beside the output."""
        answer = task.described(self._tasks.now())
        if task.running:
            return {**answer, "message": envelope(task)["message"]}
        if task.result is None:
            return answer
        try:
            answer["result"] = task.result.output
        except ValueError:  # it is not JSON: shown as it came
            answer["result"] = task.result.output_json
        return Reply(output=answer, content=task.result.content)


def owner_of_scope(scope: ToolScope) -> str:
    """Returns the owner whose tasks the caller of a tool may see: its user, else its identity or source."""
    return owner_of(scope.context.user_id, principal_of(scope).account)
