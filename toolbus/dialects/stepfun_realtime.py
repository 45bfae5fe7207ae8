"""Speaks StepFun's realtime sessions: OpenAI's events with nested tools."""

from __future__ import annotations

from typing import ClassVar

from toolbus.dialects.openai_realtime import NestedTools


class StepFunRealtime(NestedTools):
    """StepFun."""

    name: ClassVar[str] = "stepfun-realtime"
