"""Signatures as authors write them: what is declared, what the function gets, and how its result is written."""

import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import functools
import ipaddress
import json
import pathlib
import re
import types
import typing
import uuid
import zoneinfo
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Required, TypedDict, TypeVar

import pydantic
import pytest
import typing_extensions

from tests.functions.runner_cases import run, spec
from toolbus.functions.hints import output_schema

T = TypeVar("T")
S = TypeVar("S")
Bound = TypeVar("Bound", bound="Point")
Either = TypeVar("Either", int, datetime.date)


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Box(Generic[T]):
    value: T
    more: list[T] = field(default_factory=list)


@dataclass
class WholeBox(Box[int]):
    label: str = ""


@dataclass
class Shelf(Box[list[T]], Generic[T]):
    first: T | None = None


class Keyed(typing_extensions.TypedDict, Generic[T]):
    value: T


class Sized(NamedTuple, Generic[T]):
    value: T
    size: int = 1


@dataclass
class Scaled:
    side: int
    scale: InitVar[int]
    kind: ClassVar[str] = "square"
    area: int = field(init=False, default=0)

    def __post_init__(self, scale: int) -> None:
        self.area = self.side * scale


@dataclass
class Named:
    day: datetime.date
    _: KW_ONLY
    id: uuid.UUID | None = None


class Options(TypedDict, total=False):
    day: datetime.date
    size: Required[int]


class Frozen(typing_extensions.TypedDict):
    day: typing_extensions.ReadOnly[datetime.date]


class Corner(enum.Enum):
    TOP = (0, 1)
    LOW = (1, 0)


class Tone(enum.StrEnum):
    RED = enum.auto()


class Celsius(float):
    pass


class Day(datetime.date):
    pass


class Names(list[str]):
    pass


class Table(dict[str, int]):
    pass


@pydantic.dataclasses.dataclass
class Aliased:
    count: int = pydantic.Field(alias="Count", ge=1)


Pairs = typing_extensions.TypeAliasType("Pairs", dict[str, T], type_params=(T,))
DATE = datetime.date(2024, 1, 2)
WRITTEN = "2024-01-02"
A_DATE = {"type": "string", "format": "date"}
A_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
}
WHOLES = {"type": "array", "items": {"type": "integer"}}
STRING = {"type": "string"}


def box_of(inner: Any) -> dict[str, Any]:
    properties = {"value": inner, "more": {"type": "array", "items": inner}}
    return {"type": "object", "properties": properties, "required": ["value"]}


