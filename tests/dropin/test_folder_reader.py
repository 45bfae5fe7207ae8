"""Reading a folder: what is noticed as a change of a file."""

from pathlib import Path

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
