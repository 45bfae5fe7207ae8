"""Serves background tasks over HTTP: list, show, await, cancel, redirect, and a stream of those that end.

A task belongs to the user that the request names, else to the programs that call over HTTP without a user. A request
for another owner's task gets 404, as for a task that never existed.

A result may have megabytes: it is written on a thread, with its output as it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.catalog.policy import MAX_USER
from toolbus.bus.gateway.call_response import describe_raw_result
from toolbus.bus.gateway.contract_models import Invoked, Problem, Text, UserId, check_callback_url
from toolbus.bus.gateway.event_stream import RETRY, EventStream, disconnected_response, event, unless_disconnected
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of, principal_of
from toolbus.bus.gateway.json_response import json_bytes_response, json_response, write_json
from toolbus.bus.gateway.tool_routes import REFUSALS, refuse_own_address
from toolbus.common.text import quote
from toolbus.errors import NotOffered
from toolbus.parts.tasks import Task, TaskManager, owner_of
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS

AWAIT_SECONDS = 30.0  # less than the timeouts of common clients

TaskId = Annotated[str, Path(description="As the call was answered with it.", examples=["task_0123456789abcdef"])]
OneStatus = Annotated[Literal["", "running", "completed", "failed"], Query(description="Empty for all.")]
NO_TASK: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "That user has no such task."},
    503: {"model": Problem, "description": "It was begun at another bus, which is away."},
}


# -- bodies ---------------------------------------------------------------------------------------------------------


class TaskProgress(BaseModel):
    """The last progress."""

    done: float
    total: float
    message: str


class TaskLine(BaseModel):
    """The state of a task."""

    task_id: str
    tool: str
    status: Annotated[str, Field(examples=["running", "completed", "failed"])]
    seconds: Annotated[float, Field(description="How long it has run, or ran.")]
    started: Annotated[float, Field(description="Seconds since the epoch.")]
    ended: Annotated[float | None, Field(description="Null while it runs.")]
    progress: Annotated[TaskProgress | None, Field(description="Null where the tool reported none, or has ended.")]
    error: Annotated[str | None, Field(description="Why it failed, or why its result is lost.")]


class TaskLines(BaseModel):
    """A user's tasks: those that run, then the finished ones, each newest first."""

    ok: bool
    count: int
    tasks: list[TaskLine]


class TaskShown(TaskLine):
    """A task with its result."""

    result: Annotated[Invoked | None, Field(description="As an invoke answers it; null where there is none.")]


class TaskCancelled(BaseModel):
    """The result of a cancel; a task that had ended is not an error."""

    ok: bool
    task_id: str
    cancelled: bool
    status: str


class RedirectBody(BaseModel):
    """Where a task's result is posted when it ends. An unknown field is refused, as in an invoke."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"url": "http://127.0.0.1:9876/done", "user_id": "ann"}]}
    )

    url: Annotated[
        Annotated[str, Field(min_length=1), AfterValidator(check_callback_url)] | None,
        Field(description="http or https on 127.0.0.0/8, ::1 or localhost; null: nowhere any more."),
    ]
    user_id: Annotated[Text, Field(max_length=MAX_USER, description="Whose task it is.")] = ""


class TaskRedirected(BaseModel):
    """Where a task's result goes."""

    ok: bool
    task_id: str
    url: Annotated[str | None, Field(description="As it may be shown: without its password.")]


# -- endpoints ------------------------------------------------------------------------------------------------------


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/tasks", tags=["tasks"], responses=REFUSALS)
    for add in (_lists, _one, _changes):
        add(routes)
    return routes


def _lists(routes: APIRouter) -> None:
    @routes.get("", responses={200: {"model": TaskLines}})
    async def list_tasks(request: Request, user_id: UserId = "", status: OneStatus = "") -> Response:
        """Lists a user's tasks, without their results."""
        parts = parts_of(request)
        owner = task_owner(request, user_id)
        tasks = [task for task in tasks_of(parts).list_tasks(owner) if status in ("", task.status.shown)]
        now = tasks_of(parts).now()
        return json_response({"ok": True, "count": len(tasks), "tasks": [_describe(task, now) for task in tasks]})

    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def events(request: Request, user_id: UserId = "") -> Response:
        """Streams a user's tasks as they end, as events `task`, without their results.

        What ended before is listed. The stream ends with the bus.
        """
        parts = parts_of(request)
        return EventStream(_follow(parts, task_owner(request, user_id)), parts.core.program.timings.ping_seconds)


