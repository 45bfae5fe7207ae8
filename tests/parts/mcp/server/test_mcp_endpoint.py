"""The endpoint over HTTP: eras, headers, refusals, plain answers and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.exceptions import HTTPException

from tests.parts.mcp.server.http_client import META, Exchange, HttpClient, serving
from tests.support.waiting import HANG_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.bus.web_paths import Message
from toolbus.functions.scope import ToolScope
from toolbus.parts.mcp.messages.eras import (
    LEGACY_VERSIONS,
    META_CAPABILITIES,
    META_LOG_LEVEL,
    META_VERSION,
    NEWEST_LEGACY,
)
from toolbus.parts.mcp.messages.jsonrpc import McpCode
from toolbus.parts.mcp.server.sessions import MAX_STREAMS
from toolbus.parts.mcp.settings import Profile
from toolbus.protocol.limits import Timings


class Work:
    """Tools whose end a test decides."""

    def __init__(self, bus: Bus) -> None:
        self.go_on = asyncio.Event()
        self.running = 0
        self.cancelled = 0

        @bus.tool
        async def add(a: int, b: int) -> dict[str, int]:
            return {"sum": a + b}

        @bus.tool
        async def work(scope: ToolScope) -> str:
            self.running += 1
            try:
                scope.progress(0, total=2, message="begun")
                scope.progress(0, total=2, message="the same")
                await self.go_on.wait()
                scope.progress(1, total=2)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return "done"

        @bus.tool
        async def silent() -> str:
            self.running += 1
            await self.go_on.wait()
            return "said"


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    timings = Timings(ping_seconds=0.2, resumable_seconds=0.1, poll_seconds=HANG_SECONDS)
    async with serving(Profile(name="desk", deny=("add",)), timings=timings) as bus:
        yield bus


@pytest.fixture
async def polled_client() -> AsyncIterator[tuple[HttpClient, Work]]:
    """A client whose streams are closed to be resumed."""
    async with serving(timings=Timings(ping_seconds=0.2, resumable_seconds=0.1, poll_seconds=0.3)) as bus:
        yield HttpClient(bus), Work(bus)


@pytest.fixture
def work(bus: Bus) -> Work:
    return Work(bus)


@pytest.fixture
def client(bus: Bus, work: Work) -> HttpClient:
    return HttpClient(bus)


async def test_a_modern_client_calls_a_tool_without_a_handshake(client: HttpClient) -> None:
    answer = await client.call("add", {"a": 1, "b": 2})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.result["structuredContent"] == {"sum": 3}
    assert answer.result["resultType"] == "complete"
    assert "mcp-session-id" not in answer.headers


@pytest.mark.parametrize("version", LEGACY_VERSIONS)
async def test_a_legacy_client_of_each_revision_calls_a_tool_in_a_session(client: HttpClient, version: str) -> None:
    answer = await client.initialize(version)
    assert answer.result["protocolVersion"] == version
    result = (await client.call("add", {"a": 1, "b": 2})).result
    assert result["structuredContent"] == {"sum": 3}
    assert "resultType" not in result


async def test_a_handshake_of_an_unknown_revision_is_answered_with_the_newest_that_has_one(client: HttpClient) -> None:
    assert (await client.initialize("2031-01-01")).result["protocolVersion"] == NEWEST_LEGACY


async def test_both_eras_are_served_at_once(client: HttpClient, bus: Bus) -> None:
    await client.initialize()
    modern = HttpClient(bus)
    for _ in range(2):
        assert "resultType" in (await modern.call("add", {"a": 1, "b": 2})).result
        assert "resultType" not in (await client.call("add", {"a": 1, "b": 2})).result


async def test_an_unknown_modern_version_is_refused_with_those_that_are_known(client: HttpClient) -> None:
    answer = await client.ask("tools/list", meta={META_VERSION: "2031-01-01"})
    assert (answer.status, answer.error["code"]) == (400, McpCode.UNSUPPORTED_VERSION)
    assert answer.error["data"] == {"supported": ["2026-07-28"], "requested": "2031-01-01"}
    assert answer.answer["id"] == 1


@pytest.mark.parametrize("key", [META_VERSION, META_CAPABILITIES])
async def test_a_modern_request_without_what_each_must_say_is_refused(client: HttpClient, key: str) -> None:
    meta = {name: value for name, value in META.items() if name != key}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}}
    headers = {
        "Content-Type": "application/json",
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/list",
    }
    answer = await client.send(json.dumps(message).encode(), headers).done()
    assert (answer.status, answer.error["code"]) == (400, McpCode.INVALID_PARAMS)
    assert key in answer.error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Mcp-Method": "tools/list"},
        {"Mcp-Method": None},
        {"Mcp-Name": "other"},
        {"Mcp-Name": None},
        {"MCP-Protocol-Version": None},
        {"MCP-Protocol-Version": "2031-01-01"},
    ],
)
async def test_a_modern_request_whose_headers_do_not_agree_with_its_body_is_refused(
    client: HttpClient, headers: dict[str, str | None]
) -> None:
    answer = await client.call("add", {"a": 1, "b": 2}, headers=headers)
    assert (answer.status, answer.error["code"]) == (400, McpCode.HEADER_MISMATCH)


async def test_a_name_may_be_encoded_in_its_header(client: HttpClient) -> None:
    assert (await client.call("add", {"a": 1, "b": 2}, headers={"Mcp-Name": " =?base64?YWRk?= "})).status == 200


async def test_arguments_that_are_marked_must_agree_with_their_headers(client: HttpClient, bus: Bus) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "x-mcp-header": "N"}}}

    @bus.tool(parameters=schema)  # type: ignore[untyped-decorator]
    async def marked(n: int = 0) -> int:
        return n

    assert (await client.call("marked", {"n": 5}, headers={"Mcp-Param-N": "5"})).status == 200
    assert (await client.call("marked", {}, headers={})).status == 200
    for header in (None, "6"):
        refused = await client.call("marked", {"n": 5}, headers={"Mcp-Param-N": header})
        assert (refused.status, refused.error["code"]) == (400, McpCode.HEADER_MISMATCH)
    assert (await client.call("marked", {}, headers={"Mcp-Param-N": "5"})).status == 400


async def test_a_header_that_stands_twice_is_refused(client: HttpClient) -> None:
    headers = [("content-type", "application/json"), ("mcp-method", "ping"), ("mcp-method", "tools/list")]
    assert (await Exchange(client, "POST", "/mcp", headers, b"{}").done()).status == 400


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"{}", "text/plain", 415, McpCode.INVALID_REQUEST),
        (b"{}", None, 415, McpCode.INVALID_REQUEST),
        (b"{", "application/json", 400, McpCode.PARSE_ERROR),
        (b'"\xff"', "application/json; charset=utf-8", 400, McpCode.PARSE_ERROR),
        (b"[]", "application/json", 400, McpCode.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping"}', "application/json", 400, McpCode.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":7,"result":{}}', "application/json", 400, McpCode.INVALID_REQUEST),
    ],
)
async def test_a_body_that_is_no_message_of_a_session_is_refused(
    client: HttpClient, body: bytes, content_type: str | None, status: int, code: int
) -> None:
    answer = await client.send(body, {"Content-Type": content_type}).done()
    assert (answer.status, answer.error["code"]) == (status, code)


async def test_other_methods_of_http_are_refused_with_those_that_there_are(client: HttpClient) -> None:
    answer = await client.send(b"", {}, "PUT").done()
    assert (answer.status, answer.headers["allow"]) == (405, "POST, GET, DELETE")


async def test_an_unknown_method_is_not_found(client: HttpClient) -> None:
    answer = await client.ask("no/such")
    assert (answer.status, answer.error["code"]) == (404, McpCode.METHOD_NOT_FOUND)
    for gone in ("ping", "logging/setLevel", "resources/subscribe"):
        assert (await client.ask(gone)).status == 404
    await client.initialize()
    answer = await client.ask("no/such")
    assert (answer.status, answer.error["code"]) == (200, McpCode.METHOD_NOT_FOUND)


async def test_a_profile_has_a_path_of_its_own_and_an_unknown_one_none(client: HttpClient, bus: Bus) -> None:
    assert await HttpClient(bus, "/mcp/default").names() == await client.names()
    assert "add" not in await HttpClient(bus, "/mcp/desk").names()
    assert (await HttpClient(bus, "/mcp/nobody").ask("tools/list")).status == 404
    assert (await HttpClient(bus, "/mcp/desk/x").ask("tools/list")).status == 404


# -- streams ---------------------------------------------------------------------------------------------------------


async def test_progress_turns_the_answer_into_a_stream_of_rising_numbers(client: HttpClient, work: Work) -> None:
    exchange = client.begin("tools/call", {"name": "work", "arguments": {}}, meta={"progressToken": "p"})
    await exchange.told(1)
    work.go_on.set()
    await exchange.done()
    assert exchange.is_stream
    *notifications, answer = exchange.messages
    assert [each["params"] for each in notifications] == [
        {"progressToken": "p", "progress": 0, "total": 2, "message": "begun"},
        {"progressToken": "p", "progress": 1, "total": 2},
    ]
    assert answer["result"]["content"] == [{"type": "text", "text": "done"}]
    assert not any("id" in event for event in exchange.events)


async def test_texts_of_progress_are_log_messages_for_clients_that_want_them(client: HttpClient, work: Work) -> None:
    work.go_on.set()
    told = (await client.call("work", meta={META_LOG_LEVEL: "info"})).messages[:-1]
    assert [each["params"]["data"] for each in told] == ["begun", "the same"]
    assert {each["method"] for each in told} == {"notifications/message"}
    assert len((await client.call("work")).messages) == 1
    assert len((await client.call("work", meta={META_LOG_LEVEL: "warning"})).messages) == 1


async def test_a_client_that_takes_no_stream_gets_a_plain_answer(client: HttpClient, work: Work) -> None:
    work.go_on.set()
    answer = await client.call("work", meta={"progressToken": 1}, headers={"Accept": "application/json"})
    assert not answer.is_stream
    assert answer.result["content"] == [{"type": "text", "text": "done"}]


async def test_a_long_answer_becomes_a_stream_that_comments_keep_open(client: HttpClient, work: Work) -> None:
    exchange = client.begin("tools/call", {"name": "silent", "arguments": {}})
    await until(lambda: b": ping\n\n" in exchange.body, "a comment")
    work.go_on.set()
    assert (await exchange.done()).result["content"] == [{"type": "text", "text": "said"}]


@pytest.mark.parametrize("token", [None, "p"])
async def test_a_modern_client_that_leaves_cancels_its_call(
    client: HttpClient, work: Work, token: str | None, bus: Bus
) -> None:
    exchange = client.begin("tools/call", {"name": "work", "arguments": {}}, meta={"progressToken": token})
    await until(lambda: work.running, "the call")
    exchange.leave()
    await within(exchange.task)
    await until(lambda: work.cancelled == 1, "its end")
    assert bus.dispatcher.in_flight.active == 0


async def test_a_legacy_client_cancels_by_the_id_of_its_request(client: HttpClient, work: Work) -> None:
    await client.initialize()
    exchange = client.begin("tools/call", {"name": "silent", "arguments": {}}, id="x")
    other = client.begin("tools/call", {"name": "silent", "arguments": {}}, id="y")
    await until(lambda: work.running == 2, "both calls")
    noted = await client.ask("notifications/cancelled", {"requestId": "x"}, id=None)
    assert (noted.status, noted.body) == (202, b"")
    assert not (await exchange.done()).messages
    work.go_on.set()
    assert (await other.done()).result["isError"] is False


async def test_a_legacy_client_that_loses_its_connection_resumes_the_stream(client: HttpClient, work: Work) -> None:
    await client.initialize()
    exchange = client.begin("tools/call", {"name": "work", "arguments": {}}, meta={"progressToken": 1})
    await exchange.told(2)
    assert exchange.events[0]["data"] == ""  # from which a client can resume, whatever else it has read
    last = next(event["id"] for event in exchange.events if event["data"])
    exchange.leave()
    again = client.listen(last)
    await again.told(1)
    work.go_on.set()
    await again.done()
    assert work.cancelled == 0
    assert [each.get("method") for each in again.messages] == ["notifications/message", "notifications/progress", None]
    assert again.result["content"] == [{"type": "text", "text": "done"}]


async def test_the_stream_of_a_long_call_is_closed_to_be_resumed(
    polled_client: tuple[HttpClient, Work],
) -> None:
    client, work = polled_client
    await client.initialize()
    exchange = client.begin("tools/call", {"name": "silent", "arguments": {}})
    await until(lambda: exchange.ended, "the end of the first response")
    assert not exchange.messages
    assert int(exchange.events[0]["retry"]) > 0
    again = client.listen(exchange.events[0]["id"])
    work.go_on.set()
    assert (await again.done()).result["content"] == [{"type": "text", "text": "said"}]
    await within(exchange.task)


async def test_the_stream_of_a_client_that_resumes_none_stays_open(
    polled_client: tuple[HttpClient, Work],
) -> None:
    client, work = polled_client
    await client.initialize("2025-06-18")
    exchange = client.begin("tools/call", {"name": "silent", "arguments": {}})
    await until(lambda: exchange.body.count(b": ping") > 2, "some comments, longer than a stream that is polled")
    work.go_on.set()
    await exchange.done()
    assert exchange.result["content"] == [{"type": "text", "text": "said"}]
    assert all(event.get("data") for event in exchange.events)  # older clients fail on an event without data


async def test_an_event_of_no_stream_is_not_found(client: HttpClient) -> None:
    await client.initialize()
    for last in ("nowhere-1", "1", ""):
        assert (await client.listen(last).done()).status == 404
    assert (await client.call("add", {"a": 1, "b": 2})).status == 200


@pytest.mark.parametrize("modern", [True, False])
async def test_an_answer_that_is_ended_from_outside_leaves_nothing_behind(
    client: HttpClient, work: Work, modern: bool
) -> None:
    if not modern:
        await client.initialize()
    before = asyncio.all_tasks()
    exchange = client.begin("tools/call", {"name": "work", "arguments": {}}, meta={"progressToken": 1})
    await exchange.told(1)
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(exchange.task)
    await until(lambda: asyncio.all_tasks() <= before, "the end of what it began")
    assert work.cancelled == 1


async def test_a_session_with_all_its_streams_gets_one_that_cannot_be_resumed(client: HttpClient, work: Work) -> None:
    await client.initialize()
    open_streams = [client.listen() for _ in range(MAX_STREAMS)]
    await until(lambda: all(stream.status for stream in open_streams), "the streams")
    calls = [
        client.begin("tools/call", {"name": "work", "arguments": {}}, meta={"progressToken": number})
        for number in range(MAX_STREAMS + 1)
    ]
    for call in calls:
        await call.told(1)
    work.go_on.set()
    for call in calls:
        assert (await call.done()).result["isError"] is False
    assert not any("id" in event for event in calls[-1].events)
    for stream in open_streams:
        stream.leave()
        await within(stream.task)


async def test_the_standing_stream_needs_a_client_that_takes_it(client: HttpClient) -> None:
    await client.initialize()
    answer = await client.send(b"", {"Accept": "application/json", "Mcp-Session-Id": client.session}, "GET").done()
    assert answer.status == 406


async def test_a_session_learns_of_a_new_tool_on_its_standing_stream(client: HttpClient, bus: Bus) -> None:
    await client.initialize()
    stream = client.listen()
    await until(lambda: stream.status, "the stream")

    @bus.tool
    async def another() -> None: ...

    assert (await stream.told(1))[0]["method"] == "notifications/tools/list_changed"
    stream.leave()
    await within(stream.task)


async def test_a_body_that_is_too_long_is_refused_as_everywhere(client: HttpClient) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise HTTPException(413, "the body is longer than the limit")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": headers, IDENTITY: client.identity}
    await client.application(scope, receive, send)
    assert sent[0]["status"] == 413
