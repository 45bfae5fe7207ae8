from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from toolbus.common.reader import Keys, Reader, UnknownKey, list_unknown, read_file, snake_case
from toolbus.errors import SetupError

KEYS: Keys = {
    "name": ("name", Reader.text),
    "timeout_seconds": ("timeout", Reader.number),
    "timeout_ms": ("timeout", lambda reader: reader.number() / 1000),
    "elsewhere": ("", Reader.text),
}


@pytest.mark.parametrize(
    ("read", "value", "result"),
    [
        (Reader.text, "é", "é"),
        (Reader.flag, False, False),
        (Reader.number, 3, 3.0),
        (Reader.whole, 3.0, 3),
        (Reader.whole, 10**20, 10**20),
        (Reader.names, ["b", "a", "b"], ("b", "a")),
        (partial(Reader.choice, options=("on", "off")), "on", "on"),
    ],
)
def test_a_value_that_keeps_its_rule_is_returned(read: Callable[[Reader], Any], value: Any, result: Any) -> None:
    assert read(Reader(value)) == result


@pytest.mark.parametrize(
    ("read", "value", "sentence"),
    [
        (Reader.text, 1, "a.b is 1, it must be text: put it in quotes"),
        (Reader.text, "\ud800", "it holds half of a surrogate pair"),
        (Reader.flag, 0, "a.b is 0, it must be true or false"),
        (Reader.number, "1", "a.b is '1', it must be a number: write it without quotes"),
        (Reader.whole, "-2.5", "a.b is '-2.5', it must be a whole number: write it without quotes"),
        (Reader.flag, "true", "a.b is 'true', it must be true or false: write it without quotes"),
        (Reader.number, True, "it must be a number"),
        (Reader.number, float("nan"), "it must be a number"),
        (Reader.number, 10**400, "it must be a number"),
        (partial(Reader.number, least=0.5), 0, "it must be a number of at least 0.5"),
        (partial(Reader.whole, least=1, most=1_048_576), 0, "it must be a whole number from 1 to 1048576"),
        (Reader.whole, 1.5, "it must be a whole number"),
        (Reader.whole, float("inf"), "it must be a whole number"),
        (Reader.items, {}, "it must be a list: put [ and ] around it"),
        (Reader.names, ["x", ""], "a.b[1] is '', it must be a name"),
        (Reader.entries, [], "a.b is [], it must be an object"),
        (partial(Reader.choice, options=("on", "off")), [], "it must be one of on, off"),
        (Reader.text, ["x" * 1000], "…, it must be text"),
    ],
)
def test_an_error_names_place_value_rule_and_how_to_fix_it(
    read: Callable[[Reader], Any], value: Any, sentence: str
) -> None:
    with pytest.raises(SetupError) as caught:
        read(Reader(value, "bus.toml", "a.b", ("a", "b")))
    assert str(caught.value).startswith("bus.toml: a.b")
    assert sentence in str(caught.value)
    assert caught.value.loc[:2] == ("a", "b")


@pytest.mark.parametrize(("read", "value"), [(Reader.number, "soon"), (Reader.whole, ""), (Reader.flag, "yes")])
def test_a_text_that_would_not_fit_without_quotes_either_is_not_said_to_have_them(
    read: Callable[[Reader], Any], value: str
) -> None:
    with pytest.raises(SetupError, match=r"(number|true or false)$"):  # perhaps of a variable, which has no quotes
        read(Reader(value, "TOOLBUS_X"))


def test_places_follow_lists_and_objects_and_a_label_goes_behind_them() -> None:
    (item,) = Reader({"members": [{"name": 7}]}, "file").entries()["members"].items()
    with pytest.raises(SetupError, match=r"^file: members\[0\] 'Ann': name is 7, it must be text") as caught:
        item.labelled("'Ann'").record(KEYS)
    assert caught.value.loc == ("members", 0, "name")


def test_each_spelling_sets_its_field_and_null_sets_none() -> None:
    assert Reader({"timeoutMs": 500, "name": None, "elsewhere": 1}).record(KEYS, snake_case) == {"timeout": 0.5}


def test_two_keys_that_set_one_field_are_refused() -> None:
    with pytest.raises(SetupError, match="keep one of timeout_ms and timeout_seconds"):
        Reader({"timeout_ms": 1, "timeout_seconds": 1}).record(KEYS)


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(SetupError) as caught:
        Reader({"limits": {"nam": 1}}, "bus.toml").entries()["limits"].record(KEYS)
    known = "elsewhere, name, timeout_ms, timeout_seconds"
    assert str(caught.value) == f"bus.toml: unknown key limits.nam (did you mean name?); known are {known}"


def test_unknown_keys_are_collected_where_they_may_be_ignored() -> None:
    unknown: list[UnknownKey] = []
    assert Reader({"list": [{"x\ny": 1, "nme": 2}]}, unknown=unknown).entries()["list"].items()[0].record(KEYS) == {}
    assert list_unknown(unknown) == r"list[0].x\ny, list[0].nme (did you mean name?)"
    assert list_unknown(unknown * 10).endswith(" and 12 more")


def test_an_error_in_a_file_names_the_file_and_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("name = 1")
    with pytest.raises(SetupError, match=r"a\.toml: name is 1") as caught:
        read_file(tmp_path / "a.toml", lambda content: Reader(content).record(KEYS))
    assert caught.value.loc == ("name",)
