"""Measures how soon an MCP client learns of a change of the catalog, and how much memory MCP takes in a bus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.child import ChildFailed
from lab.load.raw_http import ABOUT, mcp_message
from lab.stage import LOOPBACK, Stage

SECONDS = 30.0
CALLS = 200
SETTLE_SECONDS = 1.0
_DIRECT: dict[str, Any] = {"timeout": SECONDS, "trust_env": False, "verify": False}
_CHANGED = "notifications/tools/list_changed"


class Client:
    """One MCP client on one connection."""

    def __init__(self, url: str, *, legacy: bool = False) -> None:
        self._http = httpx.Client(base_url=url, **_DIRECT)
        self._id = 0
        self._session: dict[str, str] | None = {} if legacy else None  # headers of a legacy session; None: modern
        if legacy:
            answer = self._http.send(self._request("initialize", ABOUT))
            self._session = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}

    def _request(self, method: str, params: dict[str, Any]) -> httpx.Request:
        self._id += 1
        message, headers = mcp_message(self._id, method, params, self._session)
        headers["Accept"] = "application/json, text/event-stream"
        return self._http.build_request("POST", "/mcp", json=message, headers=headers)

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        """Returns the result of a request.

        Raises:
            ChildFailed: it was refused.
        """
        answer = self._http.send(self._request(method, params))
        message = answer.json()
        if answer.status_code != 200 or "result" not in message:
            raise ChildFailed(f"{method} was answered with HTTP {answer.status_code} {answer.text[:500]}")
        return message["result"]

    @contextmanager
    def listening(self) -> Iterator[Iterator[str]]:
        """Opens the stream of what changes and reads its first event; yields the lines after that."""
        request = self._request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        response = self._http.send(request, stream=True)
        try:
            lines = response.iter_lines()
            _event(lines)
            yield lines
        finally:
            response.close()


def _event(lines: Iterator[str]) -> str:
    """Returns the data of the next event of a stream; empty where the stream has ended."""
    return next((line for line in lines if line.startswith("data:") and len(line) > 6), "")


def list_changed(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a registration, to the notification at a client that listens."""
    _, _, url = stage.bus(http=LOOPBACK)
    samples = []
    with Client(url).listening() as stream:
        for number in range(repeats):
            tool = {"name": f"tool_{number}", "callback_url": "http://127.0.0.1:9/run", "source": "lab"}
            httpx.post(f"{url}/api/tools/register", json=tool, **_DIRECT).raise_for_status()
            began_at = time.monotonic()
            event = _event(stream)
            samples.append((time.monotonic() - began_at) * 1e3)
            if _CHANGED not in event:
                raise ChildFailed(f"expected {_CHANGED!r}, got {event!r}")
    sentence = "registration answered, to list_changed at a modern client that listens"
    return Fact("list_changed", sentence, "ms", 100.0, tuple(samples))


def mcp_weight(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Reads what MCP adds to the memory of a bus."""
    bus, _, url = stage.bus(http=LOOPBACK)
    httpx.get(f"{url}/api/tools", **_DIRECT)
    unused = bus.settled_bytes(SETTLE_SECONDS)
    clients = [Client(url, legacy=True), Client(url)]
    for _ in range(CALLS):
        for client in clients:
            client.ask("tools/list", {})
    used = bus.settled_bytes(SETTLE_SECONDS)
    sentence = f"memory that {2 * CALLS} requests of MCP add to a bus"
    return Fact("mcp_weight", sentence, "MB", 10.0, ((used - unused) / 1e6,))
