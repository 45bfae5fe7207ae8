"""Lists what a program with a language model imports to let it call tools; a name's module is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.parts.models.loop.approval import (
        ApprovalGiven,
        ApprovalRequest,
        ApprovalRequested,
        Approve,
        Decision,
        allow_all,
        ask_on_terminal,
    )
    from toolbus.parts.models.loop.endpoint import (
        Endpoint,
        anthropic_endpoint,
        endpoint_of,
        gemini_endpoint,
        ollama_endpoint,
        openai_endpoint,
        responses_endpoint,
    )
    from toolbus.parts.models.loop.loop_events import (
        CallEnded,
        CallProgress,
        CallStarted,
        Finished,
        LoopEvent,
        ReasoningDelta,
        RoundEnded,
        RoundRetried,
        RoundStarted,
        TextDelta,
        ToolsLeftOut,
        ToolsRefused,
    )
    from toolbus.parts.models.loop.loop_settings import SYNCHRONET, LoopSettings
    from toolbus.parts.models.loop.realtime_session import (
        CallRefused,
        NewSessionNeeded,
        RealtimeSession,
        ResponseDone,
        SendFailed,
        Sync,
        ToolsSent,
    )
    from toolbus.parts.models.loop.structured_answer import OutputMismatch
    from toolbus.parts.models.loop.sync_tool_loop import SyncToolLoop
    from toolbus.parts.models.loop.tool_loop import ToolLoop
    from toolbus.parts.models.loop.tool_refusal import refuses_tools
    from toolbus.parts.models.loop.tool_source import Rule, ToolSource, source_of
    from toolbus.parts.models.loop.turn_reply import CallDone, Reply

__all__ = [
    # the loop
    "ToolLoop", "SyncToolLoop", "LoopSettings", "SYNCHRONET", "Rule", "Reply", "CallDone", "OutputMismatch",
    # asking before a call
    "Approve", "ApprovalRequest", "Decision", "ask_on_terminal", "allow_all",
    # a realtime session
    "RealtimeSession", "Sync", "ToolsSent", "CallRefused", "ResponseDone", "NewSessionNeeded", "SendFailed",
    # where tools come from
    "ToolSource", "source_of",
    # models
    "Endpoint", "endpoint_of", "openai_endpoint", "responses_endpoint", "anthropic_endpoint", "gemini_endpoint",
    "ollama_endpoint", "refuses_tools",
    # events of a turn
    "LoopEvent", "RoundStarted", "TextDelta", "ReasoningDelta", "RoundEnded", "RoundRetried", "ToolsLeftOut",
    "ToolsRefused", "CallStarted", "CallProgress", "CallEnded", "ApprovalRequested", "ApprovalGiven", "Finished",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parts.models.loop.tool_loop": "ToolLoop",
        "parts.models.loop.sync_tool_loop": "SyncToolLoop",
        "parts.models.loop.structured_answer": "OutputMismatch",
        "parts.models.loop.approval": (
            "ApprovalGiven ApprovalRequest ApprovalRequested Approve Decision allow_all ask_on_terminal"
        ),
        "parts.models.loop.loop_settings": "LoopSettings SYNCHRONET",
        "parts.models.loop.tool_source": "Rule ToolSource source_of",
        "parts.models.loop.turn_reply": "CallDone Reply",
        "parts.models.loop.endpoint": (
            "Endpoint anthropic_endpoint endpoint_of gemini_endpoint ollama_endpoint openai_endpoint responses_endpoint"
        ),
        "parts.models.loop.realtime_session": (
            "RealtimeSession CallRefused NewSessionNeeded ResponseDone SendFailed Sync ToolsSent"
        ),
        "parts.models.loop.tool_refusal": "refuses_tools",
        "parts.models.loop.loop_events": (
            "CallEnded CallProgress CallStarted Finished LoopEvent ReasoningDelta RoundEnded RoundRetried "
            "RoundStarted TextDelta ToolsLeftOut ToolsRefused"
        ),
    },
)
