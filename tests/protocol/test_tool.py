from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.errors import CallFailed, Code, InvalidTool, Stage
from toolbus.protocol.tool import (
    MAX_TIMEOUT_SECONDS,
    NAME,
    Annotations,
    CallError,
    Limits,
    Result,
    Tool,
    dump_arguments,
    is_source,
)
from toolbus.v1 import tool_pb2 as pb

LIMITS = Limits()
SMALL = Limits(schema_bytes=40, description_bytes=8)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
SCHEMAS = st.dictionaries(TEXT, JSON, max_size=5)
PICTURE = pb.ContentBlock(image=pb.ImageContent(data=b"123", mime_type="image/png"))
HINTS = st.none() | st.booleans()
SECONDS = st.floats(min_value=0, max_value=MAX_TIMEOUT_SECONDS)
NAMES = st.from_regex(NAME, fullmatch=True)
TOOLS = st.builds(
    Tool,
    name=NAMES,
    description=TEXT,
    parameters_json=SCHEMAS.map(json.dumps),
    role=st.none() | TEXT.filter(bool),
    timeout_seconds=SECONDS,
    idle_timeout_seconds=SECONDS,
    callback_url=TEXT,
    display_name=TEXT,
    annotations=st.builds(Annotations, HINTS, HINTS, HINTS, HINTS),
    validate=HINTS,
    no_background=st.booleans(),
    no_repair=st.booleans(),
    no_defaults=st.booleans(),
    allow_repeat=st.booleans(),
    council_eligible=st.booleans(),
    inline_available=st.booleans(),
    direct_reply=st.booleans(),
    metadata_json=SCHEMAS.map(json.dumps),
)
ERRORS = st.builds(
    CallError,
    code=st.sampled_from(Code),
    message=TEXT,
    stage=st.sampled_from(Stage),
    retry_safe=st.booleans(),
    limit=st.none() | st.tuples(TEXT, st.floats(allow_nan=False)),
    retry_after_seconds=st.floats(allow_nan=False),
    reason=TEXT,
)
BLOCKS = st.one_of(
    TEXT.map(lambda text: pb.ContentBlock(text=pb.TextContent(text=text))),
    st.binary(max_size=20).map(lambda data: pb.ContentBlock(image=pb.ImageContent(data=data, mime_type="image/png"))),
    TEXT.map(lambda uri: pb.ContentBlock(resource_link=pb.ResourceLink(uri=uri))),
)
RESULTS = st.builds(
    Result,
    call_id=TEXT,
    output_json=JSON.map(json.dumps),
    is_error=st.booleans(),
    error=st.none() | ERRORS,
    content=st.lists(BLOCKS, max_size=3).map(tuple),
)


# -- across the wire ---------------------------------------------------------------------------------------------


@given(TOOLS)
def test_a_tool_is_the_same_after_the_wire(tool: Tool) -> None:
    message = pb.Tool.FromString(tool.to_wire().SerializeToString())
    back = Tool.from_wire(message, LIMITS)
    assert back == tool
    assert back.schema_hash == tool.schema_hash


@given(RESULTS)
def test_a_result_is_the_same_after_the_wire(result: Result) -> None:
    message = pb.ToolResult.FromString(result.to_wire().SerializeToString())
    assert Result.from_wire(message) == result


@given(ERRORS)
def test_an_error_is_the_same_after_the_wire(error: CallError) -> None:
    assert CallError.from_wire(pb.CallError.FromString(error.to_wire().SerializeToString())) == error


def test_every_field_of_the_wire_has_its_place_in_the_records() -> None:
    pairs: list[tuple[Any, type]] = [
        (pb.Tool, Tool),
        (pb.ToolAnnotations, Annotations),
        (pb.ToolResult, Result),
        (pb.CallError, CallError),
    ]
    for message, record in pairs:
        names = {field.name for field in dataclasses.fields(record)} - {
            "schema_hash",
            "hints_trusted",
        }  # of the bus alone
        assert names == set(message.DESCRIPTOR.fields_by_name), record.__name__


def test_what_is_unset_stays_unset() -> None:
    message = Tool("add").to_wire()
    assert [field.name for field, _ in message.ListFields()] == ["name", "parameters_json"]


def test_an_empty_role_reads_as_every_role() -> None:
    assert Tool.from_wire(pb.Tool(name="add", role=""), LIMITS).role is None


def test_a_tool_without_parameters_takes_any_object() -> None:
    assert Tool.from_wire(pb.Tool(name="add"), LIMITS).parameters == {"type": "object"}


