"""Lists what a program with a language model imports to let it call tools; a name's module is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.lazy import lazily

if TYPE_CHECKING:
    from toolbus.loop.approval import ApprovalGiven, ApprovalRequest, ApprovalRequested, Approve, Decision
    from toolbus.loop.endpoint import (
        Endpoint,
        anthropic_endpoint,
        endpoint_of,
        gemini_endpoint,
        ollama_endpoint,
        openai_endpoint,
        responses_endpoint,
    )
    from toolbus.loop.loop_events import (
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
    from toolbus.loop.loop_settings import SYNCHRONET, LoopSettings
    from toolbus.loop.realtime_events import CallRefused, NewSessionNeeded, ResponseDone, SendFailed, Sync, ToolsSent
    from toolbus.loop.realtime_session import RealtimeSession
    from toolbus.loop.router import Rule
    from toolbus.loop.terminal_approval import ask_on_terminal
    from toolbus.loop.tool_loop import ToolLoop
    from toolbus.loop.tool_refusal import refuses_tools
    from toolbus.loop.tool_source import ToolSource, source_of
    from toolbus.loop.turn_reply import CallDone, Reply

__all__ = [
    # the loop
    "ToolLoop",
    "LoopSettings",
    "SYNCHRONET",
    "Rule",
    "Reply",
    "CallDone",
    # asking before a call
    "Approve",
    "ApprovalRequest",
    "Decision",
    "ask_on_terminal",
    # a realtime session
    "RealtimeSession",
    "Sync",
    "ToolsSent",
    "CallRefused",
    "ResponseDone",
    "NewSessionNeeded",
    "SendFailed",
    # where tools come from
    "ToolSource",
    "source_of",
    # models
    "Endpoint",
    "endpoint_of",
    "openai_endpoint",
    "responses_endpoint",
    "anthropic_endpoint",
    "gemini_endpoint",
    "ollama_endpoint",
    "refuses_tools",
    # events of a turn
    "LoopEvent",
    "RoundStarted",
    "TextDelta",
    "ReasoningDelta",
    "RoundEnded",
    "RoundRetried",
    "ToolsLeftOut",
    "ToolsRefused",
    "CallStarted",
    "CallProgress",
    "CallEnded",
    "ApprovalRequested",
    "ApprovalGiven",
    "Finished",
]

_HOMES = {
    "loop.tool_loop": ("ToolLoop",),
    "loop.approval": ("ApprovalGiven", "ApprovalRequest", "ApprovalRequested", "Approve", "Decision"),
    "loop.terminal_approval": ("ask_on_terminal",),
    "loop.loop_settings": ("LoopSettings", "SYNCHRONET"),
    "loop.router": ("Rule",),
    "loop.turn_reply": ("CallDone", "Reply"),
    "loop.tool_source": ("ToolSource", "source_of"),
    "loop.endpoint": (
        "Endpoint",
        "anthropic_endpoint",
        "endpoint_of",
        "gemini_endpoint",
        "ollama_endpoint",
        "openai_endpoint",
        "responses_endpoint",
    ),
    "loop.realtime_session": ("RealtimeSession",),
    "loop.realtime_events": ("CallRefused", "NewSessionNeeded", "ResponseDone", "SendFailed", "Sync", "ToolsSent"),
    "loop.tool_refusal": ("refuses_tools",),
    "loop.loop_events": (
        "CallEnded",
        "CallProgress",
        "CallStarted",
        "Finished",
        "LoopEvent",
        "ReasoningDelta",
        "RoundEnded",
        "RoundRetried",
        "RoundStarted",
        "TextDelta",
        "ToolsLeftOut",
        "ToolsRefused",
    ),
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
