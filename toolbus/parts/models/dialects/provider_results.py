"""Writes a result as providers require it: as text that marks a failure, or as an object; images by their bytes."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from toolbus.protocol.tool import FAILED, Result, block_text, parsed_output, repeats_failure
from toolbus.v1 import tool_pb2 as pb

_MARK = "Error: "


def answer_text(result: Result) -> str:
    """Returns a result as text for a model whose provider has no field that tells a failure: the text is marked.

    A text that is an object with `error` needs no mark.
    """
    text = result.text
    failure = result.failure
    if not failure or (not result.shown[1] and repeats_failure(parsed_output(result.output_json), failure)):
        return text
    return _MARK + text


def object_of(result: Result) -> dict[str, Any]:
    """Returns a result as an object: an object is passed on, anything else is wrapped as `{"result": …}`.

    A failure has an `error`, and the tool's output, if any, as `result`. Content is a text under
    `content`.
    """
    output = parsed_output(result.output_json)
    failure = result.failure
    content = "\n".join(block_text(block) for block in result.shown[1])
    if failure and not (failure == FAILED and isinstance(output, dict) and "error" in output):
        answer: dict[str, Any] = {"error": failure}
        if result.shown[0] and output not in (None, failure, answer):
            answer["result"] = output
    elif isinstance(output, dict) and not (content and "content" in output):
        answer = output
    else:
        answer = {"result": output}
    return answer | {"content": content} if content else answer


def arguments_object(arguments_json: str) -> dict[str, Any]:
    """Returns a model's arguments as an object, or `{}`: to echo a call, not to make it."""
    arguments = parsed_output(arguments_json)
    return arguments if isinstance(arguments, dict) else {}


# An image that a provider would refuse, for its type or its size, stays in the result, whose text then describes it. So
# does one whose bytes are not a whole image: it would make the provider refuse this request and every later one. The
# bytes decide, since tools declare wrong types.

MIB = 1024 * 1024
_COMMON_TYPES = ("image/jpeg", "image/png", "image/webp")


@dataclass(frozen=True, slots=True)
class ImageRule:
    """Which images a provider accepts.

    Attributes:
        types: MIME types.
        max_bytes: of one image as the tool returned it; base64 makes it longer by a third.
    """

    types: frozenset[str]
    max_bytes: int

    def images_of(self, result: Result) -> list[pb.ImageContent]:
        """Returns the images of a result that the provider accepts, each with the type that its bytes have."""
        return [
            pb.ImageContent(data=block.image.data, mime_type=image_type(block.image.data))
            for block in result.content
            if self._accepts(block)
        ]

    def text_beside_images(self, result: Result) -> str:
        """Returns the text of the parts that `images_of` does not return; may be ""."""
        rest = replace(result, content=tuple(block for block in result.content if not self._accepts(block)))
        text = answer_text(rest)
        return "" if text == "null" and not rest.content else text

    def _accepts(self, block: pb.ContentBlock) -> bool:
        image = block.image
        return 0 < len(image.data) <= self.max_bytes and image_type(image.data) in self.types


# The limits of the providers' APIs. Anthropic's applies to the base64 text; OpenAI's and Gemini's to all images of a
# request, of which one image may use a part.
ANTHROPIC_IMAGES = ImageRule(frozenset((*_COMMON_TYPES, "image/gif")), 5 * MIB * 3 // 4)
OPENAI_IMAGES = ImageRule(frozenset((*_COMMON_TYPES, "image/gif")), 15 * MIB)
GEMINI_IMAGES = ImageRule(frozenset((*_COMMON_TYPES, "image/heic", "image/heif")), 7 * MIB)
# Every build of Ollama's server decodes PNG and JPEG, and OpenAI documents these for sessions. Neither publishes a
# limit; an event of a session is one message of its socket.
OLLAMA_IMAGES = ImageRule(frozenset(("image/jpeg", "image/png")), 15 * MIB)
OPENAI_REALTIME_IMAGES = ImageRule(frozenset(("image/jpeg", "image/png")), 5 * MIB)
NO_IMAGES = ImageRule(frozenset(), 0)


def base64_of(image: pb.ImageContent) -> str:
    """Returns the bytes of an image as base64 text."""
    return base64.b64encode(image.data).decode("ascii")


def data_url(image: pb.ImageContent) -> str:
    """Returns an image as a `data:` URL."""
    return f"data:{image.mime_type};base64,{base64_of(image)}"


def image_label(wire: str) -> str:
    """Returns the text that stands before the images of a tool in a message of their own."""
    return f"[images in the result of {wire}]"


# The type of an image by its bytes. Only the structure is read, no picture is decoded: chunks, segments and boxes have
# to end where the file says they end.

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))  # markers without a length
_JPEG_FRAMES = frozenset((*range(0xC0, 0xD0),)) - {0xC4, 0xC8, 0xCC}  # markers with the size of the picture
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, b"\xff\xd9"
_HEIC = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"))
_HEIF = frozenset((b"mif1", b"msf1", b"heif"))


