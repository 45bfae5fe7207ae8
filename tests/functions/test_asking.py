"""Functions that ask: each question ends the run, and the function runs again with the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.waiting import within
from toolbus.errors import CallFailed, Code
from toolbus.functions.call_context import Inputs
from toolbus.functions.input_rounds import MAX_ROUNDS, answered, answered_sync
from toolbus.functions.runner import run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import describe, spec_of
from toolbus.protocol.questions import CANCELLED, DECLINED, Answer, Question
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

DAY = {"day": {"type": "string", "enum": ["monday", "friday"]}, "seats": {"type": "integer"}}


class Tool:
    """A function as its callers reach it, by messages of the wire."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.spec = spec_of(function, describe(function, name="tool"))
        self.calls: list[pb.ToolCall] = []

    async def __call__(self, name: str, arguments_json: str, *, inputs: Inputs | None) -> Result:
        call = pb.ToolCall(call_id=str(len(self.calls)), name=name, context=pb.CallContext())
        if inputs is not None:
            call.accepts.extend(inputs.accepts)
            call.input_responses_json = json.dumps(inputs.answers) if inputs.answers else ""
            call.request_state = inputs.state
        self.calls.append(call)
        result = await within(run_handler(self.spec, arguments_json, ToolScope.of(call), _on_thread))
        return Result.from_wire(result.to_wire())

    async def asked(self, on_input: Callable[[Question], Any], inputs: Inputs | None = None) -> Result:
        return await answered(self, "tool", "{}", on_input, inputs)


async def _on_thread(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


async def book(ctx: ToolScope) -> Any:
    day = await ctx.elicit("Which day?", DAY)
    sure = await ctx.elicit(f"Book {day.content.get('day')}?")
    return {"day": day.content.get("day"), "action": day.action, "sure": sure.accepted}


def book_plainly(ctx: ToolScope) -> Any:
    day = ctx.elicit_sync("Which day?", DAY)
    sure = ctx.elicit_sync(f"Book {day.content.get('day')}?")
    return {"day": day.content.get("day"), "action": day.action, "sure": sure.accepted}


async def book_in_tasks(ctx: ToolScope) -> Any:
    async with asyncio.TaskGroup() as tasks:
        day = await tasks.create_task(ctx.elicit("Which day?", DAY))
        sure = tasks.create_task(ctx.elicit(f"Book {day.content.get('day')}?"))
    return {"day": day.content.get("day"), "action": day.action, "sure": sure.result().accepted}


@pytest.mark.parametrize("function", [book, book_plainly, book_in_tasks])
async def test_a_function_that_asks_twice_runs_three_times_and_gets_both_answers(function: Callable[..., Any]) -> None:
    tool, questions = Tool(function), []

    def answer(question: Question) -> Any:
        questions.append(question)
        return {"day": "friday"} if question.schema["properties"] else Answer()

    result = await tool.asked(answer)
    assert result.unwrap() == {"day": "friday", "action": "accept", "sure": True}
    assert [question.message for question in questions] == ["Which day?", "Book friday?"]
    assert [question.needs for question in questions] == ["elicitation.form"] * 2
    assert questions[0].schema["properties"] == DAY  # the object around the properties was left out
    assert len(tool.calls) == 3


async def test_who_declines_or_makes_no_choice_is_heard() -> None:
    tool = Tool(book)
    for given, action in ((DECLINED, "decline"), (None, "cancel"), (CANCELLED, "cancel")):

        async def answer(question: Question, given: Answer | None = given) -> Answer | None:
            return given

        assert (await tool.asked(answer)).unwrap() == {"day": None, "action": action, "sure": False}


async def test_an_answer_never_counts_for_another_question_at_the_same_place() -> None:
    files = ["a"]

    def delete(ctx: ToolScope) -> list[str]:
        if ctx.elicit_sync(f"Delete {', '.join(files)}?").accepted:
            return files
        return []

    questions = []

    def answer(question: Question) -> Answer:
        questions.append(question.message)
        if len(questions) == 1:
            files.append("b")  # between the question and the answer
        return Answer()

    assert (await Tool(delete).asked(answer)).unwrap() == ["a", "b"]
    assert questions == ["Delete a?", "Delete a, b?"]


async def test_a_question_with_a_key_may_be_worded_otherwise_at_each_run() -> None:
    runs = iter(range(100))

    async def tool(ctx: ToolScope) -> int:
        await ctx.elicit(f"It is {next(runs)}. Go on?", key="go")
        return next(runs)

    assert (await Tool(tool).asked(lambda question: Answer())).unwrap() == 2


async def test_a_function_that_asks_something_new_at_each_run_ends_after_some_rounds() -> None:
    runs = iter(range(100))

    async def tool(ctx: ToolScope) -> None:
        await ctx.elicit(f"It is {next(runs)}. Go on?")

    for result in (
        await Tool(tool).asked(lambda question: Answer()),
        await asyncio.to_thread(_asked_by_blocking, Tool(tool)),
    ):
        assert result.error is not None
        assert (result.error.code, result.error.reason) == (Code.TOOL, "needs_input")
        assert f"{MAX_ROUNDS} times in a row" in result.error.message


def _asked_by_blocking(tool: Tool) -> Result:
    def call(name: str, arguments_json: str, *, inputs: Inputs | None) -> Result:
        return asyncio.run(tool(name, arguments_json, inputs=inputs))

    return answered_sync(call, "tool", "{}", lambda question: Answer(), None)


@pytest.mark.parametrize(
    "given", [{"day": "sunday"}, {"day": "friday", "seats": "two"}, {"day": "friday", "seats": True}, {"seats": 1}]
)
async def test_an_answer_that_does_not_fit_the_form_is_asked_for_again(given: dict[str, Any]) -> None:
    async def tool(ctx: ToolScope) -> Any:
        return dict((await ctx.elicit("?", {"type": "object", "properties": DAY, "required": ["day"]})).content)

    answers = [given, {"day": "monday", "seats": 2}]
    result = await Tool(tool).asked(lambda question: answers.pop(0))
    assert (result.unwrap(), answers) == ({"day": "monday", "seats": 2}, [])


async def test_several_questions_of_any_kind_are_asked_at_once() -> None:
    async def tool(ctx: ToolScope) -> Any:
        return await ctx.ask(
            {
                "where": {"method": "roots/list", "params": {}},
                "poem": {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 9}},
            }
        )

    given = {"roots/list": {"roots": []}, "sampling/createMessage": {"role": "assistant", "content": []}}
    tool_ = Tool(tool)
    result = await tool_.asked(lambda question: given[question.method], Inputs(("roots", "sampling")))
    assert result.unwrap() == {"where": {"roots": []}, "poem": {"role": "assistant", "content": []}}
    assert len(tool_.calls) == 2
    result = await Tool(tool).asked(lambda question: None, Inputs(("roots", "sampling")))
    assert result.error is not None
    assert "the folders that the user works in" in result.error.message


