"""Why a call of a council failed, in the sentences that hosts of role-play systems know."""

from __future__ import annotations

from dataclasses import replace

from toolbus.council.available_tools import AvailableTool
from toolbus.council.council_result import TimedOut
from toolbus.dialects.result_text import text_of
from toolbus.errors import Code, Stage
from toolbus.tool import Result

FAILED = "Tool invocation failed"


def failure_of(result: Result, tool: AvailableTool) -> str:
    """Returns why a call failed, "" where it did not."""
    error = result.error
    if error is None and not result.is_error:
        return ""
    if error is None or error.code is Code.TOOL:
        return (error.message if error is not None else "") or content_of(result) or FAILED
    if error.code is Code.DEADLINE_EXCEEDED:
        return str(TimedOut(tool.bare_name))
    if error.code is Code.UNAVAILABLE and error.stage is not Stage.NOT_DISPATCHED:
        return "Extension worker stopped"
    if error.code is Code.UNAVAILABLE and tool.source:  # without a source the bus's own sentence says more
        return f"Extension worker '{tool.source}' is not running"
    return error.message or error.code.name


def content_of(result: Result) -> str:
    """Returns what a tool returned, as text; null is "", as if it had said nothing."""
    if result.output_json in ("", "null") and not result.content:
        return ""
    return text_of(replace(result, is_error=False, error=None))
