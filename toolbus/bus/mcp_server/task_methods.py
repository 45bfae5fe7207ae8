"""Answers a call that continues in the background with a task, and the later requests about that task.

This is the extension `io.modelcontextprotocol/tasks` on top of the bus's tasks. Their ids are signed for the profile
and the user, so no client can guess or use the id of another client's task.
"""

from __future__ import annotations

from typing import Any

import msgspec

from toolbus.bus.mcp_server.calls import write_result
from toolbus.bus.mcp_server.mcp_request import McpRequest
from toolbus.bus.mcp_server.subscriptions import Json
from toolbus.bus.mcp_server.seal import BrokenSeal
from toolbus.bus.mcp_server.server import McpServer
from toolbus.bus.tasks import Status, Task, owner_of
from toolbus.errors import Code, Stage
from toolbus.mcp import tasks as wire
from toolbus.mcp.input_requests import InvalidInput
from toolbus.mcp.jsonrpc import McpCode, RpcError
from toolbus.text import quote
from toolbus.tool import CallError, Result

TASK = "task"  # the purpose of a signed id
_ENVELOPE = '{"status":"running","task_id":"'  # begins the output of a call that became a task
_STATUS = {
    Status.RUNNING: wire.WORKING,
    Status.INPUT_REQUIRED: wire.INPUT_REQUIRED,
    Status.COMPLETED: wire.COMPLETED,
    Status.FAILED: wire.FAILED,
    Status.CANCELLED: wire.CANCELLED,
}



# -- a call that becomes a task --------------------------------------------------------------------------------------


def task_of(server: McpServer, request: McpRequest, result: Result) -> Task | None:
    """Returns the task that a call became; None if the call has a result."""
    text = result.output_json
    if not text.startswith(_ENVELOPE):
        return None
    task_id = text[len(_ENVELOPE) :].partition('"')[0]
    return server.core.tasks.get_result(task_id, owner(server, request))


async def write_created(server: McpServer, request: McpRequest, task: Task) -> bytes:
    """Returns the answer of a call that became a task, after the task is persisted: clients may then read it."""
    await server.core.tasks.flush()
    return request.complete(_describe(server, request, task), kind="task")


def check_tasks(request: McpRequest) -> None:
    """Checks that the client supports tasks.

    Raises:
        RpcError: it did not declare the extension.
    """
    if not request.has_tasks:
        raise RpcError(
            McpCode.MISSING_CAPABILITY,
            "this needs a client that supports tasks: declare the extension io.modelcontextprotocol/tasks in "
            "clientCapabilities",
            {"requiredCapabilities": wire.REQUIRED_CAPABILITIES},
        )


# -- methods ---------------------------------------------------------------------------------------------------------


async def get_task(server: McpServer, request: McpRequest) -> bytes:
    """Shows a task, with its questions or its result."""
    return request.complete(describe_fully(server, request, _find(server, request)))


async def update_task(server: McpServer, request: McpRequest) -> bytes:
    """Answers questions of a task."""
    task = _find(server, request)
    answers = request.fields.get("inputResponses")
    if not isinstance(answers, dict):
        raise RpcError(McpCode.INVALID_PARAMS, "tasks/update needs params.inputResponses, an object")
    try:
        server.core.tasks.answer(task.task_id, answers)
    except InvalidInput as error:
        raise RpcError(McpCode.INVALID_PARAMS, str(error)) from None
    return request.complete({})


async def cancel_task(server: McpServer, request: McpRequest) -> bytes:
    """Cancels a task; one that has ended stays as it is."""
    server.core.tasks.cancel(_find(server, request).task_id)
    return request.complete({})


def owner(server: McpServer, request: McpRequest) -> str:
    """Returns the owner of the tasks that a client of a profile sees."""
    return owner_of(request.profile.user, server.calls.caller(request).principal.account)


def find_task(server: McpServer, request: McpRequest, signed: str) -> Task | None:
    """Returns the task of an id; None if this client has no such task."""
    owned_by = owner(server, request)
    try:
        task_id = server.sealer.verify(signed, TASK, request.profile.name, owned_by)
    except BrokenSeal:
        return None
    return server.core.tasks.get_result(task_id, owned_by)


def describe_fully(server: McpServer, request: McpRequest, task: Task) -> Json:
    """Returns a task with its questions, its result or its error."""
    described = _describe(server, request, task)
    if task.running:
        if task.questions:
            described["inputRequests"] = dict(task.questions)
    elif task.status is not Status.CANCELLED:
        try:
            described["result"] = msgspec.Raw(write_result(_result_of(task), request))
            described["status"] = wire.COMPLETED  # also for a failed tool: the model reads the failure
        except RpcError as error:
            described["status"] = wire.FAILED
            described["error"] = {"code": error.code, "message": error.message}
    return described


def _find(server: McpServer, request: McpRequest) -> Task:
    check_tasks(request)
    signed = request.text("taskId")
    task = find_task(server, request, signed)
    if task is None:
        raise RpcError(McpCode.INVALID_PARAMS, f"there is no task {quote(signed)}; a finished task expires later")
    return task


def _describe(server: McpServer, request: McpRequest, task: Task) -> Json:
    message = task.progress.message if task.progress is not None else ""
    return wire.write_task(
        server.sealer.sign(task.task_id, TASK, request.profile.name, task.owner),
        _STATUS[task.status],
        created=task.started,
        updated=task.updated,
        ttl_ms=max(1, int(server.core.tasks.limits.finished_seconds * 1000)),
        message=message or task.error,
    )


def _result_of(task: Task) -> Result:
    """Returns the result of the call of a finished task."""
    result = task.result or Result()
    if task.status is Status.COMPLETED and task.result is not None:
        return result
    code = Code[task.code] if task.code in Code.__members__ else Code.INTERNAL
    return Result(
        task.task_id,
        result.output_json,
        True,
        CallError(code, task.error, Stage.ACCEPTED, reason=task.reason),
        result.content,
    )
