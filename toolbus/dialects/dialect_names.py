"""Dialects by the names that users call them."""

from __future__ import annotations

import importlib

from toolbus.dialects.dialect import Dialect
from toolbus.dialects.realtime_dialect import RealtimeDialect
from toolbus.errors import InvalidRequest

_CLASSES = {
    "openai": ("openai_chat", "OpenAIChat"),
    "openai-responses": ("openai_responses", "OpenAIResponses"),
    "anthropic": ("anthropic", "Anthropic"),
    "gemini": ("gemini", "Gemini"),
    "ollama": ("ollama", "Ollama"),
    "mcp": ("mcp", "Mcp"),
    "openai-realtime": ("openai_realtime", "OpenAIRealtime"),
    "grok": ("grok", "Grok"),
    "glm-realtime": ("glm_realtime", "GlmRealtime"),
    "qwen-realtime": ("qwen_realtime", "QwenRealtime"),
    "stepfun-realtime": ("stepfun_realtime", "StepFunRealtime"),
    "gemini-live": ("gemini_live", "GeminiLive"),
}
DIALECTS: tuple[str, ...] = tuple(_CLASSES)


def find_dialect(name: str) -> Dialect | RealtimeDialect:
    """Returns a new dialect, its file loaded only now. Keep it: it remembers what it has converted.

    Raises:
        InvalidRequest: there is none of that name.
    """
    if name not in _CLASSES:
        raise InvalidRequest(f"there is no dialect {name[:80]!r}: there are {', '.join(DIALECTS)}")
    module, kind = _CLASSES[name]
    dialect: Dialect | RealtimeDialect = getattr(importlib.import_module(f"toolbus.dialects.{module}"), kind)()
    return dialect
