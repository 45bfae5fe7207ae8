"""Tests that what a mounted server sends arrives at a client as it was sent."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from toolbus.common.text import parse_json
from toolbus.errors import Code, InvalidTool
from toolbus.parts.mcp.messages.content import read_result, structured_text, write_block, write_content
from toolbus.parts.mcp.messages.tools import read_declaration, write_declaration
from toolbus.protocol.tool import Result, Tool
from toolbus.v1 import tool_pb2 as pb

DATA = base64.b64encode(b"\x89PNG\x00").decode()
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "data": DATA, "mimeType": "image/png"}
LINK = {"type": "resource_link", "uri": "file:///x", "name": "x", "description": "d", "mimeType": "text/plain"}
RESOURCE = {"type": "resource", "resource": {"uri": "test://x", "mimeType": "text/plain", "text": "t"}}
BLOB = {"type": "resource", "resource": {"uri": "test://x", "blob": DATA}}
AUDIO = {"type": "audio", "data": DATA, "mimeType": "audio/wav"}


def _text(result: Result) -> str:
    output = result.output
    if result.error is not None:
        return result.error.message
    return output if isinstance(output, str) else result.output_json


@pytest.mark.parametrize(
    "content",
    [
        [TEXT],
        [TEXT, {"type": "text", "text": "b"}],
        [IMAGE],
        [TEXT, IMAGE, AUDIO, LINK, RESOURCE, BLOB],
        [{**TEXT, "annotations": {"audience": ["user"], "priority": 0.5}}],
    ],
)
@pytest.mark.parametrize("failed", [False, True])
def test_content_of_every_kind_comes_back(content: list[dict[str, Any]], failed: bool) -> None:
    result = read_result({"content": content, "isError": failed})
    assert (result.error is not None) == failed
    if failed and not any(block["type"] == "text" for block in content):
        content = [{"type": "text", "text": "the tool reported a failure"}, *content]
    assert write_content(result, _text(result)) == content


def test_structured_output_is_the_output_and_its_own_text_is_not_kept_beside_it() -> None:
    result = read_result({"content": [{"type": "text", "text": '{"a": 1}'}], "structuredContent": {"a": 1}})
    assert result.output == {"a": 1}
    assert not result.content
    other = read_result({"content": [TEXT], "structuredContent": {"a": 1}})
    assert other.output == {"a": 1}
    assert write_content(other, other.output_json) == [TEXT]


def test_a_broken_block_becomes_a_text_and_its_neighbours_stay() -> None:
    result = read_result({"content": [TEXT, {"type": "video"}, {"type": "image", "data": "?"}, "x"]})
    assert [block.text.text[:20] for block in result.content] == ["a", "(a part of the resul", "(a part of the resul"]


def test_a_failure_of_the_tool_is_its_own_failure() -> None:
    result = read_result({"content": [TEXT], "isError": True})
    assert result.is_error
    assert result.error is not None
    assert (result.error.code, result.error.message) == (Code.TOOL, "a")
    assert write_content(result, "a") == [TEXT]


@pytest.mark.parametrize(
    ("output", "legacy", "modern"),
    [
        ('{"a":1}', '{"a":1}', '{"a":1}'),
        ("[1]", "", "[1]"),
        ("5", "", "5"),
        ('"x"', "", ""),
        ("null", "", ""),
        ("", "", ""),
    ],
)
def test_only_objects_are_structured_for_legacy_clients(output: str, legacy: str, modern: str) -> None:
    assert structured_text(output, modern=False) == legacy
    assert structured_text(output, modern=True) == modern


def test_an_empty_result_says_null() -> None:
    assert write_content(Result(), "null") == [{"type": "text", "text": "null"}]
    block = pb.ContentBlock(text=pb.TextContent(text="x"), annotations_json="{")
    assert write_content(Result(content=(block,)), "null") == [{"type": "text", "text": "x"}]


def test_a_declaration_comes_back() -> None:
    declaration = {
        "name": "get",
        "title": "Get",
        "description": "Gets.",
        "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "outputSchema": {"type": "object", "properties": {"b": {"type": "string"}}},
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
        "icons": [{"src": "data:,"}],
        "_meta": {"ui": {"resourceUri": "ui://x"}},
    }
    tool = read_declaration(declaration, "get")
    assert tool.annotations.read_only
    assert tool.annotations.destructive is None
    assert parse_json(tool.output_schema_json) == declaration["outputSchema"]
    assert write_declaration("get", tool) == declaration


def test_a_declaration_of_a_wrong_shape_names_every_fault() -> None:
    with pytest.raises(InvalidTool) as refused:
        read_declaration({"name": "x", "description": 5, "inputSchema": []}, "x")
    assert "description" in str(refused.value)
    assert "inputSchema" in str(refused.value)


@pytest.mark.parametrize("mcp", ['{"_meta":{"x":"\\ud800"}}', '{"icons":1,"_meta":[]}', '{"_meta":{"x":NaN}}', "[]"])
def test_what_metadata_keep_of_a_declaration_never_breaks_the_list(mcp: str) -> None:
    tool = Tool("t", metadata_json=f'{{"mcp":{mcp}}}')
    assert write_declaration("t", tool) == {"name": "t", "description": "", "inputSchema": {"type": "object"}}


def test_annotations_that_utf8_cannot_carry_are_left_out() -> None:
    block = pb.ContentBlock(text=pb.TextContent(text="x"), annotations_json='{"a":"\\ud800"}')
    assert write_block(block) == {"type": "text", "text": "x"}
