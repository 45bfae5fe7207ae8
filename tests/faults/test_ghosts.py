"""A tool whose program is gone is in no list, export, search and MCP session, and is back when it registers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.bus.gateway.calling import client
from tests.faults.callbacks import CallbackPlugin, Legacy, names, starting
from tests.parts.mcp.server.http_client import HttpClient
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.parts.models.dialects.names import DIALECTS
from toolbus.sdk import Host

GONE = b'{"output": null, "is_error": true, "error": "TOOL_NOT_REGISTERED"}'


async def seen(bus: Bus, words: str) -> dict[str, set[str]]:
    """Returns which of the words are in the catalog as each kind of client sees it."""
    found: dict[str, set[str]] = {}
    every = words.split()

    def keep(place: str, text: str) -> None:
        found[place] = {word for word in every if word in text}

    async with client(bus) as http, Host(bus.grpc_addresses[0]) as host:
        keep("rest", str((await http.get("/api/tools")).json()["tools_by_role"]))
        for dialect in DIALECTS:
            answer = await http.get("/api/tools/export", params={"dialect": dialect})
            assert answer.status_code == 200, answer.text
            keep(dialect, answer.text)
        hits = (await http.get("/api/tools/search", params={"q": "the lamp", "mode": "bm25", "top_k": 9})).json()
        keep("search", str([hit["name"] for hit in hits["results"]]))
        keep("host", " ".join(each.name for each in await host.list()))
    keep("mcp", " ".join(await HttpClient(bus).names()))
    return found


async def test_a_tool_that_is_gone_is_nowhere_and_the_others_stay(tmp_path: Path) -> None:
    with CallbackPlugin().come() as server, CallbackPlugin().come() as other:
        async with starting(tmp_path)("default") as bus, Legacy.of(bus) as legacy:
            for name, plugin in (("first", server), ("second", server), ("third", server), ("other", other)):
                await legacy.ask(
                    "register", name=name, description=f"Sets the {name} lamp.", callback_url=plugin.url(name)
                )
                assert not (await bus.call(name)).is_error

            async def expect(words: str) -> None:
                for place, found in (await seen(bus, "first second third other")).items():
                    assert found == set(words.split()), place

            await expect("first second third other")
            server.answers["first"] = ("200 OK", GONE)  # one tool of a server only
            assert (await bus.call("first")).is_error
            await expect("second third other")
            server.leave()
            for _ in range(3):
                assert (await bus.call("second")).is_error
            await expect("other")
            assert not (await bus.call("other")).is_error

            server.come()
            server.answers.clear()
            for name in ("first", "second"):  # as a watchdog does that misses them
                begun = time.monotonic()
                await legacy.ask("register", name=name, description=f"The {name} lamp.", callback_url=server.url(name))
                assert (await bus.call(name, {"n": 1})).output == {"n": 1}
                print(f"{name} was back {time.monotonic() - begun:.3f} s after its registration was sent")
            await expect("first second third other")  # one server: what it lost, it says at the call


@pytest.mark.parametrize("refusals", [1, 2])
async def test_a_tool_whose_server_was_away_for_a_moment_is_back_by_itself(tmp_path: Path, refusals: int) -> None:
    with CallbackPlugin().come() as server:
        async with starting(tmp_path)("default") as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="first", callback_url=server.url())
            server.leave()
            for _ in range(refusals):
                assert (await bus.call("first")).is_error
            server.come()
            await until(lambda: names(bus, away=False) == ["first"], "the tool")
            assert (await bus.call("first", {"n": 1})).output == {"n": 1}
