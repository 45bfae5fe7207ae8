"""Headers that repeat parts of a request are written so that every value survives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.parts.mcp.messages import headers
from toolbus.parts.mcp.messages.eras import is_modern


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_a_header(text: str) -> None:
    written = headers.write_value(text)
    assert written.isascii()
    assert written.isprintable()
    assert written == written.strip()
    assert headers.read_value(written) == text


@pytest.mark.parametrize("header", ["=?base64?%%%?=", "=?base64?/w==?=", "=?base64?YR==?="])
def test_a_broken_encoding_equals_no_text(header: str) -> None:
    assert headers.read_value(header) is None


def test_arguments_with_a_mark_go_into_headers() -> None:
    schema = {
        "type": "object",
        "properties": {
            "region": {"type": "string", "x-mcp-header": "Region"},
            "deep": {"properties": {"n": {"type": "integer", "x-mcp-header": "N"}}},
            "plain": {"type": "string"},
        },
    }
    names = headers.marked(schema)
    assert names == {"Region": ("region",), "N": ("deep", "n")}
    arguments = {"region": "Zürich", "deep": {"n": 5.0}, "plain": "x"}
    assert headers.param_headers(names, arguments) == {
        "Mcp-Param-Region": "=?base64?WsO8cmljaA==?=",
        "Mcp-Param-N": "5",
    }
    assert headers.param_headers(names, {"region": None, "deep": 1}) == {}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"type": "number", "x-mcp-header": "A"}}}, "needs the type"),
        ({"properties": {"a": {"x-mcp-header": "A"}}}, "needs the type"),
        ({"properties": {"a": {"type": "string", "x-mcp-header": "a b"}}}, "not a name of a header"),
        ({"properties": {"a": {"type": "string", "x-mcp-header": ""}}}, "not a name of a header"),
        ({"properties": {"a": {"items": {"type": "string", "x-mcp-header": "A"}}}}, "on properties only"),
        ({"$defs": {"d": {"properties": {"a": {"type": "string", "x-mcp-header": "A"}}}}}, "on properties only"),
        (
            {"properties": {n: {"type": "string", "x-mcp-header": h} for n, h in (("a", "X"), ("b", "x"))}},
            "used twice",
        ),
    ],
)
def test_a_mark_at_a_wrong_place_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        headers.marked(schema)


def test_a_mark_inside_data_is_none() -> None:
    assert headers.marked({"properties": {"a": {"type": "string", "default": {"x-mcp-header": "A"}}}}) == {}


@pytest.mark.parametrize(
    ("method", "said", "modern"),
    [
        ("initialize", {"meta_version": None}, False),
        ("initialize", {"meta_version": "2026-07-28"}, True),  # which has no such method
        ("tools/list", {"meta_version": "2026-07-28"}, True),
        ("tools/list", {"meta_version": "2031-01-01"}, True),
        ("tools/list", {"meta_version": None, "header_version": "2026-07-28"}, True),
        ("tools/list", {"meta_version": None, "header_version": "2025-06-18"}, False),
        ("tools/list", {"meta_version": None, "session": True}, False),
        ("tools/list", {"meta_version": None}, False),
        ("server/discover", {"meta_version": None}, True),
    ],
)
def test_the_era_is_told_by_each_message(method: str, said: dict[str, Any], modern: bool) -> None:
    assert is_modern(method, **said) is modern
