"""Finds dialects by their names for users."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from toolbus.errors import InvalidRequest
from toolbus.text import quote

if TYPE_CHECKING:
    from toolbus.dialects.dialect import Dialect
    from toolbus.dialects.realtime_dialect import RealtimeDialect

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
    """Returns a new dialect; its module is loaded now. Use one instance for long: it caches converted schemas.

    Raises:
        InvalidRequest: no dialect has that name.
    """
    if name not in _CLASSES:
        raise InvalidRequest(f"there is no dialect {quote(name)}; the dialects are {', '.join(DIALECTS)}")
    module, class_name = _CLASSES[name]
    dialect: Dialect | RealtimeDialect = getattr(importlib.import_module(f"toolbus.dialects.{module}"), class_name)()
    return dialect
