"""A lively bus as digests tell it, for pictures of `toolbus top` and for the tests of its screen."""

from __future__ import annotations

import math
from typing import Any

from tests.parts.console.top.digests import BEGAN, change, digest, ended, failed, running, session, source

_TOOLS = (
    *(("weather", "get_weather", 48, 0.01), ("weather", "get_forecast", 12, 0.0), ("maps", "geocode", 90, 0.002)),
    *(("maps", "route_between_places", 31, 0.0), ("mail", "send_email", 3, 0.08), ("mail", "search_mailbox", 7, 0.0)),
    *(("notes:filesystem", "read_file", 22, 0.0), ("notes:filesystem", "search_files", 4, 0.02)),
    *(("research", "summarize_everything_that_was_said_about_a_company_in_the_news_of_the_last_quarter", 0.4, 0.1),),
    *(("calendar", "find_free_slot", 1.5, 0.0), ("calendar", "book_room", 0.2, 0.0), ("legacy", "fax", 0, 0.0)),
)  # fmt: skip
SECONDS = 60


def digests() -> list[dict[str, Any]]:
    """Returns the digests of a minute: the first one full, then one every half second."""
    made: list[dict[str, Any]] = [digest(1, at=BEGAN + 11_000, tools=_tools(0), **_places())]
    for number in range(2, 2 + 2 * SECONDS):
        second = number / 2
        more: dict[str, Any] = {
            "at": BEGAN + 11_000 + second,
            "rate": 180 + 90 * math.sin(second / 7) + 25 * math.sin(second * 1.9),
            "tools": (tools := _tools(second)),
            "total": sum(row[2] for row in tools),
            "total_failed": sum(row[3] for row in tools),
            "in_flight": 5,
            "held_bytes": 18_432,
            "late": 3,
            "loop_lag": 0.0011,
            "running": [
                each | {"started": BEGAN + 11_000 + second - age, "deadline": BEGAN + 11_030 + second - age}
                for each, age in _RUNNING
            ],
        }
        if number == 1 + 2 * SECONDS:
            more["calls"] = _ended()
        made.append(change(number, **more))
    return made


_RUNNING = (
    (running("r1", "summarize_everything_that_was_said_about_a_company_in_the_news_of_the_last_quarter",
             source="research", stage="STARTED", user_id="u-17"), 14.2),
    (running("r2", "search_mailbox", source="mail", parent="r1", caller="research", stage="STARTED"), 3.1),
    (running("r3", "send_email", source="mail", stage="SENT", caller="host:voice"), 1.4),
    (running("r4", "route_between_places", source="maps", stage="SENT"), 0.05),
    (running("r5", "geocode", source="maps", parent="r4", caller="maps", stage="SENT"), 0.01),
)  # fmt: skip


def _tools(second: float) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for place, (of, name, rate, errors) in enumerate(_TOOLS):
        wave = second + 2 * math.sin(second / (3 + place)) if rate else 0.0
        calls = int(rate * (5_000 + wave)) if rate else 0
        p50 = (0.0008 * (place + 1) ** 3, 0.0024 * (place + 1) ** 3) if calls else (None, None)
        rows.append([of, name, calls, int(calls * errors), *p50, BEGAN + 11_000 + second if calls else None])
    return rows


def _places() -> dict[str, Any]:
    sources = [
        source("weather", sessions=2, tools=2),
        source("maps", tools=2, identity="maps-team"),
        source("mail", tools=2, state="suspect"),
        source("research", tools=1, state="draining"),
        source("notes:filesystem", kind="mount", tools=2, sessions=0, refused=1),
        source("calendar", kind="callback", tools=2, sessions=0),
        source("legacy", state="offline", tools=1, sessions=0),
    ]
    sessions = [
        session("s1", "weather", in_flight=3),
        session("s2", "weather", in_flight=0),
        session("s3", "maps", in_flight=2, identity="maps-team"),
        session("s4", "mail", in_flight=2, pending=1, stuck=1, state="suspect", max_in_flight=8),
        session("s5", "research", in_flight=1, max_in_flight=4, state="draining"),
        session("s6", "host:chat", in_flight=0, pending=4, tools=0),
        session("s7", "host:voice", in_flight=0, pending=1, tools=0),
    ]
    return {"sources": sources, "sessions": sessions}


def _ended() -> list[dict[str, Any]]:
    lost = {
        "message": "the plugin did not answer heartbeats for 6 s",
        "stage": "STARTED",
        "retry_safe": False,
        "limit": None,
    }
    late = {
        "message": "no result within 30 s, the timeout of the tool",
        "stage": "SENT",
        "retry_safe": False,
        "limit": {"name": "timeout_seconds", "value": 30.0},
    }
    full = {
        "message": "source 'mail' has 8 calls in flight, its limit",
        "stage": "NOT_DISPATCHED",
        "retry_safe": True,
        "limit": {"name": "max_in_flight", "value": 8.0},
    }
    calls = [ended(900 + number, ("geocode", "get_weather", "read_file")[number % 3]) for number in range(30)]
    calls += [
        failed(940, "send_email", source="mail", failure=lost),
        failed(941, "send_email", "OVERLOADED", source="mail", failure=full, seconds=0.0001),
        failed(942, "search_files", "DEADLINE_EXCEEDED", source="notes:filesystem", failure=late, seconds=30.0),
        failed(
            943, "get_weather", "TOOL", failure={"message": "", "stage": "FINISHED", "retry_safe": False, "limit": None}
        ),
    ]
    return [
        call | {"started": BEGAN + 10_050 + call["number"], "ended": BEGAN + 10_051 + call["number"]} for call in calls
    ][::-1]
