"""Folders of plugins written for N.E.K.O., loaded as they are."""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.parts.moving.neko.folders import copied, loaded
from tests.support.other_user import refuse_entry
from tests.support.waiting import until, within
from toolbus.errors import SetupError
from toolbus.functions.runner import run_handler
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase, tools_of
from toolbus.parts.moving.neko.plugin_folder import plugin_folders, read_manifest, wanted_folders
from toolbus.parts.moving.neko.plugin_lifecycle import start_plugin, stop_plugin
from toolbus.processes.loader import LoadedPlugin, load_plugin
from toolbus.protocol.tool import Result
from toolbus.sdk import ToolScope
from toolbus.testing import running_bus


async def run_sync(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


async def call(plugin: LoadedPlugin, name: str, arguments: dict[str, Any]) -> Result:
    assert plugin.tools is not None
    spec = plugin.tools.get(name)
    assert spec is not None
    return await run_handler(spec, arguments, ToolScope(), run_sync)


async def test_the_documents_example_runs_as_a_folder_of_its_own(tmp_path: Path) -> None:
    with loaded(copied("weather", tmp_path)) as plugin:
        assert plugin.source == "plugin:weather"
        await start_plugin(plugin.owner, run_sync)
        assert (await call(plugin, "get_weather", {"city": "Beijing"})).output == {
            "city": "Beijing",
            "temp_c": 22,
            "weather": "sunny",
        }


async def test_the_folder_of_the_moving_page_runs(tmp_path: Path) -> None:
    folder = tmp_path / "weather"
    folder.mkdir()
    for block in blocks("docs/moving/neko.md"):
        if named := re.match(r"# plugins/weather/(\S+)\n", block.text):
            (folder / named[1]).write_text(block.text, encoding="utf-8")
    with loaded(folder) as plugin:
        await start_plugin(plugin.owner, run_sync)
        assert (await call(plugin, "get_weather", {"city": "Beijing"})).output == {"city": "Beijing", "temp": "22 °C"}


async def test_every_tool_of_a_folder_gets_the_arguments_that_were_sent(tmp_path: Path) -> None:
    with loaded(copied("weather", tmp_path)) as plugin:
        assert isinstance(plugin.owner, NekoPluginBase)
        schema = {"type": "object", "properties": {"a": {"default": 1}}}
        plugin.owner.register_llm_tool(
            name="late", description="", parameters=schema, handler=lambda **arguments: arguments
        )
        specs = list(tools_of(plugin.owner))
        assert len(specs) > 1
        assert all(spec.tool.no_defaults for spec in specs)


async def test_the_documents_plugin_that_registers_by_http_itself_runs_as_it_is(tmp_path: Path) -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        with loaded(copied("registering", tmp_path)) as plugin:
            vars(plugin.module)["MAIN_SERVER"] = f"http://{bus.http_address}"
            await start_plugin(plugin.owner, run_sync)
            async for _ in bus.watch():
                if bus.list():
                    break
            assert [(each.tool.name, each.source) for each in bus.list()] == [("get_weather", "my_plugin")]
            await stop_plugin(plugin.owner, run_sync)
        assert bus.list() == []


async def test_the_examples_of_its_documents_with_what_stands_for_their_dots_run(tmp_path: Path) -> None:
    with loaded(copied("search", tmp_path)) as plugin:
        assert (await call(plugin, "search", {"query": "moon", "limit": 1})).output == ["moon"]
        failed = await call(plugin, "custom_tool", {"query": "moon"})
        assert failed.error is not None
        assert (failed.error.message, failed.output) == ("CITY_NOT_FOUND", {"reason": "city not found"})


async def test_a_plugin_of_several_modules_runs_from_a_folder_of_another_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with loaded(copied("diary", tmp_path, "n.e.k.o_plugin_diary")) as plugin:
        diary: Any = plugin.owner
        assert (plugin.source, diary.plugin_id) == ("plugin:my-diary", "my-diary")
        await start_plugin(diary, run_sync)
        await within(diary.ticked.wait())
        assert diary.events == ["startup", "loop"]
        assert [each["name"] for each in diary.list_llm_tools()] == [
            *("write_page", "read_page", "ask_others", "diary_title")
        ]
        assert (await call(plugin, "write_page", {"number": 3, "text": "rain"})).output == {"title": "Seite 3"}
        assert (await call(plugin, "read_page", {"number": 3})).output == {"text": "Dear diary, rain"}
        assert (await call(plugin, "diary_title", {})).output == "the diary"
        await stop_plugin(diary, run_sync)
        assert diary.events == ["startup", "loop", "shutdown"]
    assert "made in n.e.k.o_plugin_diary for my-diary" in caplog.text
    assert "page 3 of the diary is read" in caplog.text


async def test_what_is_missing_is_one_failed_call_that_says_what_to_use(tmp_path: Path) -> None:
    with loaded(copied("diary", tmp_path)) as plugin:
        refused = await call(plugin, "read_page", {"number": 9})
        assert refused.error is not None
        assert (refused.error.message, refused.error.reason) == ("SdkError: no page 9", "SdkError")
        missing = await call(plugin, "ask_others", {})
        assert missing.error is not None
        assert "self.plugins: in N.E.K.O. it calls entries of other plugins" in missing.error.message
        assert "scope.call(" in missing.error.message


async def test_decorators_without_effect_are_logged_once_and_the_plugin_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(copied("diary", tmp_path)) as plugin:
        diary: Any = plugin.owner
        diary.greeting = "Hello"
        for number in (1, 2):
            await call(plugin, "write_page", {"number": number, "text": "sun"})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [each.split(".")[0] for each in warnings] == [
        "write_page: toolbus has no option reply_tail of llm_tool; it has no effect",
        "write_page: timeout is 600 s, the limit of 300 s is used",
        "DiaryPlugin",  # the second read_page
        "my-diary: these methods are called by N",
        "my-diary: report_status() has no effect",
    ]
    assert (
        "only: @plugin_entry list_pages; @message on_text; @before_entry before. "
        "Run it with --entries, or put @llm_tool above one"
    ) in caplog.text


async def test_a_plugin_hears_of_each_change_of_its_configuration_and_reads_it(tmp_path: Path) -> None:
    folder = copied("diary", tmp_path)
    file, example = folder / "plugin.toml", folder / "config.example.toml"
    with loaded(folder) as plugin:
        diary: Any = plugin.owner
        lifecycle = diary.__toolbus_lifecycle__
        await lifecycle.start(run_sync, run_sync)
        before = file.read_text()
        assert (await diary.config.get("diary.greeting"), diary.changes) == ("Dear diary", [])
        file.write_text(before.replace("Dear diary", "Hello"))
        await until(lambda: len(diary.changes) == 1, "the change to be heard of")
        old, new, mode = diary.changes[0]
        assert (old["diary"]["greeting"], new["diary"]["greeting"], mode) == ("Dear diary", "Hello", "file")
        assert (await diary.config.get("diary.greeting"), diary.ctx.config) == ("Hello", new)
        file.write_text("[plugin")  # half written
        await diary.config.set("diary.lines", 4)  # its own change is not one of the files
        file.write_text(before)
        await until(lambda: len(diary.changes) == 2, "the next change to be heard of")
        assert await diary.config.get("diary.lines") == 4
        example.write_text(example.read_text() + "extra = 1\n")
        await until(lambda: len(diary.changes) == 3, "the change of the defaults to be heard of")
        await lifecycle.stop(run_sync)
        assert diary.events == ["startup", "loop", *["config_change"] * 3, "shutdown"]


async def test_the_store_and_the_configuration_are_there_in_the_next_run(tmp_path: Path) -> None:
    folder = copied("diary", tmp_path)
    with loaded(folder) as plugin:
        diary: Any = plugin.owner
        diary.greeting = "Hello"
        await call(plugin, "write_page", {"number": 1, "text": "sun"})
        await diary.config.set("diary.greeting", "Good evening")
    assert json.loads((folder / "data" / "store.json").read_text()) == {"page:1": {"text": "Hello, sun"}}
    assert (folder / "data" / "last.txt").read_text() == "sun"
    with loaded(folder) as plugin:
        again: Any = plugin.owner
        assert (await call(plugin, "read_page", {"number": 1})).output == {"text": "Hello, sun"}
        values = await again.config.dump()
        assert values["diary"] == {"greeting": "Good evening", "lines": 3, "private": True, "paper": "A5"}
        assert (values["plugin"]["id"], await again.config.get("plugin.id")) == ("my-diary", "my-diary")
        assert (await again.ctx.get_own_config())["config"]["plugin"] == again.metadata


async def test_an_entry_may_be_a_module_of_a_folder_without_a_package(tmp_path: Path) -> None:
    with loaded(copied("by_itself", tmp_path, "1st plugin")) as plugin:
        assert plugin.source == "plugin:by_itself"
        assert (await call(plugin, "double", {"number": 21})).output == 42


def test_a_plugin_that_needs_the_main_program_says_which_import_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = list(sys.path), list(sys.meta_path)
    with pytest.raises(SetupError) as caught:
        load_plugin(copied("no_such_import", tmp_path))
    text = str(caught.value)
    assert "utils: in N.E.K.O. it is a part of its main program" in text
    assert "__init__.py" in text
    assert "line 2" in text
    assert (list(sys.path), list(sys.meta_path)) == before
    assert [name for name in sys.modules if name.startswith("plugin.")] == []


async def test_a_plugin_whose_startup_returns_err_does_not_start(tmp_path: Path) -> None:
    with loaded(copied("raises_at_start", tmp_path)) as plugin, pytest.raises(SetupError, match="returned Err: no key"):
        await start_plugin(plugin.owner, run_sync)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("[plugin", ["cannot be read", "plugin.toml"]),
        ("[other]", ["no section [plugin]"]),
        ('[plugin]\nentry = "a:B"', ["needs id"]),
        ('[plugin]\nid = "a"', ["needs entry"]),
        ('[plugin]\nid = "a b"\nentry = "a:B"', ["plugin id 'a b'"]),
        ('[plugin]\nid = "a"\nentry = "a.b"', ["'a.b' is not a module and a class", "plugin.plugins.folder:MyPlugin"]),
        ('[plugin]\nid = "a"\nentry = "a:B"\ntype = "extension"', ["runs inside another plugin"]),
        ('[plugin]\nid = "a"\nentry = "plugin.plugins.a:B"', ["entry names 'B'", "has: Real"]),
        ('[plugin]\nid = "a"\nentry = "plugin.plugins.a.none:B"', ["plugin.plugins.a.none"]),
    ],
)
def test_a_manifest_that_says_too_little_names_the_rule_and_the_fix(
    tmp_path: Path, manifest: str, words: list[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "plugin.toml").write_text(manifest)
    (folder / "__init__.py").write_text(
        "from plugin.sdk.plugin import NekoPluginBase\nclass Real(NekoPluginBase): ...\n"
    )
    with pytest.raises(SetupError) as caught, loaded(folder):
        pass
    assert [each for each in words if each not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("plugin.plugins.other:A", "plugin.plugins.other"),
        ("plugin.plugins.other.core.main:A", "plugin.plugins.other.core.main"),
        ("other.core:A", "plugin.plugins.other.core"),
        ("folder:A", "plugin.plugins.folder"),
        ("inner.core:A", "plugin.plugins.folder.inner.core"),
    ],
)
def test_an_entry_is_imported_as_a_module_of_a_package(tmp_path: Path, entry: str, module: str) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "plugin.toml").write_text(f'[plugin]\nid = "a"\nentry = "{entry}"\n')
    assert read_manifest(folder).module == module


def test_a_folder_of_plugins_leaves_out_those_that_are_disabled_and_no_other(tmp_path: Path) -> None:
    for name in ("weather", "disabled", "not_toml"):
        copied(name, tmp_path)
    (tmp_path / "no_plugin").mkdir()
    found = plugin_folders(tmp_path)
    assert [each.name for each in found] == ["disabled", "not_toml", "weather"]
    assert [each.name for each in wanted_folders(tmp_path, found)] == ["not_toml", "weather"]
    named = tmp_path / "disabled"
    assert wanted_folders(named, plugin_folders(named)) == [named]


def test_a_folder_that_this_user_may_not_enter_is_no_plugin_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied("weather", tmp_path)
    (tmp_path / "lost+found").mkdir()
    refuse_entry(tmp_path / "lost+found", monkeypatch)
    assert [each.name for each in plugin_folders(tmp_path)] == ["weather"]
