"""Plays the official conformance suite of MCP against a bus, and prints a table of what it found.

    python -m tests.parts.mcp.official.conformance [server|client|mounted] [--quick] [--keep FOLDER] [SCENARIO …]

`server` asks the endpoint of a bus whose tools come from a plugin over gRPC. `mounted` asks the same of a bus that has
them from another MCP server, the everything-server of the official SDK. `client` has the client for mounted servers
play. A scenario that fails is played once more, alone, unless many fail. The exit code is 1 where a check failed, where
a scenario did not run, or where fewer checks were made than the fixtures allow.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.parts.mcp.official import fixture_bus, suite
from tests.parts.mcp.official.suite import Outcome, Scenario

SUITE_SECONDS = 300.0  # for one run of many scenarios; on a quiet machine it takes 12
SCENARIO_SECONDS = 60.0  # for one; the client's have as long in the suite itself
CLIENT = Path(__file__).with_name("client.py")
MOST_AGAIN = 10  # failed scenarios that are played once more; where more fail, it is not the machine
CLIENTS_AT_ONCE = 2  # more of them share two cores, and some scenarios measure time

# How many checks at least succeed with all fixtures: a missing one turns checks into others that are not counted. For
# 2025-11-25 one of SEP-2106 is not: its clients get no alternatives at the root of arguments.
CHECKS = {"required 2025-11-25": 82, "required 2026-07-28": 195}

# Extensions of the authorization that the client does not have: they are played, and do not count.
OPEN = ("auth/dpop", "auth/dpop-nonce", "auth/wif-jwt-bearer")

# Checks that fail by what the SDK's server lacks once it is mounted, by its era and the revision of the client. They
# are printed with the reason.
_NO_REQUESTS = "the tool asks by a request of its own, which a modern server cannot make; it answers with an error text"
_NO_QUESTIONS = "the tool answers with questions, which its SDK refuses towards a legacy client"
_NO_NEEDS = "a legacy server declares nowhere which tools will ask, and answers with an error text"
LACKS = {
    ("modern", "2025-11-25"): dict.fromkeys(
        (
            "tools-call-sampling",
            "tools-call-elicitation",
            "elicitation-sep1034-general",
            "elicitation-sep1330-general",
        ),
        _NO_REQUESTS,
    ),
    ("legacy", "2026-07-28"): {
        "sep-2575-server-rejects-undeclared-capability": _NO_NEEDS,
        "sep-2575-missing-capability-http-400": _NO_NEEDS,
        **dict.fromkeys(
            (
                "sep-2322-elicitation-incomplete",
                "sep-2322-sampling-incomplete",
                "sep-2322-list-roots-incomplete",
                "sep-2322-request-state-incomplete",
                "sep-2322-multiple-inputs-incomplete",
                "sep-2322-multi-round-r1",
                "sep-2322-non-tool-incomplete",
                "sep-2322-result-type-included",
                "sep-2322-reject-tampered-state",
                "sep-2322-respect-client-capabilities",
            ),
            _NO_QUESTIONS,
        ),
    },
}


def server_outcomes(
    url: str, folder: Path, names: Sequence[str], *, quick: bool, revisions: Sequence[str] = suite.REVISIONS
) -> Iterator[Outcome]:
    """Plays the server's scenarios: all that each revision requires or names, then all that the suite has."""
    for revision in revisions:
        title = f"required {revision}"
        expected = [*suite.required(revision, "server"), *suite.not_scored(revision, "server")]
        if names:
            if chosen := [each for each in names if each in expected]:
                yield _one_by_one(Outcome(f"named {revision}", revision, expected=chosen), url, folder)
        else:
            yield _together(Outcome(title, revision, expected=expected), url, folder, "--requirements", revision)
    if not names and not quick:
        for revision in ("2025-03-26", "2025-06-18"):
            yield _together(
                Outcome(f"all {revision}", revision), url, folder, "--suite", "all", "--spec-version", revision
            )
        yield _together(Outcome("all", ""), url, folder, "--suite", "all")


def _together(outcome: Outcome, url: str, folder: Path, *choice: str) -> Outcome:
    place = folder / outcome.title.replace(" ", "-")
    suite.play("server", ("--url", url), choice, place, SUITE_SECONDS)
    outcome.scenarios = suite.read(place)
    for name in outcome.wrong if len(outcome.wrong) <= MOST_AGAIN else ():
        again = _server_scenario(name, outcome.revision, url, place.with_name(f"{place.name}-again"))
        if again is not None:
            outcome.scenarios[name] = again
    return outcome


def _one_by_one(outcome: Outcome, url: str, folder: Path) -> Outcome:
    for name in outcome.expected:
        found = _server_scenario(name, outcome.revision, url, folder / outcome.title.replace(" ", "-"))
        if found is not None:
            outcome.scenarios[name] = found
    return outcome


def _server_scenario(name: str, revision: str, url: str, folder: Path) -> Scenario | None:
    place = folder / name.replace("/", "-")
    version = ("--spec-version", revision) if revision else ()
    suite.play("server", ("--url", url), ("--scenario", name, *version), place, SCENARIO_SECONDS)
    return suite.read(place).get(name)


