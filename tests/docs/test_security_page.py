"""Checks the tables of the page about security against the code, and that the tests against attackers exist."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from tests.docs.pages import ROOT, TEXTS, listed, table
from toolbus.bus.access.identity import VERBS, Scopes
from toolbus.bus.catalog.policy import VERBS_OF_TOOLS
from toolbus.bus.gateway.remote_access import LOCAL_ONLY, RULES

SECURITY = TEXTS["docs/about/security.md"]
_ATTACKERS = table((ROOT / "tests" / "attackers.md").read_text("utf-8"), "| attacker | test |")
_TEST = re.compile(r"\[`(test_\w+)`\]\(([\w/.]+)\)")


def test_the_page_has_the_tools_and_paths_of_each_verb_of_administer() -> None:
    documented = {row[0].strip("`"): _codes(row[2]) for row in listed(SECURITY, "The verbs of `administer`")}
    assert list(documented) == list(VERBS)
    for verb, named in documented.items():
        tools = {name for name, needed in VERBS_OF_TOOLS.items() if needed == verb}
        assert named == tools | {f"{method} {path}" for method, path, needed in RULES if needed == verb}


def test_the_page_says_where_each_scope_is_checked() -> None:
    asked = " ".join(row[2] for row in listed(SECURITY, "Each way in checks them:"))
    assert {each.name for each in fields(Scopes)} <= _codes(asked)


def test_the_page_names_the_paths_of_this_machine_only() -> None:
    (paragraph,) = (part for part in SECURITY.split("\n\n") if part.startswith("**Of this machine only**"))
    assert all(path.partition("callback/")[0] in paragraph for path in LOCAL_ONLY)


@pytest.mark.parametrize("row", _ATTACKERS, ids=[row[0] for row in _ATTACKERS])
def test_the_protection_against_each_attacker_has_a_test_that_exists(row: list[str]) -> None:
    named = _TEST.findall(row[1])
    assert named
    for test, file in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / file).read_text("utf-8"), re.MULTILINE), test


def _codes(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))
