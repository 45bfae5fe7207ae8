"""Encodes and decodes the messages between the bus and callbacks (REST-40, REST-42, REST-50).

`callback_body` writes the body of a call, `read_response` turns the response of a callback into a result, and
`envelope` turns a result into such a response, for the bus as plugin host. Nothing here knows HTTP clients, origins or
registrations. Numbers keep their value and kind: integers are exact (up to Python's 4,300 digits), 5.0 stays 5.0.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from toolbus.bus.catalog.argument_repair import original_of
from toolbus.bus.gateway.json_response import write_json
from toolbus.common.text import refuse_constant, repair_utf8, shorten, without_blanks
from toolbus.errors import Code, Stage
from toolbus.functions.reply import pictures
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

LARGE_BODY = 256 * 1024  # bytes of a response that are read at any pace, and on the loop
LARGE_COMPRESSED = 4 * 1024  # the same of a compressed one: it may be a thousandth of what it expands to
MAX_BODY_ECHO = 200  # characters of an error page that a model is shown (REST-42)
MAX_REASON = 128  # a code or a class name; a longer text is a sentence, and stands in the message
MAX_MESSAGE = 4096  # as for tools of an SDK: a model needs a sentence, not a dump
NO_REASON = "the tool failed and gave no reason"

MAX_ENCODINGS = 3  # of one body, one around the other
_GZIP, _ZLIB, _RAW = 31, 15, -15  # formats by their number in zlib
_FORMATS = {"gzip": (_GZIP,), "x-gzip": (_GZIP,), "deflate": (_ZLIB, _RAW)}  # some send deflate without its frame

# The encodings of the web. Python knows more, and some of them (punycode) take quadratic time.
_CHARSET = re.compile(
    r"utf-?(?:8|16|32)(?:-?[bl]e)?|(?:us-)?ascii|latin-?1|iso-?8859-?[0-9]{1,2}|(?:windows-|cp)[0-9]{3,4}"
    r"|gb(?:k|2312|18030)|big5|shift[_-]jis|euc-(?:jp|kr)|iso-2022-jp|koi8-[ru]",
    re.ASCII | re.IGNORECASE,
)


def finite(digits: str) -> float:
    """Reads a JSON number as a float: a ``parse_float`` for `json`.

    Raises:
        ValueError: it is too large for a float.
    """
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is more than a float can hold")
    return number


# Not orjson: it reads large integers as floats. Made once: `json.loads` with options makes one per call.
_DECODER = json.JSONDecoder(parse_float=finite, parse_constant=refuse_constant)

NOT_REGISTERED, NOT_RUNNING = "TOOL_NOT_REGISTERED", "PLUGIN_NOT_RUNNING"
NOT_THERE = {NOT_REGISTERED, NOT_RUNNING}  # errors of a plugin host, not of the tool

# REST-50: the plugin host's error for a call that did not reach its tool, or did not come back.
_HOST_ERRORS = {Code.NOT_FOUND: NOT_REGISTERED, Code.UNAVAILABLE: NOT_RUNNING, Code.DEADLINE_EXCEEDED: "TOOL_TIMEOUT"}


def callback_body(name: str, arguments_json: str, call_id: str) -> bytes:
    """Returns the body that is posted to a callback (REST-40).

    Args:
        arguments_json: as the model wrote it, or repaired; may not be JSON at all.
    """
    raw = original_of(arguments_json)
    try:
        arguments = _DECODER.decode(without_blanks(arguments_json) or arguments_json) if arguments_json else {}
        if not isinstance(arguments, dict):
            arguments = {"value": arguments}
        return _body(name, arguments, call_id, raw)
    except (ValueError, RecursionError):
        return _body(name, {"_raw": arguments_json}, call_id, raw)


def written_arguments(arguments: Any, raw: Any) -> str:
    """Returns what a model wrote, from the arguments and the raw text of a callback's body (REST-40).

    A main server puts a text that is not JSON into `_raw`, and JSON that is not an object into `value`: the text itself
    says to the model what is wrong with it.
    """
    if isinstance(raw, str) and isinstance(arguments, dict):
        if arguments == {"_raw": raw}:
            return raw
        if arguments.keys() == {"value"}:
            with suppress(ValueError, RecursionError):
                if _DECODER.decode(without_blanks(raw)) == arguments["value"]:
                    return raw
    return ""


def _body(name: str, arguments: dict[str, Any], call_id: str, raw: str) -> bytes:
    return write_json({"name": name, "arguments": arguments, "call_id": call_id, "raw_arguments": raw})


def decompress(body: bytes, encodings: str, limit: int) -> bytes | None:
    """Returns a body without its Content-Encoding: gzip or deflate. None where it has more bytes than the limit.

    Raises:
        ValueError: it is in another encoding, or cannot be read; the text goes on after `a response that`.
    """
    names = [name.strip().lower() for name in encodings.split(",")]
    for name in [name for name in reversed(names) if name not in ("", "identity")][:MAX_ENCODINGS]:
        formats = _FORMATS.get(name)
        if formats is None:
            raise ValueError(f"is compressed as {shorten(name, 40)!r}: send it as it is, or as gzip or deflate")
        for format_ in formats:
            try:
                inflated = _inflate(body, format_, limit)
                break
            except zlib.error as error:
                why = error
        else:
            raise ValueError(f"is not the {name} that its Content-Encoding promises ({why})")
        if inflated is None:
            return None
        body = inflated
    return body


def _inflate(body: bytes, format_: int, limit: int) -> bytes | None:
    """Returns a body inflated, all parts of it; None where it has more bytes than the limit."""
    parts: list[bytes] = []
    left = limit
    while body:
        inflater = zlib.decompressobj(format_)
        part = inflater.decompress(body, left + 1)
        left -= len(part)
        if left < 0:
            return None
        if not inflater.eof:
            raise zlib.error("it is cut off")
        parts.append(part)
        body = inflater.unused_data if format_ == _GZIP else b""
    return b"".join(parts)


def read_response(status: int, body: bytes, charset: str, tool_name: str) -> pb.ToolResult:
    """Returns the result in a callback's response (REST-42), without its call_id. Never raises.

    Args:
        charset: of the content type; "" where it has none.
    """
    if 300 <= status < 400:
        return _failure(
            f"the callback of {tool_name} answered {_status_line(status)}, and redirects are not followed: "
            "register the URL that it redirects to as callback_url"
        )
    if not 200 <= status < 300:
        page = _text(body, charset)[:MAX_BODY_ECHO]
        return _failure(f"{_status_line(status)}: {page}" if page else _status_line(status))
    try:
        # As json.loads reads bytes, but with a decoder that accepts JSON only.
        return _result(_DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass")))
    except (ValueError, RecursionError):
        return pb.ToolResult(output_json=_dump(_text(body, charset)))


def _result(response: Any) -> pb.ToolResult:
    if not isinstance(response, dict):
        return pb.ToolResult(output_json=_dump(response))
    output_json = _dump(response.get("output", response))
    content = pictures(response["images"]) if "images" in response and "output" in response else None
    if not response.get("is_error"):
        return pb.ToolResult(output_json=output_json, content=content)
    error = response.get("error")
    text = error if isinstance(error, str) else ""
    message = text if error is None or isinstance(error, str) else _dump(error)
    return _failure(message, text if len(text) <= MAX_REASON else "", output_json, content)


def _failure(
    message: str, reason: str = "", output_json: str = "null", content: Sequence[pb.ContentBlock] | None = None
) -> pb.ToolResult:
    message = repair_utf8(shorten(message, MAX_MESSAGE))
    error = CallError(Code.TOOL, message, Stage.ACCEPTED, reason=repair_utf8(reason))
    return pb.ToolResult(output_json=output_json, is_error=True, error=error.to_wire(), content=content)


def _dump(value: Any) -> str:
    return write_json(value).decode()


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
    """Returns the plugin host's response for a call that has ended (REST-50); `write_json` writes it.

    Pictures are its `images`, as plugins return them: each with the text above it, unless the texts are the output.

    A failure without an output has its text as the output, the only part that a main server shows to its model.

    A client SDK tells an exception from an envelope that the tool returned by the message, which begins with the class
    of the exception; an exception without a text looks like an envelope whose error is the class.
    """
    answer = _envelope(result)
    if images := _images(result.content, with_texts=result.output_json not in ("", "null")):
        answer["images"] = images
    return answer


def _images(content: Iterable[pb.ContentBlock], *, with_texts: bool) -> list[dict[str, str]]:
    images, prompt = [], ""
    for block in content:
        if block.HasField("image"):
            picture = {"data_b64": base64.b64encode(block.image.data).decode(), "mime": block.image.mime_type}
            images.append(picture | ({"vision_prompt": prompt} if prompt and with_texts else {}))
        prompt = block.text.text if block.HasField("text") else ""
    return images


def _envelope(result: Result) -> dict[str, Any]:
    output, error = _output(result), result.error
    if error is None:
        if not result.is_error:
            return {"output": output, "is_error": False}
        error = CallError(Code.TOOL, "")
    if error.code is not Code.TOOL:
        code = _HOST_ERRORS.get(error.code, error.code.name)
        return {"output": {"error": error.message or code}, "is_error": True, "error": code}
    if output is None:
        text = error.message.removeprefix(f"{error.reason}: ") if error.reason else error.message
        output = {"error": text or error.reason or NO_REASON}
    return {"output": output, "is_error": True, "error": error.reason or error.message}


def _output(result: Result) -> Any:
    """Returns the output, as text where it is not JSON; the text blocks where the output is null."""
    try:
        output = _DECODER.decode(result.output_json or "null")
    except (ValueError, RecursionError):
        return result.output_json
    texts = [block.text.text for block in result.content if block.HasField("text")]
    return "\n".join(texts) if output is None and texts else output
