"""Answers ``subscriptions/listen``: notifies a modern client of changes until it disconnects.

Lists and resources come from `Subscriptions`; the states of tasks are added here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from toolbus.bus.mcp_server import task_methods
from toolbus.bus.mcp_server.mcp_request import McpRequest
from toolbus.bus.mcp_server.server import McpServer
from toolbus.bus.mcp_server.subscriptions import LISTS, MAX_WATCHED, Json, Listener, Notify
from toolbus.bus.tasks import Task
from toolbus.errors import LimitExceeded
from toolbus.mcp.eras import META_SUBSCRIPTION
from toolbus.mcp.jsonrpc import McpCode, RpcError


async def listen(server: McpServer, request: McpRequest) -> bytes:
    """Notifies a client of changes, until it disconnects or the bus stops."""
    if not request.channel.takes_messages:
        raise RpcError(
            McpCode.INVALID_REQUEST, "subscriptions/listen needs a stream: send Accept: text/event-stream as well"
        )
    kinds = request.fields.get("notifications")
    if not isinstance(kinds, dict):
        raise RpcError(McpCode.INVALID_PARAMS, "subscriptions/listen needs params.notifications, an object")
    lists = {name: kind for name, kind in LISTS.items() if kinds.get(name) is True}
    uris, task_ids = _texts(kinds, "resourceSubscriptions"), _texts(kinds, "taskIds")
    meta = {META_SUBSCRIPTION: request.id}

    def notify(method: str, params: Json) -> None:
        request.notify(method, {**params, "_meta": meta})

    listener = Listener(request.profile, request.identity, notify, modern=True)
    ends: list[Callable[[], object]] = [lambda: server.subscriptions.remove(listener)]
    try:
        server.subscriptions.add(listener, lists)
        honored: Json = dict.fromkeys(lists, True)
        # The acknowledgement goes first: notifications of changes wait for the next turn of the loop.
        watched = [uri for uri in uris if _watch(server, request, uri, notify, ends)]
        if uris:
            honored["resourceSubscriptions"] = watched
        if task_ids:
            honored["taskIds"] = _follow_tasks(server, request, task_ids, notify, ends)
        notify("notifications/subscriptions/acknowledged", {"notifications": honored})
        await listener.ended.wait()
    except LimitExceeded as error:
        raise RpcError(McpCode.INTERNAL, str(error)) from None
    finally:
        for end in ends:
            end()
    return request.complete({"_meta": meta})


def _watch(server: McpServer, request: McpRequest, uri: str, notify: Notify, ends: list[Callable[[], object]]) -> bool:
    def updated(uri: str) -> None:
        notify("notifications/resources/updated", {"uri": uri})

    end = server.subscriptions.watch_resource(request.profile, request.identity, uri, updated)
    if end is not None:
        ends.append(end)
    return end is not None


def _follow_tasks(
    server: McpServer, request: McpRequest, signed: list[str], notify: Notify, ends: list[Callable[[], object]]
) -> list[str]:
    """Notifies of each change of some tasks. Returns the ids of those that exist."""
    task_methods.check_tasks(request)
    tasks = {id: task for id in signed if (task := task_methods.find_task(server, request, id)) is not None}
    followed = {task.task_id for task in tasks.values()}
    loop = asyncio.get_running_loop()

    def report(task: Task) -> None:
        notify("notifications/tasks", task_methods.describe_fully(server, request, task))

    def changed(task: Task) -> None:  # on any thread
        if task.task_id in followed:
            loop.call_soon_threadsafe(report, task)

    ends.append(server.core.tasks.follow(changed, task_methods.owner(server, request)))
    for task in tasks.values():  # the current state, since earlier changes were not reported
        loop.call_soon(report, task)
    return list(tasks)


def _texts(kinds: Mapping[str, Any], name: str) -> list[str]:
    texts = kinds.get(name) or []
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts) or len(texts) > MAX_WATCHED:
        raise RpcError(McpCode.INVALID_PARAMS, f"notifications.{name} must be a list of at most {MAX_WATCHED} strings")
    return list(dict.fromkeys(texts))
