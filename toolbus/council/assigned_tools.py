"""Looks up the tools that are assigned to participants, and reports those that do not exist."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from toolbus.council.available_tools import AvailableTool, missing_tool
from toolbus.council.deliberation import MissingTool, ToolOutcome
from toolbus.council.member import Member
from toolbus.text import list_names, nearest

_MAX_HINTS = 4  # misspelt names of a run for which the nearest is looked up: that takes up to 5 ms each
_RULE = "no tool of that name is offered to councils: it is misspelt, stopped, revoked or not council_eligible"

log = logging.getLogger("toolbus.extension")

Assigned = list[tuple[str, AvailableTool]]  # tools by the names that a member has for them


def assigned_tools(
    members: Iterable[Member], tools: Mapping[str, AvailableTool], unlisted: str, *, again: bool
) -> tuple[dict[str, Assigned], list[MissingTool]]:
    """Returns the tools of members by member id, and those that do not exist.

    Args:
        tools: by every name by which a tool can be assigned.
        unlisted: why the tools of the bus could not be listed, or ""; each missing tool then fails with this reason.
        again: whether it is a retry, where a missing tool fails instead of being skipped.
    """
    assigned: dict[str, Assigned] = {}
    skipped: list[MissingTool] = []
    for member in members:
        assigned[member.id] = of_member = []
        for name in dict.fromkeys(member.tools):
            if (tool := tools.get(name)) is not None:
                of_member.append((name, tool))
            elif unlisted or again:
                of_member.append((name, missing_tool(name, unlisted or _missing_reason(name))))
            else:
                hint = _hint(name, tools) if len(skipped) < _MAX_HINTS else ""
                skipped.append(MissingTool(member.id, name, _RULE + hint))
    return assigned, skipped


def log_skipped(run_id: str, skipped: Sequence[MissingTool]) -> None:
    """Logs one warning for a run about the tools that do not exist."""
    if skipped:
        names = list_names(f"{each.tool!r:.80} of member {each.member_id!r:.80}" for each in skipped)
        log.warning("council run %.80r skips %s: %s", run_id, names, skipped[0].why)


def missing_outcome(outcome: ToolOutcome) -> ToolOutcome:
    """Returns the failed outcome of a retry whose tool its member no longer has."""
    return replace(outcome, success=False, content="", error=_missing_reason(outcome.tool), seconds=0.0)


def _missing_reason(name: str) -> str:
    return f"{name} is not there now"


def _hint(name: str, tools: Mapping[str, AvailableTool]) -> str:
    near = nearest(name, tools)
    return f"; did you mean {near}?" if near else ""
