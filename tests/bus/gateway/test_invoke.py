"""Calls by POST /api/tools/invoke: what comes back for every kind of tool and of failure, and who hangs up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import Connection, client, invoke, legacy_plugin
from tests.faults.raw_peer import RawPeer, tool
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus import Bus
from toolbus.bus.gateway.call_response import LARGE_OUTPUT, call_body, describe_result
from toolbus.bus.gateway.event_stream import event
from toolbus.bus.gateway.json_response import write_json
from toolbus.errors import Code
from toolbus.sdk import Plugin, ToolScope
from toolbus.testing import running_bus
from toolbus.tool import MAX_CALL_ID, Limits, Result
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ("local", "grpc", "callback")

JSON_VALUES: list[Any] = [
    None,
    True,
    0,
    5,
    5.0,
    -0.0,
    1e300,
    2**53 + 1,
    -(2**63) - 1,
    10**200,
    0.1,
    "",
    "天気は？",
    'quotes " and \\ and \n and \0',
    [],
    [None, [1, [2.5]]],
    {},
    {"b": 1, "a": {"": None}},
    {"output": 1},
]


@dataclass
class Tools:
    """A bus whose tools ``local``, ``grpc`` and ``callback`` return their argument ``value``."""

    bus: Bus
    http: httpx.AsyncClient
    seen: list[Any] = field(default_factory=list)  # what the callback was posted
    scopes: list[ToolScope] = field(default_factory=list)  # of the calls of ``nap``
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # once ``nap`` sees its cancel


@asynccontextmanager
async def running_tools() -> AsyncIterator[Tools]:
    async with (
        running_bus(http="127.0.0.1:0", grace_seconds=0.0, roles=("Yui", "Ran")) as bus,
        client(bus) as http,
        legacy_plugin(lambda body: callback(body)) as url,
        Plugin("rest-test", address=bus.grpc_addresses[0]) as plugin,
    ):
        tools = Tools(bus, http)

        async def callback(body: dict[str, Any]) -> bytes:
            tools.seen.append(body)
            answer = {"output": body["arguments"].get("value"), "is_error": False}
            return json.dumps(answer).encode()

        @bus.tool
        def local(value: Any = None) -> Any:
            return value

        @plugin.tool
        def grpc(value: Any = None) -> Any:
            return value

        @plugin.tool
        async def nap(scope: ToolScope) -> None:
            tools.scopes.append(scope)
            scope.progress(message="asleep")
            try:
                await asyncio.Event().wait()
            finally:
                tools.cancelled.set()

        await plugin.ready()
        registered = await http.post("/api/tools/register", json={"name": "callback", "callback_url": url})
        assert registered.json()["ok"]
        yield tools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Tools]:
    async with running_tools() as tools:
        yield tools


@pytest.fixture
def tools(shared: Tools) -> Tools:
    """The bus of all tests here, with nothing seen yet."""
    shared.seen.clear()
    shared.scopes.clear()
    shared.cancelled.clear()
    return shared


# -- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
async def test_every_json_value_comes_back_as_it_was_sent(tools: Tools, name: str) -> None:
    for value in JSON_VALUES:
        said = await invoke(tools.http, name, {"value": value})
        assert not said["is_error"], said
        assert repr(said["output"]) == repr(value)


async def test_half_a_surrogate_pair_passes_where_arguments_are_not_checked(tools: Tools) -> None:
    half = {"\udc00": ["half a pair \ud83d"]}
    assert (await invoke(tools.http, "callback", {"value": half}))["output"] == half


async def test_a_call_does_not_wait_for_the_network_to_be_patient(tools: Tools) -> None:
    """An answer in two segments waits 40 ms for the first one's acknowledgement, unless told not to."""
    seconds = []
    for _ in range(11):
        began, worked = time.perf_counter(), time.process_time()
        await invoke(tools.http, "local")
        seconds.append(time.perf_counter() - began - (time.process_time() - worked))  # a slow machine works longer
    assert min(seconds) < 0.03  # a busy machine makes them longer, never shorter


