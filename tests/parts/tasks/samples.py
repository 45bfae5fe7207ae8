"""Tasks, scopes, a clock and a receiver of posts, for the tests of this room."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from toolbus.functions.call_context import CallContext
from toolbus.functions.scope import ToolScope
from toolbus.parts.tasks.task import Task
from toolbus.protocol.tool import Result


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def running(task_id: str = "task_1", owner: str = "ann", started: float = 0.0) -> Task:
    return Task(task_id, "report", owner, started)


def finished(task_id: str = "task_1", owner: str = "ann", ended: float = 1.0, output_json: str = "1") -> Task:
    return running(task_id, owner).with_result(Result(output_json=output_json), ended)


def scope_of(user_id: str) -> ToolScope:
    return ToolScope(context=CallContext(user_id=user_id))


class Receiver:
    """A web server that takes posts, and answers with the statuses that it was given, then 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.posts: list[tuple[dict[str, str], Any]] = []  # headers and bodies
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Receiver:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/done"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.posts.append((dict(request.headers), await request.json()))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204)
