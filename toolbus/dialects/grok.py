"""Speaks Grok's realtime sessions: OpenAI's events and flat tools; a session's settings carry no type of their own."""

from __future__ import annotations

from typing import ClassVar

from toolbus.dialects.conversation import Json
from toolbus.dialects.export import Export
from toolbus.dialects.openai_realtime import FlatTools, with_choice


class Grok(FlatTools):
    """Grok."""

    name: ClassVar[str] = "grok"
    max_tools: ClassVar[int | None] = 200  # docs.x.ai, function calling: "a maximum of 200 tools"

    def session(self, export: Export) -> Json:
        return with_choice(super().session(export))