async def test_missing_arguments_have_several_spellings_and_text_is_what_the_model_wrote(tools: Tools) -> None:
    for name in KINDS:
        ways: list[Any] = [None, {}, "", "{}", " {} "]
        for arguments in ways:
            said = await invoke(tools.http, name, arguments)
            assert (said["is_error"], said["output"]) == (False, None)
        assert (await invoke(tools.http, name, '{"value": 7.0}'))["output"] == 7.0


async def test_arguments_that_break_the_schema_never_reach_a_checked_tool(tools: Tools) -> None:
    for name in ("local", "grpc"):
        wrong: list[Any] = [[1], "[1]", "7", 7, True, "{half", '"text"', "NaN"]
        for arguments in wrong:
            error = (await invoke(tools.http, name, arguments))["error"]
            said = (error["code"], error["stage"], error["retry_safe"])
            assert said == ("INVALID_ARGUMENTS", "NOT_DISPATCHED", False)


async def test_an_unchecked_tool_gets_whatever_the_model_wrote(tools: Tools) -> None:
    """REST-40."""
    cases: list[tuple[Any, Any, str]] = [
        (None, {}, ""),
        ("", {}, ""),
        ({}, {}, "{}"),
        ([1, 2.0], {"value": [1, 2.0]}, "[1, 2.0]"),
        ("7", {"value": 7}, "7"),
        ("{half", {"_raw": "{half"}, "{half"),
        ("NaN", {"_raw": "NaN"}, "NaN"),
    ]
    for arguments, posted, raw in cases:
        said = await invoke(tools.http, "callback", arguments, call_id="mine")
        assert not said["is_error"]
        body = {"name": "callback", "arguments": posted, "call_id": "mine", "raw_arguments": raw}
        assert repr(tools.seen.pop()) == repr(body)


async def test_output_that_is_not_json_is_returned_as_text_with_its_content(tools: Tools) -> None:
    texts = ["{half", "NaN", "1e999", "[" * 5_000, "1" * 5_000]

    def answer(call: pb.ToolCall) -> pb.ToolResult:
        text = json.loads(call.arguments_json)["text"]
        return pb.ToolResult(
            call_id=call.call_id, output_json=text, content=[pb.ContentBlock(text=pb.TextContent(text="seen"))]
        )

    peer = await _raw(tools.bus, answer, "odd")
    try:
        for text in texts:
            said = await invoke(tools.http, "odd", {"text": text})
            assert (said["output"], said["is_error"]) == (text, False)
            assert said["content"] == [{"text": {"text": "seen"}}]
    finally:
        await peer.close()


async def _raw(bus: Bus, answer: Any, *names: str) -> RawPeer:
    """Attaches a peer that answers by itself; the caller closes it."""
    peer = RawPeer(bus.grpc_addresses[0], answer=answer)
    peer.open()
    await peer.attach("raw", *(tool(name) for name in names))
    return peer


@pytest.mark.parametrize("depth", [100, 256, *range(880, 1000)])
async def test_output_of_any_depth_can_be_written(depth: int) -> None:
    """As a value or as the text it is, whatever of the interpreter's stack is left; the answers go round it."""
    text = "[" * depth + "]" * depth
    result = Result("mine", text)
    said = describe_result(result)
    assert write_json(said)
    assert event("result", said)
    assert said["output"] == (text if depth > 990 else said["output"])


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('{"n": 123456789012345678901234567890, "half": "\\ud83d", "pad": "%s"}', None),
        ("[%s", "[%s"),
        ('[NaN, "%s"]', '[NaN, "%s"]'),
        ('[1e999, "%s"]', '[1e999, "%s"]'),
    ],
    ids=["json", "cut", "no constant of json", "no number of ours"],
)
async def test_a_large_output_is_returned_like_a_small_one_without_being_parsed(text: str, output: str | None) -> None:
    pad = "x" * LARGE_OUTPUT
    for each in ("x", pad):
        said = json.loads(await call_body(Result("mine", text % each)))
        assert said["output"] == (json.loads(text % each) if output is None else output % each)
        assert (said["call_id"], said["is_error"], said["error"]) == ("mine", False, None)
    if output is None:  # not even its blanks are touched
        assert text % pad in (await call_body(Result("mine", text % pad))).decode()


