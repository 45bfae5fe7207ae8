"""Tests what a program is asked before calls, and what its answers do."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parts.models.loop.approval_cases import DESTRUCTIVE, Person, everything, run_with, source_with_delete
from tests.parts.models.loop.realtime_provider import Provider, feed, opened, run_pending
from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from tests.support.waiting import until, within
from toolbus.errors import SetupError, Stage
from toolbus.functions.call_context import CallContext
from toolbus.loop import (
    ApprovalGiven,
    ApprovalRequest,
    ApprovalRequested,
    CallEnded,
    CallStarted,
    Decision,
    LoopEvent,
    LoopSettings,
    RealtimeSession,
    ToolLoop,
    ask_on_terminal,
)
from toolbus.parts.models.dialects.conversation import ModelCall
from toolbus.protocol.tool import Tool


async def test_only_destructive_tools_need_approval_unless_the_settings_choose_others() -> None:
    person = Person(True)
    source, _, _ = await run_with(person, says("", call("read"), call("delete", {"path": "/a"})))
    assert [(each.tool.name, each.arguments, each.round, each.order) for each in person.asked] == [
        ("delete", {"path": "/a"}, 1, 1)
    ]
    assert sorted(source.calls) == [("delete", '{"path":"/a"}'), ("read", "{}")]
    person = Person(True, True)
    await run_with(person, says("", call("read"), call("delete")), settings=LoopSettings(needs_approval=everything))
    assert sorted(each.tool.name for each in person.asked) == ["delete", "read"]
    person = Person()
    source, _, _ = await run_with(
        person, says("", call("delete")), settings=LoopSettings(needs_approval=lambda tool: False)
    )
    assert len(source.calls) == 1


async def test_a_request_shows_the_call_and_on_whose_behalf_it_is_made() -> None:
    person, context = Person(False), CallContext(user_id="ada")
    await run_with(person, says("", call("delete", {"path": "/a"}, "id1")), context=context)
    (request,) = person.asked
    assert request.context is context
    assert request.call.id == "id1"
    with pytest.raises(AttributeError):
        request.arguments = {}  # type: ignore[misc]


async def test_a_refused_call_does_not_run_and_the_model_reads_what_to_do() -> None:
    source, model, reply = await run_with(Person(False), says("", call("delete")))
    assert source.calls == []
    (done,) = reply.calls
    assert (done.outcome, done.result.error.stage) == ("permission_denied", Stage.NOT_DISPATCHED)
    assert (done.result.error.reason, done.result.error.retry_safe) == ("not_approved", False)
    (text,) = model.results(1)
    assert text.startswith("Error: delete was not run: the user refused this call. Do not make the same call again")
    assert reply.text == "done"


async def test_a_text_refuses_the_call_and_the_model_reads_it() -> None:
    source, model, _ = await run_with(Person("use the trash instead"), says("", call("delete")))
    assert source.calls == []
    assert "it was refused: use the trash instead. Do not" in model.results(1)[0]


async def test_questions_come_one_after_the_other_while_other_calls_run() -> None:
    open_questions: list[asyncio.Future[bool]] = []
    most = asked = 0

    async def approve(request: ApprovalRequest) -> bool:
        nonlocal asked, most
        asked += 1
        most = max(most, sum(not each.done() for each in open_questions) + 1)
        open_questions.append(asyncio.get_running_loop().create_future())
        return await open_questions[-1]

    source = source_with_delete()
    calls = [call("delete", {"path": f"/{n}"}) for n in range(3)]
    model = ScriptedModel(says("", *calls, call("read")), says("done"))
    turn = asyncio.ensure_future(ToolLoop(source, model.endpoint, approve=approve).run("?"))
    await until(lambda: asked == 1 and "read" in source.ended)
    for number in range(3):
        await until(lambda: asked > number)  # noqa: B023 (it is awaited at once)
        open_questions[number].set_result(number != 1)
    reply = await within(turn)
    assert (most, asked) == (1, 3)
    assert [done.outcome for done in reply.calls] == ["ok", "permission_denied", "ok", "ok"]


async def test_conversations_of_one_loop_do_not_wait_for_each_others_questions() -> None:
    both, users = asyncio.Barrier(2), set()

    async def approve(request: ApprovalRequest) -> bool:
        assert request.context is not None
        users.add(request.context.user_id)
        await within(both.wait())
        return True

    model = ScriptedModel(says("", call("delete")), says("", call("delete")), says("done"), says("done"))
    loop = ToolLoop(source_with_delete(), model.endpoint, approve=approve)
    turns = [loop.run("?", context=CallContext(user_id=user)) for user in ("ada", "bob")]
    replies = await within(asyncio.gather(*turns))
    assert [reply.text for reply in replies] == ["done", "done"]
    assert users == {"ada", "bob"}


async def test_the_timeout_of_a_call_begins_when_it_is_approved() -> None:
    approved = asyncio.Event()

    async def approve(request: ApprovalRequest) -> bool:
        await approved.wait()
        return True

    source, model = source_with_delete(), ScriptedModel(says("", call("delete")), says("done"))
    settings = LoopSettings(call_timeout=0.001)
    turn = asyncio.ensure_future(ToolLoop(source, model.endpoint, settings, approve=approve).run("?"))
    await asyncio.sleep(0.02)
    assert source.sent == []
    approved.set()
    reply = await within(turn)
    assert (source.sent[0]["timeout"], reply.calls[0].outcome) == (0.001, "ok")


@pytest.mark.parametrize("paths", [["/a"], ["/a", "/b"]])
async def test_cancelling_a_turn_cancels_the_question(paths: list[str]) -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def approve(request: ApprovalRequest) -> bool:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return True

    source, model = (
        source_with_delete(),
        ScriptedModel(says("", *(call("delete", {"path": each}) for each in paths)), says("no")),
    )
    turn = asyncio.ensure_future(ToolLoop(source, model.endpoint, approve=approve).run("?"))
    await within(asked.wait())
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(turn)
    assert cancelled.is_set()
    assert source.calls == []


async def test_a_stream_tells_of_questions_and_answers() -> None:
    model = ScriptedModel(says("", call("delete")), says("", call("delete", {"path": "/b"})), says("done"))
    loop = ToolLoop(source_with_delete(), model.endpoint, approve=Person(True, "no"))
    events: list[LoopEvent] = [event async for event in loop.stream("?")]
    of_calls = (CallStarted, ApprovalRequested, ApprovalGiven, CallEnded)
    assert [type(event) for event in events if isinstance(event, of_calls)] == [*of_calls * 2]
    given = [event for event in events if isinstance(event, ApprovalGiven)]
    assert [(event.approved, event.decision, event.request.tool.name) for event in given] == [
        (True, True, "delete"),
        (False, "no", "delete"),
    ]


def test_an_approve_that_is_not_a_function_is_refused_at_once() -> None:
    model = ScriptedModel()
    with pytest.raises(SetupError, match="approve is True: give a function"):
        ToolLoop(FunctionSource(), model.endpoint, approve=True)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="approve is True: give a function"):
        RealtimeSession(_dialect(), FunctionSource(), print, approve=True)  # type: ignore[arg-type]


def _dialect() -> Any:
    from toolbus.parts.models.dialects.openai_realtime import OpenAIRealtime

    return OpenAIRealtime()


# -- realtime sessions -----------------------------------------------------------------------------------------------


async def test_a_session_asks_before_calls_and_asks_again_in_the_next_response() -> None:
    source, provider, person = source_with_delete(), Provider(), Person(False, {"path": "/b"})
    events: list[Any] = []
    session = await opened(source, provider, approve=person, on_event=events.append)
    await feed(session, provider.begin(), provider.call("c1", "delete", path="/a"), provider.end())
    await provider.until(lambda: "c1" in provider.outputs)
    await feed(session, provider.begin("r2"), provider.call("c2", "delete", "r2", path="/a"), provider.end("r2"))
    await provider.until(lambda: "c2" in provider.outputs)
    assert "the user refused this call" in provider.outputs["c1"]
    assert 'changed the arguments of this call before it ran: {"path":"/b"}' in provider.outputs["c2"]
    assert source.calls == [("delete", '{"path":"/b"}')]
    assert [event.approved for event in events if isinstance(event, ApprovalGiven)] == [False, True]
    await session.close()


async def test_an_interruption_cancels_the_question_of_a_session() -> None:
    cancelled = asyncio.Event()

    async def approve(request: ApprovalRequest) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return True

    source, provider = source_with_delete(), Provider()
    session = await opened(source, provider, approve=approve)
    await feed(session, provider.begin(), provider.call("c1", "delete"))
    await run_pending()
    session.cancel()
    await within(cancelled.wait())
    assert source.calls == []
    await session.close()


async def test_the_settings_of_a_session_choose_which_calls_need_approval() -> None:
    source, provider, person = source_with_delete(), Provider(), Person(True)
    session = await opened(source, provider, approve=person, settings=LoopSettings(needs_approval=everything))
    await feed(session, provider.begin(), provider.call("c1", "read"), provider.end())
    await provider.until(lambda: "c1" in provider.outputs)
    assert [each.tool.name for each in person.asked] == ["read"]
    await session.close()


# -- the terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def type_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a terminal the standard input; returns what types at it."""
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield lambda line: (os.write(keyboard, line.encode()), None)[1]
    os.close(keyboard)


