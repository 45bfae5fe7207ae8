"""Which tools of a member are there when it takes part, and what is said of those that are not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from toolbus.council.available_tools import AvailableTool, missing_tool
from toolbus.council.council_result import SkippedTool, ToolOutcome
from toolbus.council.member import Member
from toolbus.text import nearest

MAX_NAMED = 8  # tools that one warning names
_MAX_HINTS = 4  # misspelt names of a run for which the nearest is looked up: that takes up to 5 ms each
_RULE = "no tool of that name is offered to councils: it is misspelt, stopped, revoked or not council_eligible"

log = logging.getLogger("toolbus.extension")

Assigned = list[tuple[str, AvailableTool]]  # tools by the names that a member has for them


def assigned_tools(
    members: Iterable[Member], tools: Mapping[str, AvailableTool], unlisted: str, *, again: bool
) -> tuple[dict[str, Assigned], list[SkippedTool]]:
    """Returns the tools of members by their ids, and those that are not there.

    Args:
        tools: by all names that assign one.
        unlisted: why those of the bus are not among them; each tool has a stand-in then that fails with it.
        again: they were there before: what is gone has a stand-in too.
    """
    assigned: dict[str, Assigned] = {}
    skipped: list[SkippedTool] = []
    for member in members:
        assigned[member.id] = there = []
        for name in dict.fromkeys(member.tools):
            if (tool := tools.get(name)) is not None:
                there.append((name, tool))
            elif unlisted or again:
                there.append((name, missing_tool(name, unlisted or _gone(name))))
            else:
                hint = _hint(name, tools) if len(skipped) < _MAX_HINTS else ""
                skipped.append(SkippedTool(member.id, name, _RULE + hint))
    return assigned, skipped


def warned(run_id: str, skipped: Sequence[SkippedTool]) -> None:
    """Tells an operator, once for a run, which tools were not there."""
    if skipped:
        named = ", ".join(f"{each.tool!r:.80} of member {each.member_id!r:.80}" for each in skipped[:MAX_NAMED])
        more = f" and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
        log.warning("council run %.80r skips %s%s: %s", run_id, named, more, skipped[0].why)


def gone(outcome: ToolOutcome) -> ToolOutcome:
    """Returns the failure of a tool that its member has no more when it is to run again."""
    return replace(outcome, success=False, content="", error=_gone(outcome.tool), seconds=0.0)


def _gone(name: str) -> str:
    return f"{name} is not there now"


def _hint(name: str, tools: Mapping[str, AvailableTool]) -> str:
    near = nearest(name, tools)
    return f"; did you mean {near}?" if near else ""
