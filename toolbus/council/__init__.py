"""Council, member and context of role-play hosts: tools that speak with the voice of a member.

Each name is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.lazy import lazily

if TYPE_CHECKING:
    from toolbus.council.argument_planning import plan_arguments
    from toolbus.council.available_tools import AvailableTool
    from toolbus.council.context import Scene
    from toolbus.council.council import Council
    from toolbus.council.council_events import CouncilCompleted, CouncilEvent, CouncilStarted, MemberDone, ToolsFailed
    from toolbus.council.council_result import Deliberation, ToolOutcome
    from toolbus.council.council_settings import CouncilSettings, read_member
    from toolbus.council.deliberation import deliberation_block
    from toolbus.council.history import CouncilHistory, HistoryEntry
    from toolbus.council.inline_tools import InlineExport, InlineTarget, InlineTools
    from toolbus.council.language_model import Completion, LanguageModel, Question
    from toolbus.council.member import Member
    from toolbus.council.prompt_tool import PromptTool, bundled_prompt_tools, read_prompt_tools
    from toolbus.council.sidecar import SidecarSettings, model_of, sidecar_model

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
    "council.council": ("Council",),
    "council.council_settings": ("CouncilSettings", "read_member"),
    "council.member": ("Member",),
    "council.context": ("Scene",),
    "council.history": ("CouncilHistory", "HistoryEntry"),
    "council.council_result": ("Deliberation", "ToolOutcome"),
    "council.available_tools": ("AvailableTool",),
    "council.deliberation": ("deliberation_block",),
    "council.council_events": ("CouncilCompleted", "CouncilEvent", "CouncilStarted", "MemberDone", "ToolsFailed"),
    "council.inline_tools": ("InlineExport", "InlineTarget", "InlineTools"),
    "council.prompt_tool": ("PromptTool", "bundled_prompt_tools", "read_prompt_tools"),
    "council.language_model": ("Completion", "LanguageModel", "Question"),
    "council.sidecar": ("SidecarSettings", "model_of", "sidecar_model"),
    "council.argument_planning": ("plan_arguments",),
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
