"""A small main server that keeps the registration half of the contract, in memory, on a real socket.

It forgets everything when it is restarted, and misbehaves in every way that a test asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = web.StreamResponse | dict[str, Any]
Misbehaviour = Callable[[web.Request, dict[str, Any]], Awaitable[Answer | None]]


class MainServer:
    """Use it as an async context manager; its URL stays the same over restarts."""

    def __init__(self, *roles: str) -> None:
        self.roles = list(roles or ("default",))
        self.tools: dict[str, dict[str, dict[str, Any]]] = {}  # role → name → the body that registered it
        self.requests: list[tuple[str, dict[str, Any]]] = []  # (verb, body) in the order in which they came
        self.misbehave: dict[str, Misbehaviour] = {}  # by verb; None from it means: as usual
        self.port = 0
        self._changed = asyncio.Event()
        self._released = asyncio.Event()  # set when requests that hang may go on
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> MainServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Starts empty, on the port it had before."""
        self.tools = {role: {} for role in self.roles}
        self._released = asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.get("/api/tools", self._serve("list", self._list)),
                web.post("/api/tools/register", self._serve("register", self._register)),
                web.post("/api/tools/unregister", self._serve("unregister", self._unregister)),
                web.post("/api/tools/clear", self._serve("clear", self._clear)),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self._released.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    # -- what tests ask

    def counted(self, verb: str) -> int:
        return sum(1 for seen, _ in self.requests if seen == verb)

    def bodies(self, verb: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.requests if seen == verb]

    def names(self, role: str = "default") -> list[str]:
        return list(self.tools.get(role, {}))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds after some request; fails after 5 s."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_asked(self, verb: str, times: int) -> None:
        """Waits for so many more requests."""
        before = self.counted(verb)
        await self.until(lambda: self.counted(verb) >= before + times)

    # -- misbehaviours

    async def hang(self, _: web.Request, __: dict[str, Any]) -> Answer | None:
        self._note()
        await self._released.wait()
        return None

    def release(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    @staticmethod
    def answering(status: int, body: object) -> Misbehaviour:
        async def answer(_: web.Request, __: dict[str, Any]) -> Answer:
            text = body if isinstance(body, str) else json.dumps(body)
            return web.Response(status=status, text=text, content_type="application/json")

        return answer

    @staticmethod
    async def endless(request: web.Request, _: dict[str, Any]) -> Answer:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"[" * 65536)
        except ConnectionError:
            return response

    # -- the contract

    def _note(self) -> None:
        self._changed.set()

    def _serve(
        self, verb: str, act: Callable[[dict[str, Any]], Answer]
    ) -> Callable[..., Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json() if request.method == "POST" else dict(request.query)
            self.requests.append((verb, body))
            try:
                misbehave = self.misbehave.get(verb)
                answer = await misbehave(request, body) if misbehave is not None else None
                answer = act(body) if answer is None else answer
                return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
            finally:
                self._note()

        return handle

    def _for(self, body: dict[str, Any]) -> list[str]:
        role = body.get("role")
        if role and role not in self.roles:
            raise web.HTTPNotFound(
                text=json.dumps({"detail": f"unknown role: {role}"}), content_type="application/json"
            )
        return [role] if role else self.roles

    def _list(self, body: dict[str, Any]) -> Answer:
        shown = {
            role: [
                {key: tool.get(key) for key in ("name", "description", "source", "callback_url")} | {"is_remote": True}
                for tool in self.tools.get(role, {}).values()
            ]
            for role in self._for(body)
        }
        return {"ok": True, "tools_by_role": shown}

    def _register(self, body: dict[str, Any]) -> Answer:
        roles = self._for(body)
        for role in roles:
            self.tools.setdefault(role, {})[body["name"]] = body
        answer = {"ok": bool(roles), "registered": body["name"], "affected_roles": roles, "failed_roles": []}
        return answer if roles else answer | {"error": "no role accepted the registration"}

    def _unregister(self, body: dict[str, Any]) -> Answer:
        had = [role for role in self._for(body) if self.tools[role].pop(body["name"], None)]
        return {"ok": True, "removed": bool(had), "name": body["name"], "affected_roles": had, "failed_roles": []}

    def _clear(self, body: dict[str, Any]) -> Answer:
        removed = 0
        for role in self._for(body):
            left = {name: tool for name, tool in self.tools[role].items() if tool["source"] != body["source"]}
            removed += len(self.tools[role]) - len(left)
            self.tools[role] = left
        return {"ok": True, "removed": removed, "source": body["source"], "affected_roles": [], "failed_roles": []}
