"""Compares the tools of pinned sources with those that are trusted: plugins in sessions, and with callback URLs.

The configuration (`pins`) names the pinned sources; others are not compared or stored. Mounted MCP servers have a
`pin` of their own and are not handled here.
"""

from __future__ import annotations

import logging
import shlex
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path

from toolbus.bus.audit.audit import Audit
from toolbus.bus.pins import fingerprints
from toolbus.bus.pins.fingerprint_file import FILE, FingerprintFile
from toolbus.bus.pins.fingerprints import Pin, Pinned, Review
from toolbus.text import list_names, quote
from toolbus.tool import HINTS, Tool

log = logging.getLogger("toolbus.pins")

FIRST_SECONDS = 60.0  # so long all tools of a new source are trusted: it may register them one by one
MAX_SOURCES = 1_000  # with fingerprints: a pattern matches names that any program may choose
MAX_TOOLS = 2_000  # of one source

Key = tuple[str, str]  # a tool's name and its role; "" is every role


class Pins:
    """The trusted tools of the pinned sources of one bus. Belongs to the bus's loop.

    Args:
        rules: ``warn`` or ``block`` by source; one that ends with ``*`` stands for all that begin so. A name goes
            before patterns, a longer pattern before a shorter one.
        clock: the monotonic time.
    """

    def __init__(
        self,
        rules: Mapping[str, Pin] | None = None,
        audit: Audit | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exact = {name: pin for name, pin in (rules or {}).items() if not name.endswith("*")}
        patterns = sorted((name for name in rules or {} if name.endswith("*")), key=len, reverse=True)
        self._patterns = {name.rstrip("*"): (rules or {})[name] for name in patterns}
        self._audit = audit or Audit()
        self._clock = clock
        self._file: FingerprintFile | None = None  # None until the first fingerprint
        self._first_seen: dict[str, float] = {}  # by source, when its first tool was seen; of this run

    def __repr__(self) -> str:
        return f"<Pins {list_names([*self._exact, *(f'{stem}*' for stem in self._patterns)])}>"

    def __bool__(self) -> bool:
        return bool(self._exact or self._patterns)

    def open(self, directory: Path) -> None:
        """Persists fingerprints from now on. Does nothing the second time, or where no source is pinned.

        Raises:
            SetupError: the file cannot be used.
        """
        if self and self._file is None:
            self._file = FingerprintFile(directory / FILE)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def pin_of(self, source: str) -> Pin | None:
        """Returns what happens to a source's changes; None where it is not pinned."""
        exact = self._exact.get(source)
        if exact is not None or not self._patterns:
            return exact
        return next((pin for stem, pin in self._patterns.items() if source.startswith(stem)), None)

    def review(self, source: str, declared: Collection[Tool], *, accepted: bool = False) -> dict[Key, str]:
        """Compares declarations with the trusted ones, and stores those that are new.

        Args:
            declared: some of the source's tools, or all, as their author declared them.
            accepted: whether they were accepted before, and only their fingerprints may be missing.

        Returns:
            Why tools must not be offered, by name and role; empty where all may be offered.
        """
        pin = self.pin_of(source)
        if pin is None or not declared:
            return {}
        known = self._store.fingerprints(source)
        seen = {subject_of(tool.name, tool.role): tool for tool in declared}
        texts = {subject: fingerprints.canonical(_declaration(tool)) for subject, tool in seen.items()}
        new = {subject: text for subject, text in texts.items() if subject not in known}
        trusts_new = accepted or self._is_first(source, known)
        fitting = dict(islice(new.items(), self._room(source, known, new)))
        old = fingerprints.review(
            {subject: known[subject] for subject in texts if subject in known},
            {subject: text for subject, text in texts.items() if subject in known},
            pin,
        )
        first = fingerprints.review({}, fitting, pin, trusts_first=trusts_new)
        self._remember(source, known, {**known, **old.pinned, **first.pinned})
        self._report(source, pin, (old, first))
        why = dict.fromkeys(old.blocked, "changed") | dict.fromkeys(first.blocked, "is new")
        if pin == "block":
            why |= {subject: "" for subject in new if subject not in fitting}
        return {
            (tool.name, tool.role or ""): _reason(source, tool.name, why[subject])
            for subject, tool in seen.items()
            if subject in why
        }

    def warnings(self, source: str) -> dict[str, str]:
        """Returns the warnings about tools that a source offers although they changed, by subject."""
        if self.pin_of(source) != "warn":
            return {}
        waiting = fingerprints.pending(self._store.fingerprints(source))
        return {
            subject: f"changed since source {quote(source)} was trusted: `toolbus approve {source}` shows how"
            for subject in waiting
        }

    # -- approving ---------------------------------------------------------------------------------------------------

    def sources(self) -> list[str]:
        """Returns the pinned sources that have fingerprints."""
        return [source for source in self._store.sources() if self.pin_of(source)] if self else []

    def known(self, source: str) -> Mapping[str, Pinned] | None:
        """Returns the fingerprints of a source; None where it is not pinned."""
        return self._store.fingerprints(source) if self.pin_of(source) else None

    def approve(self, source: str, subjects: Collection[str]) -> None:
        """Trusts the pending declarations of some subjects.

        Raises:
            sqlite3.Error: it could not be written; nothing has changed.
        """
        known = self._store.fingerprints(source)
        self._store.save_fingerprints(source, "", fingerprints.approve(known, subjects))

    # -- storing -------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> FingerprintFile:
        if self._file is None:
            self._file = FingerprintFile(None)
        return self._file

    def _is_first(self, source: str, known: Mapping[str, Pinned]) -> bool:
        """Tells whether a source is new, and its fingerprints are not just lost."""
        now = self._clock()
        if not known and not self._store.was_damaged:
            self._first_seen[source] = now
        first = self._first_seen.get(source)
        if first is not None and now - first > FIRST_SECONDS:
            del self._first_seen[source]
            first = None
        return first is not None

    def _room(self, source: str, known: dict[str, Pinned], new: Collection[str]) -> int:
        """Returns how many new tools can be stored; makes room by dropping tools that were never approved."""
        if not known and new and len(self._store.sources()) >= MAX_SOURCES:
            return 0
        if len(known) + len(new) > MAX_TOOLS:
            for subject in [subject for subject, each in known.items() if not each.approved]:
                del known[subject]
        return max(0, MAX_TOOLS - len(known))

    def _remember(self, source: str, before: Mapping[str, Pinned], after: Mapping[str, Pinned]) -> None:
        try:
            self._store.save_fingerprints(source, "", after)
        except sqlite3.Error as error:
            log.error("the fingerprints of source %s could not be stored: %s", source, error)

    def _report(self, source: str, pin: Pin, reviews: Iterable[Review]) -> None:
        news = [subject for review in reviews for subject in review.news]
        if news:
            subjects, becomes = list_names(news), "waits for an approval" if pin == "block" else "is offered"
            log.warning("changed source=%r what=%s and %s: see `toolbus approve %s`", source, subjects, becomes, source)
            self._audit.record("change", target=source, why=subjects, source=source)


def subject_of(name: str, role: str | None) -> str:
    """Returns the subject of a tool of a plugin; a name may be declared for several roles."""
    return fingerprints.tool_subject(f"{name} (role {role})" if role else name)


def _declaration(tool: Tool) -> dict[str, object]:
    """Returns the fields of a tool that a model reads, as an MCP server would declare them."""
    hints = {hint: value for hint in HINTS if (value := getattr(tool.annotations, hint)) is not None}
    return {
        "name": tool.name,
        "title": tool.display_name,
        "description": tool.description,
        "inputSchema": tool.parameters,
        "outputSchema": tool.output_schema_json,
        "annotations": hints,
    }


def _reason(source: str, name: str, why: str) -> str:
    if not why:
        return (
            f"tool {quote(name)} of source {quote(source)} cannot be stored, and the source is pinned to block: "
            f"a bus stores the fingerprints of {MAX_TOOLS} tools of a source, and of {MAX_SOURCES} sources"
        )
    return (
        f"tool {quote(name)} {why} since source {quote(source)} was trusted: an operator approves it with "
        f"`toolbus approve {source} {shlex.quote(name)}`"
    )
