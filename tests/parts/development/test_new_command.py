"""`toolbus new`: the files that it writes run as they are, with their test."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import toolbus
from toolbus.parts.development.templates import TEMPLATES


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


@pytest.mark.parametrize("name", ["calendar", "grpc"])
def test_a_name_that_would_hide_a_module_is_refused_where_the_plugin_is_in_python(tmp_path: Path, name: str) -> None:
    hiding = toolbus("new", name, "--in", tmp_path)
    assert (hiding.returncode, f"another name, as in my_{name}" in hiding.stderr) == (2, True)
    assert not (tmp_path / name).exists()
    other = next(language for language in TEMPLATES if language != "python")
    assert toolbus("new", name, "--in", tmp_path, "--language", other).returncode == 0


@pytest.mark.parametrize("language", TEMPLATES)
def test_each_language_has_its_files_and_what_is_left_out_or_unknown_is_named(tmp_path: Path, language: str) -> None:
    made = toolbus("new", "hi", "--in", tmp_path, "--language", language, "--json")
    assert made.returncode == 0, made.stderr
    written = json.loads(made.stdout)
    texts = {file: (tmp_path / "hi" / file).read_text("utf-8") for file in written["files"]}
    assert not re.search("@(start|program|name|clients)@", "".join(texts.values()))
    assert any("hi_hello" in text for text in texts.values())
    assert written["start"] in texts["README.md"]
    if TEMPLATES[language].package:
        lost = toolbus("new", "ho", "--in", tmp_path, "--language", language, "--clients", tmp_path)
        assert (lost.returncode, "pass --clients DIR" in lost.stderr) == (2, True)
    unknown = toolbus("new", "ho", "--in", tmp_path, "--language", f"{language}ish")
    assert (unknown.returncode, f"'{language}ish'" in unknown.stderr) == (2, True)
    assert not (tmp_path / "ho").exists()
