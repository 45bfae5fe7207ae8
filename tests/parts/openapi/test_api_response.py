"""Tests what a tool returns for a response."""

from __future__ import annotations

from typing import Any

import pytest

from toolbus.parts.openapi.api_client import ApiResponse, read_response

LIMIT = 100


def reply_to(status: int, body: bytes | str = b"", *, cut: bool = False, secrets: Any = (), **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body.encode() if isinstance(body, str) else body
    return read_response(ApiResponse(status, named, data, cut, "https://a.example/x"), LIMIT, secrets)


@pytest.mark.parametrize(
    ("body", "media", "output"),
    [
        ('{"is_error": true, "output": 1}', "application/json", {"is_error": True, "output": 1}),
        ('{"a": 12345678901234567890}', "application/hal+json; charset=utf-8", {"a": 12345678901234567890}),
        ("null", "application/json", None),
        ("[1]", "", [1]),
        ("plain", "", "plain"),
        ("12", "text/plain", "12"),
        ('{"a": NaN}', "application/json", '{"a": NaN}'),
        (r'"\ud800"', "application/json", r'"\ud800"'),
        ("[" * 50_000, "application/json", "[" * 50_000),
        ("<a/>", "application/atom+xml", "<a/>"),
        ("é".encode("latin-1"), "text/plain; charset=ISO-8859-1", "é"),
        (b"\xef\xbb\xbfa\xff", "text/csv", "a\ufffd"),
    ],
)
def test_json_is_a_value_and_text_is_text(body: Any, media: str, output: Any) -> None:
    reply = reply_to(200, body, content_type=media)
    assert (reply.output, reply.is_error, list(reply.content)) == (output, False, [])


def test_bytes_are_content() -> None:
    sound = reply_to(200, b"\x00", content_type="audio/ogg")
    assert (sound.output, sound.content[0].audio.data) == ({"content_type": "audio/ogg", "bytes": 1}, b"\x00")
    file = reply_to(200, b"\x00", content_type="application/pdf")
    assert (file.content[0].resource.uri, file.content[0].resource.data) == ("https://a.example/x", b"\x00")
    unknown = reply_to(200, b"\xff")
    assert unknown.content[0].resource.data == b"\xff"
    assert reply_to(200, "<svg/>", content_type="image/svg+xml").output == "<svg/>"


def test_a_response_without_a_body_is_its_status() -> None:
    assert reply_to(204, content_type="application/json").output == {"status": 204}
    created = reply_to(201, location="/pets/7", content_length="0")
    assert created.output == {"status": 201, "headers": {"location": "/pets/7"}}
    head = reply_to(200, content_type="image/png", content_length="12", etag='"a"', set_cookie="s=1")
    assert head.output["headers"] == {"content-type": "image/png", "content-length": "12", "etag": '"a"'}


def test_a_refusal_has_status_and_beginning_and_no_secret() -> None:
    reply = reply_to(403, "bad key\n s3cret of Bearer s3cret" + "x" * 5_000, secrets=("s3cret", "Bearer s3cret"))
    assert reply.is_error
    assert reply.error.startswith("HTTP 403 Forbidden: bad key *** of ***x")
    assert len(reply.error) < 1_100
    assert reply_to(599, b"\xff\x00", content_type="application/zip").error == "HTTP 599"
    later = reply_to(503, retry_after="Wed, 21 Oct 2026 07:28:00 GMT\x1b[2J")
    assert later.error == "HTTP 503 Service Unavailable: try again after Wed, 21 Oct 2026 07:28:00 GMT[U+001B][2J"


def test_a_response_that_is_too_large_asks_for_less() -> None:
    reply = reply_to(200, "[1, 2", cut=True, content_type="application/json")
    assert reply.is_error
    assert "more than 100 bytes: ask for less" in reply.error
    assert reply.error.endswith("It begins: [1, 2")
