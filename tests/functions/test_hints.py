"""Schemas from hints and docstrings, and the way back from JSON to the hinted types."""

import collections
import datetime
import decimal
import enum
import pathlib
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, Union

import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from toolbus.functions import hints
from toolbus.functions.conversion import converter
from toolbus.functions.hints import description_of, parameters_schema, signature_of
from toolbus.functions.scope import ToolScope
from toolbus.functions.type_hints import DECIMAL_TEXT

if typing.TYPE_CHECKING:
    from decimal import Decimal

EMPTY = {"type": "object", "properties": {}}


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Odd(enum.Enum):
    THING = object()


@dataclass
class Place:
    """A place.

    Attributes:
        city: its city.
    """

    city: str
    tags: list[str] = field(default_factory=list)
    near: "list[Place] | None" = None


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Point(NamedTuple):
    x: float
    y: float = 0.0


class Bound:
    """Looks like `annotated_types.Ge`."""

    ge = 1


@dataclass
class Tree:
    name: str
    below: "list[Tree]" = field(default_factory=list)


@dataclass
class Egg:
    hen: "Hen | None" = None


@dataclass
class Hen:
    egg: Egg


class OlderMovie(typing_extensions.TypedDict):
    year: int


Alias = typing_extensions.TypeAliasType("Alias", list[int])
UserId = typing.NewType("UserId", int)
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "its city."},
        "tags": {"type": "array", "items": {"type": "string"}},
        "near": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Place"}}, {"type": "null"}]},
    },
    "required": ["city"],
}

HINTS: list[tuple[Any, dict[str, Any]]] = [
    (str, {"type": "string"}),
    (int, {"type": "integer"}),
    (float, {"type": "number"}),
    (bool, {"type": "boolean"}),
    (None, {"type": "null"}),
    (Any, {}),
    (object, {}),
    (bytes, {"type": "string", "contentEncoding": "base64"}),
    (datetime.timedelta, {"type": "string", "format": "duration"}),
    (decimal.Decimal, {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL_TEXT}]}),
    (Callable[[int], int], {}),
    (typing.TypeVar("T"), {}),
    (UserId, {"type": "integer"}),
    (list, {"type": "array"}),
    (list[int], {"type": "array", "items": {"type": "integer"}}),
    (Sequence[str], {"type": "array", "items": {"type": "string"}}),
    (set[str], {"type": "array", "uniqueItems": True, "items": {"type": "string"}}),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
    (
        tuple[int, str],
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
    ),
    (tuple[()], {"type": "array", "minItems": 0, "maxItems": 0}),
    (dict, {"type": "object"}),
    (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
    (dict[str, Any], {"type": "object"}),
    (
        Mapping[str, list[int]],
        {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
    ),
    (collections.OrderedDict, {"type": "object"}),
    (typing.Dict, {"type": "object"}),  # noqa: UP006  # the older spelling, without parameters; so the next two
    (typing.Mapping, {"type": "object"}),
    (typing.Tuple, {"type": "array"}),  # noqa: UP006
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
    (Literal[1, None], {"enum": [1, None]}),
    (Color, {"type": "string", "enum": ["red", "green"]}),
    (Level, {"type": "integer", "enum": [1, 2]}),
    (Odd, {"type": "string", "enum": ["THING"]}),
    (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    (Union[str, int], {"anyOf": [{"type": "string"}, {"type": "integer"}]}),  # noqa: UP007  # the older spelling
    (int | Any, {}),
    (Annotated[str, "A city."], {"type": "string", "description": "A city."}),
    (Annotated[int, {"minimum": 1, "maximum": 9}], {"type": "integer", "minimum": 1, "maximum": 9}),
    (Annotated[int, Bound()], {"type": "integer", "minimum": 1}),
    (datetime.date, {"type": "string", "format": "date"}),
    (uuid.UUID, {"type": "string", "format": "uuid"}),
    (pathlib.Path, {"type": "string"}),
    (
        Movie,
        {
            "type": "object",
            "properties": {"title": {"type": "string"}, "year": {"type": "integer"}},
            "required": ["title"],
        },
    ),
    (
        Point,
        {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]},
    ),
]


@pytest.mark.parametrize(("hint", "schema"), HINTS, ids=lambda each: str(each)[:40])
def test_each_hint_has_its_schema(hint: Any, schema: dict[str, Any]) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = hint
    assert parameters_schema(tool) == {"type": "object", "properties": {"value": schema}, "required": ["value"]}


def test_a_class_that_contains_itself_is_a_definition() -> None:
    def tool(value: Place, other: list[Egg]) -> None: ...

    schema = parameters_schema(tool)
    assert schema["properties"]["value"] == {"$ref": "#/$defs/Place"}
    assert schema["$defs"]["Place"] == PLACE
    assert schema["$defs"]["Egg"]["properties"]["hen"]["anyOf"][0]["properties"]["egg"] == {"$ref": "#/$defs/Egg"}
    assert schema["$defs"].keys() == {"Place", "Egg"}


def test_defaults_keyword_only_and_variadic_parameters_have_schemas_of_their_own() -> None:
    def tool(a: int, b: str = "x", *rest: int, c: bool, d: Color = Color.RED, e: str = None, **more: int) -> None:  # type: ignore[assignment]  # noqa: RUF013
        ...

    assert parameters_schema(tool) == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string", "default": "x"},
            "c": {"type": "boolean"},
            "d": {"type": "string", "enum": ["red", "green"], "default": "red"},
            "e": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["a", "c"],
        "additionalProperties": {"type": "integer"},
    }
    assert signature_of(tool).any_keyword


