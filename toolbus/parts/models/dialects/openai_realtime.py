"""Writes OpenAI Realtime: flat tools set by `session.update`, calls by `call_id`, answers as conversation items.

Grok, GLM, Qwen Omni and StepFun use the same events with differences of their own, which are in their files. The
common part is here, `OpenAIEventsDialect`; `openai_event_parser` reads the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

from toolbus.errors import SetupError
from toolbus.parts.models.dialects.conversation import Answered, Json
from toolbus.parts.models.dialects.dialect import RealtimeDialect, RealtimeParser, ToolChoice
from toolbus.parts.models.dialects.export import Export, LeftOut
from toolbus.parts.models.dialects.openai_chat import flat_tool, nested_tool
from toolbus.parts.models.dialects.openai_event_parser import OpenAIEventParser
from toolbus.parts.models.dialects.provider_results import (
    OPENAI_REALTIME_IMAGES,
    ImageRule,
    answer_text,
    data_url,
    image_label,
)
from toolbus.parts.models.dialects.schemas.schema_rules import OPENAI_SCHEMAS, SchemaRules
from toolbus.parts.models.dialects.tool_choice import forced_tool, function_choice
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.protocol.tool import Tool
from toolbus.v1 import tool_pb2 as pb


class OpenAIEventsDialect(RealtimeDialect):
    """The common part of providers with OpenAI's realtime events.

    Class attributes:
        nests_tools: whether a tool's name is under `function`, as in chat completions.
    """

    name_rule: ClassVar[NameRule] = PLAIN_NAMES
    schema_rules: SchemaRules = OPENAI_SCHEMAS
    nests_tools: ClassVar[bool] = False

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return (nested_tool if self.nests_tools else flat_tool)(wire_name, tool, schema)

    def session_update(self, export: Export) -> Json:
        return {"type": "session.update", "session": self.session(export)}

    def session(self, export: Export) -> Json:
        """Returns the part of the session's settings that concerns tools."""
        return {"tools": list(export.tools)}

    def parser(self, names: NameTable) -> RealtimeParser:
        return OpenAIEventParser(names)

    def answers(self, answered: Sequence[Answered], names: NameTable, *, go_on: bool = True) -> list[Json]:
        events: list[Json] = [
            {"type": "conversation.item.create", "item": self.output_item(each.call.id, answer_text(each.result))}
            for each in answered
        ]
        for each in answered:
            if images := self.images.images_of(each.result):
                events.append(_images_item(each.call.wire_name or names.wire(each.call.name), images))
        return events + self.request() if events and go_on else events

    def request(self, export: Export | None = None, tools: ToolChoice = "auto") -> list[Json]:
        return [*super().request(export, tools), {"type": "response.create"}]

    def output_item(self, call_id: str, output: str) -> Json:
        """Returns the item of the conversation that answers a call."""
        return {"type": "function_call_output", "call_id": call_id, "output": output}


class OpenAIRealtime(OpenAIEventsDialect):
    """OpenAI's own sessions."""

    name: ClassVar[str] = "openai-realtime"
    accepted_images: ClassVar[ImageRule] = OPENAI_REALTIME_IMAGES
    max_tools: ClassVar[int | None] = 128  # as in chat completions

    def session(self, export: Export) -> Json:
        return {"type": "realtime", **with_choice(super().session(export))}

    def request(self, export: Export | None = None, tools: ToolChoice = "auto") -> list[Json]:
        if tools == "auto":
            return super().request()
        forced = forced_tool(export, tools)
        choice = "none" if forced is None else function_choice(forced)
        return [{"type": "response.create", "response": {"tool_choice": choice}}]


def _images_item(wire: str, images: Sequence[pb.ImageContent]) -> Json:
    """Returns the event that shows images as the user's, since the answer to a call is a text."""
    parts: list[Json] = [{"type": "input_text", "text": image_label(wire)}]
    parts += [{"type": "input_image", "image_url": data_url(image)} for image in images]
    return {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": parts}}


def with_choice(session: Json) -> Json:
    """Returns a session's settings in which the model chooses among the tools, if it has any."""
    return {**session, "tool_choice": "auto"} if session["tools"] else session


# GLM identifies a call by its place in the response. The id generated from it is for this side only, since GLM refuses
# an answer with an id. Every update of the tools repeats the turn detection, or the server falls back to its default.

Mode = Literal["audio", "text"]


class GlmRealtime(OpenAIEventsDialect):
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


# The provider refuses a session with both tools and its own search, so tools switch `enable_search` off. An update that
# removes all tools does not change it: the owner of the session decides whether to search then.
class QwenRealtime(OpenAIEventsDialect):
    """Qwen Omni."""

    name: ClassVar[str] = "qwen-realtime"
    nests_tools: ClassVar[bool] = True

    def session(self, export: Export) -> Json:
        session = super().session(export)
        return {**session, "enable_search": False} if export.tools else session


class StepFunRealtime(OpenAIEventsDialect):
    """StepFun."""

    name: ClassVar[str] = "stepfun-realtime"
    nests_tools: ClassVar[bool] = True


class Grok(OpenAIEventsDialect):
    """Grok."""

    name: ClassVar[str] = "grok"
    max_tools: ClassVar[int | None] = 200  # docs.x.ai, function calling: "a maximum of 200 tools"

    def session(self, export: Export) -> Json:
        return with_choice(super().session(export))
