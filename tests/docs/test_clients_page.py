"""The page for authors of clients names the rules that there are."""

import re
import tomllib

from tests.docs.pages import ROOT, TEXTS

STEPS = TEXTS["docs/start/clients.md"].partition("## The steps")[2].partition("## Read a failure")[0]


def test_every_rule_is_played_in_exactly_one_step() -> None:
    rules = tomllib.loads((ROOT / "toolbus" / "conformance" / "rules.toml").read_text())["rule"]
    ids = [rule["id"] for rule in rules]
    named = [name for choice in re.findall(r"--rules (\S+)", STEPS) for name in choice.split(",")]
    played = [each for name in named for each in ids if each == name or each.startswith(f"{name}-")]
    assert sorted(played) == sorted(ids)
    assert not [name for name in named if not any(each == name or each.startswith(f"{name}-") for each in ids)]
