"""Implements ``toolbus dev check``: what differs for code that was written for another system."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import JsonOption
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.parts.moving.check.source_file import Report

EPILOG = epilog(
    (
        "toolbus dev check plugins/weather/ --from neko",
        "toolbus dev check plugins/ --from neko --json",
        "toolbus dev check exec/llm_tools/ --from synchronet",
    ),
    """
    Reads the files and runs nothing of them. EFFECT says what a place means on this bus: stops (the code does not
    start, or a call fails at this place), differs (the code runs, but behaves in another way than in its system), or
    note (the operator has to know something). FIX is the number of the remedy below the table. Tests are not read. A
    name that the code computes while it runs is not found.
    """,
    "0 it runs as it is, 1 something has to be changed, 2 wrong usage.",
)


def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, a plugin's folder, or a folder of them.")],
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SYSTEM",
            show_default=False,
            help="The system that the code was written for: neko, stargazer, spindle or synchronet.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check code of another system without running it: list what behaves differently here."""
    from toolbus.parts.moving.check.source_file import check as check_path
    from toolbus.parts.moving.check.systems import SYSTEMS

    if not origin:
        systems = ", ".join(SYSTEMS)
        terminal.fail(f"name the system that the code was written for, with --from: {systems}", terminal.USAGE)
    if origin not in SYSTEMS:
        terminal.fail(f"--from is {origin!r}, it must be one of {', '.join(SYSTEMS)}", terminal.USAGE)
    if not path.exists():
        terminal.fail(f"{path} does not exist: check the path", terminal.USAGE)
    report = check_path(path, SYSTEMS[origin])
    if not report.files and not report.findings:
        kinds = ", ".join(SYSTEMS[origin].rules)
        terminal.fail(f"{path} has no file to check: {origin} code is in files of {kinds}", terminal.USAGE)
    if as_json:
        findings = [{**asdict(each), "path": str(each.path), "effect": each.effect.value} for each in report.findings]
        terminal.print_json({"runs": report.runs, "files": report.files, "findings": findings})
    else:
        _print(report, path)
    if not report.runs:
        raise typer.Exit(terminal.REFUSED)


def _print(report: Report, path: Path) -> None:
    from toolbus.parts.moving.check.source_file import Effect

    remedies = list(dict.fromkeys(each.remedy for each in report.findings if each.remedy))
    base = path if path.is_dir() else path.parent
    rows = []
    for each in report.findings:
        place = str(each.path.relative_to(base)) if each.path.is_relative_to(base) else str(each.path)
        number = str(remedies.index(each.remedy) + 1) if each.remedy else "-"
        rows.append((number, each.effect.value, f"{place}:{each.line}" if each.line else place, each.what))
    if rows:
        stopping = {number for number, each in enumerate(report.findings) if each.effect is Effect.STOPS}
        terminal.print_table(("FIX", "EFFECT", "PLACE", "WHAT"), rows, stopping)
    for place_in_list, remedy in enumerate(remedies, 1):
        terminal.print_lines(f"{place_in_list}. {remedy}")
    counts = [f"{sum(each.effect is effect for each in report.findings)} {effect.value}" for effect in Effect]
    verdict = "it runs as it is" if report.runs else "something has to be changed"
    read = "1 file" if report.files == 1 else f"{report.files} files"
    terminal.print_lines(f"{read} read; {verdict}: {', '.join(counts)}")
