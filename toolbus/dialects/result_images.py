"""Takes images out of results for the providers whose models look at them.

An image that a provider would refuse, for its type or its size, stays in the result, whose text then describes it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace

from toolbus.dialects.provider_results import answer_text
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

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
        """Returns the images of a result that the provider accepts."""
        return [block.image for block in result.content if self._accepts(block)]

    def text_beside_images(self, result: Result) -> str:
        """Returns the text of the parts that `images_of` does not return; may be ""."""
        rest = replace(result, content=tuple(block for block in result.content if not self._accepts(block)))
        text = answer_text(rest)
        return "" if text == "null" and not rest.content else text

    def _accepts(self, block: pb.ContentBlock) -> bool:
        return block.image.mime_type in self.types and 0 < len(block.image.data) <= self.max_bytes


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
