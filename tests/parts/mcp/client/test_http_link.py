"""Tests the parser of server-sent events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.parts.mcp.client.http_link import Event, EventTooLong, SseParser

STREAM = (
    b'\xef\xbb\xbf: hello\nid: 1\nretry: 250\ndata:\n\ndata: {"a":\ndata:1}\nid: 2\n\n'
    b"event: other\ndata: x\n\n: still here\n\n"
)
EVENTS = [Event(b"", "1"), Event(b'{"a":\n1}', "2"), Event(b"x", "2", "other")]


def _feed(parser: SseParser, pieces: list[bytes]) -> list[Event]:
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_is_read_alike_in_pieces_of_any_size_and_with_any_line_end(line_end: bytes, size: int) -> None:
    data = STREAM.replace(b"\n", line_end)
    parser = SseParser(1000)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert _feed(parser, pieces) == EVENTS
    assert (parser.last_id, parser.retry_seconds) == ("2", 0.25)


@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([b"data: ", b"id:", b"\r", b"\n", b"\r\n", b":", b"retry: 1"]))
)
def test_how_a_stream_is_cut_never_changes_its_events(pieces: list[bytes]) -> None:
    one, many = SseParser(10_000), SseParser(10_000)
    assert _feed(one, [b"".join(pieces)]) == _feed(many, pieces)
    assert (one.last_id, one.retry_seconds) == (many.last_id, many.retry_seconds)


@pytest.mark.parametrize("filler", [b"data: xxxx\n", b": comment\n", b"xxxxxxxxxx", b"id: 123\n"])
def test_an_event_beyond_the_limit_is_refused_while_it_arrives(filler: bytes) -> None:
    parser = SseParser(100)
    with pytest.raises(EventTooLong, match="more than 100 bytes"):
        _feed(parser, [filler] * 20)


def test_the_limit_is_of_one_event_and_not_of_the_stream() -> None:
    parser = SseParser(100)
    assert len(_feed(parser, [b"data: 1234567890\n\n"] * 100)) == 100


@pytest.mark.parametrize(
    "line", [b"retry: soon", b"retry: -1", b"retry: 1e3", b"retry: " + b"9" * 40, b"id: a\0b", b"xx"]
)
def test_a_field_that_is_not_understood_is_left_out(line: bytes) -> None:
    parser = SseParser(1000)
    assert parser.feed(line + b"\ndata: 1\n\n") == [Event(b"1", "")]
    assert parser.retry_seconds is None


def test_a_stream_that_goes_on_keeps_its_id_and_not_half_an_event() -> None:
    parser = SseParser(1000)
    parser.feed(b"id: 7\nretry: 100\ndata: 1\n\ndata: half")
    after = parser.restarted()
    assert after.feed(b"data: 2\n\n") == [Event(b"2", "7")]
    assert after.retry_seconds == 0.1
