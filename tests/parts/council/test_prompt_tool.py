from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parts.council.fake_tool_source import Model
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import InvalidTool, ToolBusError
from toolbus.parts.council.prompt_tool import PromptTool, PromptTools, instructions, read_prompt_tools, run_prompt_tool
from toolbus.parts.council.settings import CouncilSettings, Member, SidecarSettings
from toolbus.parts.council.sidecar import Completion, Question, SidecarError

ADA = Member(
    "1",
    "Ada",
    role="archivist",
    definition="Keeps the books.",
    personality="Dry.",
    behavior="Whispers.",
    gender_identity=0,
)
TWIST = PromptTool("propose_twist", description="One turn.", prompt="Propose one twist.")


def rules(**options: Any) -> CouncilSettings:
    return CouncilSettings(least_timeout_seconds=0.0, **options)


class Pauses:
    """Notes pauses instead of making them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


# -- running ---------------------------------------------------------------------------------------------------------


async def test_a_member_answers_the_prompt_as_itself_with_the_context_as_the_users_message() -> None:
    model = Model("  A letter arrives.  ")
    sidecar = SidecarSettings(model="small", temperature=0.3, top_p=0.5, max_tokens=200)
    assert await run_prompt_tool(TWIST, ADA, "user: hi\n", rules(), model, sidecar=sidecar) == "A letter arrives."
    (question,) = model.questions
    assert question.messages[1] == {"role": "user", "content": "user: hi"}
    assert question.messages[0] == {"role": "system", "content": instructions(TWIST, ADA, rules())}
    assert (question.model, question.temperature, question.top_p, question.max_tokens) == ("small", 0.3, 0.5, 200)
    assert question.function is None


def test_the_instructions_hold_identity_task_brevity_and_whose_the_users_character_is() -> None:
    text = instructions(TWIST, ADA, rules())
    order = ["You are Ada", "archivist", "she/her", "Keeps the books.", "Dry.", "Whispers."]
    order += ["Propose Twist", "One turn.", "Propose one twist.", "at most 250 words", "belongs to the user"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        (rules(max_words_per_tool=0), "words."),
        (rules(allow_user_control=True), "belongs to the user"),
    ],
)
def test_brevity_and_user_control_can_be_switched_off(settings: CouncilSettings, gone: str) -> None:
    assert gone not in instructions(TWIST, ADA, settings)


def test_a_member_without_description_leaves_no_gaps_in_the_prompt() -> None:
    text = instructions(TWIST, Member("1", "Bo"), rules())
    assert "pronouns" not in text
    assert "role" not in text
    assert ": \n" not in text
    assert "\n\n\n" not in text


async def test_the_councils_own_settings_fit() -> None:
    assert await run_prompt_tool(TWIST, ADA, "", CouncilSettings(), Model("Yes.")) == "Yes."


@pytest.mark.parametrize("bad", [RuntimeError("busy"), "", "  \n", Completion(""), "<think>hm</think>", None, 7])
async def test_a_failure_or_an_empty_answer_is_retried_after_a_backoff(bad: Any) -> None:
    model, pauses = Model(bad, bad, "At last."), Pauses()
    assert await run_prompt_tool(TWIST, ADA, "", rules(), model, sleep=pauses) == "At last."
    assert pauses.seconds == [0.5, 1.0]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (RuntimeError("busy"), "busy"),
        (KeyError(), "KeyError"),
        ("", "the model's answer was empty"),
        (asyncio.CancelledError(), "was cancelled"),
    ],
)
async def test_after_three_attempts_the_last_failure_is_the_error(bad: Any, reason: str) -> None:
    model, pauses = Model(bad, bad, bad, "never asked"), Pauses()
    with pytest.raises(ToolBusError, match=f'"Propose Twist" failed 3 times, at last: .*{reason}'):
        await run_prompt_tool(TWIST, ADA, "", rules(), model, sleep=pauses)
    assert (len(model.questions), pauses.seconds) == (3, [0.5, 1.0])


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_a_question_that_the_server_refuses_is_not_retried(status: int) -> None:
    model, pauses = Model(SidecarError("no such model", status), "never asked"), Pauses()
    with pytest.raises(ToolBusError, match='"Propose Twist" failed: the sidecar model failed: no such model'):
        await run_prompt_tool(TWIST, ADA, "", rules(), model, sleep=pauses)
    assert (len(model.questions), pauses.seconds) == (1, [])


async def test_an_overloaded_server_is_retried() -> None:
    model = Model(SidecarError("busy", 429), SidecarError("broken", 500), "At last.")
    assert await run_prompt_tool(TWIST, ADA, "", rules(), model, sleep=Pauses()) == "At last."


async def test_cancelling_ends_it_at_once_without_another_attempt() -> None:
    asked = asyncio.Event()
    questions = []

    async def silent(question: Question) -> str:
        questions.append(question)
        asked.set()
        await asyncio.Event().wait()
        return ""

    running = asyncio.create_task(run_prompt_tool(TWIST, ADA, "", rules(), silent))
    await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(questions) == 1


async def test_cancelling_during_a_pause_ends_it_too() -> None:
    pausing = asyncio.Event()

    async def pause(seconds: float) -> None:
        pausing.set()
        await asyncio.Event().wait()

    model = Model("")
    running = asyncio.create_task(run_prompt_tool(TWIST, ADA, "", rules(), model, sleep=pause))
    await asyncio.wait_for(pausing.wait(), WAIT_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(model.questions) == 1


async def test_all_attempts_together_end_at_the_timeout() -> None:
    async def silent(question: Question) -> str:
        await asyncio.Event().wait()
        return ""

    with pytest.raises(ToolBusError, match="Tool invocation 'propose_twist' timed out"):
        await asyncio.wait_for(run_prompt_tool(TWIST, ADA, "", rules(timeout_seconds=0.02), silent), WAIT_SECONDS)


async def test_a_model_that_turns_the_timeout_into_its_own_error_is_not_retried() -> None:
    questions = []

    async def wrapping(question: Question) -> str:
        questions.append(question)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the client was closed") from None
        return ""

    with pytest.raises(ToolBusError, match="Tool invocation 'propose_twist' timed out"):
        await asyncio.wait_for(run_prompt_tool(TWIST, ADA, "", rules(timeout_seconds=0.02), wrapping), WAIT_SECONDS)
    assert len(questions) == 1


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_missing_display_name_is_made_of_the_name() -> None:
    assert TWIST.display_name == "Propose Twist"
    assert PromptTool("x", "The X", prompt="p").display_name == "The X"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "a b", "prompt": "p"}, "'a b': its name must be 1 to 64 of [A-Za-z0-9_.-]"),
        ({"name": "source:x", "prompt": "p"}, "its name must be"),
        ({"name": 7, "prompt": "p"}, "7: its name must be"),
        ({"name": "x"}, "it has no prompt: write what the model should do"),
        ({"name": "x", "prompt": 7}, "prompt is 7, it must be text: put it in quotes"),
        ({"name": "x", "prompt": "p", "category": ["a"]}, "category is ['a'], it must be text"),
        ({"name": "x", "prompt": "p", "deliberates": "no"}, "deliberates is 'no', it must be true or false"),
        ({"name": "x", "prompt": "p", "parameters": 5}, "parameters are 5, they must be a JSON Schema"),
    ],
)
def test_an_invalid_prompt_tool_is_refused_with_value_rule_and_fix(fields: Any, sentence: str) -> None:
    with pytest.raises(InvalidTool) as caught:
        PromptTool(**fields)
    assert sentence in str(caught.value)


# -- files -----------------------------------------------------------------------------------------------------------


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def names(read: PromptTools) -> list[str]:
    return [tool.name for tool in read.tools]


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "prompt": f"Do {name}.", **more}


def test_a_file_holds_one_tool_a_list_or_a_list_under_tools(tmp_path: Path) -> None:
    written(tmp_path / "a.json", entry("one"))
    written(tmp_path / "b.json", [entry("two"), entry("three")])
    written(tmp_path / "c.json", {"tools": [entry("four")]})
    written(tmp_path / "d.toml", '[[tools]]\nname = "five"\nprompt = "Do five."\n[[tools]]\nname="six"\nprompt="6"')
    written(tmp_path / "e.toml", 'name = "seven"\nprompt = """\nDo\nseven."""\n')
    written(tmp_path / "readme.txt", "no tool")
    written(tmp_path / ".hidden.json", "{")
    read = read_prompt_tools(tmp_path)
    assert names(read) == ["one", "two", "three", "four", "five", "six", "seven"]
    assert (read.problems, read.warnings) == ((), ())
    assert names(read_prompt_tools(str(tmp_path / "b.json"))) == ["two", "three"]


def test_the_originals_keys_are_read_as_its_database_keeps_them(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}}
    row = {
        "id": "7f",
        "tool_name": "expression",
        "display_name": "Expression",
        "description": "d",
        "prompt": "p",
        "input_schema": json.dumps(schema),
        "result_variable": "mood",
        "store_in_deliberation": 0,
    }
    read = read_prompt_tools(written(tmp_path / "rows.json", [row, entry("x", resultVariable="y", category=None)]))
    assert read.tools[0] == PromptTool("expression", "Expression", "d", "p", schema, "mood", False)
    assert read.tools[1].variable == "y"
    assert not read.problems + read.warnings


@pytest.mark.parametrize("schema", ["{broken", "[]", 5, [], {"type": "array"}, {"properties": 3}, "[" * 100_000])
def test_a_broken_schema_becomes_that_of_no_arguments_with_a_warning(tmp_path: Path, schema: Any) -> None:
    read = read_prompt_tools(written(tmp_path / "a.json", [entry("one", input_schema=schema), entry("two")]))
    assert names(read) == ["one", "two"]
    assert dict(read.tools[0].parameters) == {"type": "object", "properties": {}}
    assert "is not a JSON Schema of an object: the tool is used without parameters" in read.warnings[0]
    assert "a.json, tool 1" in read.warnings[0]
    assert not read.problems


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is ignored: it is not JSON ("),
        ("[" * 100_000, "is ignored: it is nested too deep"),
        ("7", "7 is not a prompt tool: write an object with name and prompt"),
        ({"tools": {}}, "tools are {}, they must be a list"),
        ([entry("bad name")], "tool 1: prompt tool 'bad name': its name must be"),
        ([{"prompt": "p"}], "a prompt tool without a name"),
        (["x"], "'x' is not a prompt tool"),
        ("x" * (1024 * 1024 + 1), "it has more than 1048576 bytes"),
    ],
)
def test_a_broken_tool_is_a_problem_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: Any, problem: str
) -> None:
    written(tmp_path / "a.json", entry("one"))
    written(tmp_path / "b.json", content)
    written(tmp_path / "c.json", entry("two"))
    read = read_prompt_tools(tmp_path)
    assert names(read) == ["one", "two"]
    (sentence,) = read.problems
    assert problem in sentence
    assert str(tmp_path / "b.json") in sentence
    assert sentence in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.toml", b"name =", "it is not TOML ("),
        ("a.json", b"\xff\xfe", "it is not UTF-8 text"),
        ("a.yaml", b"name: x", "it is not a .json or .toml file"),
    ],
)
def test_a_file_of_another_kind_is_a_problem(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    read = read_prompt_tools(tmp_path / name)
    assert read.tools == ()
    assert problem in read.problems[0]


def test_a_path_that_is_not_there_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    for gone in ("gone.json", "gone"):
        (problem,) = read_prompt_tools(tmp_path / gone).problems
        assert problem == f"{tmp_path / gone} does not exist: write it, or name a file or folder that does"


def test_of_two_with_one_name_the_later_counts_in_the_place_of_the_first(tmp_path: Path) -> None:
    written(tmp_path / "a.json", [entry("one"), entry("two")])
    written(tmp_path / "b.json", entry("one", display_name="Newer"))
    read = read_prompt_tools(tmp_path)
    assert [tool.display_name for tool in read.tools] == ["Newer", "Two"]
    assert "prompt tool 'one' appears twice, the later one is used" in read.warnings[0]


def test_parameters_cannot_be_changed_from_outside() -> None:
    schema: dict[str, Any] = {"type": "object"}
    tool = PromptTool("x", prompt="p", parameters=schema)
    schema["type"] = "array"
    assert isinstance(tool.parameters, Mapping)
    assert tool.parameters["type"] == "object"