def test_a_hint_that_was_set_to_false_is_not_an_unknown_one() -> None:
    tool = Tool.from_wire(pb.Tool(name="add", annotations=pb.ToolAnnotations(destructive=False)), LIMITS)
    assert tool.annotations == Annotations(destructive=False)
    assert tool.to_wire().annotations.HasField("destructive")


def test_codes_of_a_newer_protocol_read_as_something_known() -> None:
    newer = pb.CallError.FromString(b"\x08\x63\x10\x63")  # code 99, stage 99
    error = CallError.from_wire(newer)
    assert (error.code, error.stage) == (Code.INTERNAL, Stage.UNKNOWN)


def test_a_result_outlives_the_frame_it_came_in() -> None:
    frame = pb.ToolResult(call_id="1", content=[pb.ContentBlock(text=pb.TextContent(text="before"))])
    result = Result.from_wire(frame)
    frame.content[0].text.text = "after"
    assert result.content[0].text.text == "before"


# -- the rules of a tool -----------------------------------------------------------------------------------------

FAULTS: list[tuple[str, Callable[[], Tool], list[str]]] = [
    ("no name", lambda: Tool(""), ["''", "0 characters", "1 to 64"]),
    ("long name", lambda: Tool("n" * 65), ["nnn", "65 characters", "1 to 64"]),
    ("name on the wire", lambda: Tool.from_wire(pb.Tool(name="two words"), LIMITS), ["'two words'", "rule", "rename"]),
    ("newline", lambda: Tool.from_wire(pb.Tool(name="add\n"), LIMITS), [r"'add\n'", "[A-Za-z0-9_.-]{1,64}", "rename"]),
    ("other digits", lambda: Tool.from_wire(pb.Tool(name="add٣"), LIMITS), ["'add٣'", "[A-Za-z0-9_.-]", "rename"]),
    ("negative", lambda: Tool("add", timeout_seconds=-1), ["'add'", "timeout_seconds is -1", "from 0", "to 300"]),
    ("too long", lambda: Tool("add", timeout_seconds=301), ["timeout_seconds is 301", "from 0", "to 300"]),
    ("nan", lambda: Tool("add", timeout_seconds=math.nan), ["timeout_seconds is nan", "from 0", "to 300"]),
    ("inf", lambda: Tool("add", idle_timeout_seconds=math.inf), ["idle_timeout_seconds is inf", "from 0", "to 300"]),
    ("no JSON", lambda: Tool("add", parameters_json="{"), ["parameters_json is not JSON", "line 1", "JSON Schema"]),
    ("NaN in JSON", lambda: Tool("add", parameters_json='{"a":NaN}'), ["JSON has no NaN", "give it the text"]),
    ("two values", lambda: Tool("add", parameters_json="{}{}"), ["not JSON", "give it the text"]),
    ("array", lambda: Tool("add", parameters_json="[1]"), ["is a JSON array", "must be an object"]),
    ("boolean", lambda: Tool("add", parameters_json="true"), ["is a JSON boolean", "must be an object"]),
    ("null", lambda: Tool("add", parameters_json="null"), ["is a JSON null", "must be an object"]),
    ("number", lambda: Tool("add", parameters_json="1.5"), ["is a JSON number", "must be an object"]),
    ("half pair", lambda: Tool("add", description="\ud83d"), ["description", "surrogate", "whole character"]),
    ("half name", lambda: Tool("\ud83d"), [r"'\ud83d'", "surrogate", "whole character"]),
    (
        "large schema",
        lambda: Tool.from_wire(pb.Tool(name="add", parameters_json='{"a":"' + "ä" * 20 + '"}'), SMALL),
        ["'add'", "parameters_json has 48 bytes", "schema_bytes = 40", "shorten"],
    ),
    (
        "large description",
        lambda: Tool.from_wire(pb.Tool(name="add", description="ä" * 5), SMALL),
        ["'add'", "description has 10 bytes", "description_bytes = 8", "shorten"],
    ),
    (
        "large metadata",
        lambda: Tool.from_wire(pb.Tool(name="add", metadata_json="x" * 41), SMALL),
        ["'add'", "metadata_json has 41 bytes", "schema_bytes = 40", "shorten"],
    ),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_fault_names_the_value_the_rule_and_the_fix(make: Callable[[], Tool], words: list[str]) -> None:
    with pytest.raises(InvalidTool) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []


def test_every_fault_of_a_tool_is_named_at_once() -> None:
    with pytest.raises(InvalidTool) as caught:
        Tool("", timeout_seconds=-1, idle_timeout_seconds=math.nan, parameters_json="[]")
    assert len(caught.value.faults) == 4


def test_a_hostile_name_is_cut_in_the_sentence() -> None:
    with pytest.raises(InvalidTool) as caught:
        Tool.from_wire(pb.Tool(name="x" * 1_000_000), LIMITS)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("depth", [*range(960, 1000), 100_000])
def test_a_schema_is_taken_or_refused_at_any_depth(depth: int) -> None:
    deep = '{"a":' * depth + "{}" + "}" * depth
    try:
        tool = Tool("add", parameters_json=deep)
    except InvalidTool as refused:
        assert "nested too deep" in str(refused)  # noqa: PT017
    else:
        assert tool.schema_hash


def test_names_are_taken_as_rest_allows_them_where_they_do_not_come_by_the_wire() -> None:
    assert Tool("天气 now!").name == "天气 now!"


@pytest.mark.parametrize("seconds", [0, 0.001, 300])
def test_a_timeout_may_be_up_to_300_seconds(seconds: float) -> None:
    assert Tool("add", timeout_seconds=seconds).timeout_seconds == seconds


def test_a_limit_is_the_last_size_that_is_taken() -> None:
    message = pb.Tool(name="add", description="x" * 8, parameters_json="{" + " " * 38 + "}")
    assert Tool.from_wire(message, SMALL).description == "x" * 8


# -- the hash of a declaration -----------------------------------------------------------------------------------


def _reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reordered(value[key]) for key in reversed(value)}
    return [_reordered(each) for each in value] if isinstance(value, list) else value


