"""Tests that a file is replaced as a whole or stays as it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from toolbus.common.whole_file import replace_file


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_gets_the_content_and_the_mode_whatever_it_had(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(b"before")
    path.chmod(0o640)
    replace_file(path, b"after", mode)
    assert path.read_bytes() == b"after"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["settings.json"]


def test_what_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        replace_file(tmp_path / "taken", b"after")
    assert os.listdir(tmp_path) == ["taken"]
