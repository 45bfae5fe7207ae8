"""Files that give rights: each is refused where another user could put another one in its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from toolbus.bus.serve_settings import settle
from toolbus.errors import SetupError
from toolbus.parts.council.settings import CouncilSettings
from toolbus.parts.dropin.manifest import load_manifest
from toolbus.processes.child_environment import read_secrets
from toolbus.sdk.credential import Credential

GRANT = '{"files": {"tool.py": {"secrets": ["KEY"]}}}'
READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "configuration": ("bus.toml", 'grpc = ["127.0.0.1:0"]\n', lambda file: settle({}, {}, file)),
    "council": ("council.toml", "", CouncilSettings.load),
    "manifest": ("_manifest.json", GRANT, lambda file: load_manifest(file.parent)),
    "secrets": ("secrets.toml", '[weather]\nKEY = "x"\n', lambda file: read_secrets(file, ["weather"])),
    "credential": ("key.toml", 'token = "t"\n', Credential.read),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("way", ["its folder", "a link to it"])
def test_a_file_that_another_user_could_replace_is_refused_with_the_command_that_fixes_it(
    tmp_path: Path, kind: str, way: str
) -> None:
    name, text, read = READERS[kind]
    place = tmp_path / "open"
    place.mkdir()
    file = place / name
    file.write_text(text)
    file.chmod(0o600)
    read(file)  # as it should be
    if way == "a link to it" and kind != "manifest":
        moved = tmp_path / name
        shutil.move(file, moved)
        file.symlink_to(moved)
    place.chmod(0o777)
    with pytest.raises(SetupError) as failure:
        read(file)
    text = str(failure.value)
    assert str(file) in text
    assert f"it leads through {place}, which may be written by other users (mode 0777)" in text
    assert f"chmod go-w {place}" in text


@pytest.mark.parametrize(("file", "is_refused"), [("tool.py", True), ("other.py", False)])
def test_a_tool_file_with_a_grant_is_nobody_elses_to_change(tmp_path: Path, file: str, is_refused: bool) -> None:
    folder = tmp_path / "tools"
    folder.mkdir(mode=0o755)
    (folder / "_manifest.json").write_text(GRANT)
    for each in ("tool.py", "other.py"):
        (folder / each).write_text("")
    (folder / file).chmod(0o666)
    if not is_refused:
        assert load_manifest(folder).files
        return
    with pytest.raises(SetupError, match=r"tool\.py cannot be used: it may be written by other users \(mode 0666\)"):
        load_manifest(folder)
