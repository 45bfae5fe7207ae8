"""Follows the catalog from outside: every change as an event, and all of it in each way of listing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from lab.chaos.scene import Scene
from toolbus.errors import ToolBusError
from toolbus.sdk import Host
from toolbus.sdk.listing import CatalogChange

AWAY = "away"
LIST_SECONDS = 10.0  # for one answer, on any machine


@dataclass(frozen=True, slots=True)
class Move:
    """A tool was seen to come, to go, or to become suspect."""

    at: float
    tool: str
    state: str  # live, suspect, or AWAY


class Watcher:
    """A host that calls nothing and follows the catalog.

    Attributes:
        moves: what was seen, oldest first.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._host = Host(scene.grpc, source="watcher")
        self._states: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None  # None until started
        self.moves: list[Move] = []

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._host.close()

    async def _follow(self) -> None:
        async for change in self._host.watch():
            self._take(change, time.monotonic())

    def _take(self, change: CatalogChange, now: float) -> None:
        if change.full:
            there = {listed.name for listed in change.added}
            for name in self._states.keys() - there:
                self._note(now, name, AWAY)
        for removed in change.removed:
            self._note(now, removed.name, AWAY)
        for listed in (*change.added, *change.changed):
            self._note(now, listed.name, listed.state)

    def _note(self, now: float, name: str, state: str) -> None:
        if self._states.get(name, AWAY) != state:
            self.moves.append(Move(now, name, state))
        self._states[name] = state

    async def views(self) -> dict[str, set[str]]:
        """Returns the live tools by each way of listing; a way that fails shows nothing."""
        found = {"events": {name for name, state in self._states.items() if state == "live"}}
        try:
            listing = await self._host.list(timeout=LIST_SECONDS)
            found["list over gRPC"] = {listed.name for listed in listing if listed.state == "live"}
        except ToolBusError:
            found["list over gRPC"] = set()
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=LIST_SECONDS) as client:
            found["list over REST"] = await _listed(client, self._scene.http)
            port = self._scene.ports.get("main-server")
            if port is not None:
                found["main server"] = await _listed(client, f"127.0.0.1:{port}")
        return found


async def _listed(client: httpx.AsyncClient, address: str) -> set[str]:
    try:
        response = await client.get(f"http://{address}/api/tools")
        return {tool["name"] for tools in response.json()["tools_by_role"].values() for tool in tools}
    except (httpx.TransportError, ValueError, KeyError):
        return set()
