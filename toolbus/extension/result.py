"""What became of the tools of a council."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """One tool that one member ran.

    Attributes:
        tool: as it was assigned; together with the member it says which run this is.
        display_name: for people and for the deliberation block.
        content: what the tool returned, as text; "" where it failed.
        error: why it failed, a sentence; "" where it succeeded.
        seconds: how long it took.
        variable: the name under which its content is kept for the host; "" for none.
        deliberates: whether its content belongs into the deliberation block.
    """

    member_id: str
    member_name: str
    tool: str
    display_name: str
    success: bool
    content: str = ""
    error: str = ""
    seconds: float = 0.0
    variable: str = ""
    deliberates: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """Which run this is: member and tool. A retry takes its place."""
        return self.member_id, self.tool

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it, under the names that extensions know."""
        record: dict[str, Any] = {
            "memberId": self.member_id,
            "memberName": self.member_name,
            "toolName": self.tool,
            "toolDisplayName": self.display_name,
            "success": self.success,
            "content": self.content,
            "durationMs": round(self.seconds * 1000),
        }
        if not self.success:
            record["error"] = self.error
        if self.variable:
            record["resultVariable"] = self.variable
        return record


@dataclass(frozen=True, slots=True)
class Deliberation:
    """A whole run of a council.

    Attributes:
        run_id: of the run; a retry keeps it.
        outcomes: in the order of members and of their tools, whatever ended first.
        block: the text for the main model.
        variables: contents by the name under which the host keeps them.
        seconds: how long the run took.
        reused: whether it is an earlier run's, since nothing had changed.
        history: a text of earlier turns' results for the main model; "" for none.
    """

    run_id: str
    outcomes: tuple[ToolOutcome, ...]
    block: str
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    reused: bool = False
    history: str = ""

    @property
    def failed(self) -> tuple[ToolOutcome, ...]:
        """Those that may be tried again."""
        return tuple(each for each in self.outcomes if not each.success)

    @property
    def characters(self) -> int:
        """How much text it keeps in memory, about: contents stand in the block once more."""
        of_outcomes = sum(len(each.content) + len(each.error) for each in self.outcomes)
        return len(self.block) + len(self.history) + of_outcomes

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it, under the names that extensions know."""
        failed = len(self.failed)
        return {
            "runId": self.run_id,
            "generationId": self.run_id,  # as the events name it
            "results": [outcome.described() for outcome in self.outcomes],
            "deliberation": self.block,
            "history": self.history,
            "namedResults": dict(self.variables),
            "totalDurationMs": round(self.seconds * 1000),
            "successCount": len(self.outcomes) - failed,
            "failedCount": failed,
            "reused": self.reused,
        }
