"""Writes and reads results of tools: content blocks, structured output, failures.

A result of a mounted server that goes on to an MCP client arrives as the server sent it, but for what `write_content`
adds to links and sounds alone, and for texts that `read_result` leaves out as repetitions.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from toolbus.common.text import dump_json, quote, read_foreign_json, shorten
from toolbus.errors import Code, Stage
from toolbus.parts.mcp.messages.eras import NEWEST
from toolbus.protocol.tool import CallError, Result, block_text
from toolbus.v1 import tool_pb2 as pb

Json = dict[str, Any]

UNKNOWN_TYPE = "application/octet-stream"
MAX_UNREAD = 4_000  # characters of a block of an unknown kind that a model reads
_FAILED = "the tool reported a failure"
_SINCE = {"audio": "2025-03-26", "resource_link": "2025-06-18"}  # the first revision with a kind of block
_DATA_URL = re.compile(r"\s*data:([^,;]*(?:;(?!base64,)[^,;]*)*)(;base64)?,", re.IGNORECASE)
_SAME_TYPES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}
_STANDARD_BASE64 = str.maketrans("-_", "+/")


# -- from the bus --------------------------------------------------------------------------------------------------


def write_content(result: Result, text: str, version: str = NEWEST) -> list[Json]:
    """Returns the content of a result: its text first, unless its content has a text; a failure is always included.

    Links and sounds alone are followed by a text about them: several clients pass neither on to the model.

    Args:
        text: the output, or the failure, as a model reads it; "null" is left out where there is other content.
        version: of the protocol; a block of a kind that it does not have becomes a text.
    """
    blocks = [
        write_block(block) if version >= _SINCE.get(block.WhichOneof("kind") or "", "") else _described(block)
        for block in result.content
    ]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    failure = result.error.message if result.error is not None else ""
    if not texts and (text != "null" or not blocks):
        blocks.insert(0, {"type": "text", "text": text})
    elif not texts and all(block["type"] in _SINCE for block in blocks):  # clients show them to no model
        blocks.append({"type": "text", "text": _in_words(result.content)})
    elif failure and failure not in "\n".join(texts):  # a mounted server's failure is its texts, joined
        blocks.insert(0, {"type": "text", "text": failure})
    return blocks


def structured_text(output_json: str, *, modern: bool) -> str:
    """Returns the text that may go out as structuredContent, or "". Whether it is valid JSON is not checked.

    Up to 2025-11-25 only an object may; since then any value. A string is already sent as text, so it is left out.
    """
    first = output_json.lstrip(" \t\r\n")[:1]
    if first == "{":
        return output_json
    return output_json if modern and first not in ('"', "n", "") else ""


def _in_words(blocks: Iterable[pb.ContentBlock]) -> str:
    return "\n".join(block_text(block) for block in blocks)


def _described(block: pb.ContentBlock) -> Json:
    return {"type": "text", "text": block_text(block)}


def write_block(block: pb.ContentBlock) -> Json:
    written = _written(block)
    if block.annotations_json:
        annotations = read_foreign_json(block.annotations_json)
        if annotations is not None:  # a block without its annotations is better than no block
            written["annotations"] = annotations
    return written


def _written(block: pb.ContentBlock) -> Json:
    match block.WhichOneof("kind"):
        case "text":
            return {"type": "text", "text": block.text.text}
        case "image":
            return {"type": "image", **_encoded(block.image)}
        case "audio":
            return {"type": "audio", **_encoded(block.audio)}
        case "resource_link":
            link = block.resource_link
            entry = {"type": "resource_link", "uri": link.uri, "name": link.name or link.uri}
            return entry | _given(description=link.description, mimeType=link.mime_type)
        case "resource":
            resource = block.resource
            body: Json = {"uri": resource.uri} | _given(mimeType=resource.mime_type)
            if resource.WhichOneof("body") == "data":
                body["blob"] = base64.b64encode(resource.data).decode("ascii")
            else:
                body["text"] = resource.text
            return {"type": "resource", "resource": body}
    return {"type": "text", "text": "[content of a kind that this version does not know]"}


def _encoded(part: pb.ImageContent | pb.AudioContent) -> Json:
    return {"data": base64.b64encode(part.data).decode("ascii"), "mimeType": part.mime_type or UNKNOWN_TYPE}


def _given(**values: str) -> Json:
    return {key: value for key, value in values.items() if value}


# -- from a mounted server -----------------------------------------------------------------------------------------


def read_result(answer: Mapping[str, Any], max_bytes: int = sys.maxsize) -> Result:
    """Returns an answer to `tools/call` (`content`, `structuredContent`, `isError`) as a result of the bus.

    The output is `structuredContent`, or the joined text of the text blocks. A block that only repeats it is left out.
    A block that cannot be read becomes a text that says so, with its own text; the others stay. A text in place of a
    block, and a text or one block in place of the list, are read as what is meant.

    Args:
        max_bytes: above it also the texts are left out that are parts of the output, as servers of the official SDKs
            return each output twice. Below they stay, since a text without a wrapper is what models read best.
    """
    content = answer.get("content")
    entries = content if isinstance(content, (list, tuple)) else () if content is None else (content,)
    blocks = [_read_or_explain(each) for each in entries if each is not None]
    texts = [block.text.text for block in blocks if block.WhichOneof("kind") == "text"]
    joined = "\n".join(texts)
    structured = answer.get("structuredContent")
    if structured is not None:
        output = dump_json(structured)
    else:
        output = dump_json(joined) if texts else "null"
    repeats = len(blocks) == 1 and texts and not blocks[0].annotations_json
    if repeats and (structured is None or _is_text_of(joined, structured)):
        blocks = []
    others = [each for each in blocks if each.WhichOneof("kind") in _SINCE]
    if others and len(texts) == 1 and structured is None and joined == _in_words(others):  # as `write_content` adds it
        blocks, output = others, "null"
    if len(output) + sum(block.ByteSize() for block in blocks) > max_bytes:
        plain = [block.text.text for block in blocks if _is_plain(block)]
        if structured is None or _are_parts(plain, structured):
            blocks = [block for block in blocks if not _is_plain(block)]
    if answer.get("isError") is True:
        error = CallError(Code.TOOL, joined or _FAILED, Stage.ACCEPTED)
        return Result("", "null" if structured is None else output, True, error, tuple(blocks))
    return Result("", output, content=tuple(blocks))


def _is_text_of(text: str, value: Any) -> bool:
    try:
        return text == value or bool(json.loads(text) == value)
    except (ValueError, RecursionError):
        return False


def _is_plain(block: pb.ContentBlock) -> bool:
    return block.WhichOneof("kind") == "text" and not block.annotations_json


def _are_parts(texts: Sequence[str], structured: Any) -> bool:
    """Tells whether texts are an output or its only member: all of it, or the items of its list."""
    is_wrapper = isinstance(structured, dict) and len(structured) == 1
    values = [structured, *structured.values()] if is_wrapper else [structured]
    lists = [parts for value in values for parts in ([value], value) if isinstance(parts, list)]
    return any(len(parts) == len(texts) and all(map(_is_text_of, texts, parts)) for parts in lists)


def _read_or_explain(block: Any) -> pb.ContentBlock:
    if not isinstance(block, Mapping):
        return _text_block(block if isinstance(block, str) else dump_json(block))
    try:
        return read_block(block)
    except (ValueError, TypeError) as error:
        note = f"(a part of the result could not be read: {error})"
        text = block.get("text")
        if isinstance(text, str):
            return _text_block(text if "type" not in block else f"{note}\n{text}")
        has_bytes = block.keys() & {"data", "blob", "resource"}
        return _text_block(note if has_bytes else f"{note}\n{shorten(dump_json(block), MAX_UNREAD)}")


def _text_block(text: str) -> pb.ContentBlock:
    return pb.ContentBlock(text=pb.TextContent(text=text))


def read_block(block: Mapping[str, Any]) -> pb.ContentBlock:
    """Reads one content block.

    Raises:
        ValueError: it breaks its format, or is of an unknown type.
    """
    read = _read(block)
    annotations = block.get("annotations")
    if isinstance(annotations, Mapping) and annotations:
        read.annotations_json = dump_json(annotations)
    return read


def _read(block: Mapping[str, Any]) -> pb.ContentBlock:
    kind = block.get("type")
    match kind:
        case "text":
            return pb.ContentBlock(text=pb.TextContent(text=_text(block, "text")))
        case "image":
            return pb.ContentBlock(image=pb.ImageContent(**_media(block)))
        case "audio":
            return pb.ContentBlock(audio=pb.AudioContent(**_media(block)))
        case "resource_link":
            link = pb.ResourceLink(
                uri=_text(block, "uri"),
                name=_text(block, "name", ""),
                description=_text(block, "description", ""),
                mime_type=_text(block, "mimeType", ""),
            )
            return pb.ContentBlock(resource_link=link)
        case "resource":
            return pb.ContentBlock(resource=_resource(block.get("resource")))
    raise ValueError(f"its type is {quote(str(kind))}, which is not one of text, image, audio, resource_link, resource")


def _resource(body: Any) -> pb.EmbeddedResource:
    if not isinstance(body, Mapping):
        raise ValueError("resource is not an object with uri and text or blob")
    resource = pb.EmbeddedResource(uri=_text(body, "uri"), mime_type=_text(body, "mimeType", ""))
    if "blob" in body:
        resource.data = _bytes(body, "blob")
    else:
        resource.text = _text(body, "text")
    return resource


def _text(block: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = block.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{key} is {'missing' if value is None else 'not text'}")
    return value


def _media(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bytes of an image or a sound and their type; that of a data URL, if no other is given."""
    url = _DATA_URL.match(_text(block, "data"))
    declared = _text(block, "mimeType", "") or (url[1] if url else "")
    plain = declared.partition(";")[0].strip().lower()
    return {"data": _bytes(block, "data"), "mime_type": _SAME_TYPES.get(plain, plain)}


def _bytes(block: Mapping[str, Any], key: str) -> bytes:
    """Returns the bytes of base64: also of a data URL, with white space, without padding, or with `-` and `_`."""
    given = _text(block, key)
    if url := _DATA_URL.match(given):
        given = given[url.end() :]
        if not url[2]:
            return unquote_to_bytes(given)
    text = "".join(given.split()).rstrip("=").translate(_STANDARD_BASE64)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{key} is not base64: {error}") from None
