"""Calls by POST /api/tools/invoke: what comes back for every kind of tool and of failure, and who hangs up."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

import asyncio
import json
import math
import time
from typing import Any

import pytest

from tests.bus.gateway.calling import Connection, client, invoke, legacy_plugin
from tests.bus.gateway.invoke_cases import Tools, raw_peer, shared, tools
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus.gateway.call_response import LARGE_OUTPUT, call_body, describe_result
from toolbus.bus.gateway.event_stream import event
from toolbus.bus.gateway.json_response import write_json
from toolbus.errors import Code
from toolbus.protocol.tool import MAX_CALL_ID, Result
from toolbus.sdk import ToolScope
from toolbus.testing import running_bus
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


async def test_a_call_does_not_wait_for_delayed_acknowledgements(tools: Tools) -> None:
    """An answer in two segments waits 40 ms for the first one's acknowledgement, unless told not to."""
    seconds = [math.inf]
    give_up = time.monotonic() + WAIT_SECONDS
    while min(seconds) > 0.03:  # a busy machine makes them longer, never shorter
        assert time.monotonic() < give_up, f"{len(seconds)} answers took {min(seconds):g} s or longer"
        began, worked = time.perf_counter(), time.process_time()
        await invoke(tools.http, "local")
        seconds.append(time.perf_counter() - began - (time.process_time() - worked))  # a slow machine works longer


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

    peer = await raw_peer(tools.bus, answer, "odd")
    try:
        for text in texts:
            said = await invoke(tools.http, "odd", {"text": text})
            assert (said["output"], said["is_error"]) == (text, False)
            assert said["content"] == [{"text": {"text": "seen"}}]
    finally:
        await peer.close()


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
    ({"user_id": "ann"}, "user_id"),  # it belongs in the context, and no call must lose it
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


async def test_half_a_surrogate_pair_anywhere_does_not_cause_an_internal_error(tools: Tools) -> None:
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


async def test_a_misspelt_user_is_refused_and_more_of_a_message_is_not(tools: Tools) -> None:
    message = {"role": "user", "content": "hallo", "tool_calls": []}
    for context, status in (({"userId": "u1"}, 422), ({"user_id": "u1", "messages": [message]}, 200)):
        body = {"name": "local", "arguments": {"value": 1}, "context": context}
        assert (answer := await tools.http.post("/api/tools/invoke", json=body)).status_code == status, answer.text
    assert answer.json()["output"] == 1


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
    tools.bus.core.program.stalls.notice()
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
        await until(lambda: not tools.bus.dispatcher.in_flight.active, "the exchange to end")


async def test_a_client_that_accepts_questions_gets_them_and_answers_by_the_same_request() -> None:
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


async def test_a_text_of_the_content_that_repeats_the_output_is_not_in_the_response() -> None:
    texts = tuple(pb.ContentBlock(text=pb.TextContent(text=text)) for text in ("alpha", "beta", "a note"))
    assert describe_result(Result(output_json='"alpha\\nbeta"', content=texts))["content"] == [
        {"text": {"text": "a note"}}
    ]
