"""Digests as a bus makes them, and a host that hands them out, for tests without a bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError, Result

BEGAN = 1_790_000_000.0  # when the bus of these digests began, in seconds since the epoch
ATTACK = "\x1b[2J\x1b]0;owned\x07[red]x[/red][@click=app.quit]y[/]\u202e\x9b31m\nsecond line"


def digest(number: int, **fields: Any) -> dict[str, Any]:
    """Returns a full digest without tools and calls, half a second after the one before it."""
    return {
        "number": number,
        "at": BEGAN + 100 + number / 2,
        "full": True,
        "began": BEGAN,
        "instance": "one",
        "version": "0.1.0",
        "bus_id": "",
        "draining": False,
        "revision": 1,
        "roles": [],
        "addresses": {"grpc": ["127.0.0.1:1"], "http": None, "https": None},
        "seconds": 0.5,
        "ended": 0,
        "failed": 0,
        "total": 0,
        "total_failed": 0,
        "rate": 0.0,
        "in_flight": 0,
        "stuck": 0,
        "held_bytes": 0,
        "late": 0,
        "loop_lag": 0.001,
        "watchers": 1,
        "tools": [],
        "calls": [],
        "skipped": 0,
        "lost": 0,
        "running": [],
        "sessions": [],
        "closed": [],
        "sources": [],
        "gone": [],
        **fields,
    }


def change(number: int, **fields: Any) -> dict[str, Any]:
    """Returns a digest that has only what changed."""
    return digest(number, full=False, **fields)


def ended(number: int, name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    """Returns an ended call as a digest describes it."""
    started = BEGAN + 90 + number
    seconds = fields.get("seconds", 0.25)
    return {
        "number": number,
        "id": f"b{number}",
        "call_id": f"c{number}",
        "name": name,
        "source": "weather",
        "caller": "host:chat",
        "user_id": "u-17",
        "round": 0,
        "order": 0,
        "started": started,
        "ended": started + seconds,
        "seconds": seconds,
        "outcome": "OK",
        "arguments_size": 2,
        "output_size": 20,
        **fields,
    }


def failed(number: int, name: str = "get_weather", outcome: str = "UNAVAILABLE", **fields: Any) -> dict[str, Any]:
    """Returns a failed call as a digest describes it."""
    failure = {"message": "the plugin is gone", "stage": "SENT", "retry_safe": False, "limit": None}
    return ended(number, name, **{"outcome": outcome, "failure": failure, **fields})


def running(key: str, name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    """Returns a call that runs, as a digest describes it."""
    return {
        "id": key,
        "parent": "",
        "call_id": f"call-{key}",
        "name": name,
        "source": "weather",
        "caller": "host:chat",
        "user_id": "",
        "started": BEGAN + 98,
        "deadline": BEGAN + 130,
        "stage": "SENT",
        "trace_id": "",
        **fields,
    }


def source(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"source": name, "kind": "peer", "state": "attached", "tools": 1, "sessions": 1, "refused": 0, **fields}


def session(key: str, name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {
        "session": key,
        "source": name,
        "kind": "peer",
        "state": "attached",
        "identity": "",
        "peer": "",
        "in_flight": 1,
        "max_in_flight": 64,
        "pending": 0,
        "stuck": 0,
        "tools": 1,
        **fields,
    }


def tool(
    name: str = "get_weather", calls: int = 10, failures: int = 0, *, of: str = "weather", p95: float | None = 0.05
) -> list[Any]:
    return [of, name, calls, failures, 0.012 if calls else None, p95 if calls else None, BEGAN + 99 if calls else None]


class DigestHost:
    """Answers as a connected host whose bus has these digests; waits once they are used up.

    Attributes:
        calls: names and arguments of the calls that were made.
    """

    def __init__(self, *digests: Mapping[str, Any] | Result) -> None:
        self._digests: asyncio.Queue[Mapping[str, Any] | Result] = asyncio.Queue()
        self.connected = True
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.answers: dict[str, Result] = {}  # of other tools, by name
        self.add(*digests)

    def add(self, *digests: Mapping[str, Any] | Result) -> None:
        for each in digests:
            self._digests.put_nowait(each)

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout: float | None = None) -> Result:
        self.calls.append((name, arguments))
        if name != "toolbus:digest":
            return self.answers[name]
        answer = await self._digests.get()
        return answer if isinstance(answer, Result) else output(answer)


def output(value: Any) -> Result:
    return Result(output_json=json.dumps(value))


def error(code: Code, message: str, stage: Stage = Stage.NOT_DISPATCHED) -> Result:
    return Result(is_error=True, error=CallError(code, message, stage, True))
