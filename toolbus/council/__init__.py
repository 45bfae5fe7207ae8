"""Runs councils of role-play hosts: members that run tools before the model answers. The public names.

Each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.lazy import lazily

if TYPE_CHECKING:
    from toolbus.council.argument_planning import plan_arguments
    from toolbus.council.available_tools import AvailableTool
    from toolbus.council.council import Council
    from toolbus.council.council_events import CouncilCompleted, CouncilEvent, CouncilStarted, MemberDone, ToolsFailed
    from toolbus.council.council_history import CouncilHistory, HistoryEntry
    from toolbus.council.council_settings import CouncilSettings, read_member
    from toolbus.council.deliberation import Deliberation, ToolOutcome
    from toolbus.council.deliberation_text import deliberation_block
    from toolbus.council.inline_tools import InlineExport, InlineTarget, InlineTools
    from toolbus.council.language_model import Completion, LanguageModel, Question
    from toolbus.council.member import Member
    from toolbus.council.prompt_files import bundled_prompt_tools, read_prompt_tools
    from toolbus.council.prompt_tool import PromptTool
    from toolbus.council.scene import Scene
    from toolbus.council.sidecar import lent, model_of, sidecar_model
    from toolbus.council.sidecar_settings import SidecarSettings

__all__ = [
    # the council
    "Council",
    "CouncilSettings",
    "Member",
    "read_member",
    "Scene",
    "CouncilHistory",
    "HistoryEntry",
    # the result of a run
    "Deliberation",
    "ToolOutcome",
    "AvailableTool",
    "deliberation_block",
    # events
    "CouncilEvent",
    "CouncilStarted",
    "MemberDone",
    "CouncilCompleted",
    "ToolsFailed",
    # tools offered to the main model itself
    "InlineExport",
    "InlineTools",
    "InlineTarget",
    # prompt tools
    "PromptTool",
    "read_prompt_tools",
    "bundled_prompt_tools",
    # the model beside the conversation
    "LanguageModel",
    "Question",
    "Completion",
    "SidecarSettings",
    "sidecar_model",
    "lent",
    "model_of",
    "plan_arguments",
]

_HOMES = {
    "council.council": ("Council",),
    "council.council_settings": ("CouncilSettings", "read_member"),
    "council.member": ("Member",),
    "council.scene": ("Scene",),
    "council.council_history": ("CouncilHistory", "HistoryEntry"),
    "council.deliberation": ("Deliberation", "ToolOutcome"),
    "council.available_tools": ("AvailableTool",),
    "council.deliberation_text": ("deliberation_block",),
    "council.council_events": ("CouncilCompleted", "CouncilEvent", "CouncilStarted", "MemberDone", "ToolsFailed"),
    "council.inline_tools": ("InlineExport", "InlineTarget", "InlineTools"),
    "council.prompt_tool": ("PromptTool",),
    "council.prompt_files": ("bundled_prompt_tools", "read_prompt_tools"),
    "council.language_model": ("Completion", "LanguageModel", "Question"),
    "council.sidecar": ("lent", "model_of", "sidecar_model"),
    "council.sidecar_settings": ("SidecarSettings",),
    "council.argument_planning": ("plan_arguments",),
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
