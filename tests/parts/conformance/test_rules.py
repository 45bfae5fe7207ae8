"""The rules, the scenarios and the mutants belong together, and to the text of the protocol."""

from __future__ import annotations

import re

import pytest

from tests.parts.conformance.clients import TABLE
from tests.parts.conformance.mutants import ROOT, Mutant, mutants
from toolbus.parts.conformance.player import WorldVerbs
from toolbus.parts.conformance.script import ROLES, VERBS, ProtocolRule, rules, scenarios
from toolbus.parts.conformance.stream_verbs import StreamVerbs


def _anchors() -> set[str]:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule.id)
def test_each_rule_is_from_a_section_of_the_protocol(rule: ProtocolRule) -> None:
    assert rule.anchor in _anchors()


def test_each_rule_has_a_scenario_that_shows_it_and_a_mutant_that_it_finds() -> None:
    assert rules().keys() == {rule for scenario in scenarios() for rule in scenario.rules}
    assert rules().keys() == {mutant.rule for mutant in mutants()}


def test_the_table_of_the_clients_counts_the_rules_of_today() -> None:
    counted = re.findall(r"\d+/(\d+)", TABLE.read_text(encoding="utf-8"))
    of_each_role = [str(sum(rule.role == role for rule in rules().values())) for role in ROLES]
    assert counted, "the table has no client"
    assert counted == of_each_role * (len(counted) // len(ROLES)), "run 'make conformance' and commit the table"


def test_each_scenario_has_a_name_of_its_own() -> None:
    names = [each.name for each in scenarios()]
    assert len(names) == len(set(names))


def test_each_verb_of_a_step_can_be_played() -> None:
    assert {verb for verb in VERBS if not hasattr(StreamVerbs, verb) and not hasattr(WorldVerbs, verb)} == {"best_of"}


@pytest.mark.parametrize("mutant", mutants(), ids=str)
def test_each_mutant_breaks_a_rule_that_exists_in_one_place_of_the_client(mutant: Mutant) -> None:
    assert mutant.rule in rules()
    compile(mutant.text, mutant.file, "exec")
