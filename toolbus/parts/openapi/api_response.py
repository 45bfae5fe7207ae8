"""Turns the response of an API into what a tool returns: pure, nothing is received here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from toolbus.common.text import dump_json, is_utf8, mark_unsafe, parse_json, shorten
from toolbus.functions.reply import Reply, audio, image, resource

MAX_EXCERPT = 1_000  # characters of a body that an error shows
_OF_A_BODY = ("content-type", "content-length")  # which HEAD asks about
_WITHOUT_BODY = ("last-modified", "etag", "location")
_TEXTS = ("application/xml", "application/yaml", "application/x-yaml", "application/javascript", "application/graphql")


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A response.

    Attributes:
        headers: by name in lower case.
        body: decoded, at most as long as the limit.
        is_cut: whether the body was longer.
        url: where it came from, without its query.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    is_cut: bool = False
    url: str = ""

    @property
    def media_type(self) -> str:
        """The media type in lower case, without its parameters; "" if it is not stated."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


def read_response(response: ApiResponse, limit: int, secrets: Collection[str] = ()) -> Reply:
    """Returns what a tool returns for a response.

    Args:
        limit: bytes that the body may have.
        secrets: texts that no error may show: APIs do repeat a key that they refuse.
    """
    if not 200 <= response.status < 300:
        return _refusal(response, secrets)
    if response.is_cut:
        return Reply(
            is_error=True,
            error=f"the response has more than {limit} bytes: ask for less, with a filter, a smaller page or fewer "
            f"fields. It begins: {_excerpt(response, secrets)}",
        )
    media = response.media_type
    kind = media.partition("/")[0]
    if not response.body:
        names = _OF_A_BODY + _WITHOUT_BODY if response.headers.get("content-length", "0") != "0" else _WITHOUT_BODY
        shown = {name: response.headers[name] for name in names if name in response.headers}
        return Reply({"status": response.status, **({"headers": shown} if shown else {})})
    if kind in ("image", "audio") and media != "image/svg+xml":
        block = image(response.body, media) if kind == "image" else audio(response.body, media)
        return Reply({"content_type": media, "bytes": len(response.body)}, [block])
    text = _text(response)
    if text is None:
        block = resource(response.url, response.body, media)
        return Reply({"content_type": media, "bytes": len(response.body)}, [block])
    return Reply(_value(text) if media.endswith("json") or not media else text)


def _refusal(response: ApiResponse, secrets: Collection[str]) -> Reply:
    try:
        phrase = f" {HTTPStatus(response.status).phrase}"
    except ValueError:
        phrase = ""
    output: dict[str, Any] = {"status": response.status}
    parts = [f"HTTP {response.status}{phrase}"]
    if retry := response.headers.get("retry-after", ""):
        output["retry_after"] = shorten(retry, 100)
        parts.append(f"try again after {shorten(mark_unsafe(retry), 100)}{' s' if retry.isdigit() else ''}")
    if 300 <= response.status < 400:
        parts.append("redirects to another place are not followed")
    if excerpt := _excerpt(response, secrets):
        parts.append(excerpt)
    return Reply(output, is_error=True, error=": ".join(parts))


def _excerpt(response: ApiResponse, secrets: Collection[str]) -> str:
    """Returns the beginning of a text body, without secrets; "" for bytes."""
    text = _text(response) or ""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return shorten(mark_unsafe(" ".join(text.split())), MAX_EXCERPT)


def _text(response: ApiResponse) -> str | None:
    """Returns a body that is text; None for bytes."""
    media = response.media_type
    says_text = media.startswith("text/") or media.endswith(("json", "+xml")) or media in _TEXTS
    if not says_text and media and media != "application/x-www-form-urlencoded":
        return None
    _, _, charset = response.headers.get("content-type", "").lower().partition("charset=")
    charset = charset.partition(";")[0].strip(" \"'")
    encoding = charset if charset in ("iso-8859-1", "latin-1", "us-ascii", "windows-1252", "utf-16") else "utf-8-sig"
    errors = "replace" if says_text or response.is_cut else "strict"
    try:
        return response.body.decode(encoding, errors)
    except UnicodeDecodeError:
        return None


def _value(text: str) -> Any:
    """Returns what a text holds as JSON; the text itself where it is not JSON that can be passed on."""
    try:
        value = parse_json(text)
        return value if is_utf8(dump_json(value)) else text
    except (ValueError, RecursionError):
        return text