@given(NAMES, TEXT, SCHEMAS)
def test_the_hash_does_not_depend_on_order_or_white_space(name: str, description: str, schema: dict[str, Any]) -> None:
    one = Tool(name, description, json.dumps(schema))
    other = Tool(name, description, json.dumps(_reordered(schema), indent=3, ensure_ascii=False))
    assert one.schema_hash == other.schema_hash


@pytest.mark.parametrize(
    "other",
    [
        Tool("sub", "adds", '{"type":"object"}'),
        Tool("add", "subtracts", '{"type":"object"}'),
        Tool("add", "adds", '{"type":"object","required":["a"]}'),
        Tool("add", "adds", '{"type":"object","enum":[1,2]}'),
        Tool("add", "adds", '{"type":"object","enum":[2,1]}'),
    ],
    ids=lambda tool: f"{tool.name} {tool.description} {tool.parameters_json}",
)
def test_the_hash_changes_with_what_a_model_sees(other: Tool) -> None:
    assert Tool("add", "adds").schema_hash != other.schema_hash


def test_the_hash_does_not_change_with_what_a_model_does_not_see() -> None:
    plain = Tool("add", "adds")
    assert Tool("add", "adds", timeout_seconds=5, role="cook", validate=False).schema_hash == plain.schema_hash


def test_the_hash_is_the_same_in_every_process() -> None:
    # Written down: hosts keep hashes, and a bus that restarts with other ones would call every catalog stale.
    assert (
        Tool("add", "Adds.", '{"type":"object","b":1,"a":[1.0,"ä"]}').schema_hash == "c8d648e3b87ad214e5b003be9017155e"
    )


def test_a_renamed_tool_keeps_the_hash_and_the_rest_of_its_declaration() -> None:
    tool = Tool("add", "adds", timeout_seconds=5)
    listed = tool.renamed("calc:" + "a" * 100)
    assert listed.name == "calc:" + "a" * 100
    assert listed.schema_hash == tool.schema_hash
    assert listed.timeout_seconds == 5
    assert tool.name == "add"
    assert tool.renamed("add") == tool


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda tool: pickle.loads(pickle.dumps(tool))])
def test_a_copied_tool_is_equal_to_its_original(twin: Callable[[Tool], Tool]) -> None:
    tool = Tool("add", "adds", role="cook", annotations=Annotations(read_only=True))
    assert twin(tool) == tool
    assert twin(tool).schema_hash == tool.schema_hash
    assert hash(twin(tool)) == hash(tool)


@pytest.mark.parametrize(
    ("annotations", "repeatable"),
    [
        (Annotations(), False),
        (Annotations(idempotent=True), True),
        (Annotations(read_only=True), True),
        (Annotations(idempotent=False, read_only=False), False),
        (Annotations(destructive=False), False),
    ],
    ids=str,
)
def test_only_a_promise_makes_a_tool_repeatable(annotations: Annotations, repeatable: bool) -> None:
    assert Tool("add", annotations=annotations).repeatable is repeatable


