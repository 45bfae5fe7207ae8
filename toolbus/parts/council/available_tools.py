"""Lists the tools that can be assigned to members: tools of the bus that are meant for councils, and prompt tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolbus.parts.council.prompt_tool import PromptTool
from toolbus.parts.council.settings import SidecarSettings
from toolbus.protocol.tool import Tool

# The settings name a model, but the program gave the council none.
_NOT_GIVEN = "no language model answers prompt tools here: give the council the one that its settings name, as model="


@dataclass(frozen=True, slots=True)
class AvailableTool:
    """One tool that can be assigned to a member.

    Attributes:
        name: by which it is assigned.
        qualified_name: with its source in front, if that is known.
        display_name: for people.
        source: of the tool; "" if the bus lists it without a source, and for prompt tools.
        category: of the tool, else its kind.
        kind: `extension` for a tool of the bus, `prompt` for a prompt tool.
        available: whether it can run now.
        reason: why it cannot run, a sentence; "" if it can.
        tool: the declaration behind it; None for a tool that does not exist.
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
        """The name without its source."""
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

    Of several tools with one name the last is used, in the place of the first: a prompt tool goes before a tool of the
    bus, and a later prompt tool before an earlier one.

    Args:
        no_model: why no language model answers prompt tools; "" if one does.
    """
    tools = {tool.name: _of_bus(tool) for tool in listed if tool.council_eligible}
    for prompt_tool in prompt_tools:
        tools[prompt_tool.name] = _of_prompt(prompt_tool, no_model)
    return tools


def no_model(sidecar: SidecarSettings) -> str:
    """Returns why a council has no model, a sentence that says how to fix it."""
    return sidecar.unavailable or _NOT_GIVEN


def by_any_name(tools: Mapping[str, AvailableTool]) -> dict[str, AvailableTool]:
    """Returns the tools by every name that assigns one: by their names, and the first of each bare name by that."""
    by_name = dict(tools)
    for tool in tools.values():
        by_name.setdefault(tool.bare_name, tool)
    return by_name


def missing_tool(name: str, reason: str) -> AvailableTool:
    """Returns a stand-in for a tool that does not exist; it fails with the reason."""
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
