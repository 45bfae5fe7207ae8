"""Tests MCP lists, calls and results against the SDK's types and a client's rules."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema_rs
import pytest

from tests.parts.models.dialects.sample_tools import CHINESE, DOTTED, QUALIFIED, SAMPLES
from tests.support.providers import mcp
from toolbus.errors import Code, InvalidRequest, Stage
from toolbus.parts.models.dialects.conversation import Answered, Json, Message, ModelCall
from toolbus.parts.models.dialects.mcp import MCP_NAMES, Mcp, call_tool_result
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.tool import Annotations, CallError, Result, Tool
from toolbus.v1 import tool_pb2 as pb

MCP = Mcp()
EXPORT = MCP.export(SAMPLES)
NAMES = EXPORT.names
IMAGE = pb.ContentBlock(image=pb.ImageContent(data=b"\x00\xff", mime_type="image/png"))


def result_of(result: Result) -> Json:
    """Returns a result in MCP's form, once the official type has read it."""
    answer = call_tool_result(result)
    read = mcp.types.CallToolResult.model_validate(answer, extra="forbid")
    assert read.is_error is answer["isError"]
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    return answer


def text(expected: str) -> Json:
    return {"type": "text", "text": expected}


def call(name: str, arguments: Any = None, **request: Any) -> Json:
    return {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": name, "arguments": arguments}, **request}


# -- tools/list


def test_tools_are_listed_as_the_official_type_requires() -> None:
    for tool in EXPORT.tools:
        read = mcp.types.Tool.model_validate(tool, extra="forbid")
        assert MCP_NAMES.accepts(read.name)
        assert tool["inputSchema"]["type"] == "object"
        assert tool.keys() == {"name", "description", "inputSchema"}
        jsonschema_rs.validator_for(tool["inputSchema"])
    assert not EXPORT.left_out
    assert not EXPORT.losses


def test_names_that_the_specification_allows_stay_and_others_are_mapped_back() -> None:
    assert NAMES.to_wire[DOTTED.name] == DOTTED.name
    for tool in (CHINESE, QUALIFIED):
        assert NAMES.to_bus[NAMES.to_wire[tool.name]] == tool.name != NAMES.to_wire[tool.name]


@pytest.mark.parametrize("schema", ["{}", '{"type":["object","null"]}', '{"properties":{"a":{}}}'])
def test_a_schema_always_has_the_type_object(schema: str) -> None:
    [listed] = MCP.export([Tool("t", parameters_json=schema)]).tools
    assert listed["inputSchema"]["type"] == "object"


def test_the_display_name_is_the_title() -> None:
    [listed] = MCP.export([Tool("t", display_name="查询")]).tools
    assert mcp.types.Tool.model_validate(listed, extra="forbid").title == "查询"


def test_annotations_are_listed_as_hints_only_where_they_are_set() -> None:
    annotations = Annotations(read_only=True, idempotent=False, destructive=False, open_world=True)
    [listed, partly] = MCP.export(
        [Tool("t", annotations=annotations), Tool("u", annotations=Annotations(destructive=True))]
    ).tools
    assert listed["annotations"] == {
        "readOnlyHint": True,
        "destructiveHint": False,
        "idempotentHint": False,
        "openWorldHint": True,
    }
    assert partly["annotations"] == {"destructiveHint": True}
    read = mcp.types.Tool.model_validate(listed, extra="forbid").annotations
    assert read is not None
    assert (read.read_only_hint, read.destructive_hint, read.idempotent_hint, read.open_world_hint) == (
        *(True, False),
        *(False, True),
    )


@pytest.mark.parametrize("version", ["2025-06-18", "2025-11-25"])
def test_lists_and_results_fit_each_version_of_the_protocol(version: str) -> None:
    tools = {"tools": list(EXPORT.tools)}
    listed = mcp.types.methods.serialize_server_result("tools/list", version, tools)["tools"]
    assert [tool["name"] for tool in listed] == list(NAMES.to_bus)
    for output_json in ("{}", '{"a":1}', "[1]", '"text"'):
        result = call_tool_result(Result(output_json=output_json, content=(IMAGE,)))
        assert mcp.types.methods.serialize_server_result("tools/call", version, result) == result


# -- tools/call


@pytest.mark.parametrize(
    "request_",
    [
        call(NAMES.to_wire[CHINESE.name], {"城市": None}, id=7),
        {"name": NAMES.to_wire[CHINESE.name], "arguments": {"城市": None}, "_meta": {"progressToken": 1}},
        {"params": {"name": NAMES.to_wire[CHINESE.name], "arguments": {"城市": None}}},
        lambda: mcp.types.CallToolRequest.model_validate(call(NAMES.to_wire[CHINESE.name], {"城市": None})),
        lambda: mcp.types.CallToolRequestParams(name=NAMES.to_wire[CHINESE.name], arguments={"城市": None}),
    ],
    ids=["request", "params", "wrapped params", "official request", "official params"],
)
def test_a_call_is_read_in_every_form(request_: Any) -> None:
    request = request_() if callable(request_) else request_
    [read] = MCP.parse(request, NAMES).calls
    assert (read.name, read.known, read.arguments_json) == (CHINESE.name, True, '{"城市":null}')
    assert read.id == ("7" if isinstance(request_, dict) and "id" in request_ else "call_0")


def test_a_call_of_a_tool_that_is_not_listed_is_unknown() -> None:
    [read] = MCP.parse(call(CHINESE.name, id="x"), NAMES).calls
    assert read == ModelCall("x", CHINESE.name, "", False, CHINESE.name)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"method": "tools/list"}, "the request is 'tools/list'"),
        ({"method": "tools/call"}, "names the tool None: give params.name"),
        (call(""), "names the tool ''"),
        ({"name": 5}, "names the tool 5"),
        ({"method": "tools/call", "params": ["now"]}, "params is a list"),
    ],
)
def test_a_request_that_is_not_a_call_is_refused_with_the_reason(request_: Json, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        MCP.parse(request_, NAMES)


# -- results


@pytest.mark.parametrize(
    ("output_json", "expected", "structured"),
    [
        ('"sunny"', "sunny", None),
        ('{"城市": "\\u5df4\\u9ece"}', '{"城市":"巴黎"}', {"城市": "巴黎"}),
        ("{ }", "{}", {}),
        ("[1, 2]", "[1,2]", None),
        ("5", "5", None),
        ("null", "null", None),
        ("", "null", None),
        ("{broken", "{broken", None),
        ('"{}"', "{}", None),
    ],
)
def test_an_output_is_text_and_an_object_is_structured_too(output_json: str, expected: str, structured: Any) -> None:
    answer = result_of(Result(output_json=output_json))
    assert answer.get("structuredContent") == structured
    assert ("structuredContent" in answer) == (structured is not None)
    assert (answer["content"], answer["isError"]) == ([text(expected)], False)


def test_nan_does_not_leak() -> None:
    answer = result_of(Result(output_json='{"a":NaN,"b":[Infinity,1]}'))
    assert answer["structuredContent"] == {"a": None, "b": [None, 1]}


@pytest.mark.parametrize(
    "failed",
    [
        Result(is_error=True, error=CallError(Code.TOOL, "no such city", Stage.ACCEPTED)),
        Result(error=CallError(Code.TOOL, "no such city", Stage.ACCEPTED)),
        Result(output_json='"no such city"', error=CallError(Code.TOOL, "no such city"), is_error=True),
    ],
)
def test_a_failure_is_marked_and_has_the_reason(failed: Result) -> None:
    assert result_of(failed) == {"content": [text("no such city")], "isError": True}


def test_content_blocks_keep_their_form() -> None:
    parts = (
        pb.ContentBlock(text=pb.TextContent(text="See:")),
        IMAGE,
        pb.ContentBlock(audio=pb.AudioContent(data=b"sound")),
        pb.ContentBlock(
            resource_link=pb.ResourceLink(uri="file:///a", name="a", description="A file.", mime_type="text/html")
        ),
        pb.ContentBlock(resource_link=pb.ResourceLink(uri="file:///b")),
        pb.ContentBlock(),
    )
    assert result_of(Result(output_json='"done"', content=parts))["content"] == [
        text("See:"),  # a text among them stands in the place of the output's
        {"type": "image", "data": base64.b64encode(b"\x00\xff").decode(), "mimeType": "image/png"},
        {"type": "audio", "data": base64.b64encode(b"sound").decode(), "mimeType": "application/octet-stream"},
        {
            "type": "resource_link",
            "uri": "file:///a",
            "name": "a",
            "description": "A file.",
            "mimeType": "text/html",
        },
        {"type": "resource_link", "uri": "file:///b", "name": "file:///b"},
        text("[content of a kind that this version does not know]"),
    ]


def test_a_result_of_content_blocks_alone_has_no_text_of_its_own() -> None:
    assert [part["type"] for part in result_of(Result(content=(IMAGE,)))["content"]] == ["image"]


def test_each_call_has_its_result() -> None:
    answered = [Answered(ModelCall(str(number), "now"), Result(output_json=str(number))) for number in range(2)]
    assert [result["content"] for result in MCP.results(answered, NAMES)] == [[text("0")], [text("1")]]


def test_streams_and_histories_are_refused_with_the_alternative() -> None:
    for refused in (
        lambda: MCP.stream(NameTable.empty()),
        lambda: MCP.history([Message("user", "Hi")], NAMES),
        lambda: MCP.request([], EXPORT),
    ):
        with pytest.raises(NotImplementedError, match=r"MCP is not a chat: .* parse\(\)"):
            refused()


def test_a_failure_is_stated_beside_any_content() -> None:
    part = pb.ContentBlock(text=pb.TextContent(text="half of it"))
    failed = Result(is_error=True, error=CallError(Code.TOOL, "no more paper"), content=(part,))
    assert result_of(failed) == {"content": [text("no more paper"), text("half of it")], "isError": True}
    repeated = Result(is_error=True, error=CallError(Code.TOOL, "half"), content=(part,))
    assert result_of(repeated) == {"content": [text("half of it")], "isError": True}


def test_the_schema_of_an_output_and_a_resource_are_as_the_server_has_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    exported = Mcp().write_tool("t", Tool("t", output_schema_json=json.dumps(schema)), {})
    assert exported["outputSchema"] == schema
    part = pb.ContentBlock(
        resource=pb.EmbeddedResource(uri="file:///a", mime_type="text/plain", text="A"),
        annotations_json='{"audience":["user"]}',
    )
    assert result_of(Result(content=(part,)))["content"] == [
        {
            "type": "resource",
            "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "A"},
            "annotations": {"audience": ["user"]},
        }
    ]


def test_a_question_is_a_failure_for_a_client_that_cannot_answer() -> None:
    answer = result_of(Result(input_requests_json='{"q":{"method":"roots/list"}}'))
    assert answer["isError"]
    assert "the folders that the user works in" in answer["content"][0]["text"]