# -- results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(), "null"),
        (Result(output_json=""), "null"),
        (Result(output_json="3"), "3"),
        (Result(output_json='""'), ""),
        (Result(output_json='"sunny"'), "sunny"),
        (Result(output_json='{"a": "\\u00e4"}'), '{"a":"ä"}'),
        (Result(output_json='"sunny"', content=(pb.ContentBlock(text=pb.TextContent(text="a map")),)), "sunny\na map"),
        (
            Result(content=(pb.ContentBlock(image=pb.ImageContent(data=b"123", mime_type="image/png")),)),
            "[image/png, 3 bytes]",
        ),
        (Result(output_json='"it broke"', is_error=True), "the tool reported a failure\nit broke"),
        (Result(output_json="null", error=CallError(Code.TOOL, "no such city")), "no such city"),
        (Result(output_json='{"a":1}', error=CallError(Code.TOOL, "no such city")), 'no such city\n{"a":1}'),
        (Result(error=CallError(Code.OVERLOADED, "")), "OVERLOADED"),
    ],
    ids=str,
)
def test_a_model_reads_the_error_first_then_the_output_then_the_content(result: Result, text: str) -> None:
    assert result.text == text


def _texts(*texts: str) -> tuple[pb.ContentBlock, ...]:
    return tuple(pb.ContentBlock(text=pb.TextContent(text=text)) for text in texts)


PICTURE = pb.ContentBlock(image=pb.ImageContent(data=b"123", mime_type="image/png"))
SEEN = "[image/png, 3 bytes]"
REPEATS = [
    # the output as JSON, the content, and the text for a model
    ('"alpha\\nbeta"', _texts("alpha", "beta"), "alpha\nbeta"),
    ('"alpha"', (*_texts("alpha"), PICTURE), f"alpha\n{SEEN}"),
    ('"alpha"', (PICTURE, *_texts("alpha")), f"alpha\n{SEEN}"),
    ('"alphabeta"', _texts("alpha", "beta"), "alphabeta"),
    ('"alpha\\nbeta"', _texts("alpha", "beta", "and a note"), "alpha\nbeta\nand a note"),
    ('{"result":"alpha"}', _texts("alpha"), "alpha"),
    ('{"result":"a\\nb"}', _texts("a\nb"), "a\nb"),
    ('{"result":"a\\nb"}', _texts("a", "b"), "a\nb"),
    ('{"result":" alpha\\n"}', (*_texts("alpha"), PICTURE), f" alpha\n\n{SEEN}"),
    ('{"result":["alpha","beta"]}', _texts("alpha", "beta"), '{"result":["alpha","beta"]}'),
    ('{"result":["alpha","beta"]}', _texts('[\n  "alpha",\n  "beta"\n]'), '{"result":["alpha","beta"]}'),
    ('{"result":[{"a":1},{"a":2}]}', _texts('{"a": 1}', '{\n "a": 2}'), '{"result":[{"a":1},{"a":2}]}'),
    ('{"result":[1,2]}', _texts("1", "2"), '{"result":[1,2]}'),
    ('{"result":true}', _texts("true"), '{"result":true}'),
    ('{"result":true}', _texts("True"), '{"result":true}'),
    ('{"result":null}', _texts("None"), '{"result":null}'),
    ('{"result":["alpha","beta"]}', _texts("alpha\nbeta"), '{"result":["alpha","beta"]}'),
    ('{"a":1,"b":[2]}', _texts('{"b": [2], "a": 1}', "done"), '{"a":1,"b":[2]}\ndone'),
    ('{"a":1}', (*_texts('```json\n{"a": 1}\n```'), PICTURE), f'{{"a":1}}\n{SEEN}'),
    ('{"text":"alpha","n":1}', _texts("alpha"), '{"text":"alpha","n":1}'),
    ('{"city":"Paris"}', (*_texts('{"city":"Paris"}'), PICTURE), f'{{"city":"Paris"}}\n{SEEN}'),
    ('[{"a":1},{"a":2}]', _texts('{"a":1}', '{"a":2}'), '[{"a":1},{"a":2}]'),
    # what is not a repetition: both reach the model
    ('{"rows":[1,2]}', _texts("Found 2 rows"), '{"rows":[1,2]}\nFound 2 rows'),
    ('{"min":42,"max":50}', _texts("42"), '{"min":42,"max":50}\n42'),
    ('{"a":1}', _texts('{"a":2}'), '{"a":1}\n{"a":2}'),
    ('"alpha"', _texts("alphabet"), "alpha\nalphabet"),
    ('{"result":true}', _texts("1"), '{"result":true}\n1'),
    ('{"result":true}', _texts("False"), '{"result":true}\nFalse'),
    ('{"rows":["alpha","beta"]}', _texts("alpha and beta"), '{"rows":["alpha","beta"]}\nalpha and beta'),
    ("null", _texts("alpha", "alpha"), "alpha\nalpha"),
]