def image_type(data: bytes) -> str:
    """Returns the MIME type of a whole image; "" for any other bytes, a cut or empty picture included."""
    for begins, is_whole, mime_type in _KINDS:
        if begins(data):
            try:
                return mime_type if is_whole(data) else ""
            except (IndexError, struct.error):  # the bytes end in the middle of a field
                return ""
    brand = data[8:12]
    if data[4:8] == b"ftyp" and (brand in _HEIC or brand in _HEIF) and _boxes_are_whole(data):
        return "image/heic" if brand in _HEIC else "image/heif"
    return ""


def _png_is_whole(data: bytes) -> bool:
    place, has_pixels = len(_PNG), False
    if data[place + 4 : place + 8] != b"IHDR" or 0 in struct.unpack_from(">II", data, place + 8):
        return False
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        (checksum,) = struct.unpack_from(">I", data, place + 8 + length)
        if zlib.crc32(memoryview(data)[place + 4 : place + 8 + length]) != checksum:
            return False
        if kind == b"IEND":
            return has_pixels
        has_pixels = has_pixels or kind == b"IDAT"
        place += 12 + length
    return False


def _jpeg_is_whole(data: bytes) -> bool:
    place, has_size = 2, False
    while data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in _JPEG_ALONE:
            place += 2
            continue
        (length,) = struct.unpack_from(">H", data, place + 2)
        if marker in _JPEG_FRAMES:
            has_size = 0 not in struct.unpack_from(">HH", data, place + 5)
        if marker == _START_OF_SCAN:
            return has_size and data.find(_END_OF_IMAGE, place + 2 + length) >= 0
        place += 2 + length
    return False


def _gif_is_whole(data: bytes) -> bool:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place, has_pixels = 13 + _colours(flags), False
    while width and height:
        kind = data[place]
        if kind == 0x3B:
            return has_pixels
        if kind == 0x2C:
            place += 11 + _colours(data[place + 9])  # the descriptor, its colours, and the size of the codes
            has_pixels = True
        elif kind == 0x21:
            place += 2
        else:
            return False
        while data[place]:  # blocks of data
            place += 1 + data[place]
        place += 1
    return False


def _colours(flags: int) -> int:
    """Returns the bytes of a table of colours."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp_is_whole(data: bytes) -> bool:
    (length,) = struct.unpack_from("<I", data, 4)
    return data[12:16] in (b"VP8 ", b"VP8L", b"VP8X") and length > 12 and len(data) >= 8 + length


def _boxes_are_whole(data: bytes) -> bool:
    place, has_pixels = 0, False
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if length == 1 and place + 16 <= len(data):
            (length,) = struct.unpack_from(">Q", data, place + 8)
        has_pixels = has_pixels or kind == b"mdat"
        if length == 0:  # the last box: it goes on to the end
            return has_pixels
        if length < 8:
            return False
        place += length
    return has_pixels and place == len(data)


_KINDS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], bool], str], ...] = (
    (lambda data: data.startswith(_PNG), _png_is_whole, "image/png"),
    (lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg_is_whole, "image/jpeg"),
    (lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _gif_is_whole, "image/gif"),
    (lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _webp_is_whole, "image/webp"),
)
