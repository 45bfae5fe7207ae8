"""Builds the end of each ``--help``, below the options: examples, notes and exit codes."""

from __future__ import annotations

from collections.abc import Sequence


def epilog(examples: Sequence[str], notes: str, exit_codes: str) -> str:
    """Returns the end of a help text. A blank line in `notes` begins a paragraph; other line ends do not count."""
    paragraphs = [" ".join(each.split()) for each in notes.split("\n\n") if each.strip()]
    commands = "\n".join(f"  {_escape(example)}" for example in examples)
    return "\n\n".join(
        (
            f"[bold]Examples[/bold]\n{commands}",
            *map(_escape, paragraphs),
            f"[bold]Exit codes:[/bold] {_escape(exit_codes)}",
        )
    )


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
