"""Tests turns of the tool loop with a scripted model."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, ScriptedModel, call, failed, says
from tests.parts.models.loop.turn_cases import add
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import Code, InvalidRequest
from toolbus.functions.call_context import CallContext
from toolbus.loop import LoopSettings, Rule, ToolLoop
from toolbus.parts.models.dialects.conversation import Answers, Message, Turn
from toolbus.parts.models.loop.loop_settings import SYNCHRONET


def greet(name: str = "you") -> str:
    return f"hello {name}"


async def test_a_model_that_calls_nothing_answers_at_once() -> None:
    model = ScriptedModel(says("hi"))
    reply = await ToolLoop(FunctionSource(add=add), model.endpoint).run("hello")
    assert (reply.text, reply.stopped, reply.rounds, reply.calls) == ("hi", "answered", 1, ())
    assert model.requests[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert model.offered(0) == ["add"]


async def test_results_go_back_to_the_model_until_it_answers() -> None:
    model = ScriptedModel(says("", call("add", {"a": 1, "b": 2})), says("", call("greet")), says("3, hello"))
    reply = await ToolLoop(FunctionSource(add=add, greet=greet), model.endpoint).run("?")
    assert (reply.text, reply.rounds, reply.stopped) == ("3, hello", 3, "answered")
    assert model.results(2) == ["3", "hello you"]
    assert [(done.name, done.round, done.order, done.outcome) for done in reply.calls] == [
        ("add", 1, 0, "ok"),
        ("greet", 2, 0, "ok"),
    ]
    assert all(0 < done.started <= done.ended for done in reply.calls)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "?"}, None, 5])
async def test_a_value_that_is_not_a_conversation_is_refused_with_how_to_write_one(messages: Any) -> None:
    model = ScriptedModel()
    with pytest.raises(InvalidRequest, match=r"is not a conversation: give a text, or a list of messages, \[\{"):
        await ToolLoop(FunctionSource(), model.endpoint).run(messages)
    assert model.requests == []


async def test_the_items_of_a_reply_continue_as_the_next_conversation() -> None:
    model = ScriptedModel(says("", call("add", {"a": 1})), says("one"), says("again"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    first = await loop.run([{"role": "system", "content": "be short"}, {"role": "user", "content": "?"}])
    assert [type(item) for item in first.items] == [Message, Message, Turn, Answers, Turn]
    await loop.run([*first.items, {"role": "user", "content": "and?"}])
    assert [message["role"] for message in model.requests[2]["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]


async def test_calls_of_one_answer_run_in_parallel_and_are_answered_in_order() -> None:
    both, order = asyncio.Barrier(2), []

    async def meet(name: str) -> str:
        await asyncio.wait_for(both.wait(), WAIT_SECONDS)
        if name == "first":
            await asyncio.sleep(0)
        order.append(name)
        return name

    model = ScriptedModel(says("", call("meet", {"name": "first"}), call("meet", {"name": "second"})), says("done"))
    reply = await ToolLoop(FunctionSource(meet=meet), model.endpoint).run("?")
    assert model.results(1) == ["first", "second"]
    assert [done.order for done in reply.calls] == [0, 1]
    assert set(order) == {"first", "second"}


async def test_with_max_parallel_1_a_call_begins_when_the_previous_one_has_ended() -> None:
    running = most = 0

    async def work(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n

    source = FunctionSource(work=work)
    model = ScriptedModel(says("", *(call("work", {"n": n}) for n in range(5))), says("done"))
    await ToolLoop(source, model.endpoint, LoopSettings(max_parallel=1)).run("?")
    assert most == 1
    assert [json.loads(arguments)["n"] for _, arguments in source.calls] == [0, 1, 2, 3, 4]


async def test_arguments_that_are_not_json_are_quoted_around_the_fault() -> None:
    text = '{"a": 1, "text": "' + "x" * 1_000 + '" "b": 2, "more": "' + "y" * 1_000 + '"}'
    model = ScriptedModel(says("", call("add", text)), says("done"))
    await ToolLoop(FunctionSource(add=add), model.endpoint).run("?")
    (result,) = model.results(1)
    assert """x" "b": 2, "more": "yyy""" in result
    assert len(result) < 500


async def test_every_call_is_answered_whatever_is_wrong_with_it() -> None:
    def breaks() -> None:
        raise RuntimeError("not for the model")

    model = ScriptedModel(
        says(
            "",
            call("ad", {}),
            call("add", "{broken"),
            call("add", '{"a": NaN}'),
            call("breaks"),
            call("add", ""),
            call("add", "null"),
            call("no", "[" * 100_000),
        ),
        says("done"),
    )
    reply = await ToolLoop(FunctionSource(add=add, breaks=breaks), model.endpoint).run("?")
    outcomes = [done.outcome for done in reply.calls]
    assert outcomes == [*("not_found", "invalid_arguments", "invalid_arguments", "internal", "ok", "ok", "not_found")]
    results = model.results(1)
    assert results[0] == "Error: there is no tool 'ad'. Call one that is offered: add, …"
    assert "not JSON" in results[1]
    assert ". You wrote '{broken'. Send one JSON object" in results[1]
    assert "JSON has no NaN" in results[2]
    assert "not for the model" not in results[3]
    assert results[4:6] == ["0", "0"]


async def test_a_known_tool_that_was_not_offered_cannot_be_called() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", call("secret")), says("no"))
    loop = ToolLoop(source, model.endpoint)
    source.offer(greet, name="secret")
    source.remove("secret")
    reply = await loop.run("?")
    assert [done.outcome for done in reply.calls] == ["not_found"]
    assert source.calls == []


async def test_calls_carry_hash_timeout_and_their_place() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", call("add"), call("add", {"a": 1})), says("", call("add", {"a": 2})), says("done"))
    context = CallContext(user_id="ann", attributes={"channel": "web"})
    await ToolLoop(source, model.endpoint, LoopSettings(call_timeout=5), context=context).run("?")
    _, tools = await source.tools()
    assert {sent["schema_hash"] for sent in source.sent} == {tools[0].schema_hash}
    assert {sent["timeout"] for sent in source.sent} == {5}
    assert [dict(sent["context"].attributes) for sent in source.sent] == [
        {"channel": "web", "round": "1", "order": "0"},
        {"channel": "web", "round": "1", "order": "1"},
        {"channel": "web", "round": "2", "order": "0"},
    ]
    assert dict(context.attributes) == {"channel": "web"}
    assert source.sent[0]["context"].user_id == "ann"


async def test_the_context_of_a_turn_replaces_that_of_the_loop() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", call("add")), says("done"))
    loop = ToolLoop(source, model.endpoint, context=CallContext(user_id="ann"))
    await loop.run("?", context=CallContext(user_id="bob"))
    assert source.sent[0]["context"].user_id == "bob"


async def test_a_tool_that_changed_meanwhile_is_exported_again_in_the_next_round() -> None:
    source = FunctionSource(add=add)

    def change(request: object) -> object:
        source.offer(add, name="add", description="Adds, now differently.")
        return says("", call("add"))

    model = ScriptedModel(change, says("", call("add")), says("done"))
    reply = await ToolLoop(source, model.endpoint).run("?")
    assert [done.outcome for done in reply.calls] == ["catalog_stale", "ok"]
    assert "has changed since it was listed" in model.results(1)[0]
    descriptions = [request["tools"][0]["function"]["description"] for request in model.requests[:2]]
    assert descriptions == ["A tool.", "Adds, now differently."]


async def test_after_the_last_round_the_model_must_answer_without_tools() -> None:
    model = ScriptedModel(*(says("", call("add", {"a": n})) for n in range(3)), says("that much"))
    reply = await ToolLoop(FunctionSource(add=add), model.endpoint).run("?")
    assert (reply.text, reply.rounds, reply.stopped) == ("that much", 4, "round_limit")
    assert [model.offered(n) for n in range(4)] == [["add"], ["add"], ["add"], []]


@pytest.mark.parametrize(
    ("text", "fallback", "read"), [("half", "sorry", "half"), ("", "sorry", "sorry"), ("", "", "")]
)
async def test_calls_instead_of_a_forced_answer_are_refused(text: str, fallback: str, read: str) -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", call("add")), says(text, call("add")))
    reply = await ToolLoop(source, model.endpoint, LoopSettings(rounds=1, no_convergence_text=fallback)).run("?")
    assert (reply.text, reply.stopped, len(source.calls)) == (read, "no_convergence", 1)
    refusals = [item for item in reply.items if isinstance(item, Answers)][-1]
    assert refusals.answered[0].result.error is not None
    assert (reply.items[-1] == Message("assistant", "sorry")) is (read == "sorry")


async def test_an_empty_answer_after_tools_gets_the_text_of_the_settings() -> None:
    model = ScriptedModel(says("", call("add")), says(""))
    settings = LoopSettings(no_summary_text="…", retries=0)
    reply = await ToolLoop(FunctionSource(add=add), model.endpoint, settings).run("?")
    assert (reply.text, reply.stopped) == ("…", "no_summary")


async def test_an_empty_answer_without_tools_is_failed() -> None:
    model = ScriptedModel(says(""), says(""))
    reply = await ToolLoop(FunctionSource(), model.endpoint, LoopSettings(no_summary_text="…")).run("?")
    assert (reply.text, reply.stopped, reply.reason) == ("", "failed", "stop: the answer is empty")


async def test_with_the_settings_of_synchronet_four_requests_end_in_a_fixed_text() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(*(says("", call("add", {"a": n})) for n in range(4)))
    reply = await ToolLoop(source, model.endpoint, SYNCHRONET).run("?")
    assert reply.text == "(tool-call loop did not converge -- try rephrasing)"
    assert (len(model.requests), len(source.calls), reply.stopped) == (4, 4, "no_convergence")


async def test_a_direct_reply_is_the_tools_own_text_without_another_request_to_the_model() -> None:
    source = FunctionSource()
    source.offer(greet, direct_reply=True)
    model = ScriptedModel(says("", call("greet", {"name": "ann"}), call("greet", {"name": "bob"})), says("and again"))
    loop = ToolLoop(source, model.endpoint)
    reply = await loop.run("?")
    assert (reply.text, reply.stopped) == ("hello ann\n\nhello bob", "direct_reply")
    assert len(model.requests) == 1
    await loop.run([*reply.items, Message("user", "more")])
    assert model.requests[1]["messages"][-2] == {"role": "assistant", "content": "hello ann\n\nhello bob"}


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ({"queued": True, "note": "Bob will read it."}, "Bob will read it."),
        ({"note": "left out", "error": "Nobody is called Bob."}, "Nobody is called Bob."),
        ({"note": "", "n": 1}, '{"note":"","n":1}'),
        ({"error": 0.5}, '{"error":0.5}'),
    ],
)
async def test_a_direct_reply_of_an_object_is_its_error_or_note(output: dict[str, object], shown: str) -> None:
    source = FunctionSource()
    source.offer(lambda: output, name="relay", direct_reply=True)
    reply = await ToolLoop(source, ScriptedModel(says("", call("relay"))).endpoint).run("?")
    assert (reply.text, reply.stopped) == (shown, "direct_reply")


@pytest.mark.parametrize("other", ["add", "fails"])
async def test_a_direct_reply_beside_another_call_or_a_failure_goes_to_the_model(other: str) -> None:
    source = FunctionSource(add=add)
    source.offer(greet, direct_reply=True)
    source.offer(lambda: failed(Code.TOOL, "no"), name="fails", direct_reply=True)
    model = ScriptedModel(says("", call("greet"), call(other)), says("done"))
    assert (await ToolLoop(source, model.endpoint).run("?")).text == "done"


async def test_the_third_success_of_the_same_call_is_refused_within_a_turn_only() -> None:
    source = FunctionSource(add=add)
    same = [says("", call("add", text)) for text in ('{"a":1,"b":2}', '{"b": 2, "a": 1}', '{"a": 1, "b": 2}')]
    model = ScriptedModel(*same, says("done"), says("", call("add", {"a": 1, "b": 2})), says("done"))
    loop = ToolLoop(source, model.endpoint)
    reply = await loop.run("?")
    assert [done.outcome for done in reply.calls] == ["ok", "ok", "repeated"]
    assert len(source.calls) == 2
    assert "result stands above" in model.results(3)[-1]
    assert [done.outcome for done in (await loop.run("?")).calls] == ["ok"]


async def test_the_same_call_many_times_in_one_answer_runs_twice() -> None:
    async def slow() -> int:
        await asyncio.sleep(0)
        return 1

    source = FunctionSource(slow=slow)
    model = ScriptedModel(says("", *(call("slow") for _ in range(6))), says("done"))
    reply = await ToolLoop(source, model.endpoint).run("?")
    assert [done.outcome for done in reply.calls] == ["ok", "ok", *["repeated"] * 4]


async def test_a_model_without_tools_gets_earlier_results_as_text() -> None:
    with_tools = ScriptedModel(says("wait", call("add", {"a": 1})), says("one"))
    reply = await ToolLoop(FunctionSource(add=add), with_tools.endpoint).run("?")
    without = ScriptedModel(ApiError(404, "No endpoints found that support tool use."), says("ok"))
    await ToolLoop(FunctionSource(add=add), without.endpoint).run([*reply.items, Message("user", "sure?")])
    assert without.requests[1]["messages"] == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "wait"},
        {"role": "user", "content": "[add returned: 1]"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "sure?"},
    ]


async def test_a_conversation_can_be_pickled_and_continued() -> None:
    model = ScriptedModel(says("", call("add", {"a": 1})), says("one"), says("again"))
    loop = ToolLoop(FunctionSource(add=add), model.endpoint)
    items = (await loop.run("?")).items
    restored = pickle.loads(pickle.dumps(items))
    assert restored == items
    assert (await loop.run([*restored, Message("user", "and?")])).text == "again"


async def test_a_catalog_that_stays_the_same_is_exported_once() -> None:
    source = FunctionSource(add=add)
    model = ScriptedModel(says("", call("add")), says("a"), says("b"))
    loop = ToolLoop(source, model.endpoint)
    exports = 0
    export = model.endpoint.dialect.export

    def counted(tools: object) -> object:
        nonlocal exports
        exports += 1
        return export(tools)  # type: ignore[arg-type]

    model.endpoint.dialect.export = counted  # type: ignore[method-assign,assignment]
    await loop.run("?")
    await loop.run("?")
    assert (exports, source.listed) == (1, 3)


async def test_a_rule_calls_its_tool_before_the_first_request_to_the_model() -> None:
    source = FunctionSource(greet=greet)
    model = ScriptedModel(says("done"))
    loop = ToolLoop(source, model.endpoint, rules=[Rule(r"greet (?P<name>\w+)", "greet")])
    reply = await loop.run("please greet ann")
    assert source.calls == [("greet", '{"name":"ann"}')]
    assert [(done.round, done.outcome) for done in reply.calls] == [(0, "ok")]
    roles = [message["role"] for message in model.requests[0]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert model.results(0) == ["hello ann"]


async def test_a_rule_for_a_tool_with_a_direct_reply_needs_no_model() -> None:
    source = FunctionSource()
    source.offer(greet, direct_reply=True)
    model = ScriptedModel()
    reply = await ToolLoop(source, model.endpoint, rules=[Rule("hi", "greet")]).run("hi")
    assert (reply.text, reply.rounds, model.requests) == ("hello you", 0, [])


@pytest.mark.parametrize("messages", [[], [42], [None]])
async def test_an_invalid_conversation_is_refused(messages: list[object]) -> None:
    with pytest.raises(InvalidRequest):
        await ToolLoop(FunctionSource(), ScriptedModel().endpoint).run(messages)  # type: ignore[arg-type]


async def test_a_providers_own_messages_pass_unchanged() -> None:
    picture = {"role": "user", "content": [{"type": "text", "text": "what is this?"}]}
    model = ScriptedModel(says("a cat"))
    await ToolLoop(FunctionSource(), model.endpoint).run([picture])
    assert model.requests[0]["messages"] == [picture]
