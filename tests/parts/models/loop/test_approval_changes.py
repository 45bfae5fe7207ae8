from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from tests.parts.models.loop.approval_cases import DESTRUCTIVE, Person, delete, everything, run_with, source_with_delete
from tests.parts.models.loop.scripted_model import ScriptedModel, call, says
from toolbus.loop import (
    ApprovalRequest,
    Decision,
    LoopSettings,
    Rule,
    ToolLoop,
)
from toolbus.protocol.tool import Tool
from toolbus.tools import ToolRegistry


async def test_changed_arguments_run_instead_and_the_model_reads_so() -> None:
    source, model, reply = await run_with(Person({"path": "/b"}), says("", call("delete", {"path": "/a"})))
    assert source.calls == [("delete", '{"path":"/b"}')]
    assert model.results(1) == [
        'deleted /b\n[The user changed the arguments of this call before it ran: {"path":"/b"}]'
    ]
    (done,) = reply.calls
    assert (done.result.output, done.result.content, done.edited_json) == ("deleted /b", (), '{"path":"/b"}')
    again = ScriptedModel(says("ok"))
    await ToolLoop(source, again.endpoint).run(
        [*pickle.loads(pickle.dumps(reply.items)), {"role": "user", "content": "?"}]
    )
    assert again.results(0) == model.results(1)


class Queue:
    """An `approve` that is empty, as a container of questions is at first."""

    def __len__(self) -> int:
        return 0

    def __call__(self, request: ApprovalRequest) -> Decision:
        return True


async def test_a_hook_that_is_an_empty_container_is_called() -> None:
    source, _, _ = await run_with(Queue(), says("", call("delete")))
    assert source.calls == [("delete", "{}")]


async def test_changed_arguments_are_checked_like_those_of_the_model() -> None:
    registry = ToolRegistry()  # checks arguments against the schema, which a function of the test does not

    @registry.tool("wipe", "Wipes.", {"type": "object", "properties": {"path": {"type": "string"}}}, destructive=True)
    def wipe(path: str) -> str:
        return f"wiped {path}"

    model = ScriptedModel(says("", call("wipe", {"path": "/a"})), says("done"))
    reply = await ToolLoop(registry, model.endpoint, approve=Person({"path": ["no"]})).run("?")
    assert reply.calls[0].outcome == "invalid_arguments"


async def test_unchanged_arguments_are_not_reported_as_changed() -> None:
    _, model, reply = await run_with(Person({"path": "/a"}), says("", call("delete", {"path": "/a"})))
    assert (model.results(1), reply.calls[0].edited_json) == (["deleted /a"], "")


async def test_a_call_runs_with_the_arguments_that_were_shown() -> None:
    def changes_its_copy(request: ApprovalRequest) -> bool:
        request.arguments["path"] = "/elsewhere"
        return True

    text = '{"path": "/a", "path": "/b"}'  # readers of JSON differ in which of the two they take
    source, _, _ = await run_with(changes_its_copy, says("", call("delete", text)))
    assert source.calls == [("delete", '{"path":"/b"}')]


async def test_a_tool_that_changes_during_its_approval_does_not_run() -> None:
    source = source_with_delete()

    def approve(request: ApprovalRequest) -> bool:
        source.offer(delete, description="Deletes the whole disk.", annotations=DESTRUCTIVE)
        return True

    model = ScriptedModel(says("", call("delete")), says("done"))
    reply = await ToolLoop(source, model.endpoint, approve=approve).run("?")
    assert (reply.calls[0].outcome, source.ended) == ("catalog_stale", [])


@pytest.mark.parametrize("decision", [None, 1, 0, ["/a"], RuntimeError("no"), TimeoutError(), {"path": object()}])
async def test_a_hook_that_fails_refuses(decision: Any, caplog: pytest.LogCaptureFixture) -> None:
    source, model, reply = await run_with(Person(decision), says("", call("delete")))
    assert source.calls == []
    assert "its approval failed" in model.results(1)[0]
    assert reply.calls[0].outcome == "permission_denied"
    (line,) = (record for record in caplog.records if "the approval of 'delete'" in record.message)
    assert "the call is refused" in line.message


@pytest.mark.parametrize(
    ("decision", "line"),
    [
        (None, "the approval of 'delete' returned None: the call is refused; return True, False, a text"),
        (TimeoutError("10 s are over"), "the approval of 'delete' timed out (10 s are over): the call is refused"),
    ],
)
async def test_a_hook_without_an_answer_is_one_line_in_the_log(
    decision: Any, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    await run_with(Person(decision), says("", call("delete")))
    (record,) = (record for record in caplog.records if "the approval of 'delete'" in record.message)
    assert (record.message[: len(line)], record.exc_info) == (line, None)


async def test_a_hook_that_cancels_itself_refuses() -> None:
    async def approve(request: ApprovalRequest) -> Decision:
        raise asyncio.CancelledError

    source, _, reply = await run_with(approve, says("", call("delete")))
    assert (source.calls, reply.calls[0].outcome) == ([], "permission_denied")


async def test_a_choice_of_tools_that_fails_asks(caplog: pytest.LogCaptureFixture) -> None:
    def fails(tool: Tool) -> bool:
        raise KeyError("no such policy")

    person = Person(False)
    source, _, _ = await run_with(person, says("", call("read")), settings=LoopSettings(needs_approval=fails))
    assert (len(person.asked), source.calls) == (1, [])


async def test_the_same_call_is_refused_again_without_asking_in_this_turn_only() -> None:
    person = Person(False, True, True)
    same = [call("delete", '{"path": "/a", "deep": true}'), call("delete", '{"deep":true, "path":"/a"}')]
    source, model, _ = await run_with(person, says("", *same), says("", same[1]), says("", call("delete")))
    assert len(person.asked) == 2
    assert source.calls == [("delete", "{}")]
    assert "refused before in this turn" in model.results(2)[2]
    model = ScriptedModel(says("", call("delete", {"path": "/a"})), says("done"))
    await ToolLoop(source, model.endpoint, approve=person).run("?")
    assert source.calls[-1] == ("delete", '{"path":"/a"}')


async def test_calls_of_rules_need_approval() -> None:
    person = Person(False)
    source, model, _ = await run_with(person, rules=[Rule("(?P<path>.+)", "delete")])
    assert (len(person.asked), person.asked[0].round, source.calls) == (1, 0, [])
    assert "was not run" in model.results(0)[0]


async def test_the_tools_of_the_loop_itself_never_need_approval() -> None:
    person = Person(True)
    settings = LoopSettings(needs_approval=everything, extension=True)
    calls = [call("extend_tool_loop"), call("request_tool_injection", {"names": ["read"]})]
    _, _, reply = await run_with(person, says("", *calls, call("read")), settings=settings, pinned=["read"])
    assert [each.tool.name for each in person.asked] == ["read"]
    assert [done.outcome for done in reply.calls] == ["ok"] * 3
