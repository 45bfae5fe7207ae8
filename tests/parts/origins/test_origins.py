"""Web pages of named origins as hosts; tests/browser/test_http_client.py has a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from toolbus.bus import Config
from toolbus.errors import SetupError
from toolbus.testing import running_bus

PAGE, OTHER = "http://localhost:5173", "http://localhost:5174"
CALL = {"name": "greet", "arguments": {"name": "Ann"}}


def greet(name: str) -> str:
    return f"Hello, {name}!"


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """Serves a tool over HTTP; yields a client of that port."""
    async with running_bus(http="127.0.0.1:0", **settings) as bus:
        bus.tool(greet)
        async with aiohttp.ClientSession(f"http://{bus.http_address}") as http:
            yield http


async def test_a_page_of_a_named_origin_calls_and_reads_the_answer() -> None:
    async with serving(http_origins=(PAGE,)) as http:
        asked = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        async with http.options("/api/tools/invoke", headers=asked) as preflight:
            assert preflight.status == 204
            assert preflight.headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
            assert "content-type" in preflight.headers["Access-Control-Allow-Headers"]
            assert "Access-Control-Allow-Private-Network" not in preflight.headers
            assert "Access-Control-Allow-Credentials" not in preflight.headers  # a page has no cookies of the bus
        async with http.post("/api/tools/invoke", json=CALL, headers={"Origin": PAGE}) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
            assert (await answer.json())["output"] == "Hello, Ann!"
        for path in ("/api/tools", "/api/tools/export?dialect=openai", "/api/tasks", "/healthz"):
            async with http.get(path, headers={"Origin": PAGE}) as answer:
                assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, PAGE), path
        async with http.get("/api/tools/events", headers={"Origin": PAGE}) as stream:
            assert stream.headers["Access-Control-Allow-Origin"] == PAGE
            assert await stream.content.readline()
        async with http.post("/api/tools/invoke", json={"name": 5}, headers={"Origin": PAGE}) as refused:
            assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (422, PAGE)


async def test_a_page_that_asks_for_a_private_network_is_allowed_it() -> None:
    async with serving(http_origins=(PAGE,)) as http:
        asked = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "GET",
            "Access-Control-Request-Private-Network": "true",
        }
        async with http.options("/api/tools", headers=asked) as preflight:
            assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"


@pytest.mark.parametrize(
    "origin", [OTHER, f"{PAGE}.evil.test", "null", "https://localhost:5173", f"{PAGE}/", PAGE.upper()]
)
async def test_a_page_of_another_origin_reads_nothing(origin: str) -> None:
    async with serving(http_origins=(PAGE,)) as http:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        async with http.options("/api/tools/invoke", headers=asked) as preflight:
            assert preflight.status != 204
            assert "Access-Control-Allow-Origin" not in preflight.headers
        async with http.get("/api/tools", headers={"Origin": origin}) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers


CLOSED = [
    *(f"/api/tools/{verb}" for verb in ("register", "unregister", "clear", "../bus/calls")),
    *("/api/bus/calls", "/api/console/stream", "/mcp", "/api/tasks/1/redirect", "/api/llm-tools/callback/p/t"),
]


@pytest.mark.parametrize("path", CLOSED)
async def test_what_hosts_do_not_use_stays_closed_to_pages(path: str) -> None:
    async with serving(http_origins=(PAGE,)) as http:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        async with http.options(path, headers=asked) as preflight:
            assert preflight.status != 204
            assert "Access-Control-Allow-Origin" not in preflight.headers


async def test_without_an_origin_nothing_changes() -> None:
    async with serving() as http, http.options("/api/tools/invoke", headers={"Origin": PAGE}) as preflight:
        assert "Access-Control-Allow-Origin" not in preflight.headers
    async with serving(http_origins=(PAGE,)) as http, http.post("/api/tools/invoke", json=CALL) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.status == 200


@pytest.mark.parametrize(
    "origin", ["*", "null", "localhost:5173", "http://localhost:5173/", "HTTP://localhost", "ftp://x"]
)
def test_what_is_no_origin_is_refused_with_a_form(origin: str) -> None:
    with pytest.raises(SetupError, match="such as http://localhost:5173"):
        Config(http_origins=(origin,))
