r"""Writes the output and the content of a result as the text that a model reads (`Result.text`).

JSON is rewritten token by token, not parsed and serialized again: integers of any size and the spelling of numbers
survive. Strings lose their `\u` escapes, which cost a model several tokens a character, NaN and Infinity become null,
and half a surrogate pair becomes U+FFFD, since a request that holds one cannot be sent.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from toolbus.text import dump_json, join_surrogates
from toolbus.v1 import tool_pb2 as pb

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'  # in runs: ten times as fast as character by character
_TOKEN = re.compile(_STRING + r"|[ \t\r\n]+|-?Infinity|NaN", re.DOTALL)
_NO_BRACKETS = re.compile(_STRING + r'|[^"\[\]{}]+', re.DOTALL)
_MAX_LEVELS = 200  # of an object that is passed on: serializing it takes a stack frame or more a level
FAILED = "the tool reported a failure"


def repeats_failure(output: Any, failure: str) -> bool:
    """Tells whether an output already contains the error message of the call."""
    if not isinstance(output, dict) or "error" not in output:
        return False
    error = output["error"]
    return failure == (error if isinstance(error, str) else dump_json(error))


def output_text(output_json: str) -> str:
    """Returns an output as text: a string unquoted, other JSON compact, invalid JSON unchanged."""
    if not _is_json(output_json):
        return join_surrogates(output_json) or "null"
    compact = _compact(output_json)
    return str(json.loads(compact)) if compact.startswith('"') else compact


def parsed_output(text: str) -> Any:
    """Returns the value of a JSON text, or the text itself where it is invalid JSON or nested too deeply."""
    if not _is_json(text) or _levels(text) > _MAX_LEVELS:
        return join_surrogates(text) or None
    return json.loads(_compact(text), parse_int=_integer, parse_float=_float)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _levels(text: str) -> int:
    """Returns how deep JSON is nested."""
    deepest = level = 0
    for bracket in _NO_BRACKETS.sub("", text):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    return deepest


def _compact(text: str) -> str:
    """Returns JSON text without white space, without needless escapes, and with null for NaN and Infinity."""
    return _TOKEN.sub(_compact_token, text)


def _compact_token(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == '"':
        if "\\" not in token:
            return join_surrogates(token)
        return json.dumps(join_surrogates(json.loads(token)), ensure_ascii=False)
    return "" if token.isspace() else "null"


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # Python refuses to read more than 4,300 digits
        return digits


def _float(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits


def block_text(block: pb.ContentBlock) -> str:
    """Returns a content block as a line: text unchanged, of anything else its type and size."""
    match block.WhichOneof("kind"):
        case "text":
            return block.text.text
        case "image":
            return f"[{block.image.mime_type or 'image'}, {len(block.image.data)} bytes]"
        case "audio":
            return f"[{block.audio.mime_type or 'audio'}, {len(block.audio.data)} bytes]"
        case "resource_link":
            link = block.resource_link
            return f"[{', '.join(filter(None, (link.mime_type, link.name, link.description, link.uri)))}]"
        case "resource":
            resource = block.resource
            if resource.WhichOneof("body") != "data":
                return resource.text
            return f"[{', '.join(filter(None, (resource.mime_type, resource.uri)))}, {len(resource.data)} bytes]"
        case _:
            return "[content of a kind that this version does not know]"
