"""Which member of a union a value becomes, and the declarations that do not say it."""

import datetime
import decimal
import enum
import pathlib
import typing
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest

from tests.functions.runner_cases import run
from toolbus.errors import Code, Stage
from toolbus.functions.conversion import AmbiguousUnion, converter
from toolbus.functions.tool_spec import describe, spec_of


@dataclass
class ByMail:
    address: str
    subject: str = ""


@dataclass
class ByPhone:
    number: str


@dataclass
class Cat:
    name: str
    kind: Literal["cat"] = "cat"


@dataclass
class Dog:
    name: str
    kind: Literal["dog"] = "dog"


@dataclass
class Count:
    value: int


@dataclass
class Label:
    value: str


@dataclass
class Node:
    left: "Node | Leaf"


@dataclass
class Leaf:
    size: int


class Size(NamedTuple):
    width: int
    height: int


class Options(TypedDict):
    depth: int


class Color(enum.Enum):
    RED = "red"


class Fruit(enum.Enum):
    APPLE = "apple"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Order:
    pets: list[Cat | Dog]
    to: ByMail | ByPhone | None = None


A_UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")
DAY = datetime.date(2024, 2, 3)
MOMENT = datetime.datetime(2024, 2, 3, 4, 5)
HEX = "0123456789abcdef0123456789abcdef"

VALUES: list[tuple[Any, Any, Any]] = [
    (ByMail | ByPhone, {"address": "a@b"}, ByMail("a@b")),
    (ByMail | ByPhone, {"number": "1"}, ByPhone("1")),
    (ByPhone | ByMail | None, {"address": "a", "subject": "s"}, ByMail("a", "s")),
    (Cat | Dog, {"name": "x", "kind": "dog"}, Dog("x")),
    (list[Cat | Dog], [{"name": "x", "kind": "dog"}, {"name": "y", "kind": "cat"}], [Dog("x"), Cat("y")]),
    (dict[str, Cat | Dog], {"a": {"name": "x", "kind": "cat"}}, {"a": Cat("x")}),
    (list[ByMail] | list[ByPhone], [{"number": "1"}], [ByPhone("1")]),
    (tuple[Cat | Dog, int], [{"name": "x", "kind": "dog"}, 1.0], (Dog("x"), 1)),
    (Count | Label, {"value": 3}, Count(3)),
    (Count | Label, {"value": "3"}, Label("3")),
    (Size | ByPhone, {"width": 1.0, "height": 2}, Size(1, 2)),
    (Options | ByPhone, {"depth": 2.0}, {"depth": 2}),
    (ByPhone | dict[str, Any], {"number": "1"}, ByPhone("1")),
    (ByPhone | dict[str, Any], {"other": 1}, {"other": 1}),
    (Node | Leaf, {"left": {"left": {"size": 1}}}, Node(Node(Leaf(1)))),
    (
        Order,
        {"pets": [{"name": "x", "kind": "dog"}], "to": {"number": "1"}},
        Order([Dog("x")], ByPhone("1")),
    ),
    (Literal["auto"] | Color, "red", Color.RED),
    (Literal["auto"] | Color, "auto", "auto"),
    (Color | Fruit, "apple", Fruit.APPLE),
    (Color | str, "blue", "blue"),
    (int | Level, 1, Level.LOW),
    (int | Level, 7.0, 7),
    (datetime.datetime | datetime.date, "2024-02-03", DAY),
    (datetime.date | datetime.datetime, "2024-02-03T04:05:00", MOMENT),
    (datetime.date | str, "tomorrow", "tomorrow"),
    (datetime.date | str, "2024-02-03", DAY),
    (datetime.date | Literal["today"], "today", "today"),
    (uuid.UUID | str, str(A_UUID), A_UUID),
    (uuid.UUID | str, HEX, HEX),
    (uuid.UUID | int | None, str(A_UUID), A_UUID),
    (pathlib.Path | str, "a/b", pathlib.Path("a/b")),
    (list[datetime.date] | datetime.date, ["2024-02-03"], [DAY]),
    (datetime.timedelta | str, "PT90S", datetime.timedelta(seconds=90)),
    (decimal.Decimal | None, "2.50", decimal.Decimal("2.50")),
    (list[int] | list[str], ["a"], ["a"]),
    (list[str] | set[str], ["a"], ["a"]),
]


