"""Defines the values that a handler may return, and writes them as the JSON text of a result.

A plain return value is the output. `Reply` adds parts that JSON cannot hold (pictures, sound, links), `Ok` and `Err`
are the results of N.E.K.O. plugins. Common Python values (dataclasses, Enums, dates, paths, sets) are written in their
obvious form; a `Decimal` as text, so that it keeps its digits. Any other value that JSON cannot hold is refused with a
text that names its place.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from typing import Any

from toolbus.common.text import json_writer
from toolbus.functions.type_hints import is_text_class, pydantic_adapter
from toolbus.v1 import tool_pb2 as pb


@dataclass(frozen=True, slots=True)
class Reply:
    """A result with parts in addition to its output.

    Attributes:
        output: for the model, like a plain return value.
        content: parts made by `text`, `image`, `audio`, `link` and `resource`.
        is_error: whether the model should read this as a failure.
        error: the tool's text of the failure; it sets `is_error`.
    """

    output: Any = None
    content: Sequence[pb.ContentBlock] = ()
    is_error: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ok:
    """Success with a value; returned from a tool, the value is the output."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Err:
    """Failure with a reason: a text, an exception, or any JSON."""

    error: Any = None


def text(words: str) -> pb.ContentBlock:
    """Returns a part that holds plain text."""
    return pb.ContentBlock(text=pb.TextContent(text=words))


def image(data: bytes, mime: str = "image/png") -> pb.ContentBlock:
    """Returns a part that holds a picture, from its encoded bytes (not base64)."""
    return pb.ContentBlock(image=pb.ImageContent(data=_bytes(data, "image"), mime_type=mime))


def audio(data: bytes, mime: str = "audio/wav") -> pb.ContentBlock:
    """Returns a part that holds a sound, from its encoded bytes (not base64)."""
    return pb.ContentBlock(audio=pb.AudioContent(data=_bytes(data, "audio"), mime_type=mime))


def link(uri: str, name: str = "", *, description: str = "", mime: str = "") -> pb.ContentBlock:
    """Returns a part that is a link to a resource."""
    return pb.ContentBlock(
        resource_link=pb.ResourceLink(uri=uri, name=name or uri, description=description, mime_type=mime)
    )


def resource(uri: str, body: str | bytes, mime: str = "") -> pb.ContentBlock:
    """Returns a part that holds a resource with its address and its content: text, or bytes (not base64)."""
    part = pb.EmbeddedResource(uri=uri, mime_type=mime)
    if isinstance(body, str):
        part.text = body
    else:
        part.data = _bytes(body, "resource")
    return pb.ContentBlock(resource=part)


def pictures_of(returned: Mapping[str, Any]) -> tuple[pb.ContentBlock, ...] | None:
    """Returns the pictures of a dict with `output` and `images`, as `pictures` does; None for any other dict."""
    if "output" not in returned or not returned.keys() <= {"output", "images", "is_error", "error"}:
        return None
    return pictures(returned["images"])


def pictures(images: Any) -> tuple[pb.ContentBlock, ...] | None:
    """Returns the pictures of a list of `{"data_b64", "mime"?, "vision_prompt"?}`, each below its text.

    Base64 may be broken into lines, or be a data URL. Without a type the bytes decide. In place of a picture that is
    not base64 there is a text that says so, since the output is still useful.

    Returns:
        None for anything that is not such a list.
    """
    if not isinstance(images, list) or not all(isinstance(each, dict) and "data_b64" in each for each in images):
        return None
    content = []
    for number, each in enumerate(images, 1):
        if prompt := each.get("vision_prompt"):
            content.append(text(str(prompt)))
        try:
            head, _, body = each["data_b64"].rpartition(",")
            data = base64.b64decode("".join(body.split()), validate=True)
            mime = each.get("mime") or (head.removeprefix("data:").partition(";")[0] if head else "")
            content.append(image(data, str(mime or picture_type(data))))
        except (ValueError, TypeError, AttributeError):
            content.append(text(f"[image {number} is not base64]"))
    return tuple(content)


def picture_type(data: bytes) -> str:
    """Returns the MIME type of a picture by its first bytes; of others JPEG, as readers of that notation assume."""
    brand = data[8:12] if data[:4] == b"RIFF" or data[4:8] == b"ftyp" else b""
    by_start = (mime for start, mime in _STARTS.items() if data.startswith(start))
    return _BRANDS.get(brand) or next(by_start, "image/jpeg")


_BRANDS = {b"WEBP": "image/webp", b"avif": "image/avif", b"heic": "image/heic"}
_STARTS = {b"\x89PNG": "image/png", b"GIF8": "image/gif", b"BM": "image/bmp", b"<svg": "image/svg+xml"}