# -- failures ------------------------------------------------------------------------------------------------------


async def test_an_unknown_tool_is_an_error_that_lists_the_tools(tools: Tools) -> None:
    error = (await invoke(tools.http, "locla"))["error"]
    assert error["code"] == "NOT_FOUND"
    for word in ("locla", "local", "grpc", "callback"):
        assert word in error["message"]
    assert "toolbus:" not in error["message"]


async def test_an_unknown_role_is_a_404_and_a_known_one_finds_its_tool(tools: Tools) -> None:
    refused = await tools.http.post("/api/tools/invoke", json={"name": "local", "role": "Nobody"})
    assert (refused.status_code, refused.json()) == (404, {"detail": "unknown role: Nobody"})
    for role in ("Ran", "", None):
        assert not (await invoke(tools.http, "local", role=role))["is_error"]


async def test_every_code_of_a_plugin_is_returned_by_its_name(tools: Tools) -> None:
    def answer(call: pb.ToolCall) -> pb.ToolResult:
        error = pb.CallError(
            code=json.loads(call.arguments_json)["code"],
            stage=pb.CALL_STAGE_ACCEPTED,
            message="so it is",
            retry_safe=True,
            limit=pb.Limit(name="tools", value=3),
        )
        return pb.ToolResult(call_id=call.call_id, is_error=True, output_json="[5.0]", error=error)

    peer = await _raw(tools.bus, answer, "fails")
    try:
        for code in [each for each in Code if each]:
            said = await invoke(tools.http, "fails", {"code": code.value}, call_id="mine")
            assert (said["call_id"], said["is_error"]) == ("mine", True)
            assert repr(said["output"]) == "[5.0]"
            assert list(said["error"]) == [
                *("code", "message", "stage", "retry_safe", "limit", "retry_after_seconds", "reason"),
            ]
            assert said["error"]["code"] == code.name
            assert said["error"]["message"] == "so it is"
    finally:
        await peer.close()


async def test_an_exception_keeps_its_class_and_its_message(tools: Tools) -> None:
    @tools.bus.tool
    def refuses() -> None:
        raise LookupError("kein Land 那里")

    error = (await invoke(tools.http, "refuses"))["error"]
    assert (error["code"], error["reason"]) == ("TOOL", "LookupError")
    assert "kein Land 那里" in error["message"]


async def test_a_timeout_names_its_limit(tools: Tools) -> None:
    seconds = 0.05
    error = (await invoke(tools.http, "nap", timeout_seconds=seconds))["error"]
    while error["stage"] == "DISPATCHED" and seconds < WAIT_SECONDS:  # a busy machine has not begun it in time
        seconds *= 4
        error = (await invoke(tools.http, "nap", timeout_seconds=seconds))["error"]
    assert (error["code"], error["stage"]) == ("DEADLINE_EXCEEDED", "ACCEPTED")
    assert error["limit"]["value"] == seconds
    await asyncio.wait_for(tools.cancelled.wait(), WAIT_SECONDS)


async def test_an_outdated_schema_hash_is_refused_before_the_tool_runs(tools: Tools) -> None:
    error = (await invoke(tools.http, "local", schema_hash="old"))["error"]
    assert (error["code"], error["stage"]) == ("CATALOG_STALE", "NOT_DISPATCHED")


