"""A folder as `toolbus new` writes it runs by its name; a folder of anything else is left to the other loaders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import toolbus
from toolbus.parts.development.folder_loader import PluginFolderLoader
from toolbus.processes.loader import loaders

PLUGIN = "from toolbus import Plugin\n\nplugin = Plugin('weather')\n"
TOOL = "from toolbus import llm_tool\n\n@llm_tool\ndef greet() -> str:\n    return 'hi'\n"


def found(folder: Path, files: dict[str, str]) -> list[str] | None:
    """Returns the names of the files that run, as the first loader that knows the folder says."""
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    known = next(filter(None, (loader.find(folder) for loader in loaders())), None)
    return None if known is None else [path.name for path in known.paths]


def test_a_new_plugin_runs_by_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert toolbus("new", "weather").returncode == 0
    assert found(tmp_path / "weather", {}) == ["weather.py"]


@pytest.mark.parametrize(
    ("files", "run"),
    [
        ({"a.py": PLUGIN, "b.py": PLUGIN.replace("plugin =", "mine: Plugin ="), "_c.py": "", "test_a.py": ""}, "ab"),
        ({"a.py": PLUGIN.replace("Plugin('", "toolbus.Plugin('"), "conftest.py": "", "setup.py": ""}, "a"),
        ({"a.py": PLUGIN, "greet.py": TOOL}, None),
        ({"greet.py": TOOL}, None),
        ({"a.py": PLUGIN, "dice.js": "exports.roll = () => 4"}, None),
        ({"a.py": PLUGIN, "_manifest.json": "{}"}, None),
        ({"a.py": "# plugin = Plugin('weather')\n"}, None),
        ({"_a.py": PLUGIN}, None),
        ({}, None),
    ],
)
def test_only_a_folder_in_which_each_file_makes_a_plugin_is_one(
    files: dict[str, str], run: str | None, tmp_path: Path
) -> None:
    assert found(tmp_path, files) == (None if run is None else [f"{name}.py" for name in run])


def test_a_file_that_cannot_be_read_makes_no_plugin(tmp_path: Path) -> None:
    (tmp_path / "a.py").mkdir()
    assert PluginFolderLoader().find(tmp_path) is None
