"""Declares the tool `search_tools`, by which a model finds tools that it is not offered, and reads its arguments."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from toolbus.search import MAX_RESULTS, MODES, WORD_MODES, default_mode
from toolbus.tool import Annotations, Tool

SEARCH_TOOLS = "search_tools"
REQUEST_TOOL_INJECTION = "request_tool_injection"
_MEANINGS = {
    "bm25": "any of the words",
    "keyword": "exactly this text",
    "semantic": "by meaning",
    "hybrid": "by meaning and words",
}


def search_tool(modes: Sequence[str] = WORD_MODES) -> Tool:
    """Returns the declaration of `search_tools`.

    Args:
        modes: those of the index that answers.
    """
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What the tool should do, e.g. `send email`"},
            "mode": {
                "type": "string",
                "enum": [*modes],
                "default": default_mode(modes),
                "description": "; ".join(f"{mode}: {_MEANINGS[mode]}" for mode in modes),
            },
            "top_k": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "default": 10},
            "include_parameters": {
                "type": "boolean",
                "default": False,
                "description": "Also return each tool's parameters",
            },
        },
        "required": ["query"],
    }
    return Tool(
        name=SEARCH_TOOLS,
        description=(
            "Find tools that are not in your list. There are more tools than the ones you see. "
            "Call this when the task needs something that none of your tools does. "
            "Do NOT call it when one of your tools fits, nor to look up facts, files or web pages: it finds tools. "
            f"To use a tool that it found, pass its name to {REQUEST_TOOL_INJECTION}. "
            "If no result fits, there is no such tool: try other words once, then say that you cannot do it. "
            "Never invent a tool."
        ),
        parameters_json=json.dumps(parameters),
        annotations=Annotations(read_only=True, idempotent=True),
    )


def search_arguments(arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the query and the options of a call, for `ToolIndex.search`, which checks the mode.

    Raises:
        ValueError: naming the argument that breaks its rule.
    """
    options = {name: arguments[name] for name in ("mode", "top_k", "include_parameters") if name in arguments}
    query, top_k = arguments.get("query", ""), options.get("top_k", 10)
    if not isinstance(query, str):
        raise ValueError(
            f"query is {reprlib.repr(query)}, it must be a string: say in a few words what the tool should do"
        )
    if not isinstance(options.get("mode", ""), str):
        raise ValueError(f"mode is {reprlib.repr(options['mode'])}, it must be one of {', '.join(MODES)}")
    if isinstance(top_k, bool) or not (isinstance(top_k, int) or (isinstance(top_k, float) and top_k.is_integer())):
        raise ValueError(f"top_k is {reprlib.repr(top_k)}, it must be an integer from 1 to {MAX_RESULTS}")
    if not isinstance(options.get("include_parameters", False), bool):
        raise ValueError(
            f"include_parameters is {reprlib.repr(options['include_parameters'])}, it must be true or false"
        )
    return query, {**options, "top_k": int(top_k)}
