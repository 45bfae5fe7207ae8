"""Tests of admission control: how many requests start in one pass of the loop, and which never wait."""

from __future__ import annotations

import asyncio
from typing import Any

from toolbus.bus.gateway.access import Admission


class Application:
    """Notes which requests started, and in which pass of the loop."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = [[]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.passes[-1].append(scope["path"])

    async def run_passes(self, count: int = 20) -> None:
        """Runs passes of the loop, until no request has started for some of them."""
        for _ in range(count):
            await asyncio.sleep(0)
            if self.passes[-1]:
                self.passes.append([])


def send(admission: Admission, *paths: str, kind: str = "http") -> list[asyncio.Task[None]]:
    scopes = ({"type": kind, "path": path} for path in paths)
    never: Any = None
    return [asyncio.create_task(admission(scope, never, never)) for scope in scopes]


async def started_passes(application: Application, admission: Admission, *paths: str) -> list[list[str]]:
    tasks = send(admission, *paths)
    await application.run_passes()
    await asyncio.gather(*tasks)
    passes = [each for each in application.passes if each]
    application.passes = [[]]
    return passes


async def test_few_requests_start_together_and_a_burst_one_by_one_in_its_order() -> None:
    application = Application()
    admission = Admission(application, together=2)
    assert await started_passes(application, admission, "a", "b") == [["a", "b"]]
    assert await started_passes(application, admission, *"abcd") == [["a", "b"], ["c", "d"]]
    assert await started_passes(application, admission, *"abcdef") == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert await started_passes(application, admission, "g", "h") == [["g", "h"]], "the burst is over"


async def test_a_later_request_does_not_overtake_those_that_wait() -> None:
    application = Application()
    admission = Admission(application, together=1)
    first = send(admission, *"abc")
    await asyncio.sleep(0)
    later = send(admission, *"de")
    await application.run_passes()
    await asyncio.gather(*first, *later)
    assert "".join(path for each in application.passes for path in each) == "abcde"


async def test_health_probes_never_wait() -> None:
    application = Application()
    admission = Admission(application, together=1)
    passes = await started_passes(application, admission, "a", "b", "c", "/healthz", "/readyz")
    assert passes[0] == ["a", "/healthz", "/readyz"]


async def test_a_request_that_is_cancelled_takes_no_place() -> None:
    application = Application()
    admission = Admission(application, together=1)
    tasks = send(admission, *"abc")
    await asyncio.sleep(0)
    tasks[1].cancel()
    await application.run_passes()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in application.passes if each] == [["a"], ["c"]]


async def test_without_requests_nothing_is_scheduled() -> None:
    application = Application()
    admission = Admission(application, together=1)
    await started_passes(application, admission, *"abc")
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    assert not loop._ready, "a pass is still scheduled"


async def test_lifespan_events_are_not_delayed() -> None:
    application = Application()
    admission = Admission(application, together=1)
    tasks = [*send(admission, "a"), *send(admission, "b", kind="lifespan")]
    await asyncio.sleep(0)
    assert application.passes == [["a", "b"]]
    await asyncio.gather(*tasks)
