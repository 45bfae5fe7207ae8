"""Writes and reads results of tools: content blocks, structured output, failures.

A result of a mounted server that goes on to an MCP client arrives as the server sent it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from toolbus.common.text import dump_json, quote, read_foreign_json
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

Json = dict[str, Any]

UNKNOWN_TYPE = "application/octet-stream"
_FAILED = "the tool reported a failure"


# -- from the bus --------------------------------------------------------------------------------------------------


def write_content(result: Result, text: str) -> list[Json]:
    """Returns the content of a result: its text first, unless its content has a text; a failure is always included.

    Args:
        text: the output, or the failure, as a model reads it; "null" is left out where there is other content.
    """
    blocks = [write_block(block) for block in result.content]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    failure = result.error.message if result.error is not None else ""
    if not texts and (text != "null" or not blocks):
        blocks.insert(0, {"type": "text", "text": text})
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


def write_block(block: pb.ContentBlock) -> Json:
    """Returns one content block."""
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


def read_result(answer: Mapping[str, Any]) -> Result:
    """Returns an answer to `tools/call` (`content`, `structuredContent`, `isError`) as a result of the bus.

    The output is `structuredContent`, or the joined text of the text blocks. Blocks that only repeat it are left out. A
    block that cannot be read becomes a text that says so; the others stay.
    """
    blocks = [_read_or_explain(each) for each in answer.get("content") or () if isinstance(each, Mapping)]
    texts = [block.text.text for block in blocks if block.WhichOneof("kind") == "text"]
    joined = "\n".join(texts)
    structured = answer.get("structuredContent")
    if structured is not None:
        output = dump_json(structured)
    else:
        output = dump_json(joined) if texts else "null"
    if len(blocks) == 1 and texts and not blocks[0].annotations_json and _repeats(joined, structured):
        blocks = []
    if answer.get("isError") is True:
        error = CallError(Code.TOOL, joined or _FAILED, Stage.ACCEPTED)
        return Result("", "null" if structured is None else output, True, error, tuple(blocks))
    return Result("", output, content=tuple(blocks))


def _repeats(text: str, structured: Any) -> bool:
    """Tells whether a text is the same as the output."""
    if structured is None:
        return True
    try:
        return bool(json.loads(text) == structured)
    except (ValueError, RecursionError):
        return False


def _read_or_explain(block: Mapping[str, Any]) -> pb.ContentBlock:
    try:
        return read_block(block)
    except (ValueError, TypeError) as error:
        return pb.ContentBlock(text=pb.TextContent(text=f"(a part of the result could not be read: {error})"))


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
            image = pb.ImageContent(data=_bytes(block, "data"), mime_type=_text(block, "mimeType"))
            return pb.ContentBlock(image=image)
        case "audio":
            audio = pb.AudioContent(data=_bytes(block, "data"), mime_type=_text(block, "mimeType"))
            return pb.ContentBlock(audio=audio)
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


def _bytes(block: Mapping[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(_text(block, key), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{key} is not base64: {error}") from None
