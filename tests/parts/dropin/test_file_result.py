"""The result of a drop-in tool as a model reads it: outputs, errors and soft errors."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.parts.dropin.loaded_files import call, load_one
from tests.support.waiting import within
from toolbus.dropin import Loaded
from toolbus.errors import Code, Stage
from toolbus.parts.models.dialects.provider_results import object_of
from toolbus.protocol.tool import Result
from toolbus.sdk import ToolScope

FLAT = {"description": "Does it."}


def tool_of(folder: Path, body: str) -> Loaded:
    """Loads a tool `t` whose body is given."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    register = f"register_tool(name='t', execute=run, definition={FLAT!r})"
    return load_one(folder, f"import asyncio\nfrom toolbus.sdk import *\ndef run(args):\n{lines}\n{register}")


async def result_of(folder: Path, body: str) -> Result:
    return await call(tool_of(folder, body), "t")


@pytest.mark.parametrize(
    ("returned", "output_json", "text"),
    [
        ("'plain text'", '"plain text"', "plain text"),
        ("'{\"a\": 1}'", '"{\\"a\\": 1}"', '{"a": 1}'),
        ("''", '""', ""),
        ("{'ok': True, 'n': [1, 2.5]}", '{"ok":true,"n":[1,2.5]}', '{"ok":true,"n":[1,2.5]}'),
        ("'北京'", '"北京"', "北京"),
        ("None", "null", "null"),
        ("5", "5", "5"),
        ("False", "false", "false"),
        ("[]", "[]", "[]"),
    ],
)
async def test_a_text_is_returned_as_it_is_and_anything_else_as_json(
    tmp_path: Path, returned: str, output_json: str, text: str
) -> None:
    result = await result_of(tmp_path, f"return {returned}")
    assert (result.output_json, result.is_error, result.error) == (output_json, False, None)
    assert result.text == text


async def test_a_function_without_a_return_value_returns_null(tmp_path: Path) -> None:
    assert (await result_of(tmp_path, "pass")).output_json == "null"


@pytest.mark.parametrize(
    ("raised", "text", "reason"),
    [
        ("ValueError('boom')", "boom", "ValueError"),
        ("KeyError('city')", "KeyError: 'city'", "KeyError"),
        ("RuntimeError()", "RuntimeError", "RuntimeError"),
        ("SystemExit(3)", "3", "SystemExit"),
        ("KeyboardInterrupt()", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("StopIteration()", "StopIteration", "StopIteration"),
        ("RecursionError('too deep')", "too deep", "RecursionError"),
        (
            "MemoryError()",
            "MemoryError: the process reached its memory limit: hold less at once, or grant more memory_mb in "
            "_manifest.json",
            "MemoryError",
        ),
        ('ValueError("a \\"quoted\\" text")', 'a "quoted" text', "ValueError"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_exception_is_an_error_output_with_the_typed_error_beside_it(
    tmp_path: Path, raised: str, text: str, reason: str, kind: str
) -> None:
    if kind == "async def" and reason == "StopIteration":
        reason, text = "RuntimeError", "coroutine raised StopIteration"
    body = f"{kind} run(args): raise {raised}\nregister_tool(name='t', execute=run, definition={FLAT!r})"
    result = await call(load_one(tmp_path, body), "t")
    assert result.output == {"error": f"tool exec: {text}"}
    assert result.is_error
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (Code.TOOL, Stage.ACCEPTED)
    assert (result.error.message, result.error.reason) == (f"tool exec: {text}", reason)


@pytest.mark.parametrize(
    "text",
    [
        "TOOL_NAME = 't'\nasync def run(): raise ValueError('boom')",
        "def f(): raise ValueError('boom')\nTOOLS = [dict(name='t', handler=f)]",
        "from toolbus import llm_tool\n@llm_tool\ndef t(): raise ValueError('boom')",
        f"async def f(): raise ValueError('boom')\nregister_tool(name='t', execute=lambda: f(), definition={FLAT!r})",
    ],
)
async def test_a_model_reads_the_error_once_whatever_the_declaration(tmp_path: Path, text: str) -> None:
    result = await call(load_one(tmp_path, text), "t")
    assert result.text == '{"error":"tool exec: boom"}'
    assert object_of(result) == {"error": "tool exec: boom"}


async def test_an_unknown_tool_has_an_error_output_of_its_own(tmp_path: Path) -> None:
    loaded = tool_of(tmp_path, "pass")
    for name in ("nobody", "toString", "__class__", "constructor", ""):
        result = await call(loaded, name)
        assert result.output == {"error": f"unknown tool: {name}"}
        assert result.text == f'{{"error":"unknown tool: {name}"}}'
        assert result.error is not None
        assert result.error.code is Code.NOT_FOUND


@pytest.mark.parametrize("returned", ["object()", "float('nan')", "b'bytes'", "{1: {2j}}", "'\\ud800'"])
async def test_an_output_that_json_cannot_hold_is_an_error_that_names_the_place(tmp_path: Path, returned: str) -> None:
    result = await result_of(tmp_path, f"return {returned}")
    assert result.is_error
    assert result.output["error"].startswith("tool exec: output")


async def test_an_error_text_is_repaired_for_utf_8_and_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not logged here: a captured log that utf-8 cannot hold ends the process that runs the tests.
    monkeypatch.setattr(logging.getLogger("toolbus.dropin.file_result"), "disabled", True)
    result = await result_of(tmp_path, "raise ValueError('\\ud800' + 'x' * 100_000)")
    assert result.output["error"].startswith("tool exec: ?xxx")
    assert len(result.output["error"]) == 4000
    assert result.error is not None
    assert result.error.message == result.output["error"]


async def test_an_exception_whose_text_raises_is_named_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("toolbus.dropin.file_result"), "disabled", True)
    result = await result_of(tmp_path, "class Odd(Exception):\n    __str__ = None\nraise Odd")
    assert result.output == {"error": "tool exec: Odd"}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'error': 'no such city'}", "no such city"),
        ("{'error': 'no such city', 'tried': ['Oslo']}", "no such city"),
        ("{'error': {'code': 4}}", '{"code":4}'),
        ("{'error': True}", "true"),
    ],
)
async def test_a_soft_error_is_the_tools_own_output_marked_as_an_error(
    tmp_path: Path, returned: str, message: str
) -> None:
    result = await result_of(tmp_path, f"return {returned}")
    assert result.output == eval(returned)
    assert result.is_error
    assert result.error is not None
    assert (result.error.code, result.error.message, result.error.reason) == (Code.TOOL, message, "")
    assert result.text == result.output_json


