"""Runs councils of role-play hosts: members that run tools before the model answers. The public names.

Each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.parts.council.council import Council, deliberation_block
    from toolbus.parts.council.deliberation import (
        CouncilCompleted,
        CouncilEvent,
        CouncilHistory,
        CouncilStarted,
        Deliberation,
        HistoryEntry,
        MemberDone,
        Scene,
        ToolOutcome,
        ToolsFailed,
    )
    from toolbus.parts.council.inline_tools import InlineExport, InlineTarget, InlineTools
    from toolbus.parts.council.prompt_tool import PromptTool, bundled_prompt_tools, read_prompt_tools
    from toolbus.parts.council.settings import CouncilSettings, Member, SidecarSettings, read_member
    from toolbus.parts.council.sidecar import Completion, LanguageModel, Question, lent, model_of, sidecar_model
    from toolbus.parts.council.tool_runner import AvailableTool, plan_arguments

__all__ = [
    # the council
    "Council", "CouncilSettings", "Member", "read_member", "Scene", "CouncilHistory", "HistoryEntry",
    # the result of a run
    "Deliberation", "ToolOutcome", "AvailableTool", "deliberation_block",
    # events
    "CouncilEvent", "CouncilStarted", "MemberDone", "CouncilCompleted", "ToolsFailed",
    # tools offered to the main model itself
    "InlineExport", "InlineTools", "InlineTarget",
    # prompt tools
    "PromptTool", "read_prompt_tools", "bundled_prompt_tools",
    # the model beside the conversation
    "LanguageModel", "Question", "Completion", "SidecarSettings", "sidecar_model", "lent", "model_of",
    "plan_arguments",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parts.council.council": "Council deliberation_block",
        "parts.council.settings": "CouncilSettings read_member Member SidecarSettings",
        "parts.council.deliberation": (
            "Scene CouncilHistory HistoryEntry Deliberation ToolOutcome CouncilCompleted CouncilEvent "
            "CouncilStarted MemberDone ToolsFailed"
        ),
        "parts.council.inline_tools": "InlineExport InlineTarget InlineTools",
        "parts.council.prompt_tool": "PromptTool bundled_prompt_tools read_prompt_tools",
        "parts.council.sidecar": "lent model_of sidecar_model Completion LanguageModel Question",
        "parts.council.tool_runner": "plan_arguments AvailableTool",
    },
)
