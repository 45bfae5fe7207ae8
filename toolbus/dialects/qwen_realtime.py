"""Qwen Omni's realtime sessions: OpenAI's events with nested tools, and no search beside them.

The provider refuses a session that has both tools and its own search, so tools switch `enable_search` off. An update
that takes all tools away leaves it alone: whether to search then is for whoever opened the session.
"""

from __future__ import annotations

from typing import ClassVar

from toolbus.dialects.conversation import Json
from toolbus.dialects.export import Export
from toolbus.dialects.openai_realtime import NestedTools


class QwenRealtime(NestedTools):
    """Qwen Omni."""

    name: ClassVar[str] = "qwen-realtime"

    def session(self, export: Export) -> Json:
        session = super().session(export)
        return {**session, "enable_search": False} if export.tools else session