# hint, its schema, a value, what the function gets
VALUES: list[tuple[Any, Any, Any, Any]] = [
    (Box[int], box_of({"type": "integer"}), {"value": 3.0, "more": [4.0]}, Box(3, [4])),
    (Box[datetime.date], box_of(A_DATE), {"value": WRITTEN}, Box(DATE)),
    (Box[Point], box_of(A_POINT), {"value": {"x": 1}}, Box(Point(1))),
    (list[Box[Box[int]]], None, [{"value": {"value": 1.0}}], [Box(Box(1))]),
    (Box[int] | Box[str], None, {"value": "a"}, Box("a")),
    (Box[int] | None, None, {"value": 3.0}, Box(3)),
    (Shelf[datetime.date], None, {"value": [WRITTEN], "first": WRITTEN}, Shelf([DATE], [], DATE)),
    (WholeBox, None, {"value": 2.0, "label": "a"}, WholeBox(2, [], "a")),
    (Keyed[datetime.date], None, {"value": WRITTEN}, {"value": DATE}),
    (Sized[Point], None, {"value": {"x": 1}}, Sized(Point(1))),
    (Pairs[datetime.date], {"type": "object", "additionalProperties": A_DATE}, {"a": WRITTEN}, {"a": DATE}),
    (Bound, A_POINT, {"x": 1}, Point(1)),
    (list[Bound], {"type": "array", "items": A_POINT}, [{"x": 1}], [Point(1)]),  # type: ignore[valid-type]
    (Either, {"anyOf": [{"type": "integer"}, A_DATE]}, WRITTEN, DATE),
    (T, {}, {"x": 1}, {"x": 1}),
    (Named, None, {"day": WRITTEN, "id": None}, Named(DATE)),
    (Options, None, {"day": WRITTEN, "size": 2.0}, {"day": DATE, "size": 2}),
    (Frozen, {"type": "object", "properties": {"day": A_DATE}, "required": ["day"]}, {"day": WRITTEN}, {"day": DATE}),
    (collections.deque[int], WHOLES, [1.0], collections.deque([1])),
    (collections.OrderedDict[str, Point], None, {"a": {"x": 1}}, collections.OrderedDict(a=Point(1))),
    (collections.Counter[str], {"type": "object"}, {"a": 2}, collections.Counter(a=2)),
    (typing.MutableSequence[Point], {"type": "array", "items": A_POINT}, [{"x": 1}], [Point(1)]),
    (collections.abc.MutableSet[int], {**WHOLES, "uniqueItems": True}, [1.0], {1}),
    (Celsius, {"type": "number"}, 3, Celsius(3)),
    (Day, A_DATE, WRITTEN, Day(2024, 1, 2)),
    (Names, {"type": "array"}, ["a"], Names(["a"])),
    (Table, {"type": "object"}, {"a": 1}, Table(a=1)),
    (Table | None, None, {"a": 1}, Table(a=1)),
    (Day | int, None, WRITTEN, Day(2024, 1, 2)),
    (pathlib.PosixPath, STRING, "/a", pathlib.PosixPath("/a")),
    (ipaddress.IPv4Address, {**STRING, "format": "ipv4"}, "1.2.3.4", ipaddress.IPv4Address("1.2.3.4")),
    (ipaddress.IPv6Network | None, None, "fe80::/10", ipaddress.IPv6Network("fe80::/10")),
    (ipaddress.IPv4Address | str, None, "localhost", "localhost"),
    (dict[ipaddress.IPv4Address, int], None, {"1.2.3.4": 1.0}, {ipaddress.IPv4Address("1.2.3.4"): 1}),
    (fractions.Fraction, STRING, "1/3", fractions.Fraction(1, 3)),
    (zoneinfo.ZoneInfo, STRING, "UTC", zoneinfo.ZoneInfo("UTC")),
    (re.Pattern[str], {**STRING, "format": "regex"}, "a+", re.compile("a+")),
    (Literal[Corner.TOP, "none"], {**STRING, "enum": ["TOP", "none"]}, "TOP", Corner.TOP),
    (Literal[Tone.RED] | None, None, "red", Tone.RED),
    (Literal[b"x"], {}, "x", "x"),
    (dict[bool, int], None, {"true": 1.0}, {True: 1}),
    (dict[Literal[1, 2], int], None, {"1": 1.0}, {1: 1}),
    (Annotated[Box[int], "a box"], {**box_of({"type": "integer"}), "description": "a box"}, {"value": 1.0}, Box(1)),
    (typing.NewType("Size", Annotated[int, pydantic.Field(ge=1)]), {"type": "integer", "minimum": 1}, 2.0, 2),
    (pydantic.AnyUrl, None, "http://a/b", pydantic.AnyUrl("http://a/b")),
    (pydantic.SecretStr, None, "s", pydantic.SecretStr("s")),
    (pydantic.PastDate, A_DATE, WRITTEN, DATE),
    (pydantic.AnyUrl | Literal["none"], None, "none", "none"),
    (typing.LiteralString, STRING, "a", "a"),
]


@pytest.mark.parametrize(("hint", "schema", "given", "expected"), VALUES, ids=str)
async def test_a_hint_is_declared_as_what_it_becomes(hint: Any, schema: Any, given: Any, expected: Any) -> None:
    def tool(value: Any) -> None:
        found.append(value)

    found: list[Any] = []
    tool.__annotations__["value"] = hint
    declared = json.loads(spec(tool).tool.parameters_json)["properties"]["value"]
    result = await run(tool, {"value": given})
    assert result.error is None, result.error
    assert (type(found[0]), found[0]) == (type(expected), expected)
    assert schema is None or declared == schema


