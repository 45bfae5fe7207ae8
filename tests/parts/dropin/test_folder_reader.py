"""Reading a folder: what is noticed as a change of a file, and which of its scripts are loaded, and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tool_folders import tool
from toolbus.parts.dropin.tool_folder import FolderReader, read_code


def test_a_change_beyond_what_is_read_of_a_file_changes_its_fingerprint(tmp_path: Path) -> None:
    reader = FolderReader(tmp_path, {}, max_code_bytes=10)
    fingerprints = []
    for description in ("1", "22"):
        (tmp_path / "a.py").write_text(tool("one", description))
        plans = reader.read({}).sources
        assert plans is not None
        fingerprints.append(plans["dropin"].fingerprint)
    assert fingerprints[0] != fingerprints[1]
    assert len(read_code(tmp_path / "a.py", limit=10)) < 100


def groups_of(folder: Path, **options: Any) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Returns the files of each source, and the faults of the folder."""
    plan = FolderReader(folder, {}, **options).read({})
    assert plan.sources is not None
    return {name: plan.group.files for name, plan in plan.sources.items()}, plan.faults


def test_a_script_that_uses_spindle_has_a_source_of_its_own_and_the_others_share_one(tmp_path: Path) -> None:
    scripts = {
        "_helper.js": "spindle.log",
        "a.js": "// spindles, and a word: spindle",
        "b.js": "spindle.on()",
        "c.js": "spindle\n  ?.on()",
        "d.js": 'spindle["on"]()',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    sources, faults = groups_of(tmp_path)
    assert sources == {
        "dropin:js": ("_helper.js", "a.js"),
        "dropin:b.js": ("b.js",),
        "dropin:c.js": ("c.js",),
        "dropin:d.js": ("d.js",),
    }
    assert faults == []


def test_without_an_engine_scripts_are_skipped_with_the_name_of_the_extra(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("")
    (tmp_path / "b.py").write_text("")
    missing = "JavaScript needs QuickJS, which is not installed: pip install 'toolbus[javascript]'"
    sources, faults = groups_of(tmp_path, missing_engine=lambda: missing)
    assert sources == {"dropin": ("b.py",)}
    assert faults == [f"a.js is not loaded: {missing}"]


def test_an_extension_whose_name_cannot_be_a_source_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "my kb.js").write_text("spindle.on()")
    assert groups_of(tmp_path)[1] == [
        "my kb.js is not loaded: its name cannot be that of a source: use letters, digits, '_', '-' and '.'"
    ]


def test_grants_that_javascript_cannot_use_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("")
    grants = '{"files": {"a.js": {"read": ["/etc/hostname"], "memory_mb": 256, "cpu_seconds": 5}}}'
    (tmp_path / "_manifest.json").write_text(grants)
    sources, faults = groups_of(tmp_path)
    assert sources == {"dropin:a.js": ("a.js",)}
    assert any(fault.startswith("a.js is granted read, which JavaScript cannot use") for fault in faults)


def test_of_a_folder_only_the_named_files_are_read_with_their_helpers(tmp_path: Path) -> None:
    for name in ("_h.js", "_h.py", "a.js", "b.js", "c.py"):
        (tmp_path / name).write_text("")
    manifest = '{"allow": ["_h.js", "a.js", "gone.py"], "files": {"c.py": {"memory_mb": 256}, "gone.py": {}}}'
    (tmp_path / "_manifest.json").write_text(manifest)
    assert groups_of(tmp_path, only=["a.js"]) == ({"dropin:js": ("_h.js", "a.js")}, [])
    sources, faults = groups_of(tmp_path, only=["b.js"])
    assert sources == {"dropin:js": ("_h.js",)}
    assert faults == ["b.js is not on the allow list of _manifest.json: add it there"]


def extension(folder: Path, name: str, manifest: str, entry: str = "dist/backend.js") -> None:
    file = folder / name / entry
    file.parent.mkdir(parents=True)
    file.write_text("")
    (folder / name / "spindle.json").write_text(manifest)


def test_a_folder_with_a_spindle_json_is_an_extension(tmp_path: Path) -> None:
    extension(tmp_path, "usual", '{"identifier": "u"}')
    extension(tmp_path, "named", '{"entry_backend": "out/main.js"}', "out/main.js")
    extension(tmp_path, "broken", "{")
    extension(tmp_path, ".hidden", "{}")
    (tmp_path / "plain").mkdir()
    sources, faults = groups_of(tmp_path)
    assert sources == {
        "dropin:usual": ("usual/dist/backend.js",),
        "dropin:named": ("named/out/main.js",),
        "dropin:broken": ("broken/dist/backend.js",),
    }
    assert faults == []
    assert groups_of(tmp_path, only=["named/out/main.js"])[0] == {"dropin:named": ("named/out/main.js",)}


@pytest.mark.parametrize("entry", ["../a.js", "/a.js", "a/../../a.js", ".a.js", "a.py", "", None, 5, "a\\b.js"])
def test_the_entry_of_an_extension_cannot_lead_out_of_its_folder(tmp_path: Path, entry: object) -> None:
    extension(tmp_path, "kb", json.dumps({"entry_backend": entry}))
    assert groups_of(tmp_path)[0] == {"dropin:kb": ("kb/dist/backend.js",)}


def test_an_extension_is_allowed_and_limited_by_the_name_of_its_entry(tmp_path: Path) -> None:
    extension(tmp_path, "kb", "{}")
    (tmp_path / "_manifest.json").write_text('{"allow": []}')
    assert groups_of(tmp_path)[0] == {}
    limits = '{"allow": ["kb/dist/backend.js"], "files": {"kb/dist/backend.js": {"memory_mb": 256}}}'
    (tmp_path / "_manifest.json").write_text(limits)
    plans = FolderReader(tmp_path, {}).read({}).sources
    assert plans is not None
    assert plans["dropin:kb"].group.grants.memory_mb == 256


def test_two_files_that_would_have_one_source_are_not_both_loaded(tmp_path: Path) -> None:
    extension(tmp_path, "kb", "{}")
    (tmp_path / "kb.py").write_text("")
    (tmp_path / "_manifest.json").write_text('{"files": {"kb.py": {"memory_mb": 256}}}')
    sources, faults = groups_of(tmp_path)
    assert sources == {"dropin:kb": ("kb.py",)}
    assert faults == [
        "kb/dist/backend.js is not loaded: its source would be dropin:kb, as that of kb.py: rename one of them"
    ]


def test_no_file_may_be_granted_to_write_an_extension(tmp_path: Path) -> None:
    extension(tmp_path, "kb", "{}")
    (tmp_path / "a.py").write_text("")
    for path in ("kb", "kb/dist", "kb/dist/backend.js", "kb/spindle.json"):
        (tmp_path / "_manifest.json").write_text(json.dumps({"files": {"a.py": {"write": [path]}}}))
        plan = FolderReader(tmp_path, {}).read({})
        assert plan.sources is None
        assert "it holds tools or their grants" in plan.faults[0]
