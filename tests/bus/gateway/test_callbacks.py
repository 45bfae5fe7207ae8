"""Whatever a legacy plugin does with its connection, the call ends in one result that says so (REST-40 to REST-42).

Each behaviour is called over a running bus and followed by a good call to the same origin, which has to be right.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.bus.gateway.calling import client
from tests.bus.gateway.misbehaving import ACTS, BODY_LIMIT, Misbehaving, Peer, answer, offer
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until
from toolbus.bus import Bus, outbound
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import MIB, CallError, Limits, Result
from toolbus.testing import running_bus


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(grace_seconds=0, limits=Limits(callback_bytes=BODY_LIMIT)) as bus:
        yield bus


@pytest.fixture
async def plugin() -> AsyncIterator[Misbehaving]:
    async with Misbehaving() as plugin:
        yield plugin


async def soon(bus: Bus, name: str, arguments: Any = None, **options: Any) -> Result:
    return await asyncio.wait_for(bus.call(name, arguments, **options), WAIT_SECONDS)


def failure(result: Result) -> CallError:
    assert result.is_error
    assert result.error is not None
    return result.error


# -- what is answered ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ends:
    """How a call has to end; no code means that it succeeds."""

    output: Any = None
    code: Code | None = None
    stage: Stage = Stage.ACCEPTED
    message: str = ""  # the whole of it, where the plugin chose the words
    words: tuple[str, ...] = ()  # each in the message
    limit: tuple[str, float] | None = None


def refused(message: str, output: Any = None) -> Ends:
    return Ends(output, Code.TOOL, message=message)


def broken(*words: str) -> Ends:
    return Ends(None, Code.UNAVAILABLE, Stage.DISPATCHED, words=(*words, "may have run"))


FINE = Ends("fine")
NO_REDIRECT = Ends(None, Code.TOOL, words=("redirects are not followed", "callback_url"))
TOO_LARGE = Ends(None, Code.RESULT_TOO_LARGE, words=(str(BODY_LIMIT),), limit=("callback_bytes", BODY_LIMIT))
NO_HTTP = broken("not an HTTP response")
BROKE = broken("broke before the response was complete")
BROKE_IN_HEADERS = broken("broke before the response was complete (Server disconnected within the headers); ")

ENDS: dict[str, Ends] = {
    "output": Ends({"f": 5.0, "i": 123456789012345678901234567890}),
    "no-output": Ends({"temperature": 3, "error": None}),
    "error-true": refused("no such city", {"near": "Tula"}),
    "error-without-word": refused("tool 'error-without-word' failed and gave no reason"),
    "error-is-text": refused("e", "o"),
    "error-is-1": refused('{"why":1}', "o"),
    "error-is-0": Ends("o"),
    "error-is-null": Ends("o"),
    "error-alone": Ends("o"),
    "list": Ends([1, 2.0]),
    "text": Ends("sunny"),
    "number": Ends(-500.0),
    "null": Ends(None),
    "not-json": Ends("sunny, 23°"),
    "nan": Ends('{"output": NaN}'),
    "empty": Ends(""),
    "204": Ends(""),
    "bom": FINE,
    "utf-16": Ends("晴"),
    "latin-1": Ends("Größe"),
    "unknown-charset": Ends("Größe"),
    "invalid-utf-8": Ends("a��b"),
    "201": FINE,
    "chunked": FINE,
    "in-pieces": FINE,
    "below-limit": Ends("x" * (BODY_LIMIT - 2)),
    "redirect-to-itself": NO_REDIRECT,
    "redirect-elsewhere": NO_REDIRECT,
    "304": NO_REDIRECT,
    "400": refused("HTTP 400 Bad Request: bad city"),
    "404-empty": refused("HTTP 404 Not Found"),
    "500-long": refused("HTTP 500 Internal Server Error: " + "é" * 200),
    "503-binary": refused("HTTP 503 Service Unavailable: " + "�" * 128),
    "500-with-output": refused('HTTP 500 Internal Server Error: {"output": "o", "is_error": false}'),
    "100-continue": FINE,
    "103-hints": FINE,
    "status-999": refused("HTTP 999: what"),
    "status-42": NO_HTTP,
    "reset": BROKE,
    "close": BROKE,
    "close-in-headers": BROKE_IN_HEADERS,
    "close-in-body": BROKE,
    "broken-chunk": NO_HTTP,
    "close-in-chunk": BROKE,
    "garbage": NO_HTTP,
    "two-lengths": NO_HTTP,
    "negative-length": NO_HTTP,
    "endless-header": NO_HTTP,
    "endless-headers": NO_HTTP,
    "endless-body": TOO_LARGE,
    "endless-length": TOO_LARGE,
    "above-limit": TOO_LARGE,
    "gzip": FINE,
    "deflate": FINE,
    "gzip-cut": Ends(None, Code.TOOL, words=("gzip", "cut off")),
    "gzip-bomb": TOO_LARGE,
    "brotli": Ends(None, Code.TOOL, words=("compressed as 'br'", "gzip or deflate")),
    "long-header": FINE,
    "good-then-gone": Ends({}),
    "connection-close": FINE,
    "http-1.0": FINE,
    "until-close": FINE,
    "one-too-many": FINE,
    "one-too-many-later": FINE,
    "rest-too-many": NO_HTTP,  # the length is wrong, so is what would be left of the answer
}
TOO_SLOW = ("trickle", "trickle-headers", "endless-hints", "silent")
NO_ANSWERS = {"good", "held", *TOO_SLOW}


def test_every_behaviour_has_an_outcome() -> None:
    assert ENDS.keys() == ACTS.keys() - NO_ANSWERS


def test_a_response_of_4_mib_fits_into_a_result() -> None:
    """Both are exact: see `below-limit` here, and the test of the dispatcher."""
    assert Limits().callback_bytes == Limits().result_bytes == 4 * MIB


def must_end(result: Result, wanted: Ends, name: str) -> None:
    if wanted.code is None:
        assert repr(result.unwrap()) == repr(wanted.output)
        return
    error = failure(result)
    assert (error.code, error.stage, error.limit) == (wanted.code, wanted.stage, wanted.limit), error.message
    assert not error.retry_safe  # it may have run
    assert repr(result.output) == repr(wanted.output)
    assert not wanted.message or error.message == wanted.message
    assert all(word in error.message for word in wanted.words), error.message
    assert wanted.message or wanted.code is Code.TOOL or repr(name) in error.message


@pytest.mark.parametrize("name", ENDS)
async def test_each_answer_ends_the_call_by_the_contract_and_the_next_call_succeeds(
    bus: Bus, plugin: Misbehaving, name: str
) -> None:
    async with Misbehaving() as trap:
        plugin.elsewhere = trap.url()
        await offer(bus, {each: plugin.url(each) for each in (name, "good")})
        must_end(await soon(bus, name), ENDS[name], name)
        await until(lambda: plugin.acted == 1, "everything to be said")
        for number in range(2):
            assert (await soon(bus, "good", {"n": number})).unwrap() == {"n": number}
        assert [request.call["name"] for request in plugin.requests] == [name, "good", "good"]
        assert trap.connections == 0


@pytest.mark.parametrize("first", ["answers", "resets"])
async def test_a_plugin_that_responds_before_it_has_read_the_request_is_believed(
    bus: Bus, plugin: Misbehaving, first: str
) -> None:
    async def answers(peer: Peer) -> bool:
        await peer.say(answer('"early"'))
        return True  # the request is read after all, and nothing is said about it

    await offer(bus, {each: plugin.url(each) for each in ("close", "good")})
    plugin.first = answers if first == "answers" else ACTS["reset"]
    result = await soon(bus, "close")
    must_end(result, Ends("early") if first == "answers" else BROKE, "close")
    plugin.first = None
    await until(lambda: plugin.opened == 0, "the connection to end")
    assert (await soon(bus, "good", {"n": 1})).unwrap() == {"n": 1}


@pytest.mark.parametrize("length", [0, 65_000, 500_000])
async def test_a_request_of_any_length_arrives_whole(bus: Bus, plugin: Misbehaving, length: int) -> None:
    await offer(bus, {"close": plugin.url("close")})
    await soon(bus, "close", {"text": "é" * length})
    assert plugin.requests[0].call["arguments"] == {"text": "é" * length}


# -- time --------------------------------------------------------------------------------------------------------------


async def test_the_timeout_is_one_deadline_for_the_whole_exchange(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {each: plugin.url(each) for each in (*TOO_SLOW, "good")})
    stopwatch = Stopwatch()
    for result in await asyncio.gather(*(soon(bus, name, timeout=0.5) for name in TOO_SLOW)):
        error = failure(result)
        assert (error.code, error.limit) == (Code.DEADLINE_EXCEEDED, ("timeout_seconds", 0.5))
        assert (error.stage, error.retry_safe) == (Stage.DISPATCHED, False)
    assert stopwatch.seconds() < 0.7  # REST-41
    assert (await soon(bus, "good", {"n": 1})).unwrap() == {"n": 1}
    await until(lambda: plugin.opened == 1, "the connections of the others to be closed")


async def test_a_cancelled_call_closes_its_connection_and_frees_its_slot(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"held": plugin.url("held")})
    call = asyncio.create_task(bus.call("held"))
    await until(lambda: plugin.holding == 1, "the request")
    (handler,) = bus.list()[0].entry.handlers()
    assert len(handler.pending) == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: plugin.opened == 0 and not handler.pending, "the connection to be closed")
    plugin.let_go.set()
    assert (await soon(bus, "held", {"n": 1})).unwrap() == {"n": 1}


async def test_of_a_cancelled_call_the_rest_of_its_request_is_not_sent() -> None:
    loop = asyncio.get_running_loop()
    began, cancelled, size = loop.create_future(), asyncio.Event(), loop.create_future()

    async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read = len(await reader.readexactly(1))
        began.set_result(None)
        await cancelled.wait()
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(MIB):
                read += len(piece)
        writer.close()
        size.set_result(read)

    text = "x" * 8 * MIB  # its request is twice as long, since it has the text as the model wrote it, too
    async with (
        running_bus(limits=Limits(arguments_bytes=len(text) + 100)) as bus,
        await asyncio.start_server(read_late, "127.0.0.1", 0) as server,
    ):
        await offer(bus, {"late": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/late"})
        call = asyncio.create_task(bus.call("late", {"text": text}))
        await asyncio.wait_for(began, WAIT_SECONDS)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        (handler,) = bus.list()[0].entry.handlers()
        await until(lambda: not handler.pending, "the exchange to end")
        cancelled.set()
        assert await asyncio.wait_for(size, WAIT_SECONDS) < 2 * len(text)


# -- connections -------------------------------------------------------------------------------------------------------


async def test_connections_stay_open_while_the_plugin_leaves_them_open(
    plugin: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "TRIAL_SECONDS", 0.0)
    defaults = {**(outbound.open_session.__kwdefaults__ or {}), "keep_alive_seconds": 60.0}  # this machine may be slow
    monkeypatch.setattr(outbound.open_session, "__kwdefaults__", defaults)
    async with running_bus(grace_seconds=0) as bus:
        await offer(bus, {each: plugin.url(each) for each in ("good", "400", "redirect-to-itself", "list")})
        for name in ("good", "400", "redirect-to-itself", "list", "good"):
            await soon(bus, name)
        assert plugin.connections == 1


async def test_a_plugin_that_closes_after_each_answer_without_saying_so_loses_no_call(
    bus: Bus, plugin: Misbehaving
) -> None:
    await offer(bus, {"good-then-gone": plugin.url("good-then-gone")})
    for number in range(200):
        assert (await soon(bus, "good-then-gone", {"n": number})).unwrap() == {"n": number}
    assert plugin.connections == 200


async def test_each_call_in_flight_has_a_connection_and_those_beyond_the_slots_are_refused_at_once(
    bus: Bus, plugin: Misbehaving
) -> None:
    await offer(bus, {"held": plugin.url("held")})
    calls = [asyncio.create_task(soon(bus, "held", {"n": number})) for number in range(300)]
    await until(lambda: plugin.holding == 256, "256 requests")
    assert plugin.opened == 256
    over = [failure(call.result()) for call in calls if call.done()]
    assert [(error.code, error.stage, error.retry_safe) for error in over] == [
        (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
    ] * 44
    plugin.let_go.set()
    results = await asyncio.gather(*calls)
    assert [each.unwrap() for each in results[:256]] == [{"n": number} for number in range(256)]
    assert plugin.connections == 256


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_localhost_is_this_machine_whatever_a_name_service_says(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    asked: list[Any] = []

    def resolve(*names: Any, **options: Any) -> Any:
        asked.append(names)
        raise OSError("no name is to be looked up")

    try:
        plugin = Misbehaving(host=host)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with plugin:
        await offer(bus, {"good": plugin.url("good", host="LocalHost")})
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        assert (await soon(bus, "good", {"n": 1})).unwrap() == {"n": 1}
        assert plugin.requests[0].headers["host"] == f"localhost:{plugin.port}"
        plugin.leave()
        for _ in range(3):
            assert failure(await soon(bus, "good")).stage is Stage.NOT_DISPATCHED
        await plugin.come()
        await until(lambda: bus.list(), "the probe to find it")  # which looks up no name either
    assert not asked


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_proxies_of_the_environment_are_not_used(
    bus: Bus, plugin: Misbehaving, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    async with Misbehaving() as trap:
        await offer(bus, {"good": plugin.url(host=host)})
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, trap.url(""))
            monkeypatch.setenv(name.lower(), trap.url(""))
        assert (await soon(bus, "good", {"n": 1})).unwrap() == {"n": 1}
        assert trap.connections == 0


# -- what is sent ------------------------------------------------------------------------------------------------------

BODIES = {
    "": '{"name":"good","arguments":{},"call_id":"ID","raw_arguments":""}',
    '{ "b": 5.0, "a": 12345678901234567890123 }': '{"name":"good","arguments":{"b":5.0,"a":12345678901234567890123},'
    '"call_id":"ID","raw_arguments":"{ \\"b\\": 5.0, \\"a\\": 12345678901234567890123 }"}',
    '{"city":"图拉"}': '{"name":"good","arguments":{"city":"图拉"},"call_id":"ID",'
    '"raw_arguments":"{\\"city\\":\\"图拉\\"}"}',
    "[1]": '{"name":"good","arguments":{"value":[1]},"call_id":"ID","raw_arguments":"[1]"}',
    "null": '{"name":"good","arguments":{"value":null},"call_id":"ID","raw_arguments":"null"}',
    '{"a":': '{"name":"good","arguments":{"_raw":"{\\"a\\":"},"call_id":"ID","raw_arguments":"{\\"a\\":"}',
}


async def test_a_call_is_posted_as_the_contract_writes_it(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"good": plugin.url("a%20b/good?x=%2F&y")})
    for number, (text, body) in enumerate(BODIES.items(), start=1):
        await soon(bus, "good", text)
        request = plugin.requests[-1]
        assert request.body.decode() == body.replace("ID", f"local-{number}")  # REST-40: the caller's own call_id
        assert request.line == "POST /a%20b/good?x=%2F&y HTTP/1.1"
        assert request.headers["content-type"] == "application/json"
        assert int(request.headers["content-length"]) == len(request.body)
        assert "authorization" not in request.headers


async def test_user_and_password_are_sent_and_shown_nowhere(
    plugin: Misbehaving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = []
    async with running_bus(grace_seconds=0, http="127.0.0.1:0") as bus, client(bus) as http:
        for name in ("good", "garbage", "close", "400"):
            body = {"name": name, "callback_url": plugin.url(name, user="bob:s3cr%65t@")}
            seen.append((await http.post("/api/tools/register", json=body)).text)
        wrong = {"name": "", "callback_url": f"{plugin.url(user='bob:s3cr%65t@')} "}
        refused = await http.post("/api/tools/register", json=wrong)
        assert refused.status_code == 422
        seen += [refused.text, (await http.get("/api/tools")).text, repr(bus.list()), repr(bus)]
        for name in ("good", "garbage", "close", "400"):
            seen.append(repr(await soon(bus, name)))
            expected = base64.b64encode(b"bob:s3cret").decode()
            assert plugin.requests[-1].headers["authorization"] == f"Basic {expected}"
        plugin.leave()
        for _ in range(4):
            seen.append(repr(await soon(bus, "good")))
        seen.append(repr(bus.list(include_offline=True)))
        seen += [repr(each.entry.handlers()) for each in bus.list(include_offline=True)]
        ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
        assert any("offline" in record.getMessage() for record in ours)
        seen += [f"{record.getMessage()} {record.exc_text}" for record in ours]
    assert "bob:***@" in "".join(seen)
    for text in seen:
        assert not any(secret in text for secret in ("s3cr", base64.b64encode(b"bob:s3cret").decode())), text


# -- tools that change meanwhile ---------------------------------------------------------------------------------------


async def test_a_call_goes_on_when_its_tool_is_taken_away(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"held": plugin.url("held")})
    call = asyncio.create_task(soon(bus, "held", {"n": 1}))
    await until(lambda: plugin.holding == 1, "the request")
    bus.registry.clear("plugin:old")
    assert bus.list() == []
    assert failure(await soon(bus, "held")).code is Code.NOT_FOUND
    plugin.let_go.set()
    assert (await call).unwrap() == {"n": 1}


async def test_a_call_goes_on_when_its_tool_is_registered_with_another_url(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"held": plugin.url("held"), "other": plugin.url()})
    call = asyncio.create_task(soon(bus, "held", {"n": 1}))
    await until(lambda: plugin.holding == 1, "the request")
    await offer(bus, {"held": plugin.url("text")})
    assert (await soon(bus, "held")).unwrap() == "sunny"
    assert [each.tool.name for each in bus.list()] == ["held", "other"]
    plugin.let_go.set()
    assert (await call).unwrap() == {"n": 1}