async def test_a_default_dict_makes_its_values() -> None:
    def tool(value: collections.defaultdict[str, list[int]]) -> list[int]:
        value["b"].append(2)
        return [*value["a"], *value["b"]]

    assert (await run(tool, {"value": {"a": [1.0]}})).output_json == "[1,2]"


async def test_what_only_the_end_of_construction_gets_is_an_argument_too() -> None:
    async def tool(square: Scaled) -> int:
        return square.area

    schema = json.loads(spec(tool).tool.parameters_json)["properties"]["square"]
    assert (list(schema["properties"]), schema["required"]) == (["side", "scale"], ["side", "scale"])
    assert (await run(tool, {"square": {"side": 2, "scale": 3.0}})).output_json == "6"


async def test_the_aliases_of_a_dataclass_of_pydantic_are_its_arguments() -> None:
    async def tool(value: Aliased) -> int:
        return value.count

    schema = json.loads(spec(tool).tool.parameters_json)["properties"]["value"]
    assert (schema["required"], schema["properties"]["Count"]["minimum"]) == (["Count"], 1)
    assert (await run(tool, {"value": {"Count": 2}})).output_json == "2"


@pytest.mark.parametrize("hint", [Day, ipaddress.IPv4Address, re.Pattern[str], Box[datetime.date], pydantic.AnyUrl])
async def test_a_value_that_does_not_become_what_the_hint_says_is_invalid(hint: Any) -> None:
    def tool(value: Any) -> None:
        raise AssertionError("it ran")

    tool.__annotations__["value"] = hint
    result = await run(tool, {"value": {"value": "("} if hint == Box[datetime.date] else "("})
    assert result.error is not None
    assert (result.error.code.name, "argument 'value'" in result.error.message) == ("INVALID_ARGUMENTS", True)


class Offer:
    def __init__(self) -> None:
        self.base = 5

    def method(self, at: Point, n: int = 2) -> str:
        return f"{self.base} {at} {n}"

    @classmethod
    def of_class(cls, at: Point) -> str:
        return f"{cls.__name__} {at}"

    @staticmethod
    def static(at: Point) -> str:
        return str(at)

    async def waiting(self, at: Point) -> str:
        return str(at)

    async def chunks(self, at: Point) -> AsyncIterator[str]:
        yield "at "
        yield str(at)

    def lines(self, at: Point) -> Iterator[str]:
        yield str(at)

    @functools.lru_cache  # noqa: B019
    def cached(self, n: int) -> int:
        return n + 1

    seventh = functools.partialmethod(method, n=7)

    def __call__(self, at: Point) -> str:
        return str(at)


class Waiting:
    async def __call__(self, at: Point) -> str:
        return str(at)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def later(at: Point) -> Any:
    async def inner() -> str:
        return str(at)

    return inner()


OFFER = Offer()
ONE = "Point(x=1, y=0)"
CALLABLES: dict[str, tuple[Callable[..., Any], str]] = {
    "method": (OFFER.method, f"5 {ONE} 2"),
    "class method": (Offer.of_class, f"Offer {ONE}"),
    "static method": (OFFER.static, ONE),
    "async method": (OFFER.waiting, ONE),
    "async generator": (OFFER.chunks, f"at {ONE}"),
    "generator": (OFFER.lines, ONE),
    "callable": (OFFER, ONE),
    "async callable": (Waiting(), ONE),
    "method of another object": (types.MethodType(Offer.method, OFFER), f"5 {ONE} 2"),
    "wrapped twice": (wrapped(wrapped(OFFER.method)), f"5 {ONE} 2"),
    "wrapped async": (wrapped(OFFER.waiting), ONE),
    "wrapped generator": (wrapped(OFFER.lines), ONE),
    "partial by name": (functools.partial(OFFER.method, n=9), f"5 {ONE} 9"),
    "partial by place": (functools.partial(Offer.method, OFFER), f"5 {ONE} 2"),
    "partial of a partial": (functools.partial(functools.partial(Offer.method, OFFER), n=1), f"5 {ONE} 1"),
    "partial of a callable": (functools.partial(OFFER), ONE),
    "partial async": (functools.partial(OFFER.waiting), ONE),
    "partial method": (OFFER.seventh, f"5 {ONE} 7"),
    "lambda": (lambda at: at["x"], "1"),
    "function that returns a coroutine": (later, ONE),
    "validated by pydantic": (pydantic.validate_call(OFFER.static), ONE),
}


