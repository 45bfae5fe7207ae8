"""`dev check --from neko`: each rule finds its place, and plugins that run as they are have nothing to change."""

from pathlib import Path

import pytest

from tests.parts.moving.neko.folders import PLUGINS
from toolbus.parts.moving.check.neko_rules import NEKO
from toolbus.parts.moving.check.source_file import Effect, Report, check

STOPS, DIFFERS, NOTE = Effect.STOPS, Effect.DIFFERS, Effect.NOTE
MANIFEST = '[plugin]\nid = "a"\nentry = "plugin.plugins.a:A"\n'
CLASS = "class A(NekoPluginBase):\n"


def _checked(folder: Path, source: str, manifest: str = MANIFEST) -> Report:
    (folder / "plugin.toml").write_text(manifest)
    (folder / "__init__.py").write_text(f"{source}\nA = None  # the class of the entry, unless the source has it\n")
    return check(folder, NEKO)


def test_the_documents_example_has_nothing_to_change() -> None:
    assert check(PLUGINS / "weather", NEKO) == Report((), 1)


def test_a_folder_of_plugins_is_checked_as_one(tmp_path: Path) -> None:
    report = check(PLUGINS, NEKO)
    assert not report.runs
    assert {each.path.relative_to(PLUGINS).parts[0] for each in report.findings if each.effect is STOPS} == {
        *("diary", "no_such_import", "not_toml")
    }


@pytest.mark.parametrize(
    ("source", "effect", "what", "remedy"),
    [
        ("import plugin.server.runtime", STOPS, "plugin.server.runtime", "only plugin.sdk"),
        ("from plugin.core.context import PluginContext", STOPS, "plugin.core.context", "only plugin.sdk"),
        ("from utils.logger_config import get", STOPS, "utils.logger_config", "Copy what"),
        ("try:\n import main_logic\nexcept ImportError: ...", DIFFERS, "goes on without it", "Copy what"),
        ("try:\n import main_logic\nexcept (KeyError, Exception): ...", DIFFERS, "goes on without it", "Copy what"),
        ("try:\n import main_logic\nexcept KeyError: ...", STOPS, "main_logic", "Copy what"),
        ("from main_logic.tool_calling import ToolDefinition", STOPS, "main_logic.tool_calling", "toolbus.tools has"),
        ("from main_logic.omni_offline_client import OmniOfflineClient", STOPS, "main_logic.omni", "plugin.generate"),
        ("from utils.llm_client import call_llm", STOPS, "utils.llm_client", "plugin.generate"),
        ("from utils import call_llm", STOPS, "utils, which calls the model", "plugin.generate"),
        ("import main_logic", STOPS, "main_logic", "plugin.generate"),
        ("from plugin.sdk.plugin import Unheard", STOPS, "plugin.sdk.plugin.Unheard", "Remove"),
        ("from plugin.sdk.plugin import MemoryClient", DIFFERS, "raises when it is used", "arguments"),
        ("def f():\n import no_such_package.part", STOPS, "no_such_package, which is not installed", "Install no_such"),
        ("import os\nos.environ['WEATHER_KEY']", NOTE, "WEATHER_KEY", "--env WEATHER_KEY"),
        (CLASS + " def f(self): return self.plugins.list()", STOPS, "self.plugins raises", "scope.call("),
        (CLASS + " def f(self): return self.ctx.bus.get()", STOPS, "self.ctx.bus raises", "arguments"),
        (
            CLASS + " def f(self):\n  try: self.bus.get()\n  except Exception: ...",
            DIFFERS,
            "goes on without",
            "arguments",
        ),
        (
            CLASS + " def f(self):\n  try: a = self.ctx.bus.x\n  except (KeyError, AttributeError): ...",
            DIFFERS,
            "bus",
            "a",
        ),
        (CLASS + " def f(self):\n  try: self.plugins.list()\n  except: ...", DIFFERS, "goes on without", "scope.call("),
        (
            CLASS + " def f(self):\n  try: self.unheard()\n  except Exception: ...",
            DIFFERS,
            "self.unheard()",
            "Write the",
        ),
        (CLASS + " def f(self):\n  try: self.bus.get()\n  except KeyError: ...", STOPS, "self.bus raises", "arguments"),
        (CLASS + " def f(self):\n  try: self.bus.get()\n  except Exception as e: raise X from e", STOPS, "bus", "a"),
        (
            CLASS + " def f(self):\n  try: ...\n  except Exception: self.bus.get()",
            STOPS,
            "self.bus raises",
            "arguments",
        ),
        (CLASS + " def __init__(self, ctx): ctx.update_status({})", DIFFERS, "ctx.update_status()", "self.logger"),
        (CLASS + " async def f(self): await self.run_update(progress=1)", DIFFERS, "self.run_update()", "progress()"),
        (CLASS + " def f(self): self.push_message(parts=[])", NOTE, "notification", "host.notifications()"),
        (CLASS + " def f(self): return self.data_path('a')", NOTE, "data/", "Copy old files"),
        (CLASS + " async def f(self): await self.config.profile_list()", STOPS, "profile_list raises", "config.set"),
        (CLASS + " def f(self): x = self.store.get('a')", STOPS, "self.store.get() is not awaited", "await self.store"),
        (CLASS + " def f(self): self.config.set('a.b', 1)", STOPS, "self.config.set() is not awaited", "await self"),
        (CLASS + " @plugin_entry(id='x')\n def f(self): ...", DIFFERS, "@plugin_entry f is called by", "--entries"),
        (
            CLASS + " @plugin_entry(id='x')\n def f(self): ...",
            DIFFERS,
            "@plugin_entry f is",
            "offers nothing until then",
        ),
        (CLASS + " @plugin.entry(id='x')\n def f(self): ...", DIFFERS, "@plugin.entry f is called by", "@llm_tool"),
        (CLASS + " @ui.action()\n def f(self): ...", DIFFERS, "@ui.action f", "@llm_tool"),
        (CLASS + " @lifecycle(id='freeze')\n def f(self): ...", DIFFERS, "never called", "startup"),
        (CLASS + " @llm_tool(timeout=301)\n def f(self): ...", DIFFERS, "cut to 300 s", "background"),
        (CLASS + " @llm_tool(new=1)\n def f(self): ...", DIFFERS, "no option new", ""),
        (CLASS + " @llm_tool(name='a b')\n def f(self): ...", STOPS, "'a b' breaks the rule", "Rename"),
        (CLASS + " @llm_tool\n def f(self): ...\n @llm_tool(name='f')\n def g(self): ...", DIFFERS, "second", "Rename"),
        ("def f(:", STOPS, "is not valid: ", "Correct"),
    ],
)
def test_each_rule_finds_its_line_and_says_what_to_do(
    tmp_path: Path, source: str, effect: Effect, what: str, remedy: str
) -> None:
    report = _checked(tmp_path, f"# a comment\n{source}\n")
    (found,) = report.findings
    assert found.effect is effect, found
    assert what in found.what, found
    assert remedy in found.remedy, found
    assert found.path == tmp_path / "__init__.py"
    lines = source.splitlines()
    marks = ("import ", "environ", "ctx.", "self.", "@", "def f(:")
    last = max(number for number, line in enumerate(lines, 2) if any(mark in line for mark in marks))
    first = min(number for number, line in enumerate(lines, 2) if any(mark in line for mark in marks))
    assert first <= found.line <= last
    assert report.runs is (effect is not STOPS)


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio, typer\nfrom plugin.sdk.plugin import *\nfrom plugin.sdk.shared.core import base",
        "from plugin.plugins.a.core import f\nfrom . import core\nfrom .core import f\nimport core",
        "if TYPE_CHECKING:\n from plugin.core.context import X",
        "from plugin.sdk.plugin import PluginSettings, SettingsField, Ok, tr",
        "class Helper:\n def f(self): return self.state, self.bus",
        CLASS + " def __init__(self): self.state = 1\n def f(self): return self.state",
        CLASS + " db = None\n def f(self): return self.db",
        CLASS + " def f(self): return getattr(self, 'bus', None)",
        "from plugin.sdk.base import NekoPluginBase\n" + CLASS + " def f(self): x = self.store.get('a')",
        CLASS + " async def f(self):\n  x = await self.store.get('a')\n  await gather(self.config.dump())",
        CLASS + " @plugin_entry(id='x')\n @llm_tool(name='x')\n def f(self): ...",
        CLASS + " @lifecycle(id='startup')\n def f(self): ...\n @timer_interval(seconds=1)\n def g(self): ...",
        "import os\nos.environ.get('HOME')",
    ],
)
def test_what_works_is_not_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "core.py").write_text("f = 1\n")
    assert _checked(tmp_path, source).findings == ()