def test_a_default_that_json_cannot_hold_is_left_out() -> None:
    def tool(a: Any = object(), b: float = float("inf")) -> None: ...  # noqa: B008

    assert parameters_schema(tool) == {"type": "object", "properties": {"a": {}, "b": {"type": "number"}}}


def no_hints(a, b=1, *args, **kwargs): ...  # type: ignore[no-untyped-def]


class Holder:
    def method(self, city: str) -> None: ...

    def __call__(self, city: str) -> None: ...


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("function", "schema"),
    [
        (no_hints, EMPTY),
        (lambda **_: None, EMPTY),
        (dict.get, EMPTY),
        (print, EMPTY),
        (lambda x, y=2: None, {"type": "object", "properties": {"x": {}, "y": {"default": 2}}, "required": ["x"]}),
        (Holder.method, CITY),
        (Holder().method, CITY),
        (Holder(), CITY),
        (
            partial(Holder().method, city="Oslo"),
            {"type": "object", "properties": {"city": {"type": "string", "default": "Oslo"}}},
        ),
    ],
)
def test_every_kind_of_callable_can_be_read(function: Callable[..., Any], schema: dict[str, Any]) -> None:
    assert parameters_schema(function) == schema


def test_one_hint_that_cannot_be_resolved_leaves_the_others() -> None:
    def tool(a: "Missing", b: int, c: "Decimal | None" = None) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert parameters_schema(tool) == {
        "type": "object",
        "properties": {"a": {}, "b": {"type": "integer"}, "c": {"default": None}},
        "required": ["a", "b"],
    }


