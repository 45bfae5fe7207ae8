"""Finds dialects by their names for users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.part import load
from toolbus.common.text import quote
from toolbus.errors import InvalidRequest

if TYPE_CHECKING:
    from toolbus.parts.models.dialects.dialect import Dialect, RealtimeDialect

_CLASSES = {
    "openai": ("openai_chat", "OpenAIChat"),
    "openai-grammar": ("openai_chat", "OpenAIGrammar"),
    "openai-responses": ("openai_responses", "OpenAIResponses"),
    "anthropic": ("anthropic", "Anthropic"),
    "gemini": ("gemini", "Gemini"),
    "ollama": ("ollama", "Ollama"),
    "mcp": ("mcp", "Mcp"),
    "openai-realtime": ("openai_realtime", "OpenAIRealtime"),
    "grok": ("openai_realtime", "Grok"),
    "glm-realtime": ("openai_realtime", "GlmRealtime"),
    "qwen-realtime": ("openai_realtime", "QwenRealtime"),
    "stepfun-realtime": ("openai_realtime", "StepFunRealtime"),
    "gemini-live": ("gemini_live", "GeminiLive"),
}
DIALECTS: tuple[str, ...] = tuple(_CLASSES)


def find_dialect(name: str) -> Dialect | RealtimeDialect:
    """Returns a new dialect; its module is loaded now. Use one instance for long: it caches converted schemas.

    Raises:
        InvalidRequest: no dialect has that name.
        SetupError: it is that of a part that was removed from this installation.
    """
    if name not in _CLASSES:
        raise InvalidRequest(f"there is no dialect {quote(name)}; the dialects are {', '.join(DIALECTS)}")
    module, class_name = _CLASSES[name]
    dialect: Dialect | RealtimeDialect = load(f"toolbus.parts.models.dialects.{module}:{class_name}")()
    return dialect
