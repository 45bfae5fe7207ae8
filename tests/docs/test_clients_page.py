"""The page for authors of clients names the rules that there are, each in a step that can show it."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from tests.docs.pages import ROOT, TEXTS
from toolbus.parts.conformance.script import scenarios
from toolbus.parts.conformance.stream_verbs import BASIC_TOOLS

STEPS = TEXTS["docs/start/clients.md"].partition("## The steps")[2].partition("## Read a failure")[0]


def test_every_rule_is_played_in_a_step() -> None:
    rules = tomllib.loads((ROOT / "toolbus" / "parts" / "conformance" / "rules.toml").read_text())["rule"]
    ids = {rule["id"] for rule in rules}
    groups = {each.rpartition("-")[0] for each in ids}
    named = {name for choice in re.findall(r"--rules (\S+)", STEPS) for name in choice.split(",")}
    assert named <= ids | groups
    assert {each for each in ids if not {each, each.rpartition("-")[0]} & named} == set()


def needed(value: Any) -> Iterator[str]:
    """Yields what a client needs for a step of a scenario: the tools that the bus calls, and to be cancelled."""
    if isinstance(value, dict):
        yield from ("cancel" for _ in value.get("cancels", ()))
        for call in value.get("calls", ()):
            yield str(call.get("item", call).get("name"))
        for key, part in value.items():
            if key != "expect":
                yield from needed(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from needed(part)


def test_a_step_plays_only_rules_that_its_tools_and_those_before_can_show() -> None:
    known: set[str] = set()
    for step in re.split(r"^### ", STEPS, flags=re.MULTILINE)[1:6]:  # the last of them adds the last basic tool
        known |= {tool for tool in BASIC_TOOLS if f"`{tool}`" in step} | {"cancel"} & set(step.lower().split()[1:2])
        rules = {rule for choice in re.findall(r"--rules (\S+)", step) for rule in choice.split(",")}
        for scenario in scenarios():
            if rules & {*scenario.rules}:
                asked = {*BASIC_TOOLS, "cancel"} & {*needed(scenario.steps)}
                assert asked <= known, (step.partition("\n")[0], scenario.name, rules & {*scenario.rules})
                streams = [each for each in scenario.steps if "accept" in each or "stream" in each]
                assert len(streams) == 1, f"{scenario.name}: the client of {step.partition('.')[0]} does not reconnect"
    assert known == {*BASIC_TOOLS, "cancel"}
