"""Implements ``toolbus dev conformance``: plays the protocol against a client or a bus, and judges each rule."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.help_text import epilog
from toolbus.common.grpc_switch import clear_switch

if TYPE_CHECKING:
    from toolbus.parts.conformance.player import Played
    from toolbus.parts.conformance.suite import Choice, ClientOutcome, Judged

EPILOG = epilog(
    (
        "toolbus dev conformance -- python -m toolbus.parts.conformance.sdk_client",
        "toolbus dev conformance --rules LIFE,BYE-2 --trace -- node conformance.js",
        "toolbus dev conformance --roles plugin,host --junit report.xml --badge badge.json -- ./my-client",
        "toolbus dev conformance --bus 127.0.0.1:48930",
    ),
    """
    The command after -- is the client under test: a program of a few tools on the client library, which finds the bus
    by TOOLBUS_ADDRESS. Each scenario starts it anew, against a bus that follows a script. A rule is kept, broken, known
    (broken, and named in the file of --known), or unclaimed: the client does not offer the tool that shows it. With
    --roles, what is unclaimed is broken. A rule in --known that is kept is an error: take it out.

    --bus plays the other way round: a raw client against a bus.
    """,
    "0 all rules are kept, 1 some are broken, 2 wrong usage, 3 the client does not start, or this program has a fault, "
    "130 after Ctrl-C, 143 after SIGTERM or SIGHUP.",
)
NO_VERDICT = 3
TERMINATED = 143  # as a shell shows SIGTERM
MAX_CAUSES = 5  # that people see; the report has all
TRACED_LINES = 15  # that people see of a trace; the report has all


def conformance(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND…", help="Starts the client.")] = None,
    roles: Annotated[str, typer.Option(metavar="plugin,host", help="What the client claims to have.")] = "",
    rules: Annotated[str, typer.Option(metavar="ID,…", help="Only these rules, or groups of them, such as LIFE.")] = "",
    known: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules that are known to be broken, one in a line; # comments.")
    ] = None,
    as_json: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for standard output.")
    ] = "",
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JUnit does.")] = None,
    badge: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the badge that shields.io shows.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many scenarios are played at once.")] = 4,
    patience: Annotated[
        float, typer.Option(min=0.1, max=100, help="Multiplies the time that a client may take for each step.")
    ] = 1.0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show the messages and the errors of what went wrong.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the rules and exit.")] = False,
    bus: Annotated[str, typer.Option(metavar="ADDRESS", help="Play against the bus there, instead of a client.")] = "",
) -> None:
    """Test a client library, or a bus, against the rules of the protocol."""
    if list_:
        _list(rules, roles)
    elif bus and command:
        terminal.fail("--bus plays against a bus and starts no client: leave out one of the two", terminal.USAGE)
    elif bus:
        _play_bus(bus)
    elif not command:
        terminal.fail("say which client to play: toolbus conformance -- COMMAND, or --bus ADDRESS", terminal.USAGE)
    else:
        outcome = _play(command, _choice(rules, roles, known), jobs, patience, quiet=as_json == "-")
        _write(outcome, as_json, junit, badge)
        if as_json != "-":
            _print(outcome, trace=trace)
        if not outcome.starts:
            raise typer.Exit(NO_VERDICT)
        if not outcome.kept:
            raise typer.Exit(terminal.REFUSED)


def _choice(rules: str, roles: str, known: Path | None) -> Choice:
    from toolbus.parts.conformance.suite import Choice, NoSuchRule

    named: list[str] = []
    if known is not None:
        try:
            lines = known.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            terminal.fail(f"--known {known} cannot be read: {error}", terminal.USAGE)
        named = [rule for line in lines if (rule := line.partition("#")[0].strip())]
    choice = Choice(_listed(roles), _listed(rules), named)
    try:
        choice.chosen()
    except NoSuchRule as error:
        terminal.fail(str(error), terminal.USAGE)
    return choice


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _play(command: list[str], choice: Choice, jobs: int, patience: float, *, quiet: bool) -> ClientOutcome:
    clear_switch()
    from toolbus.parts.conformance.stage import run_of_clients
    from toolbus.parts.conformance.suite import run

    def done(played: Played, number: int, of: int) -> None:
        if not quiet:
            verdict = "broken" if played.broken else f"no tool {played.unclaimed}" if played.unclaimed else "kept"
            rules = ", ".join(played.scenario.rules)
            terminal.print_lines(f"[{number}/{of}] {verdict}: {played.scenario.name} ({rules})", sys.stderr)

    async def play() -> ClientOutcome:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: no client is left behind
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await run(command, choice, jobs=jobs, patience=patience, done=done)

    try:
        with run_of_clients():
            return asyncio.run(play())
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None
    except Exception as error:
        fault = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        if isinstance(fault, OSError):
            terminal.fail(f"{command[0]!r} cannot be started: {fault}", NO_VERDICT)
        terminal.fail(f"a fault of this program, not of the client: {fault!r}", NO_VERDICT)


def _write(outcome: ClientOutcome, as_json: str, junit: Path | None, badge: Path | None) -> None:
    from toolbus.parts.conformance import report

    if as_json == "-":
        terminal.print_json(report.as_json(outcome))
    texts: dict[Path | None, Callable[[ClientOutcome], str]] = {
        junit: report.as_junit,
        badge: lambda outcome: report.json_text(report.as_badge(outcome)),
    }
    if as_json not in ("", "-"):
        texts[Path(as_json)] = lambda outcome: report.json_text(report.as_json(outcome))
    for path, text_of in texts.items():
        if path is not None:
            try:
                report.write(path, text_of(outcome))
            except OSError as error:
                terminal.fail(f"{path} cannot be written: {error}", terminal.USAGE)


def _print(outcome: ClientOutcome, *, trace: bool) -> None:
    from toolbus.parts.conformance.report import counts
    from toolbus.parts.conformance.suite import RuleVerdict

    if not outcome.starts:
        terminal.print_note(f"the client {outcome.why}; its last lines were:")
        terminal.print_lines("\n".join(outcome.stderr) or "(none)", sys.stderr)
        return
    first_of: dict[str, Judged] = {}  # by cause
    for each in outcome.judged:
        if each.verdict is RuleVerdict.BROKEN:
            first_of.setdefault(each.cause, each)
    rows = [
        (each.rule.id, each.rule.level, "stale", "kept: take it out of the file of --known")
        if each.stale
        else (each.rule.id, each.rule.level, each.verdict.value, _what(each, first_of.get(each.cause, each)))
        for each in outcome.judged
    ]
    wrong = [each for each in outcome.judged if each.stale or each.verdict is not RuleVerdict.KEPT]
    terminal.print_table(("RULE", "LEVEL", "RESULT", "WHAT"), rows, [outcome.judged.index(each) for each in wrong])
    if trace:
        for each in wrong:
            _print_trace(each)
    elif not outcome.kept:
        _print_causes([each for each in outcome.judged if each.verdict is RuleVerdict.BROKEN])
        terminal.print_note("--trace shows what was exchanged; --rules ID plays a rule alone")
    for role, count in counts(outcome).items():
        if sum(count.values()):
            terminal.print_lines(f"{role}: {', '.join(f'{number} {verdict}' for verdict, number in count.items())}")


def _what(judged: Judged, first: Judged) -> str:
    return f"as {first.rule.id}" if judged.why and judged is not first else judged.why or judged.rule.says


def _print_causes(broken: Sequence[Judged]) -> None:
    """Prints what the client wrote in a scenario of each cause, for those that break most rules."""
    numbers = Counter(each.cause for each in broken)
    for cause, number in numbers.most_common(MAX_CAUSES):
        first = next(each for each in broken if each.cause == cause)
        rules = first.rule.id if number == 1 else f"{first.rule.id} and {number - 1} more"
        terminal.print_lines(f"{rules}: {cause}")
        for line in first.played.first_lines or ("(the client wrote nothing)",):
            terminal.print_lines(f"    {line}")
    if len(numbers) > MAX_CAUSES:
        terminal.print_note(f"{len(numbers) - MAX_CAUSES} more causes: --json FILE has all of them")


def _print_trace(judged: Judged) -> None:
    terminal.print_lines(f"{judged.rule.id}: {judged.rule.says} (protocol.md#{judged.rule.anchor})")
    for line in [*judged.played.trace[-TRACED_LINES:], *(f"stderr: {each}" for each in judged.played.stderr)]:
        terminal.print_lines(f"    {line}")


def _list(rules: str, roles: str) -> None:
    choice = _choice(rules, roles, None)
    rows = [(each.id, each.level, each.role, each.says) for each in choice.chosen()]
    terminal.print_table(("RULE", "LEVEL", "ROLE", "WHAT"), rows)


def _play_bus(address: str) -> None:
    from toolbus.parts.conformance.bus_player import play_all
    from toolbus.parts.conformance.match import Mismatch

    def done(name: str, problem: Mismatch | None) -> None:
        terminal.print_lines(f"broken: {problem}" if problem else f"kept: {name}", sys.stderr)

    try:
        failed = asyncio.run(play_all(address, done))
    except (Mismatch, TimeoutError) as problem:
        terminal.fail(f"no bus answers at {address}: {problem}", NO_VERDICT)
    if failed:
        terminal.fail(f"{failed} scenarios are broken")
    terminal.print_lines("all scenarios are kept")
