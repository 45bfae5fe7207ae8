"""A keys directory for each test."""

from pathlib import Path

import pytest

from tests.bus.keys.keys_directory import KeysDirectory


@pytest.fixture
def keys(tmp_path: Path) -> KeysDirectory:
    return KeysDirectory(tmp_path)
