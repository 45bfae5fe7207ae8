"""Measures what MCP clients notice, a change of the catalog and a restart of the bus, and what MCP weighs there."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.benchmarks.contest import LOOPBACK, Plan
from lab.benchmarks.facts import Fact
from lab.child import ChildFailed
from lab.load.raw_http import LEGACY, MODERN
from lab.stage import BusProcess, Stage, free_ports

SECONDS = 30.0
QUIET_SECONDS = 1.0  # in which nothing may be told
TOOLS = 1_000
CALLS = 200
SETTLE_SECONDS = 1.0
_META = "io.modelcontextprotocol/"
_CHANGED = b"notifications/tools/list_changed"


class Client:
    """One MCP client on one connection, which it makes anew where the bus closed it.

    Attributes:
        session: headers of a legacy session; None: it is modern.
    """

    def __init__(self, url: str, *, legacy: bool = False) -> None:
        self._address = url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(self._address, timeout=SECONDS)
        self._id = 0
        self.session: dict[str, str] | None = None
        if legacy:
            self.session = {"MCP-Protocol-Version": LEGACY}
            about = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "lab", "version": "1"}}
            answer = self.begin("initialize", about)
            answer.read()
            self.session["Mcp-Session-Id"] = answer.headers["Mcp-Session-Id"]

    def begin(self, method: str, params: dict[str, Any]) -> http.client.HTTPResponse:
        """Posts a request; returns the response, whose body is still to be read."""
        self._id += 1
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self.session is not None:
            headers |= self.session
        else:
            headers |= {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
            headers |= {"Mcp-Name": params["name"]} if "name" in params else {}
            about: dict[str, Any] = {f"{_META}protocolVersion": MODERN, f"{_META}clientCapabilities": {}}
            params = {**params, "_meta": about}
        body = json.dumps({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params})
        self._connection.request("POST", "/mcp", body, headers)
        return self._connection.getresponse()

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        """Returns the result of a request.

        Raises:
            ChildFailed: it was refused.
        """
        try:
            answer = self.begin(method, params)
        except (http.client.HTTPException, OSError):  # the bus was started anew
            self._connection.close()
            answer = self.begin(method, params)
        body = answer.read()
        message = json.loads(body)
        if answer.status != 200 or "result" not in message:
            raise ChildFailed(f"{method} was answered with HTTP {answer.status} {body[:500]!r}")
        return message["result"]

    def listen(self) -> http.client.HTTPResponse:
        """Opens the stream of what changes, and reads its first event."""
        response = self.begin("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        _event(response)
        return response

    def close(self) -> None:
        self._connection.close()


def _event(response: http.client.HTTPResponse) -> bytes:
    """Returns the data of the next event of a stream; empty where the stream has ended."""
    while line := response.readline():
        if line.startswith(b"data:") and len(line) > 7:
            return line
    return b""


def _register(url: str, name: str) -> None:
    body = {"name": name, "callback_url": "http://127.0.0.1:9/run", "source": "lab"}
    request = urllib.request.Request(
        f"{url}/api/tools/register", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        answer.read()


@contextlib.contextmanager
def _listening(url: str) -> Iterator[http.client.HTTPResponse]:
    client = Client(url)
    try:
        yield client.listen()
    finally:
        client.close()


# -- what is told ----------------------------------------------------------------------------------------------------


def list_changed(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a registration, to the notification at a client that listens."""
    _, _, url = plan.bus(stage, http=LOOPBACK)
    samples = []
    with _listening(url) as stream:
        for number in range(repeats):
            _register(url, f"tool_{number}")
            began_at = time.monotonic()
            event = _event(stream)
            samples.append((time.monotonic() - began_at) * 1e3)
            if _CHANGED not in event:
                raise ChildFailed(f"expected {_CHANGED!r}, got {event!r}")
    sentence = "registration answered, to list_changed at a modern client that listens"
    return Fact("list_changed", sentence, "ms", 100.0, tuple(samples))


# -- a restart of the bus --------------------------------------------------------------------------------------------


def client_restart(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Kills the bus under MCP clients of both eras, which go on as if nothing had happened."""
    folder, port = Path(stage.folder()), free_ports(1)[0]
    options = ("--data-dir", str(folder / "data"))

    def start() -> BusProcess:
        return plan.bus(stage, *options, http=f"127.0.0.1:{port}")

    bus = start()
    refused, seconds = 0, []
    clients = [Client(bus.http, legacy=True), Client(bus.http)]
    for client in clients:
        client.ask("tools/list", {})
    for _ in range(max(2, repeats // 3)):
        bus.child.kill()
        bus = start()
        began_at = time.monotonic()
        for client in clients:
            try:
                client.ask("tools/list", {})
            except ChildFailed:
                refused += 1
        seconds.append((time.monotonic() - began_at) * 1e3)
    with _listening(bus.http) as stream:
        bus.child.kill()
        ended = _event(stream) == b""
    bus = start()
    with _listening(bus.http):
        pass
    what = "bus killed and started again under a legacy session and a modern client"
    return (
        Fact("client_restart", f"{what}: requests refused", "requests", 0.0, (float(refused),)),
        Fact("client_restart", f"{what}: ready line, to both lists", "ms", 1000.0, tuple(seconds)),
        Fact(
            "client_restart",
            "listeners that did not see the end of a killed bus",
            "listeners",
            0.0,
            (float(not ended),),
        ),
    )


# -- weight ----------------------------------------------------------------------------------------------------------


def mcp_weight(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Reads what MCP adds to the memory of a bus, and times the list of many tools."""
    bus, _, url = plan.bus(stage, http=LOOPBACK)
    with urllib.request.urlopen(f"{url}/api/tools", timeout=SECONDS) as answer:
        answer.read()
    unused = bus.settled_bytes(SETTLE_SECONDS)
    clients = [Client(url, legacy=True), Client(url)]
    for _ in range(CALLS):
        for client in clients:
            client.ask("tools/list", {})
    used = bus.settled_bytes(SETTLE_SECONDS)
    for number in range(TOOLS):
        _register(url, f"tool_{number}")
    samples = []
    for _ in range(repeats + 1):
        began_at = time.monotonic()
        found = len(clients[1].ask("tools/list", {})["tools"])
        samples.append((time.monotonic() - began_at) * 1e3)
        if found != TOOLS:
            raise ChildFailed(f"{found} of {TOOLS} tools were listed")
    return (
        Fact(
            "mcp_weight", f"memory that {2 * CALLS} requests of MCP add to a bus", "MB", 10.0, ((used - unused) / 1e6,)
        ),
        Fact("mcp_weight", f"tools/list of {TOOLS:,} tools, read by its client", "ms", None, tuple(samples[1:])),
        Fact("mcp_weight", f"tools/list of {TOOLS:,} tools, the first after a change", "ms", None, (samples[0],)),
    )
