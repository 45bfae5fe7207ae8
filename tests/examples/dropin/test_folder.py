"""Every tool of the folder: descriptions for models, grants of the manifest, and any arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples.dropin.conftest import FILES, FOLDER, Folder
from tests.support.examples import examples
from toolbus.bus.calls.call_records import is_secret_name
from toolbus.parts.dropin.file_loader import load_folder
from toolbus.parts.dropin.manifest import load_manifest

TOOLS = ("archive_search", "directory", "my_messages", "relay_message", "this_host")


def test_the_folder_offers_these_tools(folder: Folder) -> None:
    assert sorted(folder.registered) == list(TOOLS)


def own_copy(folder: Path) -> Path:
    """Returns a copy of the files that belongs to this user: a checkout may be another's, whose manifest is refused."""
    return Path(shutil.copytree(FOLDER, folder / "dropin"))


def test_the_loader_takes_every_file_with_the_manifest_that_ships(tmp_path: Path) -> None:
    loaded = load_folder(own_copy(tmp_path), require_manifest=True)
    assert loaded.problems == ()
    assert sorted(spec.tool.name for spec in loaded.specs) == list(TOOLS)
    flags = {spec.tool.name: (spec.tool.annotations.read_only, spec.tool.direct_reply) for spec in loaded.specs}
    assert flags == {
        **dict.fromkeys(("archive_search", "directory", "this_host"), (True, False)),
        "relay_message": (False, True),
        "my_messages": (False, False),
    }


def test_only_the_message_queue_may_be_written_and_only_their_data_is_read(tmp_path: Path) -> None:
    folder = own_copy(tmp_path)
    manifest = load_manifest(folder, require=True)
    assert sorted(manifest.allow or ()) == sorted(FILES)
    files = {
        file: {
            kind: [path.relative_to(folder).as_posix() for path in getattr(grants, kind)] for kind in ("read", "write")
        }
        for file, grants in manifest.files.items()
    }
    assert files == {
        "archive_search.py": {"read": ["data/archive_index.json"], "write": []},
        "directory.py": {"read": ["data/directory.json"], "write": []},
        "relay_message.py": {"read": [], "write": ["queue.db", "queue.db-journal"]},
    }
    assert not any(grants.connect or grants.secrets for grants in manifest.files.values())


@pytest.mark.parametrize("name", TOOLS)
def test_a_description_states_when_to_call_a_tool_and_when_not(folder: Folder, name: str) -> None:
    function = folder.registered[name]["definition"]["function"]
    assert function["name"] == name
    description = function["description"]
    assert "Do NOT call it" in description
    assert "'" in description, "no phrase of a user in it"
    assert len(description) < 700


@pytest.mark.parametrize("name", TOOLS)
def test_every_argument_is_described_and_no_limit_is_a_rule_of_the_schema(folder: Folder, name: str) -> None:
    parameters = folder.registered[name]["definition"]["function"]["parameters"]
    assert parameters["type"] == "object"
    for argument, schema in parameters["properties"].items():
        assert schema["description"], argument
        assert not {"minimum", "maximum"} & set(schema), "a clamp answers what a schema would refuse"
    assert set(parameters["required"]) <= set(parameters["properties"])


def test_each_argument_is_described_with_the_modes_that_take_it(folder: Folder) -> None:
    for name in ("directory", "this_host"):
        properties = folder.registered[name]["definition"]["function"]["parameters"]["properties"]
        for argument, modes in folder.modules[name].BELONGS_TO.items():
            assert properties[argument]["description"].startswith(f"{' and '.join(modes)} only: ")


WORDS = st.sampled_from(
    ["lookup", "list", "recent", "tools", "stats", "recent_calls", "ssh", "json", "bob", "take", "tcp"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_arguments_are_answered_with_an_object(folder: Folder, name: str, data: st.DataObject) -> None:
    properties = folder.registered[name]["definition"]["function"]["parameters"]["properties"]
    args = data.draw(st.dictionaries(st.sampled_from(sorted(properties)), VALUES))
    bus = dict.fromkeys(("plugins", "tools", "recent_calls"), list)
    with patch("socket.create_connection", side_effect=ConnectionRefusedError):
        answer = folder.call(name, args, user="ann", users="bob", bus={**bus, "stats": dict})
    assert isinstance(answer, dict)
    assert answer.get("error") != ""


def test_no_key_of_an_answer_looks_like_a_secrets(folder: Folder) -> None:
    answers = [
        folder.call("directory", {"name": "ssh", "probe": False}),
        folder.call("directory", {"kind": "reliable"}),
        folder.call("archive_search", {"query": "json"}),
        folder.call("relay_message", {"recipient": "bob", "text": "hi"}, user="ann", users="bob"),
        folder.call("my_messages", {}, user="bob"),
    ]
    assert [key for key in _keys(answers) if is_secret_name(key)] == []


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for each in value.values() for key in _keys(each))]
    return [key for each in value for key in _keys(each)] if isinstance(value, list) else []


def test_the_files_need_nothing_but_the_standard_library() -> None:
    script = f"""
        import builtins, runpy, sys
        builtins.register_tool = lambda **spec: None
        sys.path.insert(0, {str(FOLDER)!r})
        for file in {FILES!r}:
            runpy.run_path({str(FOLDER)!r} + "/" + file)
        print(sorted({{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)))
    """
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() in ("['__main__', '_common']", "['_common']")


def test_every_data_file_names_its_origin_and_licence() -> None:
    for file in ("directory.json", "archive_index.json"):
        origin = json.loads((FOLDER / "data" / file).read_text(encoding="utf-8"))["origin"]
        assert origin["url"].startswith("https://"), file
        assert origin["licence"].split(" ")[0] in ("CC0-1.0", "PSF-2.0"), file
        assert origin["licence"].split(" ")[0] in Path(FOLDER / "README.md").read_text(encoding="utf-8")
