"""Plugins, tool files and extensions in the shapes of public ones: what `toolbus check` says of each, a run does."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parts.moving.neko.folders import loaded
from toolbus.functions.runner import run_handler
from toolbus.functions.tool_spec import ToolSpec
from toolbus.parts.dropin.script_group import ScriptGroup
from toolbus.parts.moving.check.neko_rules import NEKO
from toolbus.parts.moving.check.source_file import Effect, check
from toolbus.parts.moving.check.spindle_rules import SPINDLE
from toolbus.parts.moving.check.synchronet_rules import SYNCHRONET
from toolbus.parts.moving.neko.plugin_lifecycle import start_plugin, stop_plugin
from toolbus.sdk import ToolScope

SKELETONS = tomllib.loads(Path(__file__).with_name("skeletons.toml").read_text(encoding="utf-8"))
SYSTEMS = {"neko": NEKO, "synchronet": SYNCHRONET, "spindle": SPINDLE}
CASES = [(system, name) for system, each in SKELETONS.items() for name in each]
Tools = Mapping[str, ToolSpec]


async def run_sync(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


@asynccontextmanager
async def plugin(folder: Path) -> AsyncIterator[Tools]:
    with loaded(folder, entries=True) as found:
        assert found.owner is not None
        assert found.tools is not None
        await start_plugin(found.owner, run_sync)
        try:
            yield {spec.tool.name: spec for spec in found.tools}
        finally:
            await stop_plugin(found.owner, run_sync)


@asynccontextmanager
async def scripts(folder: Path) -> AsyncIterator[Tools]:
    group = group_of(folder)
    try:
        yield {spec.tool.name: spec for spec in (await asyncio.to_thread(group.load)).specs}
    finally:
        await asyncio.to_thread(group.close)


def group_of(folder: Path) -> ScriptGroup:
    manifest = folder / "spindle.json"
    if manifest.is_file():
        entry = json.loads(manifest.read_text()).get("entry_backend", "dist/backend.js")
        return ScriptGroup(folder, [entry], is_extension=True)
    return ScriptGroup(folder, sorted(path.name for path in folder.glob("*.js")))


@pytest.mark.parametrize(("system", "name"), CASES)
async def test_a_run_does_what_the_check_says(tmp_path: Path, system: str, name: str) -> None:
    skeleton = SKELETONS[system][name]
    folder = tmp_path / "plugins" / name
    for file, text in skeleton["files"].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    report = check(folder, SYSTEMS[system])
    absent = not skeleton["calls"] or any(does == "absent" for *_, does in skeleton["calls"])
    assert report.runs is not absent, [each.what for each in report.findings if each.effect is Effect.STOPS]
    async with (plugin if system == "neko" else scripts)(folder) as tools:
        for tool, arguments, does in skeleton["calls"]:
            if does == "absent" and tool not in tools:
                continue
            result = await run_handler(tools[tool], json.loads(arguments), ToolScope("c1", tool), run_sync)
            assert result.is_error is (does != "works"), (tool, result)


def test_the_skeletons_are_many() -> None:
    assert {system: len(each) for system, each in SKELETONS.items()} == {"neko": 15, "synchronet": 15, "spindle": 20}