async def test_too_large_a_result_and_too_many_calls_name_their_limits() -> None:
    limits = Limits(result_bytes=1_000, calls_in_flight=1)
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0, limits=limits) as bus, client(bus) as http:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def answer(body: dict[str, Any]) -> bytes:
            entered.set()
            await leave.wait()
            return b'"done"'

        async with legacy_plugin(answer) as url:
            await http.post("/api/tools/register", json={"name": "slow", "callback_url": url})

            @bus.tool
            def large() -> str:
                return "x" * 1_001

            error = (await invoke(http, "large"))["error"]
            assert (error["code"], error["limit"]) == ("RESULT_TOO_LARGE", {"name": "result_bytes", "value": 1_000})
            first = asyncio.create_task(invoke(http, "slow"))
            await entered.wait()
            error = (await invoke(http, "slow"))["error"]
            assert (error["code"], error["stage"], error["retry_safe"]) == ("OVERLOADED", "NOT_DISPATCHED", True)
            assert error["retry_after_seconds"] > 0
            assert error["limit"]["value"] == 1
            leave.set()
            assert (await first)["output"] == "done"


async def test_a_draining_bus_refuses_calls_and_says_that_a_retry_is_safe() -> None:
    async with running_tools() as tools:
        napping = asyncio.create_task(invoke(tools.http, "nap", timeout_seconds=0.3))
        await until(lambda: tools.scopes, "the call to reach its tool")
        drained = asyncio.create_task(tools.bus.drain(WAIT_SECONDS))
        ready = await tools.http.get("/readyz")
        assert ready.status_code == 503
        error = (await invoke(tools.http, "local"))["error"]
        assert (error["code"], error["stage"], error["retry_safe"]) == ("UNAVAILABLE", "NOT_DISPATCHED", True)
        assert (await napping)["error"]["code"] == "DEADLINE_EXCEEDED"
        await drained


# -- what a host may say about a call ------------------------------------------------------------------------------


async def test_two_hosts_with_the_same_call_id_do_not_meet(tools: Tools) -> None:
    both = asyncio.Barrier(2)

    @tools.bus.tool
    async def meet(who: int) -> int:
        async with asyncio.timeout(WAIT_SECONDS), both:
            return who

    async with client(tools.bus) as other:
        said = await asyncio.gather(
            invoke(tools.http, "meet", {"who": 1}, call_id="same"), invoke(other, "meet", {"who": 2}, call_id="same")
        )
    assert [(each["call_id"], each["output"]) for each in said] == [("same", 1), ("same", 2)]
    assert [record.call_id for record in tools.bus.records][:2] == ["same", "same"]


async def test_a_call_without_an_id_gets_one_of_its_own(tools: Tools) -> None:
    ids = [(await invoke(tools.http, "local", call_id=given))["call_id"] for given in ("", "", "a\nb", "呼叫")]
    assert len({*ids}) == 4
    assert ids[2:] == ["a\nb", "呼叫"]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"call_id": "x" * (MAX_CALL_ID + 1)}, "call_id"),
    ({"call_id": 5}, "call_id"),
    ({"name": ""}, "name"),
    ({"timeout_seconds": 0}, "timeout_seconds"),
    ({"timeout_seconds": 300.5}, "timeout_seconds"),
    ({"timeout_seconds": float("nan")}, "timeout_seconds"),
    ({"context": 1}, "context"),
]


async def test_a_call_that_breaks_a_rule_is_a_422_that_names_the_field(tools: Tools) -> None:
    for more, place in BROKEN:
        answer = await tools.http.post("/api/tools/invoke", content=json.dumps({"name": "local", **more}))
        assert answer.status_code == 422, more
        assert [error["loc"][:2] for error in answer.json()["detail"]] == [["body", place]]