@pytest.mark.parametrize(("output", "content", "text"), REPEATS)
def test_a_text_of_the_content_that_repeats_the_output_reaches_a_model_once(
    output: str, content: tuple[pb.ContentBlock, ...], text: str
) -> None:
    assert Result(output_json=output, content=content).text == text


@pytest.mark.parametrize(
    ("output", "message", "content", "text"),
    [
        ("null", "alpha\nbeta", _texts("alpha", "beta"), "alpha\nbeta"),
        ("null", "alpha\nbeta", _texts("alpha", "beta", "a note"), "alpha\nbeta\na note"),
        ('{"result":"alpha"}', "alpha", _texts("alpha"), "alpha"),
        ('{"error":"alpha"}', "alpha", _texts("alpha"), '{"error":"alpha"}'),
        ('{"code":1}', '{"code": 1}', _texts('{"code": 1}'), '{"code": 1}'),
        ('{"code":1}', "alpha", _texts("alpha"), 'alpha\n{"code":1}'),
    ],
)
def test_a_text_of_the_content_that_repeats_the_failure_reaches_a_model_once(
    output: str, message: str, content: tuple[pb.ContentBlock, ...], text: str
) -> None:
    assert Result("", output, True, CallError(Code.TOOL, message), content).text == text


def test_programs_get_content_without_repetitions_and_annotated_texts() -> None:
    annotated = pb.ContentBlock(text=pb.TextContent(text="alpha"), annotations_json='{"priority":1}')
    result = Result(output_json='"alpha"', content=(*_texts("alpha"), PICTURE, annotated))
    assert result.content_beside_output() == (PICTURE, annotated)
    assert result.text == f"alpha\n{SEEN}"


def test_unwrap_returns_the_output_of_a_call_that_succeeded() -> None:
    assert Result(output_json='{"a":[1,null]}').unwrap() == {"a": [1, None]}
    assert Result(output_json="").unwrap() is None


def test_unwrap_raises_the_error_of_a_call_that_failed() -> None:
    error = CallError(Code.UNAVAILABLE, "the plugin is gone", Stage.DISPATCHED)
    with pytest.raises(CallFailed, match="UNAVAILABLE: the plugin is gone") as caught:
        Result(is_error=True, error=error).unwrap()
    assert caught.value.error is error


def test_unwrap_raises_for_a_failed_result_without_an_error() -> None:
    with pytest.raises(CallFailed, match='TOOL: "no such city"') as caught:
        Result(output_json='"no such city"', is_error=True).unwrap()
    assert caught.value.error.code is Code.TOOL


def test_integers_of_any_size_survive() -> None:
    assert Result.from_wire(Result(output_json=str(2**200)).to_wire()).output == 2**200


# -- arguments and names -----------------------------------------------------------------------------------------


@given(st.dictionaries(TEXT, JSON, max_size=5))
def test_arguments_are_dumped_as_json_that_reads_back(arguments: dict[str, Any]) -> None:
    assert json.loads(dump_arguments(arguments)) == arguments


def test_arguments_that_are_text_already_are_passed_on_as_they_are() -> None:
    assert dump_arguments(' {"a": 1.50} ') == ' {"a": 1.50} '
    assert dump_arguments(None) == "{}"


@pytest.mark.parametrize("arguments", [{"a": math.nan}, {"a": math.inf}, {"a": object}, {"a": {1, 2}}], ids=str)
def test_arguments_that_json_cannot_hold_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        dump_arguments(arguments)


@pytest.mark.parametrize("text", ["a", "my.plugin:1", "A-b_c", "x" * 128])
def test_a_source_may_be(text: str) -> None:
    assert is_source(text)


@pytest.mark.parametrize("text", ["", "a b", "a\n", "ä", "a/b", "x" * 129, "٣"], ids=repr)
def test_a_source_may_not_be(text: str) -> None:
    assert not is_source(text)