@pytest.mark.parametrize(("hint", "given", "expected"), VALUES, ids=str)
def test_a_value_becomes_the_member_that_it_fits(hint: Any, given: Any, expected: Any) -> None:
    convert = converter(hint)
    found = convert(given) if convert else given
    assert (type(found), found) == (type(expected), expected)


def test_a_path_or_text_stays_text_where_the_union_says_so_first() -> None:
    convert = converter(str | None)
    assert convert is None


@dataclass
class City:
    name: str


@dataclass
class Country:
    name: str
    code: str = ""


class Amount(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("hint", "names"),
    [
        (City | Country, ("City", "Country")),
        (list[City | Country], ("City", "Country")),
        (list[City] | list[Country], ("City", "Country")),
        (dict[str, City] | dict[str, Country], ("City", "Country")),
        (City | Country | None, ("City", "Country")),
        (Color | Amount, ("Color", "Amount")),
        (Literal["red"] | Color, ("Color", "red")),
        (bytes | pathlib.Path, ("bytes", "Path")),
        (set[int] | frozenset[int], ("set", "frozenset")),
    ],
    ids=str,
)
def test_a_union_of_which_two_members_fit_is_refused_where_the_tool_is_declared(hint: Any, names: Any) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = hint
    with pytest.raises(TypeError, match="tool 'tool': argument 'value': a value can fit both") as caught:
        spec_of(tool, describe(tool))
    assert all(name in str(caught.value) for name in names)


def test_a_union_within_a_class_is_judged_too() -> None:
    @dataclass
    class Trip:
        places: list[City | Country] = field(default_factory=list)

    Trip.__annotations__["places"] = list[City | Country]
    with pytest.raises(AmbiguousUnion, match="City and Country"):
        converter(Trip)


async def test_a_value_that_fits_no_member_is_refused_before_the_function_runs() -> None:
    def tool(pet: Cat | Dog) -> str:
        raise AssertionError("it ran")

    result = await run(tool, {"pet": {"name": "x"}})
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (Code.INVALID_ARGUMENTS, Stage.NOT_DISPATCHED)
    assert "fits none of Cat (name), Dog (name): set 'kind' to say which" in result.error.message


def test_models_are_told_apart_by_their_discriminator_and_their_fields() -> None:
    pydantic = pytest.importorskip("pydantic")

    Tea = pydantic.create_model("Tea", kind=(Literal["tea"], "tea"), sugar=(int, 0))
    Milk = pydantic.create_model("Milk", kind=(Literal["milk"], ...), fat=(float, 3.5))
    Bread = pydantic.create_model("Bread", flour=(str, ...))
    drink = typing.cast(Any, Annotated)[Tea | Milk, pydantic.Field(discriminator="kind")]
    for hint in (drink, drink | None, Tea | Milk | Bread):
        convert = converter(hint)
        assert convert is not None
        assert convert({"kind": "milk", "fat": 1}) == Milk(kind="milk", fat=1.0)
        assert convert({"kind": "tea"}) == Tea()
    Water = pydantic.create_model("Water", kind=(Literal["water"], "water"), bubbles=(bool, False))
    either = converter(Tea | Water)
    assert either is not None
    assert either({"kind": "water"}) == Water()
    for told in ({"bubbles": True}, {}):  # a tea without the bubbles would be a wrong success
        with pytest.raises(ValueError, match="set 'kind' to say which"):
            either(told)
    both = converter(Bread | ByPhone)
    assert both is not None
    assert both({"flour": "rye", "more": 1}) == Bread(flour="rye")
    assert both({"number": "1"}) == ByPhone("1")
    with pytest.raises(ValueError, match="flour"):
        both({"flour": 3})
    alike = pydantic.create_model("Alike", flour=(str, ...), salt=(bool, False))
    with pytest.raises(AmbiguousUnion, match="Bread and Alike"):
        converter(Bread | alike)
