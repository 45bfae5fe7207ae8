"""Tests that what a mounted server sends arrives at a client as it was sent."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from mcp import Client
from mcp.server import MCPServer

from toolbus.common.text import parse_json
from toolbus.errors import Code, InvalidTool
from toolbus.parts.mcp.messages.content import read_result, structured_text, write_block, write_content
from toolbus.parts.mcp.messages.eras import LEGACY_VERSIONS, NEWEST
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


LONG = "x" * 600


@pytest.mark.parametrize(
    ("output", "texts", "stays"),
    [
        ({"result": LONG}, [LONG], False),
        ({"result": [LONG, 1, {"a": 2}]}, [LONG, "1", '{\n"a": 2}'], False),
        ([LONG], [LONG], False),
        (None, [LONG, LONG], False),
        ({"result": LONG}, ["y" * 600], True),
        ({"result": LONG, "more": 1}, [LONG], True),
        ({"result": [LONG, None]}, [LONG, "no JSON"], True),
    ],
)
def test_texts_that_repeat_an_output_stay_only_where_there_is_room(output: Any, texts: list[str], stays: bool) -> None:
    content = [*({"type": "text", "text": text} for text in texts), IMAGE]
    answer = {"content": content, "structuredContent": output}
    for max_bytes, whole in ((10_000, True), (1_000, stays)):
        result = read_result(answer, max_bytes)
        assert [write_block(block) for block in result.content] == (content if whole else [IMAGE])
        assert result.output == ("\n".join(texts) if output is None else output)


def test_a_broken_block_becomes_a_text_and_its_neighbours_stay() -> None:
    result = read_result({"content": [TEXT, {"type": "video"}, {"type": "image", "data": "?"}, "x"]})
    assert [block.text.text[:20] for block in result.content] == [
        *("a", "(a part of the resul", "(a part of the resul", "x")
    ]


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


PICTURE = base64.b64encode(b"\xfb\xef\xbe?").decode()  # holds + and /, and needs padding


@pytest.mark.parametrize(
    ("data", "declared", "mime_type"),
    [
        (PICTURE, "image/png", "image/png"),
        (PICTURE, "image/jpg", "image/jpeg"),
        (PICTURE, "IMAGE/PNG", "image/png"),
        (PICTURE, "image/png; charset=binary", "image/png"),
        (f"data:image/webp;base64,{PICTURE}", "", "image/webp"),
        (f"data:image/webp;base64,{PICTURE}", "image/png", "image/png"),
        (f"data:image/png;name=a.png;base64,{PICTURE}", None, "image/png"),
        ("data:,%FB%EF%BE%3F", "image/png", "image/png"),
        (PICTURE.rstrip("="), "image/png", "image/png"),
        (f"{PICTURE[:3]}\r\n{PICTURE[3:]}\n", "image/png", "image/png"),
        (PICTURE.replace("+", "-").replace("/", "_"), "image/png", "image/png"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_base64_is_read_as_servers_write_it(kind: str, data: str, declared: str | None, mime_type: str) -> None:
    block = {"type": kind, "data": data} | ({} if declared is None else {"mimeType": declared})
    (read,) = read_result({"content": [block]}).content
    part = read.image if kind == "image" else read.audio
    assert (part.data, part.mime_type) == (b"\xfb\xef\xbe?", mime_type)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ({"type": "text", "text": "one block"}, "one block"),
        (["a", "b"], "a\nb"),
        (["a", TEXT | {"text": "b"}], "a\nb"),
        ([{"text": "without a type"}], "without a type"),
        ([5, None, [1]], "5\n[1]"),
        (7, "7"),
    ],
)
def test_text_in_another_place_than_a_block_is_kept(content: Any, text: str) -> None:
    assert read_result({"content": content}).text == text
    failed = read_result({"content": content, "isError": True})
    assert failed.text == text


def test_a_block_of_an_unknown_kind_keeps_what_a_model_can_read() -> None:
    for block, kept in (
        ({"type": "video", "text": "a film"}, "a film"),
        ({"type": "json", "json": {"city": "Paris"}}, '{"city":"Paris"}'),
        ({"type": "text", "value": "x"}, '"value":"x"'),
    ):
        assert kept in read_result({"content": [block]}).text
    assert "AAAA" not in read_result({"content": [{"type": "video", "data": "AAAA" * 9}]}).text


async def test_texts_of_tools_of_the_official_server_are_read_once() -> None:
    server = MCPServer("x")

    @server.tool()
    def one() -> str:
        return "alpha"

    @server.tool()
    def many() -> list[str]:
        return ["alpha", "beta"]

    @server.tool()
    def rows() -> list[dict[str, str]]:
        return [{"a": "alpha"}, {"a": "beta"}]

    async with Client(server) as client:
        for name, text in (
            ("one", "alpha"),
            ("many", '{"result":["alpha","beta"]}'),
            ("rows", '{"result":[{"a":"alpha"},{"a":"beta"}]}'),
        ):
            answer = await client.call_tool(name, {})
            assert read_result(answer.model_dump(by_alias=True, exclude_none=True, mode="json")).text == text


def test_a_revision_gets_the_kinds_of_blocks_that_it_has_and_texts_for_the_others() -> None:
    audio = pb.ContentBlock(audio=pb.AudioContent(data=b"12", mime_type="audio/wav"))
    link = pb.ContentBlock(resource_link=pb.ResourceLink(uri="x://1", name="page"))
    result = Result(content=(audio, link))
    kinds = {each: [block["type"] for block in write_content(result, "null", each)] for each in LEGACY_VERSIONS}
    assert kinds == {
        "2024-11-05": ["text", "text"],
        "2025-03-26": ["audio", "text"],
        "2025-06-18": ["audio", "resource_link", "text"],
        "2025-11-25": ["audio", "resource_link", "text"],
    }
    assert write_content(result, "null", "2024-11-05")[1]["text"] == "[page, x://1]"


def test_what_clients_pass_on_to_no_model_is_in_words_too_and_another_bus_reads_it_once() -> None:
    link = pb.ContentBlock(resource_link=pb.ResourceLink(uri="x://1", name="page", mime_type="text/html"))
    result = Result(content=(link,))
    written = write_content(result, "null", NEWEST)
    assert written[1:] == [{"type": "text", "text": "[text/html, page, x://1]"}]
    assert read_result({"content": written}) == result
    assert len(write_content(Result(content=(link, pb.ContentBlock(text=pb.TextContent(text="")))), "null")) == 2
