"""The page for authors of clients names the rules that there are."""

import re
import tomllib

from tests.docs.pages import ROOT, TEXTS

STEPS = TEXTS["docs/start/clients.md"].partition("## The steps")[2].partition("## Read a failure")[0]


def test_every_rule_is_played_in_a_step() -> None:
    rules = tomllib.loads((ROOT / "toolbus" / "conformance" / "rules.toml").read_text())["rule"]
    ids = {rule["id"] for rule in rules}
    groups = {each.rpartition("-")[0] for each in ids}
    named = {name for choice in re.findall(r"--rules (\S+)", STEPS) for name in choice.split(",")}
    assert named <= ids | groups
    assert {each for each in ids if not {each, each.rpartition("-")[0]} & named} == set()
