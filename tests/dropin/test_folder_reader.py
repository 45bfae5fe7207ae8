"""Reading a folder: what is noticed as a change of a file, and which of its scripts are loaded, and how."""

from pathlib import Path
from typing import Any

from tests.support.tool_folders import tool
from toolbus.dropin.folder_reader import FolderReader, read_code


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
