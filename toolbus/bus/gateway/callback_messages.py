"""What callbacks and the bus say to each other, as bytes and records (REST-40, REST-42, REST-50).

`callback_body` writes the body of a call, `read_answer` turns what a legacy plugin answered into a result, and
`envelope` turns a result into such an answer, for the bus as plugin host. Nothing here knows HTTP clients, origins or
registrations. Numbers keep their value and kind: integers are exact (up to Python's 4,300 digits), 5.0 stays 5.0.
"""

from __future__ import annotations

import json
import math
import re
from http import HTTPStatus
from typing import Any

import orjson

from toolbus.errors import Code, Stage
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

MAX_BODY_ECHO = 200  # characters of an error page that a model is shown (REST-42)
MAX_REASON = 128  # a code or a class name; what is longer is a sentence, and stands in the message
MAX_MESSAGE = 4096  # as for tools of an SDK: a model needs a sentence, not a dump

# The encodings of the web. Python knows more, and some of them (punycode) take quadratic time.
_CHARSET = re.compile(
    r"utf-?(?:8|16|32)(?:-?[bl]e)?|(?:us-)?ascii|latin-?1|iso-?8859-?[0-9]{1,2}|(?:windows-|cp)[0-9]{3,4}"
    r"|gb(?:k|2312|18030)|big5|shift[_-]jis|euc-(?:jp|kr)|iso-2022-jp|koi8-[ru]",
    re.ASCII | re.IGNORECASE,
)


def finite(digits: str) -> float:
    """Reads a number of JSON that a float can hold.

    Raises:
        ValueError: it cannot.
    """
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is more than a float can hold")
    return number


def no_constant(constant: str) -> Any:
    """Refuses what Python reads as JSON and others do not: NaN, Infinity.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{constant} is not JSON")


# Not orjson: it reads large integers as floats. Made once: `json.loads` with options makes one per call.
_DECODER = json.JSONDecoder(parse_float=finite, parse_constant=no_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

# REST-50: what a call that did not reach its tool, or did not come back, is called by the plugin host.
_HOST_WORDS = {
    Code.NOT_FOUND: "TOOL_NOT_REGISTERED",
    Code.UNAVAILABLE: "PLUGIN_NOT_RUNNING",
    Code.DEADLINE_EXCEEDED: "TOOL_TIMEOUT",
}


def write_json(value: Any) -> bytes:
    """Returns compact UTF-8 JSON of something that was read from JSON.

    Raises:
        RecursionError: it is nested too deep.
    """
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or half of a surrogate pair
        pass
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError:  # UTF-8 cannot hold it, an escape can
        return _ASCII_ENCODER.encode(value).encode()


def callback_body(name: str, arguments_json: str, call_id: str) -> bytes:
    """Returns the body that a callback is sent (REST-40).

    Args:
        arguments_json: what the model wrote; it need not be JSON.
    """
    try:
        arguments = _DECODER.decode(arguments_json) if arguments_json else {}
        if not isinstance(arguments, dict):
            arguments = {"value": arguments}
        return _body(name, arguments, call_id, arguments_json)
    except (ValueError, RecursionError):
        return _body(name, {"_raw": arguments_json}, call_id, arguments_json)


def _body(name: str, arguments: dict[str, Any], call_id: str, raw: str) -> bytes:
    return write_json({"name": name, "arguments": arguments, "call_id": call_id, "raw_arguments": raw})


def read_answer(status: int, body: bytes, charset: str, tool_name: str) -> pb.ToolResult:
    """Returns the result that an answer of a callback stands for (REST-42), without its call_id. Never raises.

    Args:
        charset: of the content type; "" where it says none.
    """
    if 300 <= status < 400:
        return _failure(
            f"the callback of {tool_name} answered {_status_line(status)}, and redirects are not followed: "
            "register the URL where it ends as callback_url"
        )
    if not 200 <= status < 300:
        page = _text(body, charset)[:MAX_BODY_ECHO]
        return _failure(f"{_status_line(status)}: {page}" if page else _status_line(status))
    try:
        # As json.loads reads bytes, by a decoder that takes JSON only.
        return _read(_DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass")))
    except (ValueError, RecursionError):
        return pb.ToolResult(output_json=_dump(_text(body, charset)))


def _read(answer: Any) -> pb.ToolResult:
    if not isinstance(answer, dict):
        return pb.ToolResult(output_json=_dump(answer))
    output_json = _dump(answer.get("output", answer))
    if not answer.get("is_error"):
        return pb.ToolResult(output_json=output_json)
    error = answer.get("error")
    word = error if isinstance(error, str) else ""
    message = word if error is None or isinstance(error, str) else _dump(error)
    return _failure(message, word if len(word) <= MAX_REASON else "", output_json)


def _failure(message: str, reason: str = "", output_json: str = "null") -> pb.ToolResult:
    cut = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
    error = CallError(Code.TOOL, _utf8(cut), Stage.ACCEPTED, reason=_utf8(reason))
    return pb.ToolResult(output_json=output_json, is_error=True, error=error.to_wire())


def _dump(value: Any) -> str:
    return write_json(value).decode()


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text(body: bytes, charset: str) -> str:
    if _CHARSET.fullmatch(charset):
        try:
            return body.decode(charset)
        except (LookupError, UnicodeError):
            pass
    return body.decode("utf-8", "replace")


def _status_line(status: int) -> str:
    try:
        return f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def envelope(result: Result) -> dict[str, Any]:
    """Returns what the plugin host answers for a call that ended (REST-50); `write_json` writes it.

    An SDK tells a raise from an envelope that the tool returned by the message, which begins with the exception's
    class; a raise without any text looks like an envelope whose error is the class.
    """
    output = _output(result)
    error = result.error
    if error is None:
        return {"output": output, "is_error": True, "error": ""} if result.is_error else _success(output)
    if error.code is not Code.TOOL:
        word = _HOST_WORDS.get(error.code, error.code.name)
        return {"output": {"error": error.message}, "is_error": True, "error": word}
    raised = error.reason and error.message.startswith(f"{error.reason}: ")
    if raised and output is None:
        output = {"error": error.message.removeprefix(f"{error.reason}: ")}
    return {"output": output, "is_error": True, "error": error.reason or error.message}


def _success(output: Any) -> dict[str, Any]:
    return {"output": output, "is_error": False}


def _output(result: Result) -> Any:
    """Returns the output, as text where it is no JSON; the text blocks where there is none."""
    try:
        output = _DECODER.decode(result.output_json or "null")
    except (ValueError, RecursionError):
        return result.output_json
    words = [block.text.text for block in result.content if block.HasField("text")]
    return "\n".join(words) if output is None and words else output
