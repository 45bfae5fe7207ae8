"""``toolbus dev check``: the table, the JSON, and what its exit code means."""

import json
from pathlib import Path

from tests.parts.moving.neko.folders import PLUGINS
from tests.support.processes import toolbus


def test_check_prints_places_with_the_numbers_of_their_remedies() -> None:
    ran = toolbus("check", PLUGINS / "no_such_import", "--from", "neko")
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == [
        "FIX  EFFECT  PLACE          WHAT",
        "1    stops   __init__.py:2  imports utils.config_manager, which is a part of its main program in N.E.K.O.",
        "1. Copy what the plugin needs of it into the plugin's folder.",
        "1 file read; something has to be changed: 1 stops, 0 differs, 0 note",
    ]


def test_what_runs_as_it_is_ends_with_0() -> None:
    ran = toolbus("check", PLUGINS / "weather", "--from", "neko")
    assert (ran.returncode, ran.stdout) == (0, "1 file read; it runs as it is: 0 stops, 0 differs, 0 note\n")


def test_the_json_has_every_finding() -> None:
    ran = toolbus("check", PLUGINS, "--from", "neko", "--json")
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["runs"], report["files"]) == (1, False, 13)
    assert {
        "path": str(PLUGINS / "diary" / "main.py"),
        "line": 103,
        "effect": "stops",
        "what": "self.plugins raises: it calls entries of other plugins in N.E.K.O.",
        "remedy": report["findings"][6]["remedy"],
    } in report["findings"]


def test_wrong_usage_is_told_apart(tmp_path: Path) -> None:
    for words, text in (
        ((PLUGINS, "--from", "latin"), "must be one of neko"),
        ((tmp_path / "none", "--from", "neko"), "does not exist"),
        ((tmp_path, "--from", "neko"), "has no file to check"),
        ((PLUGINS,), "with --from: neko, stargazer, spindle, synchronet"),
    ):
        ran = toolbus("check", *words)
        assert (ran.returncode, text in ran.stderr) == (2, True), ran.stderr


def test_an_extension_that_is_not_built_is_a_finding_though_it_has_no_script(tmp_path: Path) -> None:
    (tmp_path / "spindle.json").write_text('{"entry_backend": "dist/backend.js"}')
    ran = toolbus("check", tmp_path, "--from", "spindle")
    assert (ran.returncode, "its entry dist/backend.js is not in the folder" in ran.stdout) == (1, True), ran.stdout
