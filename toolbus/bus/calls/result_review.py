"""Reviews results that are not plain: large ones, failures, questions, content, and those that may not hold secrets.

An error replaces a result that the caller may not get. The short way for plain results is in `Dispatcher.results`.
"""

from __future__ import annotations

import math

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.input_exchange import why_not_asked
from toolbus.bus.calls.refusals import bounded_hint
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.schema import ArgumentChecker, load_output
from toolbus.errors import CallError, Code, Stage
from toolbus.questions import INPUT_REQUIRED
from toolbus.tool import Limits
from toolbus.v1 import tool_pb2 as pb

NO_OUTPUT = 4  # characters of null: only what is no longer can be a result with questions
OUTPUT_SCHEMA = "output_schema"  # `CallError.reason` where an output breaks the tool's own schema


def review(call: Call, result: pb.ToolResult, limits: Limits, tripwire: Tripwire | None) -> int:
    """Changes a result to one that the caller may get.

    Args:
        tripwire: blocks secrets; None where the tool's source is trusted.

    Returns:
        Its code: 0 for a success, `INPUT_REQUIRED` for questions.
    """
    error = _too_large(call, result, limits)
    if error is None and tripwire is not None:
        blocked = tripwire.check_result(call.entry.name, result)
        error = CallError(Code.SECRET_BLOCKED, blocked, stage=Stage.ACCEPTED) if blocked is not None else None
    if error is not None:
        return _replace(result, error)
    name = call.entry.name
    if result.is_error or result.HasField("error"):
        _complete(name, result)
        return result.error.code
    if result.input_requests_json and len(result.output_json) <= NO_OUTPUT:
        error = why_not_asked(name, result, call.exchange, limits)
        result.output_json = ""
        return INPUT_REQUIRED if error is None else _replace(result, error)
    result.input_requests_json = result.request_state = ""  # what has an output has no questions
    checker = call.declaration.output_checker
    error = _why_invalid(name, result.output_json, checker) if checker is not None else None
    return 0 if error is None else _replace(result, error)


def _replace(result: pb.ToolResult, error: CallError) -> int:
    """Makes a result a failure, with nothing of what the tool returned. Returns its code."""
    result.Clear()
    result.is_error = True
    result.output_json = "null"
    result.error.CopyFrom(error.to_wire())
    return error.code


def _too_large(call: Call, result: pb.ToolResult, limits: Limits) -> CallError | None:
    largest = min(limits.result_bytes, call.caller.max_item_bytes)
    if result.ByteSize() <= largest or (size := _payload_bytes(result)) <= largest:
        return None
    name = "result_bytes" if size > limits.result_bytes else "max_message_bytes"
    largest = limits.result_bytes if name == "result_bytes" else largest
    text = f"tool {call.entry.name!r} returned {size} bytes, more than {largest}: ask for less"
    return CallError(Code.RESULT_TOO_LARGE, text, stage=Stage.ACCEPTED, limit=(name, largest))


def _payload_bytes(result: pb.ToolResult) -> int:
    """Returns the size of a result: all parts from the tool in UTF-8, without the frame around them."""
    error = result.error.ByteSize() if result.HasField("error") else 0
    texts = (result.output_json, result.input_requests_json, result.request_state)
    return sum(len(text.encode()) for text in texts) + sum(block.ByteSize() for block in result.content) + error


def _complete(name: str, result: pb.ToolResult) -> None:
    """Fills in what the plugin left out of a failure; a failure has no questions."""
    result.is_error = True
    result.input_requests_json = result.request_state = ""
    error = result.error
    if not error.code:
        error.code = Code.TOOL.value  # type: ignore[assignment]  # protoc's enum types are ints
    if not error.stage:
        error.stage = Stage.ACCEPTED.value  # type: ignore[assignment]
    error.retry_after_seconds = bounded_hint(error.retry_after_seconds)
    if not math.isfinite(error.limit.value):  # JSON has no such number: records with it could not be shown
        error.limit.value = 0.0
    if not error.message and not result.output_json.strip("nul "):
        error.message = f"tool {name!r} failed and gave no reason"


def _why_invalid(name: str, output_json: str, checker: ArgumentChecker) -> CallError | None:
    """Returns the error of an output that breaks the tool's own schema."""
    try:
        output = load_output(output_json)
        fault = "" if checker.is_valid(output) else checker.explain(output)
    except ValueError as problem:
        fault = str(problem)
    if not fault:
        return None
    text = (
        f"tool {name!r} ran and returned what its own output schema does not allow: {fault}. The result is withheld: "
        "its author corrects the tool or the schema"
    )
    return CallError(Code.TOOL, text, Stage.ACCEPTED, reason=OUTPUT_SCHEMA)
