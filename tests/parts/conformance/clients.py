"""Plays all rules against the clients of this project, and writes the table of clients/CONFORMANCE.md.

    python -m tests.parts.conformance.clients [--check] [--runs 20] [NAME …]

With `--check` the table is compared, not written. Clients that `make clients` builds are played where they are built;
elsewhere the table keeps their line. Reports of clients that are kept elsewhere are read from clients/reports. The exit
code is 1 where a rule is broken, unclaimed or the table differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.parts.conformance.forked_client import forked_clients
from toolbus.parts.conformance import report
from toolbus.parts.conformance.script import ROLES
from toolbus.parts.conformance.stage import run_of_clients
from toolbus.parts.conformance.suite import Choice, ClientOutcome, RuleVerdict, run

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "clients" / "CONFORMANCE.md"
JOBS = 8  # scenarios at once: most of their time is pauses
COLD = {"java"}  # clients on a virtual machine: three at once, since each takes half a second of a processor to start
TITLE_LINES = len(report.table(()).splitlines())  # of the table, above the clients
REPORTS = ROOT / "clients" / "reports"
SDK = (sys.executable, "-m", "toolbus.parts.conformance.sdk_client")
CLIENTS: Mapping[str, Sequence[str]] = {
    "sdk": SDK,
    "stubs": (sys.executable, str(ROOT / "clients" / "python" / "conformance.py")),
}
# A virtual machine that is up soon: with the classes as an earlier run had them, where `make clients` has kept them.
JARS = ROOT / "clients" / "java" / "build"
JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xlog:disable", f"-XX:SharedArchiveFile={JARS / 'classes.jsa'}")
# Clients that `make clients` builds: the file that is there once they are built, which a program runs.
BUILT: Mapping[str, Sequence[str]] = {
    "typescript": ("node", str(ROOT / "clients" / "typescript" / "build" / "conformance.js")),
    "go": (str(ROOT / "clients" / "go" / "build" / "conformance"),),
    "rust": (str(ROOT / "clients" / "rust" / "build" / "debug" / "examples" / "conformance"),),
    "java": ("java", *JAVA, "-jar", str(JARS / "toolbus-client-0.1.0-tests.jar")),
}
# The SDK in other ways, which keep the same rules: handlers on threads; with the switch that the commands set. They
# are played where they are named.
OTHERS: Mapping[str, Sequence[str]] = {
    "sdk-plain": (*SDK, "--plain"),
    "sdk-switched": ("env", "GRPC_EXPERIMENTS=-event_engine_client,-event_engine_listener", *SDK),
}


def environment() -> None:
    """Has the clients find this project's package."""
    os.environ["PYTHONPATH"] = str(ROOT)


def wrong_of(outcome: ClientOutcome) -> list[str]:
    """Returns a line for each rule that is not kept, or one that says that the client does not start."""
    if not outcome.starts:
        return ["it opens no stream", *outcome.stderr]
    return [f"{each.rule.id}: {each.why}" for each in outcome.judged if each.verdict is not RuleVerdict.KEPT]


async def play(name: str) -> tuple[dict[str, Any], bool]:
    """Plays everything against one client; returns its report, and whether it keeps all."""
    began = time.monotonic()
    jobs, patience = (3, 3.0) if name in COLD else (JOBS, 1.0)
    outcome = await run({**CLIENTS, **BUILT, **OTHERS}[name], Choice(roles=ROLES), jobs=jobs, patience=patience)
    wrong = wrong_of(outcome)
    verdict = f"{len(wrong)} broken" if wrong else "all kept"
    print(f"{name}: {len(outcome.judged)} rules in {time.monotonic() - began:.0f} s, {verdict}", flush=True)
    for line in wrong:
        print(f"  {line}")
    return report.as_json(outcome), not wrong


def written(reports: Mapping[str, Mapping[str, Any]], table: str) -> str:
    """Returns the table of these reports, by name, and of those that others have sent.

    Args:
        table: the present one, which has the lines of clients that are not built here.
    """
    lines = {name: _line(each) for name, each in reports.items()}
    missing = iter(table.splitlines()[TITLE_LINES + len(CLIENTS) :])
    for name in BUILT:
        lines.setdefault(name, next(missing, ""))
    sent = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(REPORTS.glob("*.json"))]
    head, tail = report.table(()).splitlines(), report.table((), sent).splitlines()[TITLE_LINES:]
    return "\n".join([*head, *(lines[name] for name in (*CLIENTS, *BUILT)), *tail]) + "\n"


def _line(played: Mapping[str, Any]) -> str:
    """Returns the line of a client in the table."""
    return report.table([played]).splitlines()[-1]


def main() -> int:
    """Reads the command line and plays."""
    known = ", ".join([*CLIENTS, *BUILT, *OTHERS])
    parser = argparse.ArgumentParser(description="Play the rules of the protocol against the clients.")
    parser.add_argument("--check", action="store_true", help="compare the table instead of writing it")
    parser.add_argument("--runs", type=int, default=1, help="how often each client is played")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}; without a name all but the last two")
    options = parser.parse_args()
    if unknown := set(options.names) - {*CLIENTS, *BUILT, *OTHERS}:
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    environment()
    built = [name for name, command in BUILT.items() if Path(command[-1]).exists() and shutil.which(command[0])]
    names = options.names or [*CLIENTS, *built]
    present = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    kept, reports = True, {}
    for _ in range(options.runs):
        for name in names:
            with run_of_clients(), forked_clients(first_starts=True):
                reports[name], sound = asyncio.run(play(name))
            kept = kept and sound
    if not options.names:
        table = written(reports, present)
        if not options.check:
            TABLE.write_text(table, encoding="utf-8")
        fresh = table == present
    else:
        fresh = all(_line(reports[name]) in present for name in names if name not in OTHERS)
    if options.check and not fresh:
        print("clients/CONFORMANCE.md is not what the clients keep: run 'make conformance' and commit the result")
        kept = False
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
