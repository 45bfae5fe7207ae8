"""What stands below the options in ``--help``: examples, what to know, and the exit codes."""

from __future__ import annotations

from collections.abc import Sequence


def manual(examples: Sequence[str], about: str, codes: str) -> str:
    """Returns the end of a help text. A blank line in `about` begins a paragraph; other line ends do not count."""
    paragraphs = [" ".join(each.split()) for each in about.split("\n\n") if each.strip()]
    shown = "\n".join(f"  {_escaped(example)}" for example in examples)
    return "\n\n".join(
        (f"[bold]Examples[/bold]\n{shown}", *map(_escaped, paragraphs), f"[bold]Exit codes:[/bold] {_escaped(codes)}")
    )


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
