"""`toolbus dev check --from stargazer`: each rule finds its line, and what runs as it is has no finding."""

import os
from pathlib import Path

import pytest

from toolbus import tools
from toolbus.parts.moving.check.source_file import Effect, Report, check
from toolbus.parts.moving.check.stargazer_rules import NAMES, STARGAZER

STOPS, DIFFERS, NOTE = Effect.STOPS, Effect.DIFFERS, Effect.NOTE
FILE = "TOOL_NAME = 't'\nasync def run(**kwargs): return ''\n"


def _checked(folder: Path, text: str) -> Report:
    (folder / "a.py").write_text(f"# a comment\n{text}\n")
    return check(folder / "a.py", STARGAZER)


def test_the_names_are_those_of_the_package() -> None:
    assert set(NAMES) == set(tools.__all__)


@pytest.mark.parametrize(
    ("text", "effect", "what", "remedy"),
    [
        ("from tools import ToolRegistry", STOPS, "imports the package tools", "Write toolbus.tools"),
        ("import tools", STOPS, "imports the package tools", "Write toolbus.tools"),
        ("from tools.loader import load", STOPS, "tools.loader.load, which does not exist here", "load_tools"),
        ("from tools import ToolCallRecord", STOPS, "tools.ToolCallRecord, which does not exist here", "reload_tools"),
        ("import no_such_package", STOPS, "no_such_package, which is not installed", "Install no_such_package"),
        ("try:\n import no_such\nexcept ImportError: ...", DIFFERS, "not installed", "Install no_such"),
        ("TOOL_NAME = 't'", STOPS, "no function run", "Add run"),
        ("TOOL_PARAMETERS: dict = {}", STOPS, "TOOL_PARAMETERS without TOOL_NAME", "Add TOOL_NAME"),
        ("async def f(ctx): ctx.sent_files.append(1)", DIFFERS, "no sent_files", "registry.call("),
        ("async def f(ctx): await ctx.tool_registry.call('t', {})", DIFFERS, "no tool_registry", "ctx.call("),
        ("registry._tools.clear()", STOPS, "registry._tools does not exist here", "reload_tools"),
        ("TaskManager(timeout=5, redis=client)", STOPS, "takes no redis", "path="),
        ("registry.task_manager.purge()", STOPS, "a TaskManager has no purge", "await_result"),
        (f"import httpx\n{FILE}", NOTE, "imports httpx: a drop-in tool has no network", '"connect"'),
        (f"import subprocess\n{FILE}", STOPS, "starts no processes", "load_tools()"),
        (f"import os; os.environ['SKY_KEY']\n{FILE}", NOTE, "reads the variable SKY_KEY", '"secrets": ["SKY_KEY"]'),
    ],
)
def test_each_rule_finds_its_line_and_says_what_to_do(
    tmp_path: Path, text: str, effect: Effect, what: str, remedy: str
) -> None:
    (found,) = _checked(tmp_path, text).findings
    assert found.effect is effect, found
    assert found.line == (3 if text.startswith("try") else 2)
    assert what in found.what, found
    assert remedy in found.remedy, found


@pytest.mark.parametrize(
    "text",
    [
        FILE,
        "import json, asyncio\nimport httpx",
        "TOOLS = [{'name': 't', 'handler': print}]",
        "async def f(ctx): return ctx.user_id + ctx.channel_id + ctx.platform",
        "class R:\n def f(self): return self._tools",
        "task_manager.execute(a, 'b'); TaskManager(timeout=5)",
    ],
)
def test_what_works_is_not_found(tmp_path: Path, text: str) -> None:
    assert _checked(tmp_path, text).findings == ()


def test_a_folder_of_tool_files_without_a_manifest_is_a_difference(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def f(:")
    findings = check(tmp_path, STARGAZER).findings
    assert [(each.path.name, each.effect) for each in findings] == [(tmp_path.name, DIFFERS), ("broken.py", STOPS)]
    (tmp_path / "_manifest.json").write_text('{"allow": []}')
    (tmp_path / "broken.py").unlink()
    assert check(tmp_path, STARGAZER).findings == ()


def test_a_pipe_among_the_files_is_named_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")
    os.symlink("missing.py", tmp_path / "b.py")
    report = check(tmp_path, STARGAZER)
    assert [(each.path.name, each.effect, each.what) for each in report.findings] == [
        (name, NOTE, "is not checked: it is not a regular file") for name in ("a.py", "b.py")
    ]


def test_modules_that_the_folder_brings_along_are_not_missing(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("")
    (tmp_path / "helpers.py").write_text("")
    (tmp_path / "a.py").write_text("import tools, helpers")
    assert check(tmp_path, STARGAZER).findings == ()


def test_a_folder_of_tool_files_called_tools_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "clock.py").write_text(FILE)
    (tmp_path / "main.py").write_text("from tools import ToolRegistry\nimport tools.clock\nfrom tools import clock")
    findings = [each for each in check(tmp_path, STARGAZER).findings if each.path.name == "main.py"]
    assert [(each.line, each.what) for each in findings] == [(1, "imports the package tools")]
    (tmp_path / "tools" / "__init__.py").write_text("")
    assert check(tmp_path / "main.py", STARGAZER).findings == ()