def dump_output(value: Any, *, with_bytes: bool = False) -> str:
    """Returns a handler's return value as JSON text.

    Args:
        with_bytes: whether the handler declares that it returns bytes, which are then written as base64. Others are
            more often a picture, which a model should see and not read.

    Raises:
        TypeError: JSON cannot hold it; the text names the place, the type and how to fix it.
    """
    write, plain = (_write_bytes, _plain_with_bytes) if with_bytes else (_write, _plain)
    try:
        try:
            written = write(value)
        except TypeError:  # perhaps of a key
            written = write(_with_text_keys(value, plain))
        if not written.isascii():
            written.encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise TypeError(_culprit(value, "output", ()) or f"output: {problem}") from None
    return written


def _with_text_keys(value: Any, plain: Callable[[Any], Any]) -> Any:
    """Returns a value in which keys such as dates and Enums have their JSON form; TypeError if JSON cannot hold it."""
    if isinstance(value, Mapping):
        keys = [key if isinstance(key, str | int | float | None) else plain(key) for key in value]
        return dict(zip(keys, (_with_text_keys(each, plain) for each in value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [_with_text_keys(each, plain) for each in value]
    return value if isinstance(value, str | int | float | None) else _with_text_keys(plain(value), plain)


def duration_text(value: datetime.timedelta) -> str:
    """Returns a length of time as ISO 8601 writes it, to the microsecond: `PT1H30M`, `-P1DT0.5S`."""
    seconds, micro = divmod(abs(value) // datetime.timedelta(microseconds=1), 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    fraction = f".{micro:06}".rstrip("0") if micro else ""
    parts = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes) + f"{seconds}{fraction}S" * bool(seconds or micro)
    text = f"{days}D" * bool(days) + (f"T{parts}" if parts else "")
    return f"{'-' * (value < datetime.timedelta())}P{text or 'T0S'}"


def _bytes(data: object, function: str) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"{function}() takes the encoded bytes, not {type(data).__name__}: read the file with read_bytes()")


_LISTED = (Set, Sequence, ValuesView, deque)


def _plain(value: Any) -> Any:
    """Returns the JSON form of a value that `json` does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.date | datetime.time):  # datetime is a date
        return value.isoformat()
    if isinstance(value, pathlib.PurePath | uuid.UUID | decimal.Decimal) or is_text_class(type(value)):
        return str(value)
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, datetime.timedelta):
        return duration_text(value)
    if isinstance(value, _LISTED) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return dump()
    if (adapter := pydantic_adapter(type(value))) is not None:
        return adapter.dump_python(value, mode="json")
    raise TypeError(type(value).__name__)


def _plain_with_bytes(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes | bytearray) else _plain(value)


_write = json_writer(_plain)
_write_bytes = json_writer(_plain_with_bytes)

_FIX_BYTES = (
    "return Reply(content=[image(data, mime)]) for media, text, or for base64 annotate the function with -> bytes"
)
_FIXES: dict[Any, str] = {bytes: _FIX_BYTES, bytearray: _FIX_BYTES}


def _culprit(value: Any, path: str, above: tuple[int, ...]) -> str:
    """Returns a text about the part of a value that JSON cannot hold; empty if JSON can hold all."""
    if value is None or isinstance(value, bool | int):
        return ""
    if isinstance(value, str):
        surrogate = next((each for each in value if "\ud800" <= each <= "\udfff"), "")
        return f"{path} holds the lone surrogate {surrogate!a}: decode the text properly" if surrogate else ""
    if isinstance(value, float):
        fix = "return None or a text instead"
        return "" if math.isfinite(value) else f"{path} is {value}, which JSON cannot hold: {fix}"
    if id(value) in above:
        return f"{path} contains itself, which JSON cannot hold: return a copy without the cycle"
    if len(above) > 200:
        return f"{path[:80]}… is nested too deep for JSON: return something flatter"
    above = (*above, id(value))
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str | int | float | bool | None):
                return f"{path} has a key of type {type(key).__name__}, JSON has text keys only: use str(key)"
            if culprit := _culprit(key, f"a key of {path}", ()) or _culprit(each, f"{path}.{key}", above):
                return culprit
        return ""
    if isinstance(value, list | tuple):
        parts = (_culprit(each, f"{path}[{index}]", above) for index, each in enumerate(value))
        return next(filter(None, parts), "")
    try:
        return _culprit(_plain(value), path, above)
    except TypeError:
        fix = _FIXES.get(type(value), "return a dict, list, str, number, bool, None or a dataclass of them")
        return f"{path} is of type {type(value).__name__}, which JSON cannot hold: {fix}"
