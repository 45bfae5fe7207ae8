from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from tests.parts.moving.upstream.conftest import BASE, SHORT, Side
from tests.parts.moving.upstream.main_server import Answer, MainServer
from tests.parts.moving.upstream.upstream_cases import logged, quiet
from tests.support.core_model import tool
from toolbus.parts.moving.upstream import sync
from toolbus.parts.moving.upstream.sync import Upstream

# -- refusals ------------------------------------------------------------------------------------------------------

VALIDATION = {"detail": [{"type": "x", "loc": ["body", "callback_url"], "msg": "must be loopback", "input": "?"}]}


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, {"ok": False, "error": "no role accepted the registration"}, "no role accepted the registration"),
        (200, {"ok": False, "failed_roles": [{"role": "r", "error": "E: why"}]}, "role 'r': E: why"),
        (200, {"ok": False}, "ok is false, without a reason"),
        (404, {"detail": "unknown role: x"}, "HTTP 404: unknown role: x"),
        (422, VALIDATION, "HTTP 422: callback_url: must be loopback"),
        (422, {"detail": [1, None, {"loc": 3}]}, "HTTP 422: request: None"),
        (500, "Internal\x1b[31m\nServer Error", "HTTP 500: Internal�[31m Server Error"),
        (503, "", "HTTP 503"),
        (307, "", "HTTP 307"),
        (200, "<html>", "a body that breaks the REST contract: <html>"),
        (200, [1], "a body that breaks the REST contract: [1]"),
        (200, {"ok": "yes"}, "a body that breaks the REST contract"),
        (200, "", "a body that breaks the REST contract: empty"),
    ],
)
async def test_a_refusal_is_shown_once_and_others_are_not_stopped(
    status: int, answer: object, words: str, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = server.answering(status, answer)

    async def register(request: web.Request, body: dict[str, Any]) -> Answer | None:
        return await refuse(request, body) if body["name"] == "bad" else None

    server.misbehave["register"] = register
    side.offer("a", tool("bad"), tool("good"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["good"])
    await quiet(server)
    assert words in side.warning("bad")
    assert side.warning("good") == ""
    assert logged(caplog, "tool='bad'") == 1
    assert side.warning_changes == 1
    server.misbehave.clear()
    side.offer("a", tool("bad", "changed"))
    await server.until(lambda: "bad" in server.names())
    await quiet(server)
    assert side.warning("bad") == ""


async def test_a_refused_tool_is_retried_after_a_while_and_logged_once(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.timings = replace(side.timings, retry_seconds=0.05)
    server.misbehave["register"] = server.answering(422, {"detail": "no"})
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.counted("register") >= 3)
    assert logged(caplog, "HTTP 422: no") == 1
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t"])
    await quiet(server)
    assert side.warning("t") == ""


async def test_a_tool_that_no_function_name_fits_is_shown_without_asking(server: MainServer, side: Side) -> None:
    side.offer("s" * 60, tool("long"), qualified=True)
    await side.connect(server.url)
    await quiet(server)
    assert "not offered upstream: its name there would be" in side.warning(f"{'s' * 60}:long")


async def test_a_server_that_accepts_a_tool_and_does_not_list_it_is_not_retried_for_ever(
    server: MainServer, side: Side
) -> None:
    server.misbehave["register"] = server.answering(200, {"ok": True, "affected_roles": ["default"]})
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.counted("register") == 2)
    await quiet(server)
    assert "accepted the tool and does not list it as it was sent: role 'default'" in side.warning("t")


async def test_a_server_that_does_not_unregister_is_retried_with_backoff_and_logged_once(
    server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    server.misbehave["unregister"] = server.answering(500, "broken")
    side.withdraw(plugin)
    await server.until(lambda: server.counted("unregister") == 3)
    assert logged(caplog, "does not unregister tool='t': HTTP 500: broken") == 1
    server.misbehave.clear()
    await server.until(lambda: server.names() == [])


# -- bad servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "garbage",
        "[" * 100_000,
        [],
        {"ok": True},
        {"ok": False, "error": "starting"},
        {"ok": True, "tools_by_role": []},
        {"ok": True, "tools_by_role": {"r": {}}},
        {"ok": True, "tools_by_role": {"r": [None]}},
        {"ok": True, "tools_by_role": {"r": [{"name": 5}]}},
    ],
)
async def test_an_invalid_listing_counts_as_unreachable_and_the_loop_goes_on(
    answer: object, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    server.misbehave["list"] = server.answering(200, answer)
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until_asked("list", 3)
    assert logged(caplog, "unreachable: GET /api/tools") == 1
    assert server.counted("register") == 0
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t"])


@pytest.mark.parametrize("verb", ["list", "register"])
async def test_an_endless_answer_is_cut_off(
    verb: str, server: MainServer, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.max_response_bytes = 1 << 20
    server.misbehave[verb] = server.endless
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.counted(verb) >= 2)
    assert logged(caplog, "a response has more than 1048576 bytes") == 1
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t"])


@pytest.mark.usefixtures("short_requests")
async def test_one_registration_that_hangs_does_not_stop_the_others(server: MainServer, side: Side) -> None:
    async def register(request: web.Request, body: dict[str, Any]) -> Answer | None:
        return await server.hang(request, body) if body["name"].startswith("bad") else None

    server.misbehave["register"] = register
    side.offer("a", *(tool(f"bad{number}") for number in range(4)), tool("good"))
    await side.connect(server.url)
    await server.until(lambda: "good" in server.names())
    await side.until(lambda: "POST /api/tools/register was not answered within 0.1 s" in side.warning("bad0"))
    server.misbehave.clear()
    server.release()
    await side.until(lambda: not any(side.warning(f"bad{number}") for number in range(4)))
    assert len(server.names()) == 5


@pytest.mark.usefixtures("short_requests")
async def test_a_server_that_hangs_is_unreachable_until_it_answers(server: MainServer, side: Side) -> None:
    server.misbehave["list"] = server.hang
    side.offer("a", tool("t"))
    upstream = await side.connect(server.url)
    await server.until(lambda: server.counted("list") == 2)
    assert "was not answered within 0.1 s" in upstream.state
    server.misbehave.clear()
    server.release()
    await server.until(lambda: server.names() == ["t"])


async def test_a_server_that_dies_in_the_middle_has_refused_nothing(server: MainServer, side: Side) -> None:
    async def die(request: web.Request, body: dict[str, Any]) -> Answer | None:
        server.misbehave["list"] = server.answering(503, "going down")
        assert request.transport is not None
        request.transport.abort()
        return None

    server.misbehave["register"] = die
    side.offer("a", tool("t"), tool("u"))
    await side.connect(server.url)
    await server.until_asked("list", 3)
    assert (side.warning("t"), side.warning_changes) == ("", 0)
    server.misbehave.clear()
    await server.until(lambda: server.names() == ["t", "u"])


async def test_an_exception_of_ours_is_logged_and_the_loop_goes_on(
    server: MainServer, side: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(sync, "make_plan", broken)
    side.offer("a", tool("t"))
    await side.connect(server.url)
    await server.until(lambda: server.names() == ["t"])
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "a fault of the bus" in record.getMessage()


async def test_a_catalog_that_stops_telling_of_changes_is_polled(
    server: MainServer, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()

    async def broken() -> AsyncIterator[object]:
        for fault in (RuntimeError("a bug"),):
            raise fault
        yield None

    upstream = Upstream(
        server.url,
        side.registry,
        side.view,
        callback_base=BASE,
        bus_id="b",
        changed=broken,
        on_warning=lambda: None,
        timings=SHORT,
    )
    await upstream.start()
    await server.until_asked("list", 2)
    side.offer("a", tool("t"))
    await server.until(lambda: server.names() == ["t"])
    await upstream.stop()
    assert logged(caplog, "a fault of the bus") >= 1


async def test_localhost_is_connected_to_without_asking_a_name_service(
    server: MainServer, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_lookup(*_: object, **__: object) -> None:  # REST-32
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", no_lookup)
    side.offer("a", tool("t"))
    await side.connect(f"http://localhost:{server.port}")
    await server.until(lambda: server.names() == ["t"])


async def test_no_redirect_is_followed(server: MainServer, side: Side) -> None:
    async with MainServer() as elsewhere:

        async def away(_: web.Request, __: dict[str, Any]) -> Answer:
            return web.Response(status=307, headers={"Location": f"{elsewhere.url}/api/tools"})

        server.misbehave["list"] = away
        side.offer("a", tool("t"))
        await side.connect(server.url)
        await server.until_asked("list", 2)
        assert elsewhere.requests == []
