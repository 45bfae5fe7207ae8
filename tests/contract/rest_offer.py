"""A legacy plugin: an HTTP server of its own, whose tools are registered over the bus's REST API.

It is written as such plugins are: aiohttp's server, a path for each tool, `json`, and what an author does by hand for a
tool that says no, one that raises, and a caller that hangs up.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from aiohttp import web

from tests.contract.offer import SOURCE, Offer, on
from tests.contract.works import Refuses, Scope, Shows, Work, drop
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.sdk import CallContext
from toolbus.sdk.shared_loop import SharedLoop

BODY = ("name", "arguments", "call_id", "raw_arguments")  # REST-40; nothing else of the call is sent
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # as the common frameworks do


class RestOffer(Offer):
    """`aiohttp.web` on a loop of its own; calls arrive as POSTs, a caller that hangs up cancels."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._thread = SharedLoop("contract-rest")
        self._thread.loop.set_default_executor(ThreadPoolExecutor(32))  # for works that are plain functions
        self._runner: web.AppRunner | None = None  # None before the first tool
        self._url = ""
        assert bus.http_address is not None, "this way needs a bus that serves HTTP"
        base = f"http://{bus.http_address}/api/tools"
        self._http = httpx.AsyncClient(base_url=base, trust_env=False, verify=False, timeout=WAIT_SECONDS)

    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        if self._runner is None:
            self._thread.start()
            await on(self._thread, self._serve())
        for name in set(removed) - self.works.keys():
            await self._ask("/unregister", name=name)
        for work in added:
            await self._ask(
                "/register",
                name=work.name,
                description=work.description,
                parameters=work.parameters,
                callback_url=f"{self._url}/{work.name}",
                source=SOURCE,
                timeout_seconds=work.timeout,
            )

    async def _ask(self, path: str, **body: Any) -> None:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["ok"], answer.text

    async def close(self) -> None:
        for name in self.works:
            await self._ask("/unregister", name=name)
        await self._http.aclose()
        if self._runner is not None:
            await on(self._thread, self._runner.cleanup())
            await asyncio.to_thread(self._thread.stop)

    # -- on the plugin's own thread ----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        app = web.Application(logger=logging.getLogger("contract.rest"), client_max_size=1 << 22)
        app.router.add_post("/{name}", self._run)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        host, port = self._runner.addresses[0]
        self._url = f"http://{host}:{port}"

    async def _run(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert tuple(body) == BODY
        work = self.works[body["name"]]  # a call may come after its tool was taken away, as with any plugin
        scope = Scope(CallContext(), _no_progress, threading.Event())
        try:
            answer = _envelope(await _returned(work.run, body["arguments"], scope))
        except Exception as problem:  # the traceback is for the plugin's own log
            logging.getLogger("contract.rest").info("%s failed", work.name, exc_info=problem)
            answer = {"output": None, "is_error": True, "error": f"{type(problem).__name__}: {problem}"}
        return web.json_response(answer, dumps=_dumps)


async def _returned(run: Callable[..., Any], arguments: dict[str, Any], scope: Scope) -> Any:
    if inspect.iscoroutinefunction(run):
        return await run(arguments, scope)
    running = asyncio.ensure_future(asyncio.to_thread(run, arguments, scope))
    try:
        returned = await asyncio.shield(running)
        return await returned if inspect.isawaitable(returned) else returned
    except asyncio.CancelledError:
        scope.cancelled.set()
        running.add_done_callback(lambda ended: drop(ended.result()))
        raise


def _envelope(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Refuses):
        return {"output": returned.output, "is_error": True, "error": returned.error}
    return {"output": returned.output if isinstance(returned, Shows) else returned, "is_error": False}


def _no_progress(progress: float = 0.0, /, *, total: float = 0.0, message: str = "", chunk: str = "") -> None:
    """There is no way to report anything."""
