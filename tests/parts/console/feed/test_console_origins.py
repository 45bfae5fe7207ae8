"""The console on this machine: its own pages may do everything, pages of other origins and ports nothing."""

from __future__ import annotations

import itertools
from typing import Any

from tests.parts.console.feed.console_bus import STREAM, console_bus

ACTS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/api/bus/stats", {}),
    ("POST", "/api/tools/invoke", {"name": "add", "arguments": {"a": 1, "b": 2}}),
    ("GET", "/api/console/me", None),
    ("GET", "/api/tools", None),
)


async def test_a_page_of_the_console_acts_over_the_paths_that_every_program_has() -> None:
    async with console_bus() as (bus, client):
        for headers in ({"Origin": f"http://{bus.http_address}"}, {"Sec-Fetch-Site": "same-origin"}):
            for method, path, body in ACTS:
                answer = await client.request(method, path, json=body, headers=headers)
                assert answer.status_code == 200, (path, headers)


GUARDED = (
    ("GET", STREAM),
    ("GET", "/api/console/me"),
    ("POST", "/api/bus/drain"),
    ("POST", "/api/bus/digest"),
    ("POST", "/api/console/login"),
)
FOREIGN = (
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost:1"},
    {"Origin": "https://elsewhere.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
)


async def test_a_page_of_another_origin_or_port_neither_reads_digests_nor_administers() -> None:
    async with console_bus() as (bus, client):
        for headers, (method, path) in itertools.product(FOREIGN, GUARDED):
            refused = await client.request(method, path, json={} if method == "POST" else None, headers=headers)
            assert refused.status_code == 403, (path, headers)
        assert not bus.core.sessions.presence.draining


async def test_a_browser_may_open_the_page_but_nothing_can_frame_it() -> None:
    async with console_bus() as (_, client):
        page = await client.get("/console/", headers={"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"})
        assert page.status_code == 200
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
        assert page.headers["x-frame-options"] == "DENY"


async def test_without_the_setting_there_is_no_console() -> None:
    async with console_bus(console=False) as (bus, client):
        for path in ("/console", "/console/", "/api/console/me", STREAM):
            assert (await client.get(path)).status_code == 404
        assert (await bus.call("toolbus:digest")).output["full"]


async def test_there_is_no_login_on_this_machine_and_none_is_needed() -> None:
    async with console_bus() as (_, client):
        for path in ("/api/console/code", "/api/console/login"):
            refused = await client.post(path, json={"code": "x"})
            assert refused.status_code == 404
            assert "need no login" in refused.json()["detail"]