@pytest.mark.parametrize(
    ("manifest", "line", "effect", "what"),
    [
        ("[plugin\n", 1, STOPS, "cannot be read"),
        ('[plugin]\nid = "a"\nx = \n', 3, STOPS, "cannot be read"),
        ('[plugin]\nid = "a b"\nentry = "a:B"', 2, STOPS, "plugin id"),
        ('[plugin]\nid = "a"\nentry = "a"', 3, STOPS, "is not a module and a class"),
        ('[plugin]\nid = "a"\n\ntype = "adapter"\nentry = "a:B"', 4, STOPS, "cannot run alone"),
        ('[plugin]\nid = "a"\nentry = "plugin.plugins.a.none:B"', 3, STOPS, "not in the folder"),
        (
            '[plugin]\nid = "a"\nentry = "plugin.plugins.a:B"',
            3,
            STOPS,
            "the class B, which plugin.plugins.a does not have",
        ),
        (MANIFEST + "[plugin_runtime]\nenabled = false", 5, NOTE, "enabled = false"),
    ],
)
def test_a_plugin_toml_is_checked_by_its_lines(
    tmp_path: Path, manifest: str, line: int, effect: Effect, what: str
) -> None:
    (found,) = _checked(tmp_path, "", manifest).findings
    assert (found.path.name, found.line, found.effect) == ("plugin.toml", line, effect), found
    assert what in found.what


def test_an_old_store_is_a_difference_and_tests_and_data_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"")
    for folder in ("tests", "data", ".git", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_a.py").write_text("import utils.x")
    report = _checked(tmp_path, "")
    assert [(each.path.name, each.effect) for each in report.findings] == [("store.db", DIFFERS)]
    assert report.files == 1


def test_a_single_file_is_checked_and_one_that_is_no_text_is_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(b"import brain\n")
    assert [each.what[:13] for each in check(file, NEKO).findings] == ["imports brain"]
    file.write_bytes(b"\xff\xfe")
    (found,) = check(file, NEKO).findings
    assert (found.effect, "cannot be read" in found.what) == (STOPS, True)
