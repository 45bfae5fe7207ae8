from __future__ import annotations

from typing import Any

from tests.parts.council.fake_tool_source import (
    USER,
    member,
)
from toolbus.extension import (
    Completion,
    Council,
    Deliberation,
    Question,
)

ANN, BOB = member("Ann", "look", "listen"), member("Bob", "look")


async def ran(council: Council, **fields: Any) -> Deliberation:
    deliberation = await council.run([USER], **fields)
    assert deliberation is not None
    return deliberation


def texts_of(deliberation: Deliberation) -> list[str]:
    return [outcome.content or f"! {outcome.error}" for outcome in deliberation.outcomes]


async def model(question: Question) -> Completion:
    return Completion(f"model says, after {question.messages[-1]['content']!r}")
