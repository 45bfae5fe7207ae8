"""Finding the plugin in a file, the documents' two forms included, and errors that name the file and how to fix it."""

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.process_state import restored_imports
from toolbus.errors import SetupError
from toolbus.functions.runner import run_handler
from toolbus.functions.tool_spec import ToolSet, describe, spec_of
from toolbus.parts.moving.neko.plugin_lifecycle import start_plugin, stop_plugin
from toolbus.processes.loader import LoadedPlugin, Loader, load_plugin, safe_id
from toolbus.protocol.tool import plugin_source
from toolbus.sdk import PluginContext, ToolScope

# The two forms of the documents, as their authors write them; only the import line is ours.
DECORATED = """
from toolbus.sdk import neko_plugin, NekoPluginBase, llm_tool, lifecycle, Ok

@neko_plugin
class WeatherPlugin(NekoPluginBase):
    @lifecycle(id="startup")
    async def startup(self, **_):
        return Ok({"status": "ready"})

    @llm_tool(
        name="get_weather",
        description="Tells the weather of a city.",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Which city, 'Beijing' for one"}},
            "required": ["city"],
        },
    )
    async def get_weather(self, *, city: str):
        return {"city": city, "temp_c": 22, "weather": "sunny"}
"""
HOOKS = """
import asyncio
from toolbus.sdk import NekoPluginBase, plugin

events = []

async def register_with_retry():
    events.append("registered")

async def unregister_on_shutdown():
    events.append("unregistered")

@plugin
class WeatherPlugin(NekoPluginBase):
    async def on_start(self):
        self.task = asyncio.create_task(register_with_retry())

    async def on_shutdown(self):
        await self.task
        await unregister_on_shutdown()
"""
FUNCTIONS = '''
from __future__ import annotations
from dataclasses import dataclass
from toolbus.sdk import llm_tool
import neighbour

@dataclass
class Place:
    city: str

@llm_tool
def where(place: Place) -> str:
    """Says where."""
    return neighbour.PREFIX + place.city

@llm_tool(name="second")
async def other(): ...

alias = where
'''