async def test_a_page_to_open_is_a_question_too() -> None:
    async def tool(ctx: ToolScope) -> bool:
        assert "elicitation.url" in ctx.accepts
        return (await ctx.elicit("Sign in", url="https://example.org/in")).accepted

    questions = []

    def answer(question: Question) -> Answer:
        questions.append((question.url, question.needs, bool(question.params["elicitationId"])))
        return Answer()

    assert (await Tool(tool).asked(answer, Inputs(("elicitation.url",)))).unwrap() is True
    assert questions == [("https://example.org/in", "elicitation.url", True)]


async def test_a_function_may_keep_its_own_state_and_return_its_questions() -> None:
    def tool(ctx: ToolScope) -> Any:
        if ctx.request_state:
            return [ctx.request_state, ctx.input_responses]
        return Result(input_requests_json='{"q":{"method":"roots/list"}}', request_state="mine")

    result = await Tool(tool).asked(lambda question: {"roots": []}, Inputs(("roots",)))
    assert result.unwrap() == ["mine", {"q": {"roots": []}}]


async def test_except_exception_in_a_function_does_not_swallow_its_question() -> None:
    async def tool(ctx: ToolScope) -> str:
        try:
            await ctx.elicit("?")
        except Exception:
            return "swallowed"
        return "asked"

    assert (await Tool(tool).asked(lambda question: Answer())).unwrap() == "asked"


@pytest.mark.parametrize("state", ["[]", "{", '{"answers":7}', "made up"])
async def test_a_made_up_state_does_not_count_as_an_answer(state: str) -> None:
    result = await Tool(book)("tool", "{}", inputs=Inputs(state=state))
    assert result.asks


async def test_without_an_answer_a_result_that_asks_is_a_failure_for_programs_and_models() -> None:
    result = await Tool(book)("tool", "{}", inputs=None)
    assert result.text.startswith("the tool needs input before it can go on: 'Which day?' (day: string, one of")
    with pytest.raises(CallFailed, match="needs input"):
        result.unwrap()


async def test_what_the_answering_function_raises_is_raised() -> None:
    def answer(question: Question) -> Answer:
        raise LookupError("nobody there")

    with pytest.raises(LookupError):
        await Tool(book).asked(answer)
