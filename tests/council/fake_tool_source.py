"""A source of tools in memory, which keeps what it was asked, and small councils over it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from toolbus.council.language_model import Completion, Question
from toolbus.errors import Code, Stage
from toolbus.extension import CouncilSettings, Member, ToolOutcome
from toolbus.functions.call_context import CallContext
from toolbus.tool import CallError, Progress, Result, Tool

USER = {"role": "user", "content": "Who is at the door?"}


@dataclass(frozen=True)
class Asked:
    name: str
    arguments: Any
    context: CallContext
    timeout: float | None


class Rolls:
    """Numbers that were thought of before."""

    def __init__(self, *numbers: float) -> None:
        self.left = list(numbers)

    def random(self) -> float:
        return self.left.pop(0)


class Shelf:
    """Tools with answers: a value, a `Result`, or a function of the call that returns, awaits or raises."""

    def __init__(self, *tools: Tool, **answers: Any) -> None:
        self.offered = tools
        self.answers = answers  # by the name without source
        self.asked: list[Asked] = []

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
        asked = Asked(name, json.loads(arguments_json), context, timeout)
        self.asked.append(asked)
        answer = self.answers.get(name.rpartition(":")[2], f"what {name} says")
        if callable(answer):
            answer = answer(asked)
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
    said = {"success": True, "member_id": who.lower(), "member_name": who, "display_name": tool.title(), **fields}
    return ToolOutcome(tool=tool, content=content, **said)


class Model:
    """Answers with one answer after another, and keeps what it was asked; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Question] = []

    async def __call__(self, question: Question) -> Completion | str:
        self.asked.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]
