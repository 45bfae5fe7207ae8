"""Decimals, lengths of time and bytes as arguments and results; defaults of every kind; arguments that do not fit."""

import base64
import datetime
import decimal
import json
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypedDict

import pytest
import typing_extensions

from tests.functions.runner_cases import run
from toolbus.errors import Code, Stage
from toolbus.functions.conversion import converter
from toolbus.functions.hints import output_schema, parameters_schema
from toolbus.functions.reply import dump_output
from toolbus.functions.tool_spec import ToolDefinition, describe, spec_of


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal
    picture: bytes = b""


LONG = "0.12345678901234567890123456789"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"price": 9.9}', "9.9"),
        ('{"price": ' + LONG + "}", LONG),
        (' {"price": ' + LONG + "} ", LONG),
        ('{"price": "' + LONG + '"}', LONG),
        ('{"price": 12345678901234567890}', "12345678901234567890"),
        ('{"price": "2.50"}', "2.50"),
        ({"price": 0.1}, "0.1"),
    ],
)
async def test_a_decimal_keeps_every_digit_in_both_directions(arguments: Any, expected: str) -> None:
    def tool(price: Decimal) -> Decimal:
        assert type(price) is Decimal
        return price

    result = await run(tool, arguments)
    assert result.output == expected


async def test_decimals_within_classes_lists_and_keywords_keep_their_digits() -> None:
    def tool(item: Item, prices: list[Decimal], share: float, **more: Decimal) -> list[Any]:
        assert all(type(each) is Decimal for each in (item.price, *prices, *more.values()))
        return [item, prices, share + 1, more]

    text = f'{{"item":{{"name":"a","price":{LONG}}},"prices":[{LONG},"1.10"],"share":0.5,"x":{LONG}}}'
    result = await run(tool, text)
    assert result.error is not None  # the picture is not declared as a result
    assert "output[0].picture is of type bytes" in result.error.message


async def test_decimals_anywhere_in_a_result_keep_their_digits() -> None:
    def tool() -> dict[str, Any]:
        return {"prices": [Decimal("1.10"), Decimal(LONG)], "x": {"y": (Decimal("0.1"), Decimal("1e400"))}}

    result = await run(tool, "{}")
    assert result.output == {"prices": ["1.10", LONG], "x": {"y": ["0.1", "1E+400"]}}


async def test_bytes_are_base64_where_they_are_declared() -> None:
    def tool(data: bytes) -> bytes:
        return data[::-1]

    def picture(data: bytes) -> Item:
        return Item("a", Decimal("1.0"), data)

    given = {"data": base64.b64encode(b"\x00\xff!").decode()}
    assert (await run(tool, given)).output == base64.b64encode(b"!\xff\x00").decode()
    assert (await run(picture, given)).output == {"name": "a", "price": "1.0", "picture": given["data"]}
    wrong = await run(tool, {"data": "no base64"})
    assert wrong.error is not None
    assert (wrong.error.code, wrong.error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED)
    assert "is not base64" in wrong.error.message


DURATIONS = [
    ("PT1H30M", datetime.timedelta(hours=1.5)),
    ("PT0S", datetime.timedelta()),
    ("P2D", datetime.timedelta(days=2)),
    ("-P1DT0.000001S", -datetime.timedelta(days=1, microseconds=1)),
    ("PT1.5S", datetime.timedelta(seconds=1.5)),
    ("P999999999DT23H59M59.999999S", datetime.timedelta.max),
]


@pytest.mark.parametrize(("text", "value"), DURATIONS)
def test_a_length_of_time_is_written_and_read_to_the_microsecond(text: str, value: datetime.timedelta) -> None:
    read = converter(datetime.timedelta)
    assert read is not None
    assert read(text) == value
    assert json.loads(dump_output({"v": value}))["v"] == text


@pytest.mark.parametrize(
    ("text", "expected"), [("P1W", {"days": 7}), ("PT1.5H", {"minutes": 90}), ("P1DT12H", {"hours": 36})]
)
def test_other_spellings_of_a_length_of_time_are_read(text: str, expected: dict[str, int]) -> None:
    read = converter(datetime.timedelta)
    assert read is not None
    assert read(text) == datetime.timedelta(**expected)


@pytest.mark.parametrize("text", ["", "P", "PT", "90", "P1Y", "PT1.2.3S", "P99999999999D"])
def test_what_is_no_length_of_time_is_refused_with_the_spelling(text: str) -> None:
    read = converter(datetime.timedelta)
    assert read is not None
    with pytest.raises(ValueError, match="write PT90S"):
        read(text)


def test_results_are_declared_as_they_are_written() -> None:
    def tool() -> dict[str, Decimal]: ...  # type: ignore[empty-body]

    assert output_schema(tool)["additionalProperties"]["type"] == "string"


DAY, NUMBER = datetime.date(2024, 2, 3), uuid.UUID(int=7)


