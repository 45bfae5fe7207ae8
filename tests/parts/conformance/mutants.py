"""Plays clients that are broken on purpose: a check that nobody saw fail is no check.

    python -m tests.parts.conformance.mutants [RULE …]

One line a mutant; the exit code is 1 where one is not found by its rule.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.parts.conformance.forked_client import forked_clients
from toolbus.parts.conformance.stage import run_of_clients
from toolbus.parts.conformance.suite import Choice, ClientOutcome, RuleVerdict, run

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ROOT / "clients" / "python"
AT_ONCE = 8  # most of their time is pauses
PLAYS = 3  # of a mutant that is not found: pauses are drawn at random, and a broken one may happen to be right


@dataclass(frozen=True, slots=True)
class Mutant:
    """A client with one fault.

    Attributes:
        rule: the id of the rule that finds it.
        breaks: what it does.
        file: of clients/python.
        old: stands once there.
        new: stands in its place.
    """

    rule: str
    breaks: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.breaks}"

    @property
    def text(self) -> str:
        """The broken file.

        Raises:
            ValueError: `old` does not stand exactly once in the file.
        """
        text = (CLIENT / self.file).read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            raise ValueError(
                f"{self}: {self.old!r} stands {times} times in clients/python/{self.file}, it must be once"
            )
        return text.replace(self.old, self.new)

    async def play(self) -> ClientOutcome:
        """Plays the scenarios of its rule."""
        with tempfile.TemporaryDirectory(prefix="toolbus-") as folder:
            broken = Path(folder, "client")
            shutil.copytree(CLIENT, broken, ignore=shutil.ignore_patterns("__pycache__"))
            (broken / self.file).write_text(self.text, encoding="utf-8")
            command = (sys.executable, str(broken / "conformance.py"))
            return await run(command, Choice(rules=(self.rule,)), jobs=1, until_broken=True)


@cache
def mutants() -> tuple[Mutant, ...]:
    """Returns all mutants."""
    read = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
    return tuple(Mutant(**each) for each in read["mutant"])


def is_found(mutant: Mutant, outcome: ClientOutcome) -> bool:
    """Tells whether a mutant was found by its rule, and not because it does not even start."""
    return outcome.starts and any(
        each.rule.id == mutant.rule and each.verdict is RuleVerdict.BROKEN for each in outcome.judged
    )


async def play_all(wanted: list[str]) -> int:
    """Plays the mutants of rules or groups, or all; returns how many were not found."""
    room, missed = asyncio.Semaphore(AT_ONCE), 0

    async def play(mutant: Mutant) -> None:
        nonlocal missed
        async with room:
            for _ in range(PLAYS):
                outcome = await mutant.play()
                if hit := is_found(mutant, outcome):
                    break
        missed += not hit
        why = next((each.why for each in outcome.judged if each.rule.id == mutant.rule), "it does not start")
        print(f"{'found ' if hit else 'MISSED'} {mutant}{f' ({why})' if hit else ''}", flush=True)

    async with asyncio.TaskGroup() as group:
        for each in mutants():
            if not wanted or each.rule in wanted or each.rule.partition("-")[0] in wanted:
                group.create_task(play(each))
    return missed


def main() -> int:
    """Plays, and says what came of it."""
    os.environ["PYTHONPATH"] = str(ROOT)
    with run_of_clients(), forked_clients():
        missed = asyncio.run(play_all(sys.argv[1:]))
    print(f"{missed} not found" if missed else "all found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
