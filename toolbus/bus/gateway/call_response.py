"""Renders the result of a call as the HTTP response of an invoke.

A large output is passed on as it came, after a thread has checked that it is JSON: parsing and writing it again would
delay every other call.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict

from toolbus.bus.gateway.callback_messages import finite
from toolbus.bus.gateway.json_response import write_json
from toolbus.common.text import parse_json, refuse_constant
from toolbus.errors import Code
from toolbus.protocol.tool import CallError, Result

_STRICT = json.JSONEncoder(allow_nan=False)
LARGE_OUTPUT = 65_536  # characters: they are parsed and written in 2 ms, which a thread could not do sooner


async def call_body(result: Result) -> bytes:
    """Returns the body of an invoke's response."""
    if len(result.output_json) <= LARGE_OUTPUT:
        return write_json(describe_result(result))
    return await asyncio.to_thread(lambda: write_json(describe_raw_result(result)))


def describe_result(result: Result) -> dict[str, Any]:
    """Returns a result as an invoke answers it; an output that is not JSON becomes a text."""
    try:
        output = parse_json(result.output_json)
        _STRICT.encode([[[[output]]]])  # a number may overflow, and the response is nested around it
    except (ValueError, RecursionError):
        output = result.output_json
    error = result.error
    if result.is_error and error is None:
        error = CallError(Code.TOOL, "")
    described = {
        "call_id": result.call_id,
        "output": output,
        "is_error": result.is_error,
        "error": None if error is None else error.described(),
        "content": [MessageToDict(block, preserving_proto_field_name=True) for block in result.content_beside_output()],
    }
    if result.asks:  # only where the request has `accepts`
        described["input_requests"] = parse_json(result.input_requests_json)
        described["request_state"] = result.request_state
    return described


def describe_raw_result(result: Result) -> dict[str, Any]:
    """Returns what `describe_result` returns, for `write_json`; the output is not parsed, however large."""
    text = result.output_json
    output = orjson.Fragment(text) if _is_json(text) else text
    described = describe_result(replace(result, output_json="null", content=result.content_beside_output()))
    return {**described, "output": output}


# Builds no values, but runs Python code for most of them, so that other threads get their turn in between.
_CHECKER = json.JSONDecoder(
    object_pairs_hook=lambda pairs: None,
    parse_int=lambda digits: None,
    parse_float=finite,
    parse_constant=refuse_constant,
)


def _is_json(text: str) -> bool:
    """Returns whether a text is JSON that every client can read, nested as the response nests it."""
    try:
        for each in (text, f"[[[[{text}]]]]"):
            _CHECKER.decode(each)
    except (ValueError, RecursionError):
        return False
    return True