def test_postponed_annotations_work() -> None:
    names: dict[str, Any] = {}
    source = (
        "from __future__ import annotations\nfrom typing import *\ndef tool(a: Annotated[int, 'n'], b: str | None): ..."
    )
    exec(compile(source, "author.py", "exec"), names)
    properties = parameters_schema(names["tool"])["properties"]
    assert properties == {
        "a": {"type": "integer", "description": "n"},
        "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }


def annotated(city: str, scope: ToolScope) -> None: ...
def optional(city: str, scope: ToolScope | None = None) -> None: ...
def spelled(city: str, scope: "sdk.ToolScope") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def described(city: str, scope: Annotated[ToolScope, "of the call"]) -> None: ...
def described_in_union(city: str, scope: Annotated[ToolScope, "of the call"] | None = None) -> None: ...
def spelled_in_brackets(city: str, scope: "sdk.ToolScope | None" = None) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def by_name(city: str, ctx) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("function", "scope"),
    [
        *((each, "scope") for each in (annotated, optional, spelled, described, described_in_union)),
        (spelled_in_brackets, "scope"),
        (by_name, "ctx"),
    ],
)
def test_the_injected_parameter_is_no_argument(function: Callable[..., Any], scope: str) -> None:
    assert parameters_schema(function) == CITY
    assert signature_of(function).scope == scope


def test_a_hinted_ctx_is_an_ordinary_argument() -> None:
    def tool(ctx: str) -> None: ...

    assert parameters_schema(tool)["required"] == ["ctx"]
    assert signature_of(tool).scope == ""


GOOGLE = """Looks up the weather
in a city.

More that models need not read.

Args:
    city (str): the city,
        in any language.
    days: how many: 1 to 7
    *rest: more.

Returns:
    city: not a parameter.
"""
REST = """Looks up the weather in a city.

:param str city: the city,
    in any language.
:param days: how many: 1 to 7
:returns: something
"""
NUMPY = """Looks up the weather in a city.

Parameters
----------
city : str
    the city,
    in any language.
days
    how many: 1 to 7

Returns
-------
city
    not a parameter.
"""


@pytest.mark.parametrize("text", [GOOGLE, REST, NUMPY], ids=["google", "rest", "numpy"])
def test_each_layout_of_docstrings_gives_summary_and_parameters(text: str) -> None:
    parsed = hints.parse(text)
    assert parsed.summary == "Looks up the weather in a city."
    assert {key: parsed.parameters[key] for key in ("city", "days")} == {
        "city": "the city, in any language.",
        "days": "how many: 1 to 7",
    }
    assert "not a parameter" not in str(parsed.parameters)


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (None, ""),
        ("", ""),
        ("One line.", "One line."),
        ("Args:\n    a: b", ""),
        ("Does it.\nArgs:\n    a: b", "Does it."),
    ],
)
def test_a_docstring_may_be_short(text: str | None, summary: str) -> None:
    assert hints.parse(text).summary == summary


def test_a_chinese_docstring_is_read() -> None:
    parsed = hints.parse("查询天气。\n\n参数：\n    city：城市名")
    assert (parsed.summary, dict(parsed.parameters)) == ("查询天气。", {"city": "城市名"})


@given(st.text(alphabet=st.sampled_from("ab:- \n\t*(),Args:param"), max_size=200))
def test_no_docstring_makes_the_reader_fail(text: str) -> None:
    hints.parse(text)


def test_descriptions_reach_the_schema_and_annotated_wins() -> None:
    def tool(city: str, days: Annotated[int, "From the hint."]) -> None: ...

    tool.__doc__ = GOOGLE
    properties = parameters_schema(tool)["properties"]
    assert properties["city"]["description"] == "the city, in any language."
    assert properties["days"]["description"] == "From the hint."
    assert description_of(tool) == "Looks up the weather in a city."
    assert description_of(partial(tool, city="Oslo")) == "Looks up the weather in a city."


@pytest.mark.parametrize(
    "hint",
    [
        str,
        float,
        bool,
        Any,
        list[str],
        dict[str, str],
        typing.Dict,  # noqa: UP006
        str | None,
        Literal["a"],
        list,
        int | float,
        {"not": "a hint"},
    ],
)
def test_hints_that_json_satisfies_need_no_converter(hint: Any) -> None:
    assert converter(hint) is None


