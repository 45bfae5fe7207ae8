"""Translates tools, calls and results into the formats of the providers of language models, and back.

Each name is loaded from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.parts.models.dialects.anthropic import Anthropic
    from toolbus.parts.models.dialects.conversation import Answered, Answers, Delta, Message, ModelCall, Turn, Usage
    from toolbus.parts.models.dialects.dialect import (
        CallsCancelled,
        Dialect,
        EndpointError,
        RealtimeDialect,
        RealtimeParser,
        TurnStream,
    )
    from toolbus.parts.models.dialects.export import Export, LeftOut
    from toolbus.parts.models.dialects.gemini import Gemini
    from toolbus.parts.models.dialects.gemini_live import GeminiLive
    from toolbus.parts.models.dialects.mcp import Mcp
    from toolbus.parts.models.dialects.names import DIALECTS, find_dialect
    from toolbus.parts.models.dialects.ollama import Ollama
    from toolbus.parts.models.dialects.openai_chat import OpenAIChat
    from toolbus.parts.models.dialects.openai_realtime import (
        GlmRealtime,
        Grok,
        OpenAIRealtime,
        QwenRealtime,
        StepFunRealtime,
    )
    from toolbus.parts.models.dialects.openai_responses import OpenAIResponses
    from toolbus.parts.models.dialects.schemas.losses import Loss

__all__ = [
    # by name
    "find_dialect", "DIALECTS",
    # one for each provider
    "Anthropic", "Gemini", "GeminiLive", "GlmRealtime", "Grok", "Mcp", "Ollama", "OpenAIChat", "OpenAIRealtime",
    "OpenAIResponses", "QwenRealtime", "StepFunRealtime",
    # base classes
    "Dialect", "RealtimeDialect", "TurnStream", "RealtimeParser",
    # out: tools
    "Export", "Loss", "LeftOut",
    # in: a model's answer
    "Turn", "ModelCall", "Usage", "Delta", "CallsCancelled", "EndpointError",
    # a conversation
    "Message", "Answers", "Answered",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parts.models.dialects.anthropic": "Anthropic",
        "parts.models.dialects.gemini": "Gemini",
        "parts.models.dialects.gemini_live": "GeminiLive",
        "parts.models.dialects.mcp": "Mcp",
        "parts.models.dialects.ollama": "Ollama",
        "parts.models.dialects.openai_chat": "OpenAIChat",
        "parts.models.dialects.openai_realtime": "GlmRealtime Grok OpenAIRealtime QwenRealtime StepFunRealtime",
        "parts.models.dialects.openai_responses": "OpenAIResponses",
        "parts.models.dialects.conversation": "Answered Answers Delta Message ModelCall Turn Usage",
        "parts.models.dialects.dialect": (
            "Dialect EndpointError TurnStream CallsCancelled RealtimeDialect RealtimeParser"
        ),
        "parts.models.dialects.names": "DIALECTS find_dialect",
        "parts.models.dialects.export": "Export LeftOut",
        "parts.models.dialects.schemas.losses": "Loss",
    },
)
