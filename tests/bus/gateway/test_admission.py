"""How many requests begin in one pass of the loop, and who does not wait for it."""

from __future__ import annotations

import asyncio
from typing import Any

from toolbus.bus.gateway.admission import Admission


class Entered:
    """An application that notes which requests began, and in which pass of the loop."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = [[]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.passes[-1].append(scope["path"])

    async def turn(self, most: int = 20) -> None:
        """Lets the loop turn until nobody has begun for some passes."""
        for _ in range(most):
            await asyncio.sleep(0)
            if self.passes[-1]:
                self.passes.append([])


def ask(turnstile: Admission, *paths: str, kind: str = "http") -> list[asyncio.Task[None]]:
    scopes = ({"type": kind, "path": path} for path in paths)
    never: Any = None
    return [asyncio.create_task(turnstile(scope, never, never)) for scope in scopes]


async def begun(entered: Entered, turnstile: Admission, *paths: str) -> list[list[str]]:
    tasks = ask(turnstile, *paths)
    await entered.turn()
    await asyncio.gather(*tasks)
    passes = [each for each in entered.passes if each]
    entered.passes = [[]]
    return passes


async def test_few_begin_together_and_a_crowd_one_by_one_in_its_order() -> None:
    entered = Entered()
    turnstile = Admission(entered, together=2)
    assert await begun(entered, turnstile, "a", "b") == [["a", "b"]]
    assert await begun(entered, turnstile, *"abcd") == [["a", "b"], ["c", "d"]]
    assert await begun(entered, turnstile, *"abcdef") == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert await begun(entered, turnstile, "g", "h") == [["g", "h"]], "the crowd has gone"


async def test_who_comes_later_does_not_overtake_those_who_wait() -> None:
    entered = Entered()
    turnstile = Admission(entered, together=1)
    first = ask(turnstile, *"abc")
    await asyncio.sleep(0)
    later = ask(turnstile, *"de")
    await entered.turn()
    await asyncio.gather(*first, *later)
    assert "".join(path for each in entered.passes for path in each) == "abcde"


async def test_probes_wait_for_nobody() -> None:
    entered = Entered()
    turnstile = Admission(entered, together=1)
    passes = await begun(entered, turnstile, "a", "b", "c", "/healthz", "/readyz")
    assert passes[0] == ["a", "/healthz", "/readyz"]


async def test_a_request_that_is_given_up_takes_nobodys_place() -> None:
    entered = Entered()
    turnstile = Admission(entered, together=1)
    tasks = ask(turnstile, *"abc")
    await asyncio.sleep(0)
    tasks[1].cancel()
    await entered.turn()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in entered.passes if each] == [["a"], ["c"]]


async def test_once_nobody_comes_the_loop_rests() -> None:
    entered = Entered()
    turnstile = Admission(entered, together=1)
    await begun(entered, turnstile, *"abc")
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    assert not loop._ready, "something still turns"


async def test_what_is_no_request_goes_through() -> None:
    entered = Entered()
    turnstile = Admission(entered, together=1)
    tasks = [*ask(turnstile, "a"), *ask(turnstile, "b", kind="lifespan")]
    await asyncio.sleep(0)
    assert entered.passes == [["a", "b"]]
    await asyncio.gather(*tasks)