def client_outcomes(folder: Path, names: Sequence[str], quick: bool) -> Iterator[Outcome]:
    """Plays the client's scenarios, each with a process of the client of its own."""
    command = shlex.join(["exec", sys.executable, str(CLIENT)])  # exec: the suite ends only the shell it starts
    for revision in suite.REVISIONS:
        also = () if quick else suite.not_scored(revision, "client")
        expected = [each for each in (*suite.required(revision, "client"), *also) if not names or each in names]
        if not expected:
            continue
        outcome = Outcome(f"{'named' if names else 'required'} {revision}", revision, expected=expected)
        place = folder / f"client-{revision}"
        with ThreadPoolExecutor(CLIENTS_AT_ONCE) as pool:
            playing = [pool.submit(_client_scenario, name, revision, command, place) for name in expected]
        found = [each.result() for each in playing]
        outcome.scenarios = {each.name: each for each in found if each is not None}
        wrong = [name for name in outcome.wrong if name not in OPEN]
        for name in wrong if len(wrong) <= MOST_AGAIN else ():
            again = _client_scenario(name, revision, command, place.with_name(f"{place.name}-again"))
            if again is not None:
                outcome.scenarios[name] = again
        yield outcome


def _client_scenario(name: str, revision: str, command: str, folder: Path) -> Scenario | None:
    place = folder / name.replace("/", "-")
    version = () if name in suite.extensions(revision, "client") else ("--spec-version", revision)
    choice = ("--scenario", name, *version, "--timeout", f"{SCENARIO_SECONDS * 1000:.0f}")
    suite.play("client", ("--command", command), choice, place, SCENARIO_SECONDS * 2)
    return suite.read(place).get(name)


def report(outcome: Outcome, least: int) -> bool:
    """Prints what an outcome found that matters; returns whether all is kept.

    Args:
        least: how many checks have to succeed.
    """
    wrong = outcome.wrong
    kept = not set(wrong) - set(OPEN) and outcome.passed >= least
    print(
        f"{outcome.title:<22} {len(outcome.scenarios) - len(wrong):>4} of {len(outcome.scenarios):<4} scenarios "
        f"{outcome.passed:>5} checks {outcome.count('failed'):>4} failed {outcome.count('warned'):>3} warnings "
        f"{outcome.count('skipped'):>3} skipped",
        flush=True,
    )
    for name in wrong:
        scenario = outcome.scenarios.get(name)
        if scenario is None or not (scenario.failed or scenario.warned):
            print(f"  {name}: did not run, or checked nothing")
            continue
        is_open = " (open)" if name in OPEN else ""
        for finding in (*scenario.failed, *scenario.warned):
            missing = " [not testable]" if finding.untestable else ""
            print(f"  {name}: {finding.check}{missing}{is_open}: {finding.text:.300}")
    if not wrong and not kept:
        print(f"  {outcome.passed} checks succeeded, {least} do with all fixtures: is one missing?")
    return kept


def mounted_reports(folder: Path, names: Sequence[str]) -> Iterator[bool]:
    """Plays the server's scenarios of each revision through a mount, with a server of each era."""
    for transport in fixture_bus.TRANSPORTS:
        for legacy in (True, False):
            era = "legacy" if legacy else "modern"
            with fixture_bus.mounted(folder / f"{transport}-{era}", transport, legacy=legacy) as url:
                print(f"mounted over {transport}, {era}:", flush=True)
                for outcome in server_outcomes(url, folder / f"{transport}-{era}" / "results", names, quick=True):
                    yield report_mounted(outcome, era)


def report_mounted(outcome: Outcome, era: str) -> bool:
    """Prints what an outcome found, and by name what a mounted server of that era lacks; tells whether all is kept."""
    outcome.leave_out("tasks-")  # the SDK has none
    outcome.forgive_warnings()  # it says that lists have changed where they have not; a bus does not
    lacks = LACKS.get((era, outcome.revision), {})
    failed = outcome.skip(lacks)
    kept = report(outcome, 0)
    for check in failed:
        print(f"  {check}: not counted: {lacks[check]}")
    is_whole = outcome.title.startswith("required")
    gained = [check for check in lacks if is_whole and check not in failed]
    for check in gained:
        print(f"  {check}: it does not fail any more: remove it from LACKS")
    return kept and not gained


def main() -> int:
    """Reads the command line and plays."""
    parser = argparse.ArgumentParser(description="Play the official conformance suite of MCP against a bus.")
    parser.add_argument("part", nargs="?", choices=("server", "client", "mounted"), default="server")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="play only these")
    parser.add_argument("--url", help="play against this server instead of a bus with the fixtures")
    parser.add_argument("--quick", action="store_true", help="only what the revisions require or name")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the suite's own results and logs stay")
    options = parser.parse_args()
    suite.install()
    names: list[str] = options.scenarios
    kept: list[bool] = []
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolbus-mcp-")))
        folder.mkdir(parents=True, exist_ok=True)
        if options.part == "client":
            outcomes = client_outcomes(folder, names, options.quick)
            kept += [report(each, 0) for each in outcomes]
        elif options.part == "mounted":
            kept += mounted_reports(folder, names)
        else:
            url = options.url or stack.enter_context(fixture_bus.running(folder / "bus"))
            for outcome in server_outcomes(url, folder / "results", names, quick=options.quick):
                kept.append(report(outcome, 0 if names or options.url else CHECKS.get(outcome.title, 0)))
    if not kept:
        print(f"no scenario of this part is called {' or '.join(names)}")
    return 0 if kept and all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
