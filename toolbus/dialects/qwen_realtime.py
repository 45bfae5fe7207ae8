"""Speaks Qwen Omni's realtime sessions: OpenAI's events with nested tools, and no search beside them.

The provider refuses a session with both tools and its own search, so tools switch `enable_search` off. An update that
removes all tools does not change it: the owner of the session decides whether to search then.
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