async def run_sync(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    with restored_imports():
        yield


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(source: str, name: str = "weather.py") -> Path:
        file = tmp_path / name
        file.write_text(source, encoding="utf-8")
        return file

    return write


Write = Callable[..., Path]


async def test_the_documents_decorated_plugin_runs_with_its_import_line_changed(write: Write) -> None:
    loaded = load_plugin(write(DECORATED))
    assert loaded.source == "plugin:weather"
    assert loaded.owner is not None
    assert loaded.owner.plugin_id == "weather"
    assert isinstance(vars(loaded.owner)["ctx"], PluginContext)
    assert loaded.tools is not None
    await start_plugin(loaded.owner, run_sync)
    spec = loaded.tools.get("get_weather")
    assert spec is not None
    result = await run_handler(spec, '{"city":"北京"}', ToolScope(), run_sync)
    assert result.output == {"city": "北京", "temp_c": 22, "weather": "sunny"}
    await stop_plugin(loaded.owner, run_sync)


@pytest.mark.parametrize("module", ["plugin.sdk.plugin", "plugin.sdk", "plugin.sdk.shared.core.base"])
def test_the_documents_plugin_runs_with_the_import_line_of_the_documents(write: Write, module: str) -> None:
    loaded = load_plugin(write(DECORATED.replace("from toolbus.sdk", f"from {module}")))
    assert loaded.source == "plugin:weather"
    assert loaded.tools is not None
    assert [each.tool.name for each in loaded.tools] == ["get_weather"]


async def test_the_documents_plugin_with_hooks_runs_with_its_import_line_changed(write: Write) -> None:
    loaded = load_plugin(str(write(HOOKS, "hooks.py")))
    assert loaded.owner is not None
    assert loaded.tools is not None
    assert (loaded.source, len(loaded.tools)) == ("plugin:hooks", 0)
    await start_plugin(loaded.owner, run_sync)
    await stop_plugin(loaded.owner, run_sync)
    assert loaded.module.events == ["registered", "unregistered"]


async def test_a_file_of_functions_is_a_plugin(write: Write) -> None:
    write("PREFIX = 'in '", "neighbour.py")
    loaded = load_plugin(write(FUNCTIONS, "my tools.py"))
    assert (loaded.source, loaded.owner, loaded.plugin) == ("plugin:my_tools", None, None)
    assert loaded.tools is not None
    assert [each.tool.name for each in loaded.tools] == ["where", "second"]
    spec = loaded.tools.get("where")
    assert spec is not None
    assert (await run_handler(spec, {"place": {"city": "Oslo"}}, ToolScope(), run_sync)).output == "in Oslo"


def test_a_plugin_object_is_found_first(write: Write) -> None:
    source = "class P:\n    __toolbus_plugin__ = True\n    source = 'mine'\np = P()\nsame = p\n" + DECORATED
    loaded = load_plugin(write(source))
    assert loaded.plugin is loaded.module.p
    assert (loaded.source, loaded.owner, loaded.tools) == ("mine", None, None)


CLASS = "from toolbus.sdk import NekoPluginBase, plugin, llm_tool\n"


@pytest.mark.parametrize(
    ("body", "source", "class_name"),
    [
        ("class A(NekoPluginBase):\n    plugin_id = 'set'\n", "plugin:set", "A"),
        ("class A(NekoPluginBase):\n    plugin_id = 'plugin:set'\n", "plugin:set", "A"),
        ("class A(NekoPluginBase):\n    id = 'other'\n", "plugin:other", "A"),
        ("class A(NekoPluginBase):\n    @property\n    def id(self): return 1\n", "plugin:weather", "A"),
        ("@plugin(id='given')\nclass A(NekoPluginBase):\n    plugin_id = 'set'\n", "plugin:given", "A"),
        ("class A(NekoPluginBase): ...\nclass B(A): ...\n", "plugin:weather", "B"),
        ("class A(NekoPluginBase): ...\n@plugin\nclass B(NekoPluginBase): ...\n", "plugin:weather", "B"),
        ("class A(NekoPluginBase):\n    def __init__(self): super().__init__(None)\n", "plugin:weather", "A"),
        ("class A(NekoPluginBase):\n    def __init__(self, ctx, x=1): super().__init__(ctx)\n", "plugin:weather", "A"),
    ],
)
def test_the_plugin_class_and_its_id_are_found(write: Write, body: str, source: str, class_name: str) -> None:
    loaded = load_plugin(write(CLASS + body))
    assert (loaded.source, type(loaded.owner).__name__) == (source, class_name)


def test_an_imported_plugin_class_counts_where_the_file_has_none(write: Write) -> None:
    write(DECORATED, "neighbour.py")
    loaded = load_plugin(write("from neighbour import WeatherPlugin", "main.py"))
    assert loaded.source == "plugin:main"


def test_functions_beside_a_class_are_not_dropped_in_silence(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_plugin(write(DECORATED + "\n@llm_tool\ndef lonely(): ...\n"))
    assert "lonely" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x = 1", ["holds no plugin", "@llm_tool"]),
        (CLASS + "class A(NekoPluginBase): ...\nclass B(NekoPluginBase): ...", ["several plugin classes (A, B)"]),
        ("class P:\n    __toolbus_plugin__ = True\na, b = P(), P()", ["2 Plugin objects"]),
        ("def f(): return 1 / 0\nf()", ["could not be imported", "ZeroDivisionError", "line 1", "line 2"]),
        ("def f(:\n", ["SyntaxError", "line 1"]),
        ("import no_such_module_here", ["install no_such_module_here"]),
        ("from plugin.server.runtime import llm_tool", ["plugin server", "only plugin.sdk"]),
        ("from plugin.sdk.plugin import no_such_name", ["plugin.sdk.plugin.no_such_name", "copy what it does"]),
        ("from main_logic.tool_calling import ToolDefinition", ["main program", "plugin's folder"]),
        ("raise SystemExit(1)", ["__main__"]),
        (CLASS + "@llm_tool(timeout=900)\ndef f(): ...", ["ValueError", "300"]),
        (CLASS + "@llm_tool\ndef a(): ...\n@llm_tool(name='a')\ndef b(): ...", ["two tools named 'a'"]),
        (CLASS + "class A(NekoPluginBase):\n    plugin_id = 'a b'", ["'a b'", "plugin_id"]),
        (CLASS + "class A(NekoPluginBase):\n    def __init__(self, ctx): 1 / 0", ["A()", "ZeroDivisionError"]),
        (CLASS + "@llm_tool\ndef a(x, /): ...", ["remove the '/'"]),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_fix(write: Write, body: str, words: list[str]) -> None:
    file = write(body)
    before = list(sys.path), set(sys.modules), list(sys.meta_path)
    with pytest.raises(SetupError) as caught:
        load_plugin(file)
    text = str(caught.value)
    assert str(file) in text
    assert all(each in text for each in words), text
    assert "loader.py" not in text
    if "imported" in text:
        left = {each for each in sys.modules if each.startswith(("toolbus_plugin_", "plugin."))} - before[1]
        assert (list(sys.path), list(sys.meta_path), left) == (before[0], before[2], set())


def test_a_class_that_cannot_start_is_reported_by_its_path_also_where_that_says_imported(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "imported").mkdir()
    file = write(CLASS + "class A(NekoPluginBase):\n    def __init__(self, ctx): 1 / 0", "imported/weather.py")
    with pytest.raises(SetupError) as caught:
        load_plugin(file)
    assert str(caught.value).startswith(f"{file} could not be started: A(): correct it")


def test_a_missing_file_and_a_folder_without_a_manifest_have_texts_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not exist"):
        load_plugin(tmp_path / "no.py")
    with pytest.raises(SetupError, match=r"folder without plugin\.toml"):
        load_plugin(tmp_path)


def test_two_files_of_one_name_are_two_modules(write: Write, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one = load_plugin(write(DECORATED))
    two = load_plugin(write(DECORATED, "sub/weather.py"))
    assert one.module is not two.module
    assert one.module.__name__ in sys.modules
    assert two.module.__name__ in sys.modules


@pytest.mark.parametrize(
    ("plugin_id", "source"),
    [
        ("weather", "plugin:weather"),
        ("plugin:weather", "plugin:weather"),
        ("plugin:plugin:weather", "plugin:weather"),
        ("x" * 121, "plugin:" + "x" * 121),
    ],
)
def test_the_prefix_is_set_once(plugin_id: str, source: str) -> None:
    assert plugin_source(plugin_id) == source


@pytest.mark.parametrize("plugin_id", ["", "plugin:", "a b", "天气", "x" * 122])
def test_an_id_that_makes_no_source_is_refused(plugin_id: str) -> None:
    with pytest.raises(SetupError, match="plugin id"):
        plugin_source(plugin_id)


@pytest.mark.parametrize("stem", ["weather", "my plugin", "天气", "__", "a" * 300])
def test_every_file_name_makes_an_id(stem: str) -> None:
    assert plugin_source(safe_id(stem)).startswith("plugin:")
    assert safe_id("天气") != safe_id("时间")


class _Ini(Loader):
    """Plugins of a system of its own: a folder with an ini file, and files with a list `COMMANDS`."""

    sign = "plugin.ini"

    def load_folder(self, folder: Path, *, entries: bool) -> LoadedPlugin | None:
        if not (folder / self.sign).is_file():
            return None
        return LoadedPlugin(folder, (folder / self.sign).read_text(), None, None, ToolSet(), ModuleType("ini"))

    def load_file(self, file: Path, module: ModuleType, *, entries: bool) -> LoadedPlugin | None:
        if not hasattr(module, "COMMANDS"):
            return None
        tools = ToolSet()
        for function in module.COMMANDS:
            tools.add(spec_of(function, describe(function, description="Of a list.")))
        return LoadedPlugin(file, "ini", None, None, tools, module)


def test_a_loader_says_which_files_and_folders_are_its_own(write: Write, tmp_path: Path) -> None:
    loaded = load_plugin(write("def roll(sides: int): ...\nCOMMANDS = [roll]"), known=[_Ini()])
    assert loaded.tools is not None
    assert (loaded.source, [each.tool.name for each in loaded.tools]) == ("ini", ["roll"])
    assert load_plugin(write(FUNCTIONS.replace("import neighbour", ""), "plain.py"), known=[_Ini()]).tools is not None
    with pytest.raises(SetupError, match=r"is a folder without plugin\.ini: name"):
        load_plugin(tmp_path, known=[_Ini()])
    write("dice", "plugin.ini")
    assert load_plugin(tmp_path, known=[_Ini()]).source == "dice"


@pytest.fixture
def without_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Python find no folder ``toolbus/parts/moving``."""
    monkeypatch.setitem(sys.modules, "toolbus.parts.moving", None)


@pytest.mark.usefixtures("without_moving")
def test_without_a_part_its_kinds_have_an_error_that_names_it_and_the_others_load(write: Write, tmp_path: Path) -> None:
    write("PREFIX = 'in '", "neighbour.py")
    assert load_plugin(write(FUNCTIONS)).source == "plugin:weather"
    write('[plugin]\nid = "a"\nentry = "a:A"', "plugin.toml")
    for path in (tmp_path, write("import plugin.sdk.plugin", "imports.py"), write("x = 1", "empty.py")):
        with pytest.raises(SetupError, match=r"lacks its part 'moving': install the whole distribution"):
            load_plugin(path)
