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

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.gateway.call_response import describe_raw_result
from toolbus.bus.gateway.contract_models import Problem
from toolbus.bus.gateway.event_stream import RETRY, EventStream, disconnected_response, event, unless_disconnected
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of, task_owner
from toolbus.bus.gateway.host_models import RedirectBody, TaskCancelled, TaskLines, TaskRedirected, TaskShown, UserId
from toolbus.bus.gateway.json_response import json_bytes_response, json_response, write_json
from toolbus.bus.gateway.tool_routes import REFUSALS, refuse_own_address
from toolbus.bus.tasks import Task
from toolbus.common.text import quote
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS

AWAIT_SECONDS = 30.0  # less than the timeouts of common clients

TaskId = Annotated[str, Path(description="As the call was answered with it.", examples=["task_0123456789abcdef"])]
OneStatus = Annotated[Literal["", "running", "completed", "failed"], Query(description="Empty for all.")]
NO_TASK: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "That user has no such task."}}


def router() -> APIRouter:
    """Returns the endpoints."""
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
        tasks = [task for task in parts.core.tasks.list_tasks(owner) if status in ("", task.status.shown)]
        now = parts.core.tasks.now()
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
        return EventStream(_follow(parts, task_owner(request, user_id)), parts.core.timings.ping_seconds)


def _one(routes: APIRouter) -> None:
    @routes.get("/{task_id}", responses={200: {"model": TaskShown}, **NO_TASK})
    async def get_task(task_id: TaskId, request: Request, user_id: UserId = "") -> Response:
        """Shows the state of a task, with its result once it has ended."""
        parts = parts_of(request)
        task = parts.core.tasks.get_result(task_id, task_owner(request, user_id))
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
        cancelled = parts.core.tasks.cancel(task_id, owner)
        task = parts.core.tasks.get_result(task_id, owner)
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
        if not parts.core.tasks.set_output_redirect(task_id, body.url, task_owner(request, body.user_id)):
            return _not_found(task_id)
        return json_response({"ok": True, "task_id": task_id, "url": shown})


async def _follow(parts: GatewayParts, owner: str) -> AsyncGenerator[bytes]:
    events = parts.core.tasks.events(owner, results=False)  # a slow client would hold the results in memory
    try:
        yield RETRY  # a client that has read this misses no task from now on
        async for task in events:
            yield event("task", _describe(task, parts.core.tasks.now()))
    finally:
        events.close()


async def _await_task(parts: GatewayParts, task_id: str, seconds: float, owner: str) -> Response:
    return await _task_response(parts, task_id, await parts.core.tasks.await_result(task_id, seconds, owner))


async def _task_response(parts: GatewayParts, task_id: str, task: Task | None) -> Response:
    if task is None:
        return _not_found(task_id)
    return json_bytes_response(await asyncio.to_thread(_task_body, task, parts.core.tasks.now()))


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
