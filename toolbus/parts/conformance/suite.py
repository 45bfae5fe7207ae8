"""Plays all scenarios side by side, and judges each rule by the scenarios that test it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from toolbus.parts.conformance.player import Played, Player
from toolbus.parts.conformance.script import ROLES, ProtocolRule, Scenario, rules, scenarios
from toolbus.parts.conformance.stream_verbs import BASIC_TOOLS

_STEP = re.compile(r"step \d+ \(\w+\): ")
OTHER_ROLE = "the client's tool about does not name this role among its roles"
REPLAYS = 4  # of a scenario that failed while this process did not get the processor
ABOUT = Scenario(
    "the client tells about itself",
    (),
    (
        {"accept": {}},
        {"send": {"calls": [{"call_id": "1", "name": "about"}]}},
        {"expect": {"results": [{"call_id": "1", "is_error": False, "output_json": {"$bind": "about"}}]}},
    ),
)


class RuleVerdict(Enum):
    """The verdict on a rule."""

    KEPT = "kept"
    BROKEN = "broken"
    KNOWN = "known"
    UNCLAIMED = "unclaimed"


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one rule, with its reason.

    Attributes:
        why: what the client did instead; "" if it kept the rule.
        played: the scenario that shows it best: the first that failed, or the first of all.
        stale: whether the rule was declared as known to be broken, and was kept.
    """

    rule: ProtocolRule
    verdict: RuleVerdict
    why: str
    played: Played
    stale: bool = False

    @property
    def cause(self) -> str:
        """The reason without the scenario and its step: rules that one fault of the client breaks have the same."""
        return _STEP.sub("", self.why.removeprefix(f"{self.played.scenario.name}, "))


@dataclass(frozen=True, slots=True)
class ClientOutcome:
    """The verdicts on a client.

    Attributes:
        about: its name, version and language, if its tool `about` states them.
        starts: whether it opened a stream.
        why: what it did instead; "" if it opened one.
    """

    about: Mapping[str, Any]
    starts: bool
    judged: Sequence[Judged]
    stderr: Sequence[str] = ()
    why: str = ""

    @property
    def kept(self) -> bool:
        """Whether the broken rules are exactly those that are known to be broken."""
        return self.starts and not any(each.verdict is RuleVerdict.BROKEN or each.stale for each in self.judged)


class NoSuchRule(ValueError):
    """A rule, a group or a role does not exist; the text names those that do."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rules to play.

    Attributes:
        roles: the roles that the client claims: a rule for which it lacks a tool is broken. Empty: such a rule is
            unclaimed.
        rules: ids, or groups such as `LIFE`; empty for all.
        known: ids of rules that are known to be broken.
    """

    roles: Collection[str] = ()
    rules: Collection[str] = ()
    known: Collection[str] = ()

    def chosen(self) -> list[ProtocolRule]:
        """Returns the rules to judge.

        Raises:
            NoSuchRule: one that is named does not exist.
        """
        there = rules()
        groups = {each.rpartition("-")[0] for each in there}
        for named in (*self.rules, *self.known):
            if named not in there and named not in groups:
                raise NoSuchRule(
                    f"{named!r} is not a rule: the groups are {', '.join(sorted(groups))}; --list shows all rules"
                )
        for role in self.roles:
            if role not in ROLES:
                raise NoSuchRule(f"{role!r} is not a role: the roles are {', '.join(ROLES)}")
        return [
            rule
            for rule in there.values()
            if (not self.roles or rule.role in self.roles)
            and (not self.rules or rule.id in self.rules or rule.id.rpartition("-")[0] in self.rules)
        ]


async def run(
    command: Sequence[str],
    choice: Choice,
    *,
    jobs: int = 4,
    patience: float = 1.0,
    until_broken: bool = False,
    done: Callable[[Played, int, int], object] = lambda played, number, of: None,
) -> ClientOutcome:
    """Plays the scenarios that test the chosen rules.

    Args:
        command: starts the client.
        jobs: how many scenarios are played at once.
        patience: multiplies all times that a client may take.
        until_broken: stops once a chosen rule is broken.
        done: called after each scenario, with how many are done and how many there are.

    Raises:
        NoSuchRule: the choice names a rule, group or role that does not exist.
        OSError: the client cannot be started.
        Exception: a fault of this program or of a scenario.
    """
    chosen = {rule.id: rule for rule in choice.chosen()}
    first = await _play(command, ABOUT, patience)
    if first.exited_early:
        return ClientOutcome({}, False, (), first.stderr, _no_stream(first))
    claimed = {*choice.roles, *first.about.get("roles", ROLES[:2])}
    played_rules = {rule.id for rule in chosen.values() if rule.role in claimed}
    chosen_scenarios = [each for each in scenarios() if played_rules & set(each.rules)]
    room = asyncio.Semaphore(jobs)
    finished = 0
    broken = False  # whether a chosen rule is

    async def play(scenario: Scenario) -> Played | None:
        nonlocal finished, broken
        async with room:
            if broken and until_broken:
                return None
            played = await _play(command, scenario, patience)
        finished += 1
        broken = broken or not chosen.keys().isdisjoint(played.broken)
        done(played, finished, len(chosen_scenarios))
        return played

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(play(each)) for each in chosen_scenarios]
    played = [each for task in tasks if (each := task.result()) is not None]
    judged = [
        _judge(rule, played, choice) if rule.role in claimed else Judged(rule, RuleVerdict.UNCLAIMED, OTHER_ROLE, first)
        for rule in chosen.values()
    ]
    return ClientOutcome(first.about, True, judged)


def _no_stream(played: Played) -> str:
    if played.code is None:
        return f"opened no stream to the bus at TOOLBUS_ADDRESS in {played.seconds:.0f} s"
    return f"ended with exit code {played.code} before it opened a stream to the bus at TOOLBUS_ADDRESS"


async def _play(command: Sequence[str], scenario: Scenario, patience: float) -> Played:
    played = await Player(command, scenario, patience=patience).play()
    for _ in range(REPLAYS):
        if not (played.broken and played.starved):
            break
        played = await Player(command, scenario, patience=patience).play()
    return played


def _judge(rule: ProtocolRule, all_played: Sequence[Played], choice: Choice) -> Judged:
    """Judges a rule by the scenarios that test it, and by others in which the client broke it."""
    shows = [each for each in all_played if rule.id in each.scenario.rules or rule.id in each.broken]
    wrong = next((each for each in shows if rule.id in each.broken), None)
    known = rule.id in choice.known
    if wrong is not None:
        return Judged(rule, RuleVerdict.KNOWN if known else RuleVerdict.BROKEN, wrong.broken[rule.id], wrong)
    shows = shows or [*all_played][:1]  # a rule of every scenario
    lacking = next((each for each in shows if each.unclaimed), None)
    if lacking is not None:
        why = f"the client does not offer the tool {lacking.unclaimed!r}"
        verdict = RuleVerdict.BROKEN if choice.roles or lacking.unclaimed in BASIC_TOOLS else RuleVerdict.UNCLAIMED
        return Judged(rule, RuleVerdict.KNOWN if known and verdict is RuleVerdict.BROKEN else verdict, why, lacking)
    return Judged(rule, RuleVerdict.KEPT, "", shows[0], stale=known)
