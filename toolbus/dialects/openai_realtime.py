"""Writes OpenAI Realtime: flat tools set by `session.update`, calls by `call_id`, answers as conversation items.

Grok, GLM, Qwen Omni and StepFun use the same events with differences of their own, which are in their files. The
common part is here, `OpenAIEventsDialect`; `openai_event_parser` reads the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from toolbus.dialects.conversation import Answered, Json
from toolbus.dialects.dialect import ToolChoice
from toolbus.dialects.export import Export
from toolbus.dialects.openai_chat import nested_tool
from toolbus.dialects.openai_event_parser import OpenAIEventParser
from toolbus.dialects.realtime_dialect import RealtimeDialect, RealtimeParser
from toolbus.dialects.result_text import answer_text
from toolbus.dialects.schemas.schema_rules import OPENAI_SCHEMAS, SchemaRules
from toolbus.dialects.tool_choice import forced_tool, function_choice
from toolbus.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.tool import Tool


class OpenAIEventsDialect(RealtimeDialect):
    """What the providers that use OpenAI's realtime events have in common."""

    name_rule: ClassVar[NameRule] = PLAIN_NAMES
    schema_rules: SchemaRules = OPENAI_SCHEMAS

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
    max_tools: ClassVar[int | None] = 128  # as in chat completions

    def session(self, export: Export) -> Json:
        return {"type": "realtime", **with_choice(super().session(export))}

    def request(self, export: Export | None = None, tools: ToolChoice = "auto") -> list[Json]:
        if tools == "auto":
            return super().request()
        forced = forced_tool(export, tools)
        choice = "none" if forced is None else function_choice(forced)
        return [{"type": "response.create", "response": {"tool_choice": choice}}]


def with_choice(session: Json) -> Json:
    """Returns a session's settings in which the model chooses among the tools, where there are any."""
    return {**session, "tool_choice": "auto"} if session["tools"] else session