HALVES: list[dict[str, Any]] = [
    {"name": "\ud800"},
    {"call_id": "\ud800"},
    {"role": "\ud800"},
    {"schema_hash": "\ud800"},
    {"arguments": "\ud800"},
    {"arguments": {"\ud800": "\udc00x"}},
    {"arguments": "\0"},
    {"arguments": float("inf")},
    {"context": {"user_id": "\ud800"}},
    {"context": {"attributes": {"\ud800": "\ud800"}}},
    {"context": {"messages": [{"content": "\ud800"}]}},
    {"context": {"traceparent": "\ud800"}},
    {"context": {"member": {"\ud800": float("nan")}}},
]


async def test_half_a_surrogate_pair_anywhere_is_no_fault_of_the_bus(tools: Tools) -> None:
    for name in KINDS:
        for more in HALVES:
            answer = await tools.http.post("/api/tools/invoke", content=json.dumps({"name": name, **more}))
            assert answer.status_code in (200, 404, 422), (more, answer.text)
            assert (await invoke(tools.http, name, {"value": 1}))["output"] == 1


async def test_the_context_reaches_the_tool(tools: Tools) -> None:
    context = {
        "user_id": "u1",
        "attributes": {"lang": "日本語"},
        "member": {"id": 2**60, "score": 5.0},
        "messages": [{"role": "user", "content": "hallo", "name": "Ann"}],
        "traceparent": "00-1-2-01",
    }
    call = asyncio.create_task(invoke(tools.http, "nap", context=context))
    await until(lambda: tools.scopes, "the call to arrive")
    call.cancel()
    await asyncio.wait_for(tools.cancelled.wait(), WAIT_SECONDS)
    seen = tools.scopes[0].context
    assert (seen.user_id, dict(seen.attributes), seen.traceparent) == ("u1", {"lang": "日本語"}, "00-1-2-01")
    assert seen.member is not None
    assert repr(dict(seen.member)) == repr(context["member"])
    assert [(each.role, each.content, each.name) for each in seen.messages] == [("user", "hallo", "Ann")]


# -- the bus's own tools -------------------------------------------------------------------------------------------


async def test_the_buss_own_tools_are_not_for_hosts(tools: Tools) -> None:
    for name in ("toolbus:drain", "toolbus:role_add"):
        error = (await invoke(tools.http, name, {"role": "New"}))["error"]
        assert error["code"] == "PERMISSION_DENIED"
    assert (await invoke(tools.http, "drain"))["error"]["code"] == "NOT_FOUND"


async def test_an_operator_adds_a_role_and_tools_for_all_roles_are_in_it(tools: Tools) -> None:
    added = await tools.http.post("/api/bus/role_add", json={"role": "新しい"})
    assert (added.status_code, added.json()["output"]) == (200, ["Yui", "Ran", "新しい"])
    listed = (await tools.http.get("/api/tools")).json()["tools_by_role"]
    assert [each["name"] for each in listed["新しい"]] == [each["name"] for each in listed["Yui"]]
    assert (await tools.http.post("/api/bus/stats")).json()["output"]["roles"] == ["Yui", "Ran", "新しい"]
    removed = await tools.http.post("/api/bus/role_remove", json={"role": "新しい"})
    assert removed.json()["output"] == ["Yui", "Ran"]
    refused = (await tools.http.post("/api/bus/role_remove", json={"role": "nobody"})).json()
    assert refused["is_error"]
    assert "nobody" in refused["error"]["message"]


async def test_an_unknown_tool_of_the_bus_is_a_404(tools: Tools) -> None:
    for name in ("nothing", "local", "toolbus:drain", "x" * 300):
        answer = await tools.http.post(f"/api/bus/{name}")
        assert answer.status_code == 404
        assert name[:79] in answer.json()["detail"]


