"""A call's result as an answer over HTTP shows it.

A large output is passed on as it came, once a thread has seen that it is JSON: read and written anew it would keep
every other call waiting.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict

from toolbus.bus.gateway import callback_messages
from toolbus.errors import Code
from toolbus.tool import CallError, Result

LARGE = 65_536  # characters of an output: they are read and written in 2 ms, which a thread could not do sooner


async def written(result: Result) -> bytes:
    """Returns what an invoke answers, as bytes."""
    if len(result.output_json) <= LARGE:
        return callback_messages.write_json(invoked(result))
    return await asyncio.to_thread(lambda: callback_messages.write_json(as_it_came(result)))


def invoked(result: Result) -> dict[str, Any]:
    """Returns a result as the answer of an invoke; output that is no JSON comes as the text it is."""
    try:
        output = json.loads(result.output_json, parse_constant=callback_messages.no_constant)
        json.dumps([[[[output]]]], allow_nan=False)  # a number may overflow, and the answer goes round it
    except (ValueError, RecursionError):
        output = result.output_json
    error = result.error
    if result.is_error and error is None:
        error = CallError(Code.TOOL, "")
    return {
        "call_id": result.call_id,
        "output": output,
        "is_error": result.is_error,
        "error": None if error is None else _fault(error),
        "content": [MessageToDict(block, preserving_proto_field_name=True) for block in result.content],
    }


def _fault(error: CallError) -> dict[str, Any]:
    return {
        "code": error.code.name,
        "message": error.message,
        "stage": error.stage.name,
        "retry_safe": error.retry_safe,
        "limit": {"name": error.limit[0], "value": error.limit[1]} if error.limit else None,
        "retry_after_seconds": error.retry_after_seconds,
        "reason": error.reason,
    }


def as_it_came(result: Result) -> dict[str, Any]:
    """Returns what `invoked` returns, for `callback_messages.write_json`; the output is not read, however large."""
    text = result.output_json
    return {**invoked(replace(result, output_json="null")), "output": orjson.Fragment(text) if _is_json(text) else text}


# Without the values, and with a step of Python for nearly each of them: other threads have their turn between two.
_READER = json.JSONDecoder(
    object_pairs_hook=lambda pairs: None,
    parse_int=lambda digits: None,
    parse_float=callback_messages.finite,
    parse_constant=callback_messages.no_constant,
)


def _is_json(text: str) -> bool:
    """Whether a text is JSON that whoever gets it can read, with what stands around it."""
    try:
        for each in (text, f"[[[[{text}]]]]"):
            _READER.decode(each)
    except (ValueError, RecursionError):
        return False
    return True