@pytest.mark.parametrize("name", CALLABLES)
async def test_every_kind_of_callable_gets_its_arguments(name: str) -> None:
    function, expected = CALLABLES[name]
    schema = json.loads(spec(function).tool.parameters_json)
    assert (next(iter(schema["properties"])), schema["required"]) == ("at", ["at"])
    result = await run(function, {"at": {"x": 1.0 if name != "lambda" else 1}})
    assert result.error is None, result.error
    assert str(json.loads(result.output_json)) == expected


async def test_a_cached_method_is_a_tool() -> None:
    assert (await run(OFFER.cached, {"n": 1.0})).output_json == "2"


Color = enum.Enum("Color", {"RED": "red"})
RESULTS: list[tuple[Any, Any]] = [
    ({DATE: 1, Color.RED: {uuid.UUID(int=1): 2}}, {WRITTEN: 1, "red": {str(uuid.UUID(int=1)): 2}}),
    ([Box({decimal.Decimal("1.50"): DATE})], [{"value": {"1.50": WRITTEN}, "more": []}]),
    ({1: None, None: 2, False: 3}, {"1": None, "null": 2, "false": 3}),
    (collections.deque([1]), [1]),
    ({"a": 1}.keys(), ["a"]),
    ({"a": 1}.values(), [1]),
    ({"a": range(2)}, {"a": [0, 1]}),
    (collections.UserList([1]), [1]),
    (ipaddress.ip_address("1.2.3.4"), "1.2.3.4"),
    ([fractions.Fraction(1, 3), zoneinfo.ZoneInfo("UTC"), re.compile("a+")], ["1/3", "UTC", "a+"]),
    ({"url": pydantic.AnyUrl("http://a/b")}, {"url": "http://a/b"}),
    ([decimal.Decimal("0.10"), {"a": (decimal.Decimal("1E+30"),)}], ["0.10", {"a": ["1E+30"]}]),
    ([decimal.Decimal("12345678901234567890.12345678901234567890")], ["12345678901234567890.12345678901234567890"]),
]


@pytest.mark.parametrize(("value", "expected"), RESULTS, ids=str)
async def test_a_result_is_written_as_its_argument_would_be(value: Any, expected: Any) -> None:
    async def tool() -> Any:
        return value

    result = await run(tool)
    assert result.error is None, result.error
    assert json.loads(result.output_json) == expected


async def test_the_adapter_of_a_class_is_made_once_for_all_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[type](), pydantic.TypeAdapter

    class Link(pydantic.AnyUrl):
        pass

    def note(kind: type) -> Any:
        made.append(kind)
        return make(kind)

    monkeypatch.setattr(pydantic, "TypeAdapter", note)

    async def tool() -> Any:
        return [Link("http://a/b"), Link("http://a/c")]

    for _ in range(2):
        assert json.loads((await run(tool)).output_json) == ["http://a/b", "http://a/c"]
    assert made == [Link]


async def test_a_secret_is_not_written_out() -> None:
    async def tool() -> Any:
        return {"key": pydantic.SecretStr("hunter2")}

    assert "hunter2" not in (await run(tool)).output_json


@pytest.mark.parametrize("value", [{(1, 2): 1}, {b"a": 1}, memoryview(b"a"), (each for each in "ab"), 1j])
async def test_what_json_cannot_hold_is_still_refused_with_its_place(value: Any) -> None:
    async def tool() -> Any:
        return [value]

    result = await run(tool)
    assert result.error is not None
    assert "output[0]" in result.error.message


def test_the_result_of_a_generic_class_is_declared() -> None:
    def tool() -> Box[datetime.date]:
        raise NotImplementedError

    assert output_schema(tool) == box_of(A_DATE)
