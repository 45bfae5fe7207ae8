"""`toolbus new`: the files that it writes run as they are, with their test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.support.processes import toolbus


def test_the_test_of_a_new_plugin_passes_and_nothing_that_is_there_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = toolbus("new", "my_weather", "--in", tmp_path)
    assert made.returncode == 0, made.stderr
    assert "toolbus dev my_weather.py" in made.stdout
    monkeypatch.syspath_prepend(str(tmp_path / "my_weather"))
    try:
        importlib.import_module("test_my_weather").test_it_greets()
    finally:
        for name in ("test_my_weather", "my_weather"):
            sys.modules.pop(name, None)
    again = toolbus("new", "my_weather", "--in", tmp_path)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    bad = toolbus("new", "My-Weather", "--in", tmp_path)
    assert (bad.returncode, "use small letters" in bad.stderr) == (2, True)
