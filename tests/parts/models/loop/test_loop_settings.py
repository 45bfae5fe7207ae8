"""Tests the settings of a loop, and what an import of the loop loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toolbus.loop
from toolbus.errors import SetupError
from toolbus.loop import SYNCHRONET, LoopSettings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds is 0, it must be a whole number of at least 1"),
        ({"max_parallel": 0}, "max_parallel is 0"),
        ({"max_calls": 0}, "max_calls is 0"),
        ({"repeats": -1}, "repeats is -1"),
        ({"extension_most": 21}, "extension_most is 21, it must be a whole number from 1 to 20"),
        ({"rounds_most": 26}, "rounds_most is 26, it must be a whole number from 1 to 25"),
        ({"call_timeout": 0}, "call_timeout is 0"),
        ({"call_timeout": 301}, "at most 300"),
        ({"call_timeout": float("nan")}, "call_timeout is nan"),
        ({"list_timeout": 0}, "list_timeout is 0"),
        ({"max_tools": 7}, "max_tools is 7, it must be 8 or more"),
        ({"max_tools": -1}, "max_tools is -1"),
        ({"rounds": "3"}, "rounds is '3', it must be a whole number of at least 1: write it without quotes"),
        ({"list_timeout": None}, "list_timeout is None, it must be a number"),
        ({"needs_approval": True}, "needs_approval is True: give a function that takes a tool"),
        ({"may_route": None}, "may_route is None: give a function"),
        ({"forced_answer": False}, "no_convergence_text: set it"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_an_error_with_its_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        LoopSettings(**options)


def test_by_default_there_are_three_rounds_and_a_forced_answer() -> None:
    assert (LoopSettings().rounds, LoopSettings().forced_answer, LoopSettings().extension) == (3, True, False)


def test_synchronets_texts_are_its_own() -> None:
    assert SYNCHRONET.no_summary_text == (
        "(I got the data but did not produce a summary -- try rephrasing the question.)"
    )
    assert (SYNCHRONET.rounds, SYNCHRONET.forced_answer, SYNCHRONET.max_parallel) == (4, False, 1)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no public name 'ToolLop'; it has ToolLoop"):
        toolbus.loop.ToolLop  # noqa: B018


def test_importing_the_loop_loads_no_provider_and_nothing_of_the_server() -> None:
    heavy = ["openai", "anthropic", "google.genai", "ollama", "grpc", "orjson", "jsonschema_rs", "toolbus.bus"]
    script = (
        "import sys; from toolbus.loop import ToolLoop, endpoint_of, LoopSettings, source_of; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[4], timeout=30
    )
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")
