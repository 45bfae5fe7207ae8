"""Council, member and context of role-play hosts: tools that speak with the voice of a member.

Each name is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.lazy import lazily

if TYPE_CHECKING:
    from toolbus.extension.available import AvailableTool
    from toolbus.extension.context import Scene
    from toolbus.extension.council import Council
    from toolbus.extension.deliberation import deliberation_block
    from toolbus.extension.events import CouncilCompleted, CouncilEvent, CouncilStarted, MemberDone, ToolsFailed
    from toolbus.extension.history import CouncilHistory, HistoryEntry
    from toolbus.extension.inline import InlineExport, InlineTarget, InlineTools
    from toolbus.extension.member import Member
    from toolbus.extension.model import Completion, LanguageModel, Question
    from toolbus.extension.planning import plan_arguments
    from toolbus.extension.prompt_tool import PromptTool, bundled_prompt_tools, read_prompt_tools
    from toolbus.extension.result import Deliberation, ToolOutcome
    from toolbus.extension.settings import CouncilSettings, read_member
    from toolbus.extension.sidecar import SidecarSettings, model_of, sidecar_model

__all__ = [
    # the council
    "Council",
    "CouncilSettings",
    "Member",
    "read_member",
    "Scene",
    "CouncilHistory",
    "HistoryEntry",
    # what became of a run
    "Deliberation",
    "ToolOutcome",
    "AvailableTool",
    "deliberation_block",
    # what happens meanwhile
    "CouncilEvent",
    "CouncilStarted",
    "MemberDone",
    "CouncilCompleted",
    "ToolsFailed",
    # tools offered to the main model itself
    "InlineExport",
    "InlineTools",
    "InlineTarget",
    # tools that are a prompt
    "PromptTool",
    "read_prompt_tools",
    "bundled_prompt_tools",
    # the model beside the conversation
    "LanguageModel",
    "Question",
    "Completion",
    "SidecarSettings",
    "sidecar_model",
    "model_of",
    "plan_arguments",
]

_HOMES = {
    "extension.council": ("Council",),
    "extension.settings": ("CouncilSettings", "read_member"),
    "extension.member": ("Member",),
    "extension.context": ("Scene",),
    "extension.history": ("CouncilHistory", "HistoryEntry"),
    "extension.result": ("Deliberation", "ToolOutcome"),
    "extension.available": ("AvailableTool",),
    "extension.deliberation": ("deliberation_block",),
    "extension.events": ("CouncilCompleted", "CouncilEvent", "CouncilStarted", "MemberDone", "ToolsFailed"),
    "extension.inline": ("InlineExport", "InlineTarget", "InlineTools"),
    "extension.prompt_tool": ("PromptTool", "bundled_prompt_tools", "read_prompt_tools"),
    "extension.model": ("Completion", "LanguageModel", "Question"),
    "extension.sidecar": ("SidecarSettings", "model_of", "sidecar_model"),
    "extension.planning": ("plan_arguments",),
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
