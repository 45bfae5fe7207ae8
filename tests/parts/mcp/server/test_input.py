"""Questions of tools in the middle of a call, towards clients of both eras."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parts.mcp.server.asking import (
    FORM,
    Channel,
    Json,
    McpBench,
    Mounted,
    accepted,
    answers_of,
    asks,
    mcp_bench,
    question,
)
from toolbus.bus.calls.call import Call
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server.input import _digest
from toolbus.v1 import tool_pb2 as pb


def greet(call: Call) -> pb.ToolResult:
    """Asks for a name, and greets it."""
    answers = answers_of(call)
    if "who" not in answers:
        return asks("s1", who=question())
    assert call.exchange is not None
    return pb.ToolResult(output_json=json.dumps([answers["who"], call.exchange.state]))


def tour(call: Call) -> pb.ToolResult:
    """Asks two questions, and after them a third."""
    answers = answers_of(call)
    state = call.exchange.state if call.exchange is not None else ""
    if not answers:
        return asks("first", a=question("a?"), b=question("b?"))
    if state == "first":
        return asks("second", c=question("c?"))
    return pb.ToolResult(output_json=json.dumps([state, answers["c"]["content"]]))


def text_of(result: Json) -> Any:
    return json.loads(result["content"][0]["text"])


# -- modern ----------------------------------------------------------------------------------------------------------


async def test_a_modern_client_gets_the_questions_and_calls_again_with_the_answers() -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet)
        first = await bench.call("greet", capabilities=FORM)
        assert first["resultType"] == "input_required"
        assert first["inputRequests"] == {"who": question()}
        sent = {"inputResponses": {"who": accepted(name="Ann")}, "requestState": first["requestState"]}
        last = await bench.call("greet", capabilities=FORM, sent=sent)
        assert (last["resultType"], text_of(last)) == ("complete", [accepted(name="Ann"), "s1"])


async def test_answers_to_nothing_are_ignored_and_unanswered_questions_are_asked_again() -> None:
    async with mcp_bench() as bench:
        bench.offer("tour", tour)
        first = await bench.call("tour", capabilities=FORM)
        sent = {"inputResponses": {"a": accepted(name="x"), "z": {"odd": 1}}, "requestState": first["requestState"]}
        second = await bench.call("tour", capabilities=FORM, sent=sent)
        assert list(second["inputRequests"]) == ["b"]
        sent = {"inputResponses": {"b": {"action": "decline"}}, "requestState": second["requestState"]}
        third = await bench.call("tour", capabilities=FORM, sent=sent)
        assert list(third["inputRequests"]) == ["c"]
        sent = {"inputResponses": {"c": accepted(name="y")}, "requestState": third["requestState"]}
        assert text_of(await bench.call("tour", capabilities=FORM, sent=sent)) == ["second", {"name": "y"}]


async def test_answers_without_a_state_count_where_they_are_to_what_is_asked() -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet)
        sent: Json = {"inputResponses": {"who": accepted(name="Ann"), "more": 1}}
        assert text_of(await bench.call("greet", capabilities=FORM, sent=sent))[0] == accepted(name="Ann")
        others: tuple[Json | None, ...] = ({}, {"other": accepted()}, None)
        for other in others:
            asked = await bench.call("greet", capabilities=FORM, sent={"inputResponses": other})
            assert asked["resultType"] == "input_required"
        with pytest.raises(RpcError) as raised:
            await bench.call("greet", capabilities=FORM, sent={"inputResponses": {"who": 12345}})
        assert raised.value.code == McpCode.INVALID_PARAMS


async def test_a_tool_never_sees_an_answer_that_breaks_its_form() -> None:
    async with mcp_bench() as bench:
        seen: list[Json] = []

        def run(call: Call) -> pb.ToolResult:
            seen.append(answers_of(call))
            return asks(who=question(name={"type": "integer", "minimum": 1}))

        bench.offer("pick", run)
        first = await bench.call("pick", capabilities=FORM)
        wrongs: tuple[Any, ...] = (accepted(name=0), accepted(name="1"), {"action": "maybe"}, [])
        for wrong in wrongs:
            sent = {"inputResponses": {"who": wrong}, "requestState": first["requestState"]}
            with pytest.raises(RpcError) as raised:
                await bench.call("pick", capabilities=FORM, sent=sent)
            assert raised.value.code == McpCode.INVALID_PARAMS
        assert seen == [{}]


async def test_a_state_is_worth_nothing_for_another_tool_arguments_or_user() -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet, parameters_json='{"type":"object","properties":{"n":{}}}')
        bench.offer("other", greet)
        first = await bench.call("greet", {"n": 1}, capabilities=FORM)
        state, answers = first["requestState"], {"who": accepted(name="Ann")}
        wrong: list[tuple[str, Json, str]] = [
            ("greet", {"n": 2}, state),
            ("other", {"n": 1}, state),
            ("greet", {"n": 1}, state + "-TAMPERED"),
            ("greet", {"n": 1}, "B" + state[1:]),
            ("greet", {"n": 1}, ""),
        ]
        for name, arguments, tried in wrong:
            sent = {"inputResponses": answers, "requestState": tried}
            with pytest.raises(RpcError, match="requestState") as raised:
                await bench.call(name, arguments, capabilities=FORM, sent=sent)
            assert raised.value.code == McpCode.INVALID_PARAMS
        sent = {"inputResponses": answers, "requestState": state}
        assert await bench.call("greet", {"n": 1}, capabilities=FORM, sent=sent)


async def test_a_modern_client_that_cannot_be_asked_learns_which_capability_it_lacks() -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet)
        bench.offer("needy", greet, needs=("sampling",))
        for name, required in (("greet", {"elicitation": {"form": {}}}), ("needy", {"sampling": {}})):
            with pytest.raises(RpcError) as raised:
                await bench.call(name, capabilities={"roots": {}})
            assert raised.value.code == McpCode.MISSING_CAPABILITY
            assert raised.value.data == {"requiredCapabilities": required}


async def test_only_a_client_that_declares_it_is_asked_to_give_its_model_tools() -> None:
    message = {"role": "user", "content": {"type": "text", "text": "hi"}}
    params = {"messages": [message], "maxTokens": 9, "tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    declared: Json = {"sampling": {"tools": {}}}
    async with mcp_bench() as bench:
        bench.offer("think", lambda call: asks(it={"method": "sampling/createMessage", "params": params}))
        with pytest.raises(RpcError) as raised:
            await bench.call("think", capabilities={"sampling": {}})
        assert raised.value.data == {"requiredCapabilities": declared}
        assert (await bench.call("think", capabilities=declared))["inputRequests"]["it"]["params"] == params
        channel = Channel()
        result = await bench.call("think", session=bench.session({"sampling": {}}), channel=channel)
        assert "did not declare sampling.tools" in result["content"][0]["text"]
        assert channel.messages == []


async def test_a_question_that_breaks_its_format_is_a_failure_of_the_tool() -> None:
    async with mcp_bench() as bench:
        bench.offer("odd", lambda call: asks(who={"method": "elicitation/create", "params": {"message": "?"}}))
        result = await bench.call("odd", capabilities=FORM)
        assert result["isError"]
        assert "requestedSchema" in result["content"][0]["text"]


# -- legacy ----------------------------------------------------------------------------------------------------------


async def test_a_legacy_client_is_asked_on_the_stream_of_its_call() -> None:
    async with mcp_bench() as bench:
        bench.offer("tour", tour)
        channel = Channel(lambda method, params: {"result": accepted(name=params["message"])})
        result = await bench.call("tour", session=bench.session(FORM), channel=channel)
        assert text_of(result) == ["second", {"name": "c?"}]
        assert [each["method"] for each in channel.messages] == ["elicitation/create"] * 3
        assert all(each["params"]["mode"] == "form" for each in channel.messages)


async def test_an_older_client_is_not_told_a_mode() -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet)
        channel = Channel(lambda method, params: {"result": accepted(name="x")})
        await bench.call("greet", session=bench.session(FORM, "2025-06-18"), channel=channel)
        assert "mode" not in channel.messages[0]["params"]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"result": {"action": "accept", "content": {"name": 1}}}, "must be a string"),
        ({"result": {}}, "action is"),
        ({"error": {"code": -1, "message": "no window"}}, "no window"),
    ],
)
async def test_a_legacy_answer_that_is_of_no_use_is_a_failure_that_a_model_reads(reply: Json, why: str) -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet)
        channel = Channel(lambda method, params: reply)
        result = await bench.call("greet", session=bench.session(FORM), channel=channel)
        assert result["isError"]
        assert why in result["content"][0]["text"]


async def test_a_legacy_client_that_cannot_be_asked_gets_a_failure_of_the_tool() -> None:
    async with mcp_bench() as bench:
        bench.offer("greet", greet)
        channel = Channel()
        result = await bench.call("greet", session=bench.session(), channel=channel)
        assert result["isError"]
        assert channel.messages == []


async def test_a_tool_that_asks_without_end_is_stopped() -> None:
    async with mcp_bench() as bench:
        bench.offer("nag", lambda call: asks(who=question()))
        channel = Channel(lambda method, params: {"result": {"action": "decline"}})
        result = await bench.call("nag", session=bench.session(FORM), channel=channel)
        assert "16 rounds" in result["content"][0]["text"]


# -- prompts and resources -------------------------------------------------------------------------------------------


def _mounted(bench: McpBench) -> Mounted:
    def answer(method: str, params: Json) -> Json:
        if "inputResponses" not in params:
            return {"resultType": "input_required", "inputRequests": {"who": question()}, "requestState": "inner"}
        return {"resultType": "complete", "messages": [params["inputResponses"], params["requestState"]]}

    mounted = Mounted("m", prompts=["p"], resources=["test://x"], answer=answer)
    features_of(bench.bus.core).add(mounted)
    return mounted


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"inputRequests": {str(number): question() for number in range(9)}}, "input_requests = 8"),
        ({"inputRequests": {"who": {"method": "tools/call"}}}, "must be one of"),
        ({"requestState": "x" * 16_385}, "request_state_bytes"),
    ],
)
async def test_a_mounted_server_may_not_ask_without_measure(result: Json, why: str) -> None:
    async with mcp_bench() as bench:
        asks = {"resultType": "input_required", **result}
        features_of(bench.bus.core).add(Mounted("m", prompts=["p"], answer=lambda *_: asks))
        with pytest.raises(RpcError, match=why) as raised:
            await bench.ask("prompts/get", {"name": "m_p"}, capabilities=FORM)
        assert raised.value.code == McpCode.INTERNAL


@pytest.mark.parametrize(
    ("method", "params"), [("prompts/get", {"name": "m_p"}), ("resources/read", {"uri": "test://x"})]
)
async def test_a_mounted_server_asks_in_the_middle_of_prompts_and_resources_too(method: str, params: Json) -> None:
    async with mcp_bench() as bench:
        mounted = _mounted(bench)
        first = await bench.ask(method, params, capabilities=FORM)
        assert (first["resultType"], first["inputRequests"]) == ("input_required", {"who": question()})
        assert first["requestState"] != "inner"
        answers = {"who": accepted(name="Ann")}
        sent = {**params, "inputResponses": answers, "requestState": first["requestState"]}
        last = await bench.ask(method, sent, capabilities=FORM)
        assert last["messages"] == [answers, "inner"]
        with pytest.raises(RpcError) as raised:
            await bench.ask(method, params)
        assert raised.value.code == McpCode.MISSING_CAPABILITY
        channel = Channel(lambda method, params: {"result": accepted(name="Bob")})
        legacy = await bench.ask(method, params, session=bench.session(FORM), channel=channel)
        assert legacy["messages"][0] == {"who": accepted(name="Bob")}
        assert mounted.askers[0].accepts == frozenset({"elicitation.form"})


async def test_a_state_is_worth_nothing_for_another_completion() -> None:
    async with mcp_bench() as bench:
        _mounted(bench)
        params = {"ref": {"type": "ref/prompt", "name": "m_p"}, "argument": {"name": "a", "value": "x"}}
        first = await bench.ask("completion/complete", params, capabilities=FORM)
        sent = {"inputResponses": {"who": accepted(name="Ann")}, "requestState": first["requestState"]}
        with pytest.raises(RpcError, match="requestState"):
            await bench.ask(
                "completion/complete",
                {**params, "argument": {"name": "a", "value": "y"}, **sent},
                capabilities=FORM,
            )
        assert await bench.ask("completion/complete", {**params, **sent}, capabilities=FORM)


def test_arguments_that_python_does_not_read_have_a_digest_too() -> None:
    assert _digest(b'{"n":%b}' % (b"9" * 5000)) != _digest(b'{"n":%b}' % (b"8" * 5000))
    assert _digest(b'{"a":1, "b":2}') == _digest(b'{"b":2,"a":1}')