def _one(routes: APIRouter) -> None:
    @routes.get("/{task_id}", responses={200: {"model": TaskShown}, **NO_TASK})
    async def get_task(task_id: TaskId, request: Request, user_id: UserId = "") -> Response:
        """Shows the state of a task, with its result once it has ended."""
        parts = parts_of(request)
        task = await tasks_of(parts).find(task_id, task_owner(request, user_id))
        return await _task_response(parts, task_id, task)

    @routes.get("/{task_id}/await", responses={200: {"model": TaskShown}, **NO_TASK})
    async def await_task(
        task_id: TaskId,
        request: Request,
        timeout: Annotated[  # the contract's word, not a way to cancel
            float, Query(ge=0, le=MAX_TIMEOUT_SECONDS, description="How many seconds to wait at most.")
        ] = AWAIT_SECONDS,
        user_id: UserId = "",
    ) -> Response:
        """Waits until a task has ended, and shows it; one that still runs then is shown so, and goes on."""
        parts = parts_of(request)
        waiting: Awaitable[Response] = _await_task(parts, task_id, timeout, task_owner(request, user_id))
        return await unless_disconnected(request, waiting) or disconnected_response()


def _changes(routes: APIRouter) -> None:
    @routes.delete("/{task_id}", responses={200: {"model": TaskCancelled}, **NO_TASK})
    async def cancel_task(task_id: TaskId, request: Request, user_id: UserId = "") -> Response:
        """Ends a task that is still running; what it has done stays done."""
        parts = parts_of(request)
        owner = task_owner(request, user_id)
        cancelled = tasks_of(parts).cancel(task_id, owner)
        task = await tasks_of(parts).find(task_id, owner)
        if task is None:
            return _not_found(task_id)
        return json_response({"ok": True, "task_id": task_id, "cancelled": cancelled, "status": task.status.shown})

    @routes.post("/{task_id}/redirect", responses={200: {"model": TaskRedirected}, **NO_TASK})
    async def redirect_task(task_id: TaskId, body: RedirectBody, request: Request) -> Response:
        """Has a task's result posted to a URL of this machine when it ends, or at once where it has ended.

        The body is `task_id`, `tool`, `status`, `text` and `truncated`; the text is cut at 9,000 characters.
        """
        parts = parts_of(request)
        shown = None
        if body.url is not None:
            target = parse_callback_url(body.url)
            refuse_own_address(parts, "url", target)
            shown = target.shown
        if not tasks_of(parts).set_output_redirect(task_id, body.url, task_owner(request, body.user_id)):
            return _not_found(task_id)
        return json_response({"ok": True, "task_id": task_id, "url": shown})


def tasks_of(parts: GatewayParts) -> TaskManager:
    """Returns the tasks of the bus that a request came to.

    Raises:
        NotOffered: the bus has none.
    """
    tasks = parts.core.rooms.provider(TaskManager)
    if tasks is None:  # another bus of this process has them
        raise NotOffered("this bus has no background tasks: it was made without TasksRoom")
    return tasks


def task_owner(request: Request, user_id: str) -> str:
    """Returns the owner of a user's tasks; with "" that of clients that name no user over HTTP.

    Raises:
        NotPermitted: the identity may not act for that user.
    """
    return owner_of(user_id, principal_of(request, user_id).account)


async def _follow(parts: GatewayParts, owner: str) -> AsyncGenerator[bytes]:
    events = tasks_of(parts).events(owner, results=False)  # a slow client would hold the results in memory
    try:
        yield RETRY  # a client that has read this misses no task from now on
        async for task in events:
            yield event("task", _describe(task, tasks_of(parts).now()))
    finally:
        events.close()


async def _await_task(parts: GatewayParts, task_id: str, seconds: float, owner: str) -> Response:
    return await _task_response(parts, task_id, await tasks_of(parts).await_result(task_id, seconds, owner))


async def _task_response(parts: GatewayParts, task_id: str, task: Task | None) -> Response:
    if task is None:
        return _not_found(task_id)
    return json_bytes_response(await asyncio.to_thread(_task_body, task, tasks_of(parts).now()))


def _task_body(task: Task, now: float) -> bytes:
    result = None if task.result is None else describe_raw_result(task.result)
    return write_json({**_describe(task, now), "result": result})


def _describe(task: Task, now: float) -> dict[str, Any]:
    moments = {"started": round(task.started, 6), "ended": None if task.ended is None else round(task.ended, 6)}
    return {"progress": None, "error": None, **task.described(now), **moments}


def _not_found(task_id: str) -> Response:
    detail = (
        f"there is no task {quote(task_id)} of this user: GET /api/tasks?user_id=… lists the user's tasks. A finished "
        "task expires after a while"
    )
    return json_response({"detail": detail}, 404)
