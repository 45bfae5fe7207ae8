"""Writes a result as providers require it: as text that marks a failure, or as an object."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Any

from toolbus.parts.models.dialects.image_type import image_type
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