def defaults(  # type: ignore[no-untyped-def]
    day: datetime.date = DAY,
    number: uuid.UUID = NUMBER,
    path: pathlib.Path = pathlib.Path("a/b"),
    tags: frozenset[str] = frozenset(("b", "a", "c")),
    item: Item = Item("a", Decimal("1.50")),  # frozen
    wait: datetime.timedelta = datetime.timedelta(seconds=5),
    price: Decimal = Decimal("2.50"),
    data: bytes = b"\xff",
    unhinted=DAY,
) -> Any:
    return [day, number, path, tags, item, wait, price, data, unhinted]


async def test_defaults_are_shown_as_json_and_arrive_as_the_same_value() -> None:
    shown = {
        name: each["default"] for name, each in parameters_schema(defaults)["properties"].items() if "default" in each
    }
    assert shown == {
        "day": "2024-02-03",
        "number": str(NUMBER),
        "path": "a/b",
        "tags": ["a", "b", "c"],
        "item": {"name": "a", "price": "1.50", "picture": ""},
        "wait": "PT5S",
        "price": "2.50",
        "data": "/w==",
    }
    spec = spec_of(defaults, describe(defaults, name="tool"))
    result = await run(lambda: defaults() == defaults(**{name: own(shown[name]) for name, own in spec.converters}))
    assert result.output is True


def test_the_default_of_a_model_is_shown() -> None:
    pydantic = pytest.importorskip("pydantic")
    Place = pydantic.create_model("Place", city=(str, ...), since=(datetime.date, DAY))

    oslo = Place(city="Oslo")

    def tool(place: Any = oslo) -> None: ...

    tool.__annotations__["place"] = Place
    assert parameters_schema(tool)["properties"]["place"]["default"] == {"city": "Oslo", "since": "2024-02-03"}


def unhinted(x, y=2):  # type: ignore[no-untyped-def]
    return [x, y]


class Extra(TypedDict):
    depth: int
    note: typing_extensions.NotRequired[str]


def unpacked(city: str, **more: typing_extensions.Unpack[Extra]) -> Any:
    return [city, dict(more)]


def counted(city: str, **rest: int) -> Any:
    return [city, rest]


def test_the_keys_of_unpacked_options_are_arguments() -> None:
    schema = parameters_schema(unpacked)
    assert schema["required"] == ["city", "depth"]
    assert schema["properties"]["note"] == {"type": "string"}
    assert "additionalProperties" not in schema


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (unhinted, {"x": [1]}, [[1], 2]),
        (unhinted, {}, "is missing 'x'"),
        (unhinted, {"x": 1, "z": 2}, "takes no argument 'z'"),
        (unpacked, {"city": "a", "depth": 2.0}, ["a", {"depth": 2}]),
        (unpacked, {"city": "a"}, "is missing 'depth'"),
        (unpacked, {"city": "a", "depth": 1, "other": 1}, "takes no argument 'other'"),
        (counted, {"city": "a", "b": 2.0}, ["a", {"b": 2}]),
    ],
)
async def test_arguments_that_a_function_cannot_take_are_invalid(
    function: Callable[..., Any], arguments: dict[str, Any], expected: Any
) -> None:
    result = await run(function, arguments)
    if isinstance(expected, str):
        assert result.error is not None
        assert (result.error.code, result.error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED)
        assert expected in result.error.message
    else:
        assert json.dumps(result.output) == json.dumps(expected)


async def test_a_keyword_that_does_not_convert_is_named() -> None:
    def tool(**days: datetime.date) -> Any:
        return days

    result = await run(tool, {"first": "2024-99-99"})
    assert result.error is not None
    assert result.error.code is Code.INVALID_ARGUMENTS
    assert "argument 'first'" in result.error.message


def names(*names: str) -> None: ...
def city_and_names(city, *names, flag=False): ...  # type: ignore[no-untyped-def]
def names_and_typed(*names: str, **rest: int) -> None: ...


@pytest.mark.parametrize("function", [names, city_and_names, names_and_typed])
def test_a_parameter_that_no_argument_can_fill_is_refused_where_the_tool_is_declared(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(TypeError, match=r"no argument can fill \*names.*names: list\[str\]"):
        spec_of(function, describe(function))
    with pytest.raises(TypeError, match=r"\*names"):
        ToolDefinition("tool", parameters={"type": "object"}, handler=function, dict_handler=False).spec()


async def test_a_wrapper_and_a_parameter_that_expects_nothing_are_tools() -> None:
    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        return kwargs

    assert (await run(wrapper, {"a": 1})).output == {"a": 1}
    assert (await run(lambda *_: 1)).output == 1


def test_a_tool_without_decimals_reads_numbers_as_before() -> None:
    def plain(city: str, days: int = 1) -> None: ...

    spec = spec_of(plain, describe(plain))
    assert (spec.exact, spec.rest, spec.bytes_output) == (False, None, False)
    assert decimal.Decimal("1") == 1
