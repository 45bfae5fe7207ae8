"""The return annotation as the schema of a tool's output: it says what is written, and the bus checks it."""

from __future__ import annotations

import datetime
import enum
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field

from tests.support.core_model import Core, error_of
from toolbus.errors import Code
from toolbus.functions.reply import Err, Ok, Reply
from toolbus.functions.runner import run_plain
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec, llm_tool, spec_of
from toolbus.protocol.tool import Result
from toolbus.tools import ToolRegistry
from toolbus.v1 import tool_pb2 as pb


class Unit(enum.Enum):
    CELSIUS = "celsius"


@dataclass
class Weather:
    city: str
    degrees: float
    unit: Unit = Unit.CELSIUS
    on: datetime.date = field(default_factory=lambda: datetime.date(2024, 2, 3))


class Point(NamedTuple):
    x: int
    y: float


class Route(TypedDict):
    points: list[Point]


class Page(BaseModel):
    number: int = Field(alias="no")
    below: list[Page] = []


def tool_of(returned: Any, value: Any) -> ToolSpec:
    def tool() -> Any:
        return value

    tool.__annotations__["return"] = returned
    return spec_of(llm_tool(output_schema=True, validate_output=True)(tool))


WEATHER = Weather("Oslo", 3)
PAGE = Page(no=1, below=[Page(no=2)])
RETURNED: list[tuple[Any, Any, Any]] = [
    (Weather, WEATHER, {"city": "Oslo"}),
    (Weather | Err, WEATHER, "text"),
    (Weather | None, None, "text"),
    (list[Weather], [WEATHER], [{}]),
    (dict[str, int], {"a": 1}, {"a": "b"}),
    (Point, Point(1, 2.5), {"x": 1, "y": 2.5}),
    (Route, {"points": [Point(1, 2)]}, {"points": [[1]]}),
    (Page, PAGE, {"no": 1}),
    (list[Page] | None, [PAGE], [{"number": "a"}]),
    (str, "a", 5),
    (Awaitable[int], 5, "a"),
]


@pytest.mark.parametrize(("returned", "value", "wrong"), RETURNED, ids=[str(each[0])[:40] for each in RETURNED])
def test_the_schema_fits_what_is_written_and_the_bus_withholds_what_it_does_not_fit(
    returned: Any, value: Any, wrong: Any
) -> None:
    spec = tool_of(returned, value)
    output = run_plain(spec, "{}", ToolScope("1", "tool"))
    assert isinstance(output, str)
    assert spec.tool.output_schema is not None
    assert jsonschema_rs.is_valid(spec.tool.output_schema, json.loads(output))
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", spec.tool)
    for answer, fits in ((output, True), (json.dumps(wrong), False)):
        call_id = core.call(host, "tool")
        (call,) = plugin.pending.values()
        core.dispatcher.results(plugin, [pb.ToolResult(call_id=call.id, output_json=answer)], core.now)
        if not fits:
            error = error_of(host, call_id)
            assert (error.code, error.reason) == (Code.TOOL, "output_schema")


def test_a_model_that_contains_itself_is_still_an_object_at_its_root() -> None:
    schema = tool_of(Page, PAGE).tool.output_schema
    assert schema is not None
    assert (schema["type"], schema["$ref"]) == ("object", "#/$defs/Page")


def test_the_output_of_a_generator_is_its_text() -> None:
    @llm_tool(output_schema=True)
    def pieces() -> Iterator[str]:
        yield "a"

    assert spec_of(pieces).tool.output_schema == {"type": "string"}


def test_nothing_is_declared_without_being_asked_for() -> None:
    def tool() -> Weather:
        return WEATHER

    assert spec_of(llm_tool(tool)).tool.output_schema is None
    assert spec_of(llm_tool(output_schema=False)(tool)).tool.output_schema is None


@pytest.mark.parametrize("returned", [Any, object, Reply, Reply | Err, Err, Ok, Result, Callable[[], int]])
def test_an_annotation_that_does_not_describe_the_output_is_refused(returned: Any) -> None:
    with pytest.raises(TypeError, match="tool 'tool': output_schema=True reads the return annotation, which does not"):
        tool_of(returned, None)


def test_a_check_without_a_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="validate_output checks results against output_schema, which is missing"):
        llm_tool(validate_output=True)


async def test_tools_of_a_registry_have_it_too() -> None:
    registry = ToolRegistry()

    @registry.tool(output_schema=True, validate_output=True)
    def broken() -> Weather:
        return "none"  # type: ignore[return-value]

    assert "does not allow" in await registry.call("broken", {})
