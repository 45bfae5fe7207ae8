"""Defines the results of a run of a council: the outcome of each tool, skipped tools, and the whole deliberation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from toolbus.errors import SetupError, ToolBusError
from toolbus.text import list_names, shorten


class TimedOut(ToolBusError):
    """A tool exceeded its timeout; the text is exactly the one that extensions know."""

    def __init__(self, bare_name: str) -> None:
        super().__init__(f"Tool invocation '{bare_name}' timed out")


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """One tool that one member ran.

    Attributes:
        tool: as it was assigned; unique together with the member.
        display_name: for people and for the deliberation block.
        content: the tool's result as text; "" if it failed.
        error: why it failed, a sentence; "" if it succeeded.
        seconds: how long it took.
        variable: the name under which the host stores its content; "" if it does not.
        deliberates: whether its content belongs in the deliberation block.
        timeout_seconds: the timeout, if it was exceeded; else 0.
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
    timeout_seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Member and tool: the outcome of a retry replaces the one with the same key."""
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
            if self.timeout_seconds:
                record["timeoutMs"] = round(self.timeout_seconds * 1000)
        if self.variable:
            record["resultVariable"] = self.variable
        return record


@dataclass(frozen=True, slots=True)
class MissingTool:
    """A tool of a participant that did not exist when the run started.

    Attributes:
        tool: as it is assigned.
        why: the reason, a sentence.
    """

    member_id: str
    tool: str
    why: str

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it."""
        return {"memberId": self.member_id, "toolName": self.tool, "why": self.why}


@dataclass(frozen=True, slots=True)
class Deliberation:
    """A whole run of a council.

    Attributes:
        run_id: of the run; a retry has the same.
        outcomes: in the order of members and of their tools.
        block: the text for the main model.
        variables: contents by the name under which the host stores them.
        seconds: how long the run took.
        reused: whether it is the result of an earlier run, returned since nothing had changed.
        history: a text of earlier turns' results for the main model; may be "".
        skipped: tools that did not exist; they have no outcome.
    """

    run_id: str
    outcomes: tuple[ToolOutcome, ...]
    block: str
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    reused: bool = False
    history: str = ""
    skipped: tuple[MissingTool, ...] = ()

    @property
    def failed(self) -> tuple[ToolOutcome, ...]:
        """The outcomes that may be retried."""
        return tuple(each for each in self.outcomes if not each.success)

    def chosen(self, only: Iterable[tuple[str, str]] | None) -> set[tuple[str, str]]:
        """Returns which failed tools a retry runs again, as (member id, tool).

        Args:
            only: the selected ones; None means all failed ones.

        Raises:
            SetupError: it is empty, or names a tool that did not fail in this run.
        """
        failed = {outcome.key: None for outcome in self.failed}
        if only is None:
            return set(failed)
        selected = dict.fromkeys((member_id, tool) for member_id, tool in only)
        failures = f"failed in this run: {list_names(map(_key_text, failed))}"
        if not selected:
            raise SetupError(f"only is empty: leave it out to retry all; {failures}")
        if others := [_key_text(key) for key in selected if key not in failed]:
            raise SetupError(f"only names {list_names(others)}, which did not fail in this run: {failures}")
        return set(selected)

    @property
    def characters(self) -> int:
        """The approximate number of characters in memory: contents are in the block again."""
        of_outcomes = sum(len(each.content) + len(each.error) for each in self.outcomes)
        of_skipped = sum(len(each.tool) + len(each.why) for each in self.skipped)
        return len(self.block) + len(self.history) + of_outcomes + of_skipped

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
            "skipped": [each.described() for each in self.skipped],
        }


def _key_text(key: tuple[str, str]) -> str:
    return shorten(" ".join(key), 160)
