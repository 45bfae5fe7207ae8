"""Checks that the numbered REST contract is complete: each cited id is defined, each defined id has a test."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, TEXTS

DEFINED = re.findall(r"^### REST-(\d+)$", TEXTS["docs/reference/rest-contract.md"], re.MULTILINE)
_CITED = re.compile(r"\bREST-(\d+)\b")


def _cited(*folders: str) -> dict[str, set[str]]:
    """Returns the files that cite an id, by the id."""
    citing: dict[str, set[str]] = {}
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".proto", ".toml") and "node_modules" not in path.parts:
                for number in _CITED.findall(path.read_text("utf-8")):
                    citing.setdefault(number, set()).add(str(path.relative_to(ROOT)))
    return citing


def test_every_id_is_defined_once_and_in_order() -> None:
    assert [str(number) for number in sorted(set(map(int, DEFINED)))] == DEFINED


def test_every_cited_id_is_defined() -> None:
    cited = _cited("toolbus", "tests", "clients", "examples", "lab", "docs", "proto")
    undefined = {f"REST-{number}": files for number, files in cited.items() if number not in DEFINED}
    assert not undefined


def test_every_defined_id_is_cited_by_a_test() -> None:
    cited = _cited("tests")
    untested = [f"REST-{number}" for number in DEFINED if number not in cited]
    assert not untested


def test_the_guide_gives_authors_the_four_rules_of_the_documents() -> None:
    """REST-65."""
    guide = TEXTS["docs/start/plugins.md"]
    section = guide.partition("## Four rules\n")[2].partition("\n## ")[0]
    rules = re.findall(r"^- \*\*(.+?)\*\*", section, re.MULTILINE)
    assert len(rules) == 4
    words = ("tool names", "five minutes", "empty success", "registering")
    assert all(word in rule for word, rule in zip(words, rules, strict=True)), rules
