from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolbus.parts import council
from toolbus.parts.council.prompt_tool import PromptTool, bundled_prompt_tools, instructions, read_prompt_tools
from toolbus.parts.council.settings import CouncilSettings, Member

FOLDER = Path(str(council.__file__)).parent / "bundled"
TOOLS = bundled_prompt_tools()


def test_ten_tools_are_bundled_without_a_problem() -> None:
    assert {tool.name for tool in TOOLS} == {
        "suggest_direction",
        "analyze_character",
        "propose_twist",
        "voice_concern",
        "highlight_opportunity",
        "worldbuilding_note",
        "prose_guardian",
        "style_adherence",
        "historical_accuracy",
        "detect_expression",
    }
    read = read_prompt_tools(FOLDER)
    assert read.problems + read.warnings == ()


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_each_file_is_named_after_its_tool(file: Path) -> None:
    assert file.name == json.loads(file.read_text("utf-8"))["name"] + ".json"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_each_prompt_is_short_and_says_what_to_return_and_what_not(tool: PromptTool) -> None:
    assert 30 <= len(tool.prompt.split()) <= 110
    assert "Return" in tool.prompt
    assert any(word in tool.prompt for word in ("not ", "nothing else", "No "))
    assert tool.description.endswith(".")
    assert tool.category


def test_only_results_that_are_not_advice_stay_out_of_the_deliberation() -> None:
    apart = [tool for tool in TOOLS if not tool.deliberates]
    assert [(tool.name, tool.variable) for tool in apart] == [("detect_expression", "expression")]


def test_each_makes_instructions_of_less_than_350_words() -> None:
    member = Member("1", "Ada", role="archivist")
    assert all(len(instructions(tool, member, CouncilSettings()).split()) < 350 for tool in TOOLS)
