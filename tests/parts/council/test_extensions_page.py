"""The tables of the guides for councils and for those who move from Spindle are those of the code."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import listed
from tests.parts.council import test_spindle_differences
from toolbus.extension import (
    CouncilCompleted,
    CouncilEvent,
    CouncilSettings,
    CouncilStarted,
    Member,
    MemberDone,
    SidecarSettings,
    ToolsFailed,
    bundled_prompt_tools,
)
from toolbus.functions.scope import ToolScope
from toolbus.parts.council import settings
from toolbus.parts.council.council import MAX_PARALLEL
from toolbus.parts.council.deliberation import MAX_CHATS, MAX_ENTRIES_PER_CHAT, MAX_ENTRY_CHARACTERS
from toolbus.parts.council.settings import ATTEMPTS
from toolbus.parts.extension.extension import ToolInvocation

START = Path(__file__).parents[3] / "docs" / "start"
PAGE = "\n".join((START / f"{page}.md").read_text("utf-8") for page in ("extensions", "councils", "council-settings"))
SPINDLE = (Path(__file__).parents[3] / "docs" / "moving" / "spindle.md").read_text("utf-8")
ANN = Member("m1", "Ann")
EVENTS: tuple[CouncilEvent, ...] = (
    CouncilStarted("r", "c", 1),
    MemberDone("r", "c", ANN, ()),
    CouncilCompleted("r", "c", 1.0, 1),
    ToolsFailed("r", "c", (), 0),
)


def names(cells: Iterable[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize(
    ("before", "record"), [("# Settings of a council", CouncilSettings), ("toolbus[council]", SidecarSettings)]
)
def test_the_page_lists_every_setting_with_its_default(before: str, record: Any) -> None:
    listing = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in listed(PAGE, before)}
    assert listing == {each.name: each.default for each in fields(record) if each.default is not MISSING}
    assert len(listing) == len(fields(record))


def test_the_page_lists_every_time_that_a_program_can_change() -> None:
    listing = {row[0].strip("`"): float(row[1]) for row in listed(PAGE, "## Times and tokens")}
    assert listing == {each.name: each.default for each in fields(settings.CouncilTimings)}


def test_the_page_has_the_tokens_of_a_plan() -> None:
    numbers = f"{settings.PLAN_TOKENS_PER_SECOND} tokens for each second of the tool's timeout, "
    assert f"{numbers}{settings.LEAST_PLAN_TOKENS} at least" in " ".join(PAGE.split())


def test_the_page_lists_every_event_with_its_fields() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(CouncilEvent))
    for event, (kind, name, keys) in zip(EVENTS, listed(PAGE, "`on_event` of `run` gets:"), strict=True):
        described = event.described()
        assert (kind, name) == (f"`{type(event).__name__}`", f"`{described.pop('event')}`")
        assert names([keys]) == [key for key in described if key not in ("generationId", "chatId")]


def test_the_page_lists_every_key_of_an_invocation_and_of_a_member() -> None:
    listing = listed(PAGE, "### What the host sets")
    call = ToolInvocation.of({}, ToolScope())
    assert names(row[0] for row in listing if row[1]) == list(call)
    assert names(row[1] or row[0] for row in listing) == [each.name for each in fields(ToolInvocation)]
    (of_member,) = (row[2] for row in listing if row[0] == "`councilMember`")
    assert names([of_member]) == list(ANN.described())


def test_every_defect_of_the_table_has_its_test() -> None:
    tested = set(re.findall(r"test_defect_(\d+)_", " ".join(vars(test_spindle_differences))))
    assert set(re.findall(r"^(\d+)\. ", SPINDLE.partition("## What differs")[2], re.MULTILINE)) == tested


@pytest.mark.parametrize(
    ("sentence", "number"),
    [
        (r"at most (\d+) run at a time", MAX_PARALLEL),
        (r"cut to ([\d,]+)\s+characters", MAX_ENTRY_CHARACTERS),
        (r"a chat has at most (\d+) entries", MAX_ENTRIES_PER_CHAT),
        (r"for the ([\d,]+) chats", MAX_CHATS),
    ],
)
def test_the_numbers_of_the_page_are_those_of_the_code(sentence: str, number: int) -> None:
    assert [int(found.replace(",", "")) for found in re.findall(sentence, " ".join(PAGE.split()))] == [number]


def test_the_numbers_in_the_text_of_the_page_are_true() -> None:
    words = {"ten": len(bundled_prompt_tools()), "three times in all": ATTEMPTS, "twelve": len(ANN.described())}
    assert words == {"ten": 10, "three times in all": 3, "twelve": 12}
    assert all(word in " ".join(PAGE.split()) for word in words)