@pytest.mark.parametrize(
    "returned",
    [
        *("{'error': None, 'n': 1}", "{'error': ''}", "{'error': False}", "{'error': []}", "{'error': 0.03}"),
        *("{'error': 404}", "{'errors': ['x']}", "[{'error': 'x'}]", '\'{"error": "x"}\''),
    ],
)
async def test_a_falsy_error_or_a_number_is_a_result(tmp_path: Path, returned: str) -> None:
    result = await result_of(tmp_path, f"return {returned}")
    assert (result.output, result.is_error) == (eval(returned), False)


@pytest.mark.parametrize(
    ("body", "output", "is_error", "parts"),
    [
        ("return Reply('seen', content=[image(b'1')])", "seen", False, 1),
        ("return text('a part')", None, False, 1),
        ("return [text('a'), text('b')]", None, False, 2),
        ("return Ok({'n': 1})", {"n": 1}, False, 0),
        ("return Err('no')", None, True, 0),
        ("return {'is_error': True, 'error': 'no', 'output': 5}", 5, True, 0),
        ("yield 'one '\nyield 'two'", "one two", False, 0),
        ("return (each for each in ('one ', 'two'))", "one two", False, 0),
    ],
)
async def test_values_of_the_sdk_keep_their_meaning(
    tmp_path: Path, body: str, output: Any, is_error: bool, parts: int
) -> None:
    result = await result_of(tmp_path, body)
    assert (result.output, result.is_error, len(result.content)) == (output, is_error, parts)


@pytest.mark.parametrize("execute", ["run", "lambda: run()"])
async def test_a_cancelled_call_ends_with_the_code_cancelled(tmp_path: Path, execute: str) -> None:
    body = f"""
    import asyncio
    begun = asyncio.Event()

    async def run():
        begun.set()
        await asyncio.Event().wait()

    register_tool(name="t", execute={execute}, definition={{"description": "Waits."}})
    register_tool(name="begun", execute=begun.wait, definition={{"description": "Waits for the other one."}})
    """
    loaded = load_one(tmp_path, body)
    scope = ToolScope("c1", "t")
    task = asyncio.create_task(call(loaded, "t", scope=scope))
    await within(call(loaded, "begun"))
    scope.cancel("the user left")
    task.cancel()
    result = await within(task)
    assert result.error is not None
    assert result.error.code is Code.CANCELLED
    assert "the user left" in result.error.message


async def test_a_failure_is_logged_with_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await result_of(tmp_path, "raise ValueError('boom')")
    (record,) = [each for each in caplog.records if each.name == "toolbus.dropin.file_result"]
    assert record.getMessage() == "tool t failed"
    assert record.exc_info is not None
