"""Reads the body of a request: which of its media types is sent, and how its fields are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.openapi.document import STEPS_OF_A_PART, Document, DocumentFault, JsonObject, ReadBudget, text_of
from toolbus.text import quote

JSON, FORM, MULTIPART, TEXT, BYTES = "json", "form", "multipart", "text", "bytes"
QUERY_STYLES = ("form", "spaceDelimited", "pipeDelimited", "deepObject")


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an operation.

    Attributes:
        argument: its name as an argument of the tool.
        kind: how it is written: `JSON`, `FORM`, `MULTIPART`, `TEXT` or `BYTES`.
        media_type: its Content-Type.
        schema: as the document has it.
        styles: how fields of a form are written, style and explode by name, where the document says it.
    """

    argument: str
    kind: str
    media_type: str
    required: bool
    description: str = ""
    schema: Any = field(default=True, repr=False)
    styles: Mapping[str, tuple[str, bool]] = field(default_factory=dict)


def read_body(document: Document, operation: JsonObject, budget: ReadBudget) -> Body | None:
    """Reads the body of an operation, in the first of the media types that can be written here; None where it has none.

    Args:
        budget: of the whole document.

    Raises:
        DocumentFault: it cannot be sent.
    """
    if "requestBody" not in operation:
        return None
    content = document.resolve_object(operation["requestBody"], "its body")
    medias = content.get("content")
    if not isinstance(medias, Mapping) or not medias:
        return None
    budget.spend(STEPS_OF_A_PART * len(medias))
    kinds = [(_kind_of_body(str(media)), str(media), described) for media, described in medias.items()]
    for preferred in (JSON, FORM, MULTIPART, TEXT, BYTES):
        for kind, media, described in kinds:
            if kind == preferred:
                return Body(
                    argument="body",
                    kind=kind,
                    media_type="application/json" if "*" in media else media,
                    required=content.get("required") is True,
                    description=text_of(content, "description"),
                    schema=described.get("schema", True) if isinstance(described, Mapping) else True,
                    styles=_styles_of_form(described) if kind == FORM else {},
                )
    names = ", ".join(quote(media) for _, media, _ in kinds[:5])
    raise DocumentFault(f"its body is of type {names}; JSON, forms, text and bytes can be sent")


def _styles_of_form(described: Any) -> dict[str, tuple[str, bool]]:
    """Returns style and explode of the fields that the media type's `encoding` names."""
    encoding = described.get("encoding") if isinstance(described, Mapping) else None
    styles = {}
    for name, each in encoding.items() if isinstance(encoding, Mapping) else ():
        style = each.get("style", "form") if isinstance(each, Mapping) and {"style", "explode"} & each.keys() else None
        if style in QUERY_STYLES:
            explode = each.get("explode")
            styles[str(name)] = (style, explode if isinstance(explode, bool) else style in ("form", "deepObject"))
    return styles


def _kind_of_body(media: str) -> str:
    plain = media.partition(";")[0].strip().lower()
    if is_json(plain) or plain in ("*/*", "application/*"):
        return JSON
    if plain.startswith("text/"):
        return TEXT
    kinds = {"application/x-www-form-urlencoded": FORM, "multipart/form-data": MULTIPART}
    return kinds.get(plain, BYTES if plain == "application/octet-stream" else "")


def is_json(media: str) -> bool:
    """Tells whether a media type is JSON."""
    plain = media.partition(";")[0].strip().lower()
    return plain == "application/json" or plain.endswith("+json")
