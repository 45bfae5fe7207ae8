"""Tasks over HTTP: calls that outlived their caller's patience, asked for later, awaited, cancelled, sent on.

Whose task it is is always looked at: that of the user who is named, else that of programs which name none over HTTP. A
foreign task is answered like one that never was.

A result may have megabytes: it is written on a thread, with its output as it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.gateway import callback_messages
from toolbus.bus.gateway.call_answer import as_it_came
from toolbus.bus.gateway.call_routes import GONE, unless_gone
from toolbus.bus.gateway.contract_models import Problem
from toolbus.bus.gateway.event_stream import EventStream, event
from toolbus.bus.gateway.host_models import RedirectBody, TaskCancelled, TaskLines, TaskRedirected, TaskShown, UserId
from toolbus.bus.gateway.parts import GatewayParts
from toolbus.bus.gateway.tool_routes import REFUSALS, not_to_us
from toolbus.bus.tasks import Task
from toolbus.tool import MAX_TIMEOUT_SECONDS

AWAIT_SECONDS = 30.0  # below what common clients wait for an answer
MAX_ECHO = 80  # characters of an unknown id that its error repeats

TaskId = Annotated[str, Path(description="As the call was answered with it.", examples=["task_0123456789abcdef"])]
OneStatus = Annotated[Literal["", "running", "completed", "failed"], Query(description="Empty for all.")]
NO_TASK: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "That user has no such task."}}


def router(parts: GatewayParts) -> APIRouter:
    """Returns the endpoints over one bus."""
    routes = APIRouter(prefix="/api/tasks", tags=["tasks"], responses=REFUSALS)
    for add in (_lists, _one, _changes):
        add(routes, parts)
    return routes


def _lists(routes: APIRouter, parts: GatewayParts) -> None:
    @routes.get("", responses={200: {"model": TaskLines}})
    async def list_tasks(user_id: UserId = "", status: OneStatus = "") -> Response:
        """Lists a user's tasks, without their results."""
        tasks = [task for task in parts.core.tasks.list_tasks(parts.task_owner(user_id)) if status in ("", task.status)]
        now = parts.core.tasks.now()
        return _json({"ok": True, "count": len(tasks), "tasks": [_line(task, now) for task in tasks]})

    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def events(user_id: UserId = "") -> Response:
        """Streams a user's tasks as they end, as events `task`, without their results.

        What ended before is listed. The stream ends with the bus.
        """
        return EventStream(_ended(parts, parts.task_owner(user_id)))


def _one(routes: APIRouter, parts: GatewayParts) -> None:
    @routes.get("/{task_id}", responses={200: {"model": TaskShown}, **NO_TASK})
    async def get_task(task_id: TaskId, user_id: UserId = "") -> Response:
        """Shows how a task is, with its result once it is there."""
        return await _shown(parts, task_id, parts.core.tasks.get_result(task_id, parts.task_owner(user_id)))

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
        waiting: Awaitable[Response] = _awaited(parts, task_id, timeout, parts.task_owner(user_id))
        answer = await unless_gone(request, waiting)
        return Response(status_code=GONE) if answer is None else answer


def _changes(routes: APIRouter, parts: GatewayParts) -> None:
    @routes.delete("/{task_id}", responses={200: {"model": TaskCancelled}, **NO_TASK})
    async def cancel_task(task_id: TaskId, user_id: UserId = "") -> Response:
        """Ends a task that is still running; what it has done stays done."""
        owner = parts.task_owner(user_id)
        cancelled = parts.core.tasks.cancel(task_id, owner)
        task = parts.core.tasks.get_result(task_id, owner)
        if task is None:
            return _unknown(task_id)
        return _json({"ok": True, "task_id": task_id, "cancelled": cancelled, "status": task.status})

    @routes.post("/{task_id}/redirect", responses={200: {"model": TaskRedirected}, **NO_TASK})
    async def redirect_task(task_id: TaskId, body: RedirectBody) -> Response:
        """Has a task's result posted to a URL of this machine when it ends, or at once where it has ended.

        The body is `task_id`, `tool`, `status`, `text` and `truncated`; the text is cut at 9,000 characters.
        """
        shown = None
        if body.url is not None:
            target = parse_callback_url(body.url)
            not_to_us(parts, "url", target)
            shown = target.shown
        if not parts.core.tasks.set_output_redirect(task_id, body.url, parts.task_owner(body.user_id)):
            return _unknown(task_id)
        return _json({"ok": True, "task_id": task_id, "url": shown})


async def _ended(parts: GatewayParts, owner: str) -> AsyncGenerator[bytes]:
    ended = parts.core.tasks.events(owner, results=False)  # whoever reads slowly would hold them in memory
    try:
        yield b"retry: 1000\n\n"  # whoever has read this hears of every task from now on
        async for task in ended:
            yield event("task", _line(task, parts.core.tasks.now()))
    finally:
        ended.close()


async def _awaited(parts: GatewayParts, task_id: str, seconds: float, owner: str) -> Response:
    return await _shown(parts, task_id, await parts.core.tasks.await_result(task_id, seconds, owner))


async def _shown(parts: GatewayParts, task_id: str, task: Task | None) -> Response:
    if task is None:
        return _unknown(task_id)
    body = await asyncio.to_thread(_written, task, parts.core.tasks.now())
    return Response(body, media_type="application/json")


def _written(task: Task, now: float) -> bytes:
    result = None if task.result is None else as_it_came(task.result)
    return callback_messages.write_json({**_line(task, now), "result": result})


def _line(task: Task, now: float) -> dict[str, Any]:
    moments = {"started": round(task.started, 6), "ended": None if task.ended is None else round(task.ended, 6)}
    return {"progress": None, "error": None, **task.described(now), **moments}


def _unknown(task_id: str) -> Response:
    shown = task_id if len(task_id) <= MAX_ECHO else f"{task_id[: MAX_ECHO - 1]}…"
    detail = (
        f"there is no task {shown!r} of this user: GET /api/tasks?user_id=… lists theirs. Finished ones are kept for "
        "a while"
    )
    return JSONResponse({"detail": detail}, status_code=404)


def _json(content: dict[str, Any]) -> Response:
    return Response(callback_messages.write_json(content), media_type="application/json")
