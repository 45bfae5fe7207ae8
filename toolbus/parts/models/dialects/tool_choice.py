"""Reads a choice of tools: which call it forces, for the dialects that write it, and whether a model followed it."""

from __future__ import annotations

import difflib

from toolbus.common.text import MAX_COMPARED, MAX_COMPARED_LENGTH, list_names, quote, shorten
from toolbus.errors import InvalidRequest
from toolbus.parts.models.dialects.conversation import Turn
from toolbus.parts.models.dialects.dialect import ToolChoice
from toolbus.parts.models.dialects.export import Export

ANY_TOOL = ""

_WORDS = frozenset(("auto", "none", "required"))


def chosen_names(tools: ToolChoice) -> tuple[str, ...]:
    """Returns the tool that a choice names, if it names one.

    Raises:
        InvalidRequest: it is not text.
    """
    if not isinstance(tools, str):  # a provider's own form, or None as in its clients
        raise InvalidRequest(
            f"tool_choice is {shorten(repr(tools))}: give 'auto', 'none', 'required' or the name of a tool"
        )
    return () if tools in _WORDS else (tools,)


def forces_call(tools: ToolChoice) -> bool:
    """Tells whether a choice forces the model to call."""
    return tools not in ("auto", "none")


def follows(turn: Turn, tools: ToolChoice) -> bool:
    """Tells whether a model's turn has the call that a choice forces; servers may ignore what they do not know."""
    return not forces_call(tools) or any(tools in ("required", call.name) for call in turn.calls)


def forced_tool(export: Export | None, tools: ToolChoice) -> str | None:
    """Returns the wire name of the tool that the model must call, `ANY_TOOL` for any; None if no call is forced.

    Raises:
        InvalidRequest: the export does not have the tool, or is empty.
    """
    if not forces_call(tools):
        return None
    names = {} if export is None else export.names.to_wire
    if not names:
        raise InvalidRequest(
            f"tool_choice is {quote(tools)}, but no tool is offered: offer one, or give 'auto' or 'none'"
        )
    if tools == "required":
        return ANY_TOOL
    wire_name = names.get(tools)
    if wire_name is None:
        raise _unknown_tool(export, tools)
    return wire_name


def function_choice(forced: str) -> str | dict[str, str]:
    """Returns a forced call as OpenAI's Responses and Realtime write it."""
    return {"type": "function", "name": forced} if forced else "required"


def _unknown_tool(export: Export | None, tools: ToolChoice) -> InvalidRequest:
    names = [] if export is None else list(export.names.to_wire)
    left_out = {} if export is None else {each.tool: each.why for each in export.left_out}
    if tools in left_out:
        return InvalidRequest(f"tool_choice is {quote(tools)}, which is not offered: {left_out[tools]}")
    compared = names[:MAX_COMPARED] if len(tools) <= MAX_COMPARED_LENGTH else []
    similar = difflib.get_close_matches(tools, compared, 5, cutoff=0.5)
    listed = list_names(map(shorten, similar or names))
    return InvalidRequest(
        f"tool_choice is {quote(tools)}, and no tool with that name is offered: give 'auto', 'none', 'required' or the "
        f"name of one, such as {listed}"
    )
