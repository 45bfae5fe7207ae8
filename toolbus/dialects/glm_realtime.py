"""Speaks GLM's realtime sessions: OpenAI's events and flat tools, without ids of calls, and tools in audio mode only.

GLM identifies a call by its place in the response. The id generated from it is for this side only, since GLM refuses
an answer with an id. Every update of the tools repeats the turn detection, or the server falls back to its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

from toolbus.dialects.conversation import Json
from toolbus.dialects.export import Export, LeftOut
from toolbus.dialects.openai_event_parser import OpenAIEventParser
from toolbus.dialects.openai_realtime import FlatTools
from toolbus.dialects.realtime_dialect import RealtimeParser
from toolbus.dialects.wire_names import NameTable
from toolbus.errors import SetupError
from toolbus.tool import Tool

Mode = Literal["audio", "text"]


class GlmRealtime(FlatTools):
    """GLM.

    In text mode it calls no tools: `export` then leaves all of them out with that reason, and an update of the session
    does not mention tools.
    """

    name: ClassVar[str] = "glm-realtime"

    def __init__(self, mode: Mode = "audio") -> None:
        """Creates the dialect of sessions in one mode.

        Raises:
            SetupError: the mode is unknown.
        """
        if mode not in get_args(Mode):
            raise SetupError(f"GLM realtime has no mode {mode!r}: give 'audio', which calls tools, or 'text'")
        super().__init__()
        self.mode = mode

    def export(self, tools: Iterable[Tool]) -> Export:
        if self.mode == "audio":
            return super().export(tools)
        why = "GLM realtime calls tools in audio mode only, and this session is in text mode: open it in audio mode"
        left_out = tuple(LeftOut(name, why) for name in dict.fromkeys(tool.name for tool in tools))
        return replace(super().export(()), left_out=left_out)

    def session(self, export: Export) -> Json:
        tools = super().session(export) if self.mode == "audio" else {}
        return {**tools, "turn_detection": {"type": "server_vad"}}

    def parser(self, names: NameTable) -> RealtimeParser:
        return _GlmParser(names)

    def output_item(self, call_id: str, output: str) -> Json:
        return {"type": "function_call_output", "output": output}


class _GlmParser(OpenAIEventParser):
    """Reads GLM's events."""

    def call_id(self, response: str, place: int | None, source: Mapping[str, Any]) -> str:
        return "" if place is None else f"glm_{response}_{place}"