# -- hanging up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "application/vnd.toolbus+json"}, {"Accept": "text/event-stream"}],
    ids=["plain", "not plain", "stream"],
)
async def test_a_disconnect_cancels_the_call_at_its_plugin(tools: Tools, headers: dict[str, str]) -> None:
    cancelled = tools.bus.records.outcomes[Code.CANCELLED]
    async with Connection(tools.bus) as connection:
        await connection.ask("POST", "/api/tools/invoke", {"name": "nap"}, **headers)
        await until(lambda: tools.scopes, "the call to reach its tool")
        connection.cut()
        await within(tools.cancelled.wait())
    await until(lambda: tools.bus.records.outcomes[Code.CANCELLED] == cancelled + 1, "the record of the call")


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
async def test_a_client_that_left_while_the_bus_stood_still_has_its_tool_not_run(tools: Tools, accept: str) -> None:
    ran = len(tools.scopes)
    tools.bus.core.stalls.notice()
    async with Connection(tools.bus) as left, Connection(tools.bus) as waits:
        await left.ask("POST", "/api/tools/invoke", {"name": "nap", "arguments": {}}, Accept=accept)
        left.leave()
        await waits.ask("POST", "/api/tools/invoke", {"name": "local", "arguments": {"value": 3}}, Accept=accept)
        await waits.read_until(b'"output":3')
    assert len(tools.scopes) == ran


async def test_a_disconnect_cancels_the_exchange_with_a_callback(tools: Tools) -> None:
    cancelled = tools.bus.records.outcomes[Code.CANCELLED]
    posted = asyncio.Event()

    async def answer(body: dict[str, Any]) -> bytes:
        posted.set()
        await asyncio.Event().wait()
        return b""

    async with legacy_plugin(answer) as url, Connection(tools.bus) as connection:
        await tools.http.post("/api/tools/register", json={"name": "hangs", "callback_url": url})
        await connection.ask("POST", "/api/tools/invoke", {"name": "hangs"})
        await asyncio.wait_for(posted.wait(), WAIT_SECONDS)
        connection.cut()
        await until(lambda: tools.bus.records.outcomes[Code.CANCELLED] == cancelled + 1, "the record of the call")
        await until(lambda: not tools.bus.dispatcher.active, "the exchange to end")


async def test_a_client_that_says_what_it_accepts_is_asked_and_answers_by_the_same_request() -> None:
    body: dict[str, Any] = {"name": "book", "arguments": {}, "accepts": ["elicitation.form"], "call_id": "c"}
    async with running_bus(http="127.0.0.1:0") as bus, client(bus) as http:

        @bus.tool
        async def book(ctx: ToolScope) -> Any:
            return (await ctx.elicit("Which day?", {"day": {"type": "string"}})).content["day"]

        asked = (await http.post("/api/tools/invoke", json=body)).json()
        ((key, question),) = asked.pop("input_requests").items()
        assert question["params"]["message"] == "Which day?"
        assert asked == {
            "call_id": "c",
            "output": None,
            "is_error": False,
            "error": None,
            "content": [],
            "request_state": "",
        }
        body["input_responses"] = {key: {"action": "accept", "content": {"day": "friday"}}}
        answer = (await http.post("/api/tools/invoke", json=body | {"request_state": ""})).json()
        assert (list(answer), answer["output"]) == (["call_id", "output", "is_error", "error", "content"], "friday")
        alone = await invoke(http, "book", {})
        assert alone["error"]["reason"] == "needs_input"


async def test_a_resource_in_a_result_is_in_the_answer_as_the_wire_has_it() -> None:
    text = pb.ContentBlock(
        resource=pb.EmbeddedResource(uri="file:///a", mime_type="text/plain", text="A"),
        annotations_json='{"priority":1}',
    )
    data = pb.ContentBlock(resource=pb.EmbeddedResource(uri="file:///b", data=b"B"))
    assert describe_result(Result(content=(text, data)))["content"] == [
        {
            "resource": {"uri": "file:///a", "mime_type": "text/plain", "text": "A"},
            "annotations_json": '{"priority":1}',
        },
        {"resource": {"uri": "file:///b", "data": "Qg=="}},
    ]
