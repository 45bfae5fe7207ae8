"""Tests that what stands beside a hint becomes the schema of an argument, whichever library it is of."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from typing import Annotated, Any

import annotated_types
import pytest
import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

from tests.support.core_model import Core, error_of
from toolbus.errors import Code
from toolbus.functions.hints import parameters_schema, signature_of
from toolbus.functions.runner import run_plain
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec, llm_tool, spec_of
from toolbus.protocol.tool import Result

UNUSUAL: Any = {"default": 1j, "minimum": 1}
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
NULL = {"type": "null"}

BESIDE: list[tuple[Any, dict[str, Any]]] = [
    (Annotated[int, "How many"], {**INTEGER, "description": "How many"}),
    (Annotated[int, {"minimum": 1}, "How many"], {**INTEGER, "minimum": 1, "description": "How many"}),
    (Annotated[int, annotated_types.Ge(1), annotated_types.Lt(9)], {**INTEGER, "minimum": 1, "exclusiveMaximum": 9}),
    (Annotated[int, annotated_types.Interval(gt=1, le=9)], {**INTEGER, "exclusiveMinimum": 1, "maximum": 9}),
    (Annotated[int, annotated_types.MultipleOf(5)], {**INTEGER, "multipleOf": 5}),
    (Annotated[str, annotated_types.Len(1, 8)], {**STRING, "minLength": 1, "maxLength": 8}),
    (Annotated[list[str], annotated_types.MinLen(2)], {"type": "array", "items": STRING, "minItems": 2}),
    (Annotated[dict[str, Any], annotated_types.MaxLen(2)], {"type": "object", "maxProperties": 2}),
    (Annotated[str | None, annotated_types.MaxLen(8)], {"anyOf": [STRING, NULL], "maxLength": 8}),
    (Annotated[str | list[str], annotated_types.MaxLen(8)], {"anyOf": [STRING, {"type": "array", "items": STRING}]}),
    (Annotated[str, typing_extensions.Doc("A city.")], {**STRING, "description": "A city."}),
    (
        Annotated[str, Field(description="A code.", min_length=2, max_length=4, pattern="^[A-Z]+$", examples=["AB"])],
        {
            **STRING,
            "description": "A code.",
            "minLength": 2,
            "maxLength": 4,
            "pattern": "^[A-Z]+$",
            "examples": ["AB"],
        },
    ),
    (
        Annotated[float, Field(ge=0, lt=1, multiple_of=0.5)],
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.5},
    ),
    (
        Annotated[str, StringConstraints(pattern=re.compile("^a"), max_length=3)],
        {**STRING, "pattern": "^a", "maxLength": 3},
    ),
    (Annotated[int, Field(json_schema_extra={"x-unit": "m"})], {**INTEGER, "x-unit": "m"}),
    # What JSON cannot hold is left out: an unusual hint must not keep a plugin from starting.
    (Annotated[int, Field(json_schema_extra=UNUSUAL)], {**INTEGER, "minimum": 1}),
    (Annotated[int, UNUSUAL], {**INTEGER, "minimum": 1}),
    (Annotated[float, Field(ge=float("nan"), le=9)], {"type": "number", "maximum": 9}),
    (Annotated[str, Field(examples=[object()])], STRING),
    (PositiveInt, {**INTEGER, "exclusiveMinimum": 0}),
    (list[Annotated[int, Field(ge=1)]], {"type": "array", "items": {**INTEGER, "minimum": 1}}),
]


@pytest.mark.parametrize(("hint", "schema"), BESIDE, ids=[str(hint)[:60] for hint, _ in BESIDE])
def test_each_annotation_is_in_the_schema(hint: Any, schema: dict[str, Any]) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = hint
    assert parameters_schema(tool)["properties"]["value"] == schema


def ends(  # type: ignore[no-untyped-def]
    city: str = Field(description="its name", max_length=8),
    days: int = Field(2, ge=1),
    tags: list[str] = Field(default_factory=list),  # noqa: B008
    ident: Annotated[str, Field(default_factory=lambda: uuid.uuid4().hex)] = "",
    level: Annotated[int, Field(default=5)] = Field(6),
    *,
    unit: Annotated[str, Field("km")],
    untyped=Field(1),  # noqa: B008
) -> list[Any]:
    tags.append(city)
    return [city, days, tags, ident, level, unit, untyped]


def run(spec: ToolSpec, arguments: dict[str, Any]) -> Any:
    outcome = run_plain(spec, json.dumps(arguments), ToolScope("1", spec.tool.name))
    return json.loads(outcome) if isinstance(outcome, str) else outcome


def test_a_field_may_be_the_default_of_a_parameter_and_hold_that_of_its_argument() -> None:
    schema = parameters_schema(ends)
    assert schema["required"] == ["city"]
    assert schema["properties"] == {
        "city": {**STRING, "description": "its name", "maxLength": 8},
        "days": {**INTEGER, "minimum": 1, "default": 2},
        "tags": {"type": "array", "items": STRING},  # a default that is made is not shown: the bus would fill it in
        "ident": {**STRING, "default": ""},
        "level": {**INTEGER, "default": 6},
        "unit": {**STRING, "default": "km"},
        "untyped": {"default": 1},
    }
    spec = spec_of(llm_tool(ends))
    for _ in range(2):  # and tags is another list each time
        assert run(spec, {"city": "Oslo"}) == ["Oslo", 2, ["Oslo"], "", 6, "km", 1]
    assert run(spec, {"city": "Oslo", "days": 3.0})[1] == 3
    missing = run(spec, {})
    assert isinstance(missing, Result)
    assert missing.error is not None
    assert "is missing 'city'" in missing.error.message


def test_a_default_that_is_made_in_a_hint_is_made_for_each_call() -> None:
    def tool(ident: Annotated[str, Field(default_factory=lambda: uuid.uuid4().hex)]) -> str:
        return ident

    spec = spec_of(llm_tool(tool))
    assert run(spec, {}) != run(spec, {})
    assert run(spec, {"ident": "a"}) == "a"
    assert [name for name, _ in signature_of(tool).defaults] == ["ident"]


def test_the_bus_checks_what_annotations_say() -> None:
    def tool(code: Annotated[str, Field(max_length=2)], days: int = Field(1, le=7)) -> None: ...

    core = Core()
    host, _ = core.peer("h"), core.plugin("p", spec_of(llm_tool(tool)).tool)
    for arguments in ('{"code": "abc"}', '{"code": "ab", "days": 8}'):
        assert error_of(host, core.call(host, "tool", arguments)).code == Code.INVALID_ARGUMENTS


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sku: Annotated[str, Field(pattern="^[0-9]+$")]
    count: int = Field(1, ge=1)


class Order(BaseModel):
    lines: list[Line]
    parent: Order | None = None


def other_line() -> type[BaseModel]:
    class Line(BaseModel):
        text: str

    class Page(BaseModel):
        lines: list[Line]

    return Page


def test_models_are_parameters_and_their_definitions_do_not_collide() -> None:
    def tool(order: Order, page: Any, more: list[Line] | None = None) -> Any:
        assert isinstance(order.lines[0], Line)
        return [order.lines[0].count, more and more[0].sku, page.lines[0].text]

    tool.__annotations__ = {"order": Order, "page": other_line(), "more": list[Line] | None}
    schema = parameters_schema(tool)
    assert schema["properties"]["order"] == {"$ref": "#/$defs/Order"}
    assert schema["$defs"]["Line"]["properties"]["sku"]["pattern"] == "^[0-9]+$"
    assert schema["properties"]["page"]["properties"]["lines"]["items"] == {"$ref": "#/$defs/Line_"}
    assert list(schema["$defs"]["Line_"]["properties"]) == ["text"]
    spec = spec_of(llm_tool(tool))
    order, page = {"lines": [{"sku": "1", "count": 2.0}]}, {"lines": [{"text": "x"}]}
    assert run(spec, {"order": order, "page": page, "more": [{"sku": "3"}]}) == [2, "3", "x"]
    wrong = run(spec, {"order": {"lines": [{"sku": "a"}]}, "page": page})
    assert "argument 'order'" in wrong.error.message


class TypeAliasType:
    """What `type Json = …` makes from Python 3.12 on, where an alias may contain itself."""

    __value__: Any


Json: Any = TypeAliasType()
Json.__value__ = dict[str, Json] | list[Json] | int


def test_an_alias_that_contains_itself_ends() -> None:
    def tool(value: Any) -> Any:
        return repr(value)

    tool.__annotations__["value"] = Json
    assert parameters_schema(tool)["properties"]["value"]["anyOf"][2] == INTEGER
    assert run(spec_of(llm_tool(tool)), {"value": {"a": [1.0]}}) == "{'a': [1]}"


def test_no_library_is_imported_to_read_its_annotations() -> None:
    program = (
        "import sys, toolbus, toolbus.sdk\n"
        "from toolbus.functions.hints import parameters_schema\n"
        "parameters_schema(lambda x: 0)\n"
        "print([name for name in ('pydantic', 'annotated_types', 'typing_extensions') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
