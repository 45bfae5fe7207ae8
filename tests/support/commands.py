"""Finds commands of `toolbus` as they run, for tests of their options."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from toolbus.cli.command_line import app


@functools.cache
def find_command(*words: str) -> Any:
    """Returns the command that some words name; None if there is none."""
    if not words:
        return typer.main.get_command(app)
    above = find_command(*words[:-1])
    context = above.make_context("", list(words[-1:]), resilient_parsing=True)
    return above.resolve_command(context, list(words[-1:]))[1]


def choose(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the command that the first words name, and the words that are left for it."""
    command, rest = find_command(), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = find_command(*words[: len(words) - len(rest) + 1])
        del rest[0]
    return command, rest


def command_words(*words: str) -> Iterator[tuple[str, ...]]:
    """Yields the words of all commands that begin with some, groups and hidden ones included."""
    yield words
    for word in getattr(find_command(*words), "commands", {}):
        yield from command_words(*words, word)
