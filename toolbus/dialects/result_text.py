r"""What a model reads of a result, and what a provider that wants objects gets of results and arguments.

JSON is rewritten token by token, not parsed and written anew: integers of any size and the spelling of numbers survive.
Strings lose their `\u` escapes, which cost a model several tokens a character, NaN and Infinity become null, and what
UTF-8 cannot carry becomes U+FFFD, since one such character would make a whole request impossible to send.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from toolbus.errors import Code
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'  # in runs: ten times as fast as character by character
_TOKEN = re.compile(_STRING + r"|[ \t\r\n]+|-?Infinity|NaN", re.DOTALL)
_NO_BRACKETS = re.compile(_STRING + r'|[^"\[\]{}]+', re.DOTALL)
_MAX_LEVELS = 200  # of an object that is handed on: writing it takes a stack frame or more a level
_FAILED = "the tool reported a failure"


def text_of(result: Result) -> str:
    """Returns what a model reads: the error's message first, then the output, then the content, a line each.

    An output whose own `error` is that message stands alone: nothing is said twice.
    """
    output = _output_text(result.output_json)
    failure = _failure(result)
    parts = [failure] if failure and not _says(_parsed(result.output_json), failure) else []
    if output not in ("", "null", failure):
        parts.append(output)
    parts += [_block_text(block) for block in result.content]
    return "\n".join(parts) if parts else output


def object_of(result: Result) -> dict[str, Any]:
    """Returns a result as an object: one is passed on, anything else is wrapped as `{"result": …}`.

    A failure has an `error`, with what the tool returned, if anything, as `result` beside it. Content is a text under
    `content`.
    """
    output = _parsed(result.output_json)
    failure = _failure(result)
    content = "\n".join(_block_text(block) for block in result.content)
    if failure and not (failure == _FAILED and isinstance(output, dict) and "error" in output):
        answer: dict[str, Any] = {"error": failure}
        if output not in (None, failure, answer):
            answer["result"] = output
    elif isinstance(output, dict) and not (content and "content" in output):
        answer = output
    else:
        answer = {"result": output}
    return answer | {"content": content} if content else answer


def arguments_of(arguments_json: str) -> dict[str, Any]:
    """Returns a model's arguments as an object, `{}` where they are none: for echoing a call, not for making it."""
    arguments = _parsed(arguments_json)
    return arguments if isinstance(arguments, dict) else {}


def utf8(text: str) -> str:
    """Returns a text with surrogate pairs joined and halves of them replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def utf8_json(value: Any) -> Any:
    """Returns JSON, as Python has it, in which every text is one that UTF-8 can carry."""
    try:
        return _utf8_json(value)
    except RecursionError:  # nested so deep that nobody can write it either
        return value


def _utf8_json(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else utf8(value)
    if isinstance(value, (dict, Mapping)):  # the first is found ten times as fast
        return {_utf8_json(key): _utf8_json(inner) for key, inner in value.items()}
    return [_utf8_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _failure(result: Result) -> str:
    """Returns why a call failed, "" where it did not."""
    if result.error is None:
        return _FAILED if result.is_error else ""
    return utf8(result.error.message) or (_FAILED if result.error.code is Code.TOOL else result.error.code.name)


def _says(output: Any, failure: str) -> bool:
    """Tells whether an output already says why the call failed."""
    if not isinstance(output, dict) or "error" not in output:
        return False
    word = output["error"]
    return failure == (word if isinstance(word, str) else json.dumps(word, ensure_ascii=False, separators=(",", ":")))


def _output_text(output_json: str) -> str:
    """Returns an output as text: a string unquoted, other JSON compact, what is no JSON as it is."""
    if not _is_json(output_json):
        return utf8(output_json) or "null"
    compact = _compact(output_json)
    return str(json.loads(compact)) if compact.startswith('"') else compact


def _parsed(text: str) -> Any:
    """Returns a text as JSON that can be written again, or as the text that it is."""
    if not _is_json(text) or _levels(text) > _MAX_LEVELS:
        return utf8(text) or None
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
    """Returns JSON text without white space, escapes that are not needed, and words that are no JSON."""
    return _TOKEN.sub(_rewritten, text)


def _rewritten(token: re.Match[str]) -> str:
    found = token[0]
    if found[0] == '"':
        if "\\" not in found:
            return utf8(found)
        return json.dumps(utf8(json.loads(found)), ensure_ascii=False)
    return "" if found.isspace() else "null"


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # Python refuses to read more than 4,300 digits
        return digits


def _float(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits


def _block_text(block: pb.ContentBlock) -> str:
    """Returns a part of a result as a line: text as it is, of everything else what it is."""
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
        case _:
            return "[content of a kind that this version does not know]"
