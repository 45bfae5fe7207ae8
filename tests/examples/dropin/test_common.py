"""Tests how arguments are read and answers are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.examples.dropin.conftest import Folder


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        *((None, 20), (7, 7), ("7", 7), (7.0, 7), (" 8 ", 8)),
        *((-3, 1), (51, 50), (10**30, 50)),
        *(("many", 20), ([], 20), (2.5, 20), (math.inf, 20), (math.nan, 20), ("inf", 20), (False, 1), (0, 1)),
    ],
    ids=repr,
)
def test_a_limit_is_clamped(folder: Folder, asked: Any, given: int) -> None:
    assert folder.modules["_common"].limit_of({"limit": asked}, 20, 50) == given


@pytest.mark.parametrize("value", [None, "", False, 0, "  ", []], ids=repr)
def test_empty_values_of_models_count_as_missing(folder: Folder, value: Any) -> None:
    assert folder.modules["_common"].text_of({"a": value}, "a") == ""
    assert folder.modules["_common"].wrong_mode({"a": value}, "tool", ("mode", "x"), {"a": ("y",)}) is None


def test_an_argument_of_another_mode_is_refused_with_what_to_do(folder: Folder) -> None:
    refusal = folder.modules["_common"].wrong_mode({"a": "b"}, "tool", ("mode", "x"), {"a": ("y", "z")})
    assert refusal == {
        "error": "`a` does not go with mode='x'. Call tool again with mode='y' or mode='z' and the same `a`, or leave "
        "`a` out."
    }


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        *(("ssh", ["ssh"]), ("SSH", ["ssh"]), ("sh", ["ssh", "sshell"]), ("my sshell here", ["ssh", "sshell"])),
        *(("ab", ["ab"]), ("tab", ["tabs"]), ("xabx", []), ("nothing", [])),
    ],
)
def test_a_name_is_matched_exactly_then_inside_then_around(folder: Folder, wanted: str, found: list[str]) -> None:
    names = ["ssh", "sshell", "ab", "tabs"]
    assert folder.modules["_common"].matching(names, wanted, lambda name: [name]) == found


def test_a_list_says_how_many_there_are_and_how_many_are_shown(folder: Folder) -> None:
    cut = folder.modules["_common"].cut
    assert cut([1, 2, 3], 2, "rows") == {"count": 3, "shown": 2, "rows": [1, 2]}
    assert cut([1], 2, "rows", counted_as="total") == {"total": 1, "shown": 1, "rows": [1]}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1_288_490_189, "1.2 GiB"), (2**60, "1048576.0 TiB")],
)
def test_sizes_are_short_texts(folder: Folder, size: int, text: str) -> None:
    assert folder.modules["_common"].size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"),
        (0.0123, "12 ms"),
        (5, "5 s"),
        (150, "2 min"),
        (7200, "2 h"),
        (172_800, "2 days"),
        (10**7, "116 days"),
    ],
)
def test_lengths_of_time_are_short_texts(folder: Folder, seconds: float, text: str) -> None:
    assert folder.modules["_common"].span_text(seconds) == text


@pytest.mark.parametrize(
    ("level", "may"), [(90, True), (255, True), ("90", True), (89, False), (None, False), ("operator", False)]
)
def test_the_level_of_the_host_makes_an_operator(folder: Folder, level: Any, may: bool) -> None:
    assert folder.modules["_common"].is_operator({"level": level}) is may


@pytest.mark.parametrize("value", ["ann, bob,,", ["ann", " bob "]])
def test_names_come_as_a_list_or_as_a_text_with_commas(folder: Folder, value: Any) -> None:
    assert folder.modules["_common"].names_in({"users": value}, "users") == ["ann", "bob"]
    assert folder.modules["_common"].names_in({}, "users") == []
