"""Tests what a program is asked before calls, and what its answers do."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import pty
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.loop.realtime_provider import Provider, feed, opened, run_pending
from tests.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from tests.support.waiting import until, within
from toolbus.dialects.conversation import ModelCall
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
    Rule,
    ToolLoop,
    ask_on_terminal,
)
from toolbus.tool import Annotations, Tool
from toolbus.tools import ToolRegistry

DESTRUCTIVE = Annotations(destructive=True)


def delete(path: str = "/tmp/x") -> str:
    return f"deleted {path}"


def read(path: str = "/tmp/x") -> str:
    return f"contents of {path}"


def source_with_delete() -> FunctionSource:
    source = FunctionSource(read=read)
    source.offer(delete, annotations=DESTRUCTIVE)
    return source


class Person:
    """An `approve` that takes down what it was asked, and answers with one decision after the other."""

    def __init__(self, *decisions: Any) -> None:
        self.asked: list[ApprovalRequest] = []
        self._decisions = list(decisions)

    def __call__(self, request: ApprovalRequest) -> Decision:
        self.asked.append(request)
        decision = self._decisions.pop(0)
        if isinstance(decision, Exception):
            raise decision
        return decision  # type: ignore[no-any-return]


def everything(tool: Tool) -> bool:
    return True


async def run_with(person: Any, *answers: Any, **options: Any) -> tuple[FunctionSource, ScriptedModel, Any]:
    source, model = source_with_delete(), ScriptedModel(*answers, says("done"))
    settings = options.pop("settings", None)
    reply = await ToolLoop(source, model.endpoint, settings, approve=person, **options).run("?")
    return source, model, reply


async def test_only_destructive_tools_are_asked_about_unless_the_settings_choose_others() -> None:
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


async def test_a_text_refuses_and_is_told_to_the_model() -> None:
    source, model, _ = await run_with(Person("use the trash instead"), says("", call("delete")))
    assert source.calls == []
    assert "it was refused: use the trash instead. Do not" in model.results(1)[0]


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


async def test_a_hook_that_is_an_empty_container_is_asked() -> None:
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


async def test_what_was_shown_is_what_runs() -> None:
    def changes_its_copy(request: ApprovalRequest) -> bool:
        request.arguments["path"] = "/elsewhere"
        return True

    text = '{"path": "/a", "path": "/b"}'  # readers of JSON differ in which of the two they take
    source, _, _ = await run_with(changes_its_copy, says("", call("delete", text)))
    assert source.calls == [("delete", '{"path":"/b"}')]


async def test_a_tool_that_changes_while_somebody_decides_does_not_run() -> None:
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
    assert "nobody could be asked whether it may run" in model.results(1)[0]
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


async def test_calls_of_rules_are_asked_about() -> None:
    person = Person(False)
    source, model, _ = await run_with(person, rules=[Rule("(?P<path>.+)", "delete")])
    assert (len(person.asked), person.asked[0].round, source.calls) == (1, 0, [])
    assert "was not run" in model.results(0)[0]


async def test_the_tools_of_the_loop_itself_are_never_asked_about() -> None:
    person = Person(True)
    settings = LoopSettings(needs_approval=everything, extension=True)
    calls = [call("extend_tool_loop"), call("request_tool_injection", {"names": ["read"]})]
    _, _, reply = await run_with(person, says("", *calls, call("read")), settings=settings, pinned=["read"])
    assert [each.tool.name for each in person.asked] == ["read"]
    assert [done.outcome for done in reply.calls] == ["ok"] * 3


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


def test_what_is_no_function_is_refused_at_once() -> None:
    model = ScriptedModel()
    with pytest.raises(SetupError, match="approve is True: give a function"):
        ToolLoop(FunctionSource(), model.endpoint, approve=True)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="approve is True: give a function"):
        RealtimeSession(_dialect(), FunctionSource(), print, approve=True)  # type: ignore[arg-type]


def _dialect() -> Any:
    from toolbus.dialects.openai_realtime import OpenAIRealtime

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


async def test_the_settings_of_a_session_choose_which_calls_are_asked_about() -> None:
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