def pending(arguments: Any = None) -> ApprovalRequest:
    tool = Tool("delete", "Deletes.", annotations=DESTRUCTIVE)
    return ApprovalRequest(tool, ModelCall("c1", "delete"), {"path": "/a"} if arguments is None else arguments, 1, 0)


@pytest.mark.parametrize(
    ("line", "decision"),
    [
        ("y\n", True),
        ("Yes\n", True),
        ("\n", False),
        ("no\n", False),
        ("use the trash\n", "the user wrote: use the trash"),
        ("\x04", False),  # Ctrl-D
    ],
)
async def test_a_person_at_the_terminal_says_yes_no_or_what_to_do(
    type_line: Callable[[str], None], capsys: pytest.CaptureFixture[str], line: str, decision: Decision
) -> None:
    question = asyncio.ensure_future(ask_on_terminal(pending()))
    await asyncio.sleep(0)  # now it waits for a line
    type_line(line)
    assert await within(question) == decision
    shown = capsys.readouterr()
    assert 'call delete, which may destroy data:\n{\n  "path": "/a"\n}' in shown.err
    assert shown.out == ""


async def test_lines_that_were_pasted_before_a_question_do_not_answer_it(type_line: Callable[[str], None]) -> None:
    type_line("and then\ny\ny\n")
    assert await asyncio.to_thread(sys.stdin.readline) == "and then\n"  # the message of the chat
    question = asyncio.ensure_future(ask_on_terminal(pending()))
    await asyncio.sleep(0)
    type_line("no\n")
    assert await within(question) is False


async def test_a_cancelled_question_at_the_terminal_takes_no_line(type_line: Callable[[str], None]) -> None:
    question = asyncio.ensure_future(ask_on_terminal(pending()))
    await asyncio.sleep(0)
    question.cancel()
    await asyncio.gather(question, return_exceptions=True)
    assert not asyncio.get_running_loop().remove_reader(sys.stdin.fileno())  # nothing waits for it any more
    type_line("next\n")
    assert await asyncio.to_thread(sys.stdin.readline) == "next\n"


async def test_arguments_cannot_change_the_terminal_and_are_bounded(
    type_line: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    question = asyncio.ensure_future(ask_on_terminal(pending({"path": "/a\x1b[2K\u202e" + "x" * 20_000})))
    await asyncio.sleep(0)
    type_line("\n")
    await within(question)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "more characters" in shown
    assert len(shown) < 12_000


async def test_without_a_terminal_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (io.StringIO("y\n"), None):
        monkeypatch.setattr(sys, "stdin", stdin)
        decision = await ask_on_terminal(pending())
        assert isinstance(decision, str)
        assert "no terminal" in decision
