from __future__ import annotations

from typing import Any

from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, says
from toolbus.loop import (
    ApprovalRequest,
    Decision,
    ToolLoop,
)
from toolbus.protocol.tool import Annotations, Tool

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
