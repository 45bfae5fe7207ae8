"""Which tools members can be assigned: those of the bus that are meant for councils, and prompt tools over them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolbus.council.prompt_tool import PromptTool
from toolbus.council.sidecar import SidecarSettings
from toolbus.tool import Tool

# Settings that name a model, and none was made of them: only a program can do that.
_NOT_GIVEN = "no language model answers prompt tools here: give the council the one that its settings name, as model="


@dataclass(frozen=True, slots=True)
class AvailableTool:
    """One tool, as a member is assigned it.

    Attributes:
        name: as it is assigned.
        qualified_name: with its source in front, where that is known.
        display_name: for people.
        source: whose tool it is; "" where the bus lists it without, and for prompt tools.
        category: as the tool says, else its kind.
        kind: `extension` for a tool of the bus, `prompt` for one that a language model answers.
        available: whether it can run now.
        reason: why it cannot, a sentence; "" where it can.
        tool: the declaration behind it; None for one that could not even be looked up.
    """

    name: str
    qualified_name: str
    display_name: str
    description: str = ""
    source: str = ""
    category: str = ""
    kind: Literal["prompt", "extension"] = "extension"
    available: bool = True
    reason: str = ""
    tool: Tool | PromptTool | None = field(default=None, repr=False)

    @property
    def bare_name(self) -> str:
        """The name without its source, as the plugin knows it."""
        return self.name.rpartition(":")[2]

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it, under the names that extensions know."""
        return {
            "name": self.name,
            "qualifiedName": self.qualified_name,
            "displayName": self.display_name,
            "description": self.description,
            "source": self.source,
            "category": self.category,
            "kind": self.kind,
            "available": self.available,
            "reason": self.reason,
        }


def available_tools(
    listed: Iterable[Tool], prompt_tools: Iterable[PromptTool], *, no_model: str = ""
) -> dict[str, AvailableTool]:
    """Returns the tools by the name under which they are assigned.

    Of one name the later counts, in the place of the first: prompt tools over those of the bus, and among prompt tools
    whichever was given last.

    Args:
        no_model: why no language model answers prompt tools; "" where one does.
    """
    found = {tool.name: _of_bus(tool) for tool in listed if tool.council_eligible}
    for prompt_tool in prompt_tools:
        found[prompt_tool.name] = _of_prompt(prompt_tool, no_model)
    return found


def no_model(sidecar: SidecarSettings) -> str:
    """Returns why a council that was given no model has none, a sentence with the cure."""
    return sidecar.unavailable or _NOT_GIVEN


def by_any_name(tools: Mapping[str, AvailableTool]) -> dict[str, AvailableTool]:
    """Returns the tools by all names that assign one: its own, else as a bare name that of the first which has it."""
    found = dict(tools)
    for tool in tools.values():
        found.setdefault(tool.bare_name, tool)
    return found


def missing_tool(name: str, reason: str) -> AvailableTool:
    """Returns a stand-in for a tool that could not be looked up."""
    bare = name.rpartition(":")[2]
    return AvailableTool(name, name, bare, available=False, reason=reason)


def _of_bus(tool: Tool) -> AvailableTool:
    source, _, bare = tool.name.rpartition(":")
    return AvailableTool(
        name=tool.name,
        qualified_name=tool.name,
        display_name=tool.display_name or bare,
        description=tool.description,
        source=source,
        category=_category(tool.metadata_json) or "extension",
        tool=tool,
    )


def _of_prompt(tool: PromptTool, no_model: str) -> AvailableTool:
    return AvailableTool(
        name=tool.name,
        qualified_name=tool.name,
        display_name=tool.display_name or tool.name,
        description=tool.description,
        category=tool.category or "prompt",
        kind="prompt",
        available=not no_model,
        reason=no_model,
        tool=tool,
    )


def _category(metadata_json: str) -> str:
    try:
        metadata = json.loads(metadata_json or "{}")
    except (ValueError, RecursionError):
        return ""
    category = metadata.get("category") if isinstance(metadata, dict) else None
    return category if isinstance(category, str) else ""
