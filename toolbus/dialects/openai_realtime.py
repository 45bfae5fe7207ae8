"""Writes OpenAI Realtime: flat tools set by `session.update`, calls by `call_id`, answers as conversation items.

Grok, GLM, Qwen Omni and StepFun use the same events with differences of their own, which are in their files. The
common part is here, `OpenAIEventsDialect`; `openai_event_parser` reads the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from toolbus.dialects.conversation import Answered, Json
from toolbus.dialects.dialect import ToolChoice
from toolbus.dialects.export import MAX_CACHED_SCHEMAS, Export
from toolbus.dialects.openai_chat import nested_tool
from toolbus.dialects.openai_event_parser import OpenAIEventParser
from toolbus.dialects.provider_results import answer_text
from toolbus.dialects.realtime_dialect import RealtimeDialect, RealtimeParser
from toolbus.dialects.result_images import NO_IMAGES, OPENAI_REALTIME_IMAGES, ImageRule, data_url, image_label
from toolbus.dialects.schemas.schema_rules import OPENAI_SCHEMAS, SchemaRules
from toolbus.dialects.tool_choice import forced_tool, function_choice
from toolbus.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.tool import Tool
from toolbus.v1 import tool_pb2 as pb


class OpenAIEventsDialect(RealtimeDialect):
    """The common part of providers with OpenAI's realtime events.

    Class attributes:
        accepted_images: which images in results its models accept.

    Args:
        images: False for a model that refuses images: the text of a result then describes them.
    """

    name_rule: ClassVar[NameRule] = PLAIN_NAMES
    schema_rules: SchemaRules = OPENAI_SCHEMAS
    accepted_images: ClassVar[ImageRule] = NO_IMAGES

    def __init__(self, max_cached_schemas: int = MAX_CACHED_SCHEMAS, *, images: bool = True) -> None:
        super().__init__(max_cached_schemas)
        self.images = self.accepted_images if images else NO_IMAGES

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


class FlatTools(OpenAIEventsDialect):
    """Providers that expect a tool's name beside its type."""

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return {"type": "function", "name": wire_name, "description": tool.description, "parameters": schema}


class NestedTools(OpenAIEventsDialect):
    """Providers that expect a tool's name under `function`, as in chat completions."""

    def write_tool(self, wire_name: str, tool: Tool, schema: Json) -> Json:
        return nested_tool(wire_name, tool, schema)


class OpenAIRealtime(FlatTools):
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
