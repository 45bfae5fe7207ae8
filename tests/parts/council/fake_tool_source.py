"""A tool source in memory that records its calls, and small councils over it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from toolbus.errors import Code, Stage
from toolbus.extension import CouncilSettings, Member, ToolOutcome
from toolbus.functions.call_context import CallContext
from toolbus.parts.council.sidecar import Completion, Question
from toolbus.protocol.tool import CallError, Progress, Result, Tool

USER = {"role": "user", "content": "Who is at the door?"}


@dataclass(frozen=True)
class RecordedCall:
    name: str
    arguments: Any
    context: CallContext
    timeout: float | None


class FixedRolls:
    """Random numbers that a test has chosen."""

    def __init__(self, *numbers: float) -> None:
        self.left = list(numbers)

    def random(self) -> float:
        return self.left.pop(0)


class FakeToolSource:
    """Tools with fixed answers: a value, a `Result`, or a function of the call that returns, awaits or raises."""

    def __init__(self, *tools: Tool, **answers: Any) -> None:
        self.offered = tools
        self.answers = answers  # by the name without source
        self.calls: list[RecordedCall] = []

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        return 1, self.offered

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        context: CallContext | None,
        schema_hash: str,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Result:
        assert context is not None
        call = RecordedCall(name, json.loads(arguments_json), context, timeout)
        self.calls.append(call)
        answer = self.answers.get(name.rpartition(":")[2], f"what {name} says")
        if callable(answer):
            answer = answer(call)
            if isawaitable(answer):
                answer = await answer
        return answer if isinstance(answer, Result) else Result(output_json=json.dumps(answer))

    async def changes(self) -> AsyncIterator[int]:
        yield 1


def tool(name: str, **fields: Any) -> Tool:
    """Returns a tool as a bus lists it; a source before the colon is not part of the declaration."""
    bare = name.rpartition(":")[2]
    return Tool(bare, **{"council_eligible": True, **fields}).renamed(name)


def failed(code: Code, message: str = "", stage: Stage = Stage.UNKNOWN) -> Result:
    return Result(is_error=code is Code.TOOL, error=CallError(code, message, stage))


def member(name: str, *tools: str, **fields: Any) -> Member:
    return Member(id=name.lower(), name=name, tools=tools, **fields)


def settings(*members: Member, **fields: Any) -> CouncilSettings:
    return CouncilSettings(members=members, **fields)


def outcome(who: str, tool: str, content: str = "", **fields: Any) -> ToolOutcome:
    outcome_fields = {
        "success": True,
        "member_id": who.lower(),
        "member_name": who,
        "display_name": tool.title(),
        **fields,
    }
    return ToolOutcome(tool=tool, content=content, **outcome_fields)


class Model:
    """Answers with one answer after another, and records the questions; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.questions: list[Question] = []

    async def __call__(self, question: Question) -> Completion | str:
        self.questions.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]
