"""What a program with a language model imports to let it call tools, each name loaded when it is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolbus.loop.endpoint import (
        Endpoint,
        anthropic_endpoint,
        endpoint_of,
        gemini_endpoint,
        ollama_endpoint,
        openai_endpoint,
        responses_endpoint,
    )
    from toolbus.loop.events import (
        CallEnded,
        CallProgress,
        CallStarted,
        Finished,
        LoopEvent,
        ReasoningDelta,
        RoundEnded,
        RoundStarted,
        TextDelta,
        ToolsRefused,
    )
    from toolbus.loop.realtime import RealtimeSession
    from toolbus.loop.refusal import refuses_tools
    from toolbus.loop.reply import CallDone, Reply
    from toolbus.loop.router import Rule
    from toolbus.loop.settings import SYNCHRONET, LoopSettings
    from toolbus.loop.source import ToolSource, source_of
    from toolbus.loop.tool_loop import ToolLoop

__all__ = [
    # the loop
    "ToolLoop",
    "LoopSettings",
    "SYNCHRONET",
    "Rule",
    "Reply",
    "CallDone",
    # the same for a session that stays open
    "RealtimeSession",
    # where tools come from
    "ToolSource",
    "source_of",
    # whom to ask
    "Endpoint",
    "endpoint_of",
    "openai_endpoint",
    "responses_endpoint",
    "anthropic_endpoint",
    "gemini_endpoint",
    "ollama_endpoint",
    "refuses_tools",
    # what happens meanwhile
    "LoopEvent",
    "RoundStarted",
    "TextDelta",
    "ReasoningDelta",
    "RoundEnded",
    "ToolsRefused",
    "CallStarted",
    "CallProgress",
    "CallEnded",
    "Finished",
]

_NAMES = {
    "tool_loop": ("ToolLoop",),
    "settings": ("LoopSettings", "SYNCHRONET"),
    "router": ("Rule",),
    "reply": ("CallDone", "Reply"),
    "source": ("ToolSource", "source_of"),
    "endpoint": (
        "Endpoint",
        "anthropic_endpoint",
        "endpoint_of",
        "gemini_endpoint",
        "ollama_endpoint",
        "openai_endpoint",
        "responses_endpoint",
    ),
    "realtime": ("RealtimeSession",),
    "refusal": ("refuses_tools",),
    "events": (
        "CallEnded",
        "CallProgress",
        "CallStarted",
        "Finished",
        "LoopEvent",
        "ReasoningDelta",
        "RoundEnded",
        "RoundStarted",
        "TextDelta",
        "ToolsRefused",
    ),
}
_HOMES = {name: f"toolbus.loop.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no public name {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