@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        (Color, "red", Color.RED),
        (Color | None, None, None),
        (Annotated[Color, "x"], "green", Color.GREEN),
        (Odd, "THING", Odd.THING),
        (list[Color], ["red"], [Color.RED]),
        (dict[str, Level], {"a": 2}, {"a": Level.HIGH}),
        (set[int], [1, 2], {1, 2}),
        (tuple[int, Color], [1, "red"], (1, Color.RED)),
        (tuple[int, ...], [1, 2], (1, 2)),
        (Place, {"city": "Oslo"}, Place("Oslo")),
        (Point, {"x": 1}, Point(1)),
        (Movie, {"title": "M"}, {"title": "M"}),
        (datetime.date, "2024-02-03", datetime.date(2024, 2, 3)),
        (set[int], "not a list", "not a list"),
        (Place, None, None),
        (Tree, {"name": "a", "below": [{"name": "b"}]}, Tree("a", [Tree("b")])),
        (Egg, {"hen": {"egg": {}}}, Egg(Hen(Egg()))),
        (int | Color, "red", Color.RED),
        (Place | str, {"city": "Oslo"}, Place("Oslo")),
        (Place | str, "Oslo", "Oslo"),
        (list[Place] | Place | None, [{"city": "Oslo"}], [Place("Oslo")]),
        (Place | Movie, {"title": "M"}, {"title": "M"}),  # which one is meant is a guess
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (dict[Color, int], {"red": 1.0}, {Color.RED: 1}),
        (dict[Level, str], {"2": "b"}, {Level.HIGH: "b"}),
        (dict[datetime.date, Any], {"2024-02-03": None}, {datetime.date(2024, 2, 3): None}),
        (Literal[Color.RED], "red", Color.RED),
        (OlderMovie, {"year": 1999.0}, {"year": 1999}),
        (Alias, [3.0], [3]),
    ],
)
def test_arguments_arrive_as_their_hints_say(hint: Any, given: Any, expected: Any) -> None:
    convert = converter(hint)
    assert (convert(given) if convert else given) == expected


@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        (int, 3.0, 3),
        (int | None, -3.0, -3),
        (list[int], [1, 2.0], [1, 2]),
        (dict[str, int], {"a": 5.0}, {"a": 5}),
        (int, 3.5, 3.5),  # the schema refuses it
        (int, "3", "3"),
        (int, True, True),
        (float, 3, 3),
        (int | str, 3.0, 3),
        (int | float, 3.0, 3.0),
        (int | float, 3, 3),
        (Literal[1, 2, "a"], 2.0, 2),
        (Literal[1, 2, "a"], "a", "a"),
        (Literal[1, True], True, True),
        (Movie, {"title": "M", "year": 1999.0}, {"title": "M", "year": 1999}),
        (Point, {"x": 1, "y": 2}, Point(1, 2)),
    ],
)
def test_a_whole_number_that_is_written_as_a_fraction_arrives_as_an_int(hint: Any, given: Any, expected: Any) -> None:
    convert = converter(hint)
    assert repr(convert(given) if convert else given) == repr(expected)


def test_a_value_outside_an_enum_is_refused_with_the_choices() -> None:
    convert = converter(Color)
    assert convert is not None
    with pytest.raises(ValueError, match="'blue' is not one of 'red', 'green'"):
        convert("blue")
    with pytest.raises(ValueError, match="'blue' is not one of 'red', 'green'"):
        converter(dict[Color, int])({"blue": 1})  # type: ignore[misc]


def test_a_model_class_brings_its_own_schema_and_checks() -> None:
    pydantic = pytest.importorskip("pydantic")
    Inner = pydantic.create_model("Inner", n=(int, ...))
    Outer = pydantic.create_model("Outer", inner=(Inner, ...))

    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = Outer
    schema = parameters_schema(tool)
    assert schema["properties"]["value"]["properties"]["inner"] == {"$ref": "#/$defs/Inner"}
    assert "Inner" in schema["$defs"]
    convert = converter(Outer)
    assert convert is not None
    assert convert({"inner": {"n": 3}}).inner.n == 3
