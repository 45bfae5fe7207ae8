"""The bundled tools: which there are, and adding one to a folder."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import toolbus
from toolbus.dropin import load_folder
from toolbus.errors import SetupError
from toolbus.parts.dropin.bundled_tools import JAVASCRIPT, Bundled, add, bundled

ROOT = Path(__file__).parents[3]
TOOLS = {tool.name: tool for tool in bundled()}


def manifest(folder: Path) -> Any:
    return json.loads((folder / "_manifest.json").read_text())


def test_five_tools_are_bundled_each_with_the_files_that_it_needs() -> None:
    assert {name: tool.files for name, tool in TOOLS.items()} == {
        "archive_search": ("data/archive_index.json", "_common.py", "archive_search.py"),
        "directory": ("data/directory.json", "_common.py", "directory.py"),
        "relay_message": ("_common.py", "relay_message.py"),
        "run_script": ("run_script.py",),
        "this_host": ("_common.py", "this_host.py"),
    }


def _paths(tool: Bundled) -> list[str]:
    return [(tool.home / file).relative_to(TOOLS["this_host"].home).as_posix() for file in tool.files]


def test_the_wheel_includes_every_file_that_can_be_added() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    included = wheel["force-include"]
    needed = {"_manifest.json", "README.md"}.union(*map(_paths, TOOLS.values()))
    assert included == {f"examples/dropin/{file}": f"toolbus/bundled_dropin/{file}" for file in needed}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=list(TOOLS))
def test_an_added_tool_loads_with_its_grants_and_a_second_time_changes_nothing(tmp_path: Path, tool: Bundled) -> None:
    folder = tmp_path / "tools"
    assert {state for _, state in add(tool, folder).files} == {"added"}
    loaded = load_folder(folder)
    assert loaded.problems == ()
    assert tool.name in [spec.tool.name for spec in loaded.specs]
    if tool.grants:
        assert manifest(folder) == {"files": {f"{tool.name}.py": dict(tool.grants)}}
    again = add(tool, folder)
    assert {state for _, state in again.files} == {"unchanged"}
    assert not again.granted


def test_all_bundled_tools_together_have_the_manifest_of_the_examples(tmp_path: Path) -> None:
    (tmp_path / "_manifest.json").write_text('{"allow": []}')
    for tool in (each for each in TOOLS.values() if each.home.name != JAVASCRIPT):
        add(tool, tmp_path)
    ours = manifest(ROOT / "examples/dropin")
    assert sorted(manifest(tmp_path)["allow"]) == sorted(ours["allow"])
    assert manifest(tmp_path)["files"] == ours["files"]


def test_existing_grants_of_a_manifest_stay(tmp_path: Path) -> None:
    own = {"connect": ["127.0.0.1:22"], "read": ["/etc/hostname"], "memory_mb": 256}
    content = {"allow": ["mine.py"], "files": {"directory.py": own, "mine.py": {"secrets": ["KEY"]}}}
    (tmp_path / "_manifest.json").write_text(json.dumps(content))
    assert add(TOOLS["directory"], tmp_path).granted
    assert manifest(tmp_path) == {
        "allow": ["mine.py", "_common.py", "directory.py"],
        "files": {
            "directory.py": {**own, "read": ["/etc/hostname", "data/directory.json"]},
            "mine.py": {"secrets": ["KEY"]},
        },
    }


@pytest.mark.parametrize("file", ["_common.py", "relay_message.py"])
def test_a_changed_file_is_overwritten_with_force_only(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("mine = 1\n")
    with pytest.raises(SetupError, match=rf"{file} would be overwritten.*--force"):
        add(TOOLS["relay_message"], tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [file]
    assert (file, "replaced") in add(TOOLS["relay_message"], tmp_path, force=True).files
    assert (tmp_path / file).read_bytes() == (ROOT / "examples/dropin" / file).read_bytes()


def test_nothing_is_added_beside_a_broken_manifest(tmp_path: Path) -> None:
    (tmp_path / "_manifest.json").write_text("{")
    with pytest.raises(
        SetupError, match=f"nothing was added, since the manifest in {tmp_path} is broken: .*is not JSON"
    ):
        add(TOOLS["relay_message"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["_manifest.json"]


def test_a_folder_that_cannot_be_written_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No such file or directory: create its parent folder"):
        add(TOOLS["this_host"], tmp_path / "not" / "there")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="file is not a folder: name another one with --dir"):
        add(TOOLS["this_host"], tmp_path / "file")


def test_the_command_adds_and_says_what_it_did(tmp_path: Path) -> None:
    done = toolbus("tools", "add", "relay_message", "--dir", tmp_path / "tools")
    assert done.returncode == 0
    assert f"added {tmp_path}/tools/relay_message.py\n" in done.stdout
    assert "granted: write queue.db, queue.db-journal\n" in done.stdout
    added = json.loads(toolbus("tools", "add", "relay_message", "--dir", tmp_path / "tools", "--json").stdout)
    assert added["granted"] is False
    assert added["files"] == [
        {"file": "_common.py", "state": "unchanged"},
        {"file": "relay_message.py", "state": "unchanged"},
    ]
    (tmp_path / "tools/relay_message.py").write_text("")
    plain = toolbus("tools", "add", "this_host", "--dir", tmp_path / "plain")
    assert "grant" not in plain.stdout
    assert "added" in plain.stdout
    refused = toolbus("tools", "add", "relay_message", "--dir", tmp_path / "tools")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "would be overwritten" in refused.stderr
    assert toolbus("tools", "add", "relay_message", "--dir", tmp_path / "tools", "--force").returncode == 0


def test_the_command_lists_what_comes_along_and_knows_no_others() -> None:
    assert [each["name"] for each in json.loads(toolbus("tools", "bundled", "--json").stdout)] == list(TOOLS)
    assert toolbus("tools", "bundled").stdout.startswith("NAME            GRANTS")
    unknown = toolbus("tools", "add", "nothing")
    assert unknown.returncode == 2
    assert "unknown bundled tool 'nothing': use one of archive_search, directory, relay_message" in unknown.stderr
    assert "toolbus plugins tools add relay_message --dir tools/" in toolbus("tools", "add", "--help").stdout
