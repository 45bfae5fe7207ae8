"""Compares the tools of pinned sources with those that are trusted: plugins in sessions, and with callback URLs.

The configuration (`pins`) names the pinned sources; others are not compared or stored. Mounted MCP servers have a
`pin` of their own and are not handled here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import shlex
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from toolbus.bus.audit import Audit
from toolbus.bus.catalog.policy import Key, Pinning
from toolbus.bus.storage.database import checksum_of
from toolbus.bus.storage.store import Earlier, Kind, Store, WriteFailed, earlier_database
from toolbus.common.text import escape_surrogates, escape_unsafe, list_names, quote
from toolbus.parts.pins.settings import Pin
from toolbus.protocol.tool import HINTS, Tool

# The first declarations are trusted. A later change is offered and marked (`warn`), or waits for an approval (`block`).
# The fingerprint covers what a model reads: name, title, description, schemas, hints; not icons and `_meta`. Pure:
# `Fingerprints` stores them.

INSTRUCTIONS = "instructions"  # the subject of a server's instructions to models
MAX_SUBJECTS = 20_000  # of one mount; beyond it, withdrawn ones are forgotten
MAX_SHOWN_LINES = 400  # of one difference
_TOOL = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_PROMPT = ("name", "title", "description", "arguments")


@dataclass(frozen=True, slots=True)
class Pinned:
    """The texts of one subject: a tool, a prompt or the instructions.

    Attributes:
        approved: the canonical text that is trusted; "" before the first approval.
        pending: the canonical text that the server declares instead; "" where it declares the approved one.
    """

    approved: str = ""
    pending: str = ""

    @property
    def fingerprint(self) -> str:
        """The SHA-256, in hex, of the approved text; "" without one."""
        return digest_of(self.approved) if self.approved else ""

    def difference(self) -> str:
        """Returns what an approval would change, as a unified diff."""
        before, after = (_lines(text) for text in (self.approved, self.pending))
        lines = list(difflib.unified_diff(before, after, "approved", "declared now", lineterm="", n=2))
        if len(lines) > MAX_SHOWN_LINES:
            lines[MAX_SHOWN_LINES:] = [f"… {len(lines) - MAX_SHOWN_LINES} more lines"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Review:
    """The result of a comparison.

    Attributes:
        pinned: the texts by subject, to be stored.
        news: the subjects with a new change.
        blocked: the subjects that must not be offered.
    """

    pinned: Mapping[str, Pinned]
    news: tuple[str, ...] = ()
    blocked: frozenset[str] = frozenset()


def tool_subject(name: str) -> str:
    """Returns the subject of a tool, by the server's own name for it."""
    return f"tool:{escape_surrogates(name)}"


def prompt_subject(name: str) -> str:
    return f"prompt:{escape_surrogates(name)}"


def subjects_of(
    tools: Iterable[Mapping[str, Any]],
    prompts: Iterable[Mapping[str, Any]] = (),
    instructions: str = "",
    texts: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns the canonical text of each declaration of a server, by subject; of equal names the first.

    Args:
        texts: those of tools that are known already, by the identity of the declaration.
    """
    seen: dict[str, str] = {}
    for declaration in tools:
        text = texts.get(id(declaration)) or canonical(declaration)
        seen.setdefault(tool_subject(str(declaration.get("name"))), text)
    for declaration in prompts:
        seen.setdefault(prompt_subject(str(declaration.get("name"))), canonical(declaration, _PROMPT))
    if instructions:
        seen[INSTRUCTIONS] = json.dumps(instructions)
    return seen


def digest_of(canonical: str) -> str:
    """Returns the fingerprint of a canonical text: SHA-256 in hex."""
    return hashlib.sha256(canonical.encode()).hexdigest()


def review(known: Mapping[str, Pinned], seen: Mapping[str, str], pin: str, *, trusts_first: bool = True) -> Review:
    """Compares the declarations of a server with those that are trusted.

    Args:
        known: by subject; empty where the server was never seen.
        seen: canonical texts by subject, see `subjects_of`.
        pin: ``warn``, or ``block``: then new subjects of a known server wait for an approval too.
        trusts_first: whether a server that was never seen is trusted as it is.
    """
    blocks = pin == "block"
    trusts_new = not blocks or (trusts_first and not known)
    pinned: dict[str, Pinned] = {}
    news = []
    for subject, text in seen.items():
        before = known.get(subject)
        if before is None:
            after = Pinned(text) if trusts_new else Pinned(pending=text)
        else:
            after = Pinned(before.approved, "" if text == before.approved else text)
        if after.pending and (before is None or after.pending != before.pending):
            news.append(subject)
        pinned[subject] = after
    room = MAX_SUBJECTS - len(pinned)
    # Withdrawn subjects are remembered: a tool that comes back changed is a changed tool.
    withdrawn = [(subject, each) for subject, each in known.items() if subject not in pinned]
    pinned.update((subject, replace(each, pending="")) for subject, each in withdrawn[: max(0, room)] if each.approved)
    blocked = frozenset(subject for subject in seen if pinned[subject].pending) if blocks else frozenset()
    return Review(pinned, tuple(news), blocked)


def pending(known: Mapping[str, Pinned]) -> dict[str, Pinned]:
    """Returns the subjects that wait for an approval, or are marked as changed."""
    return {subject: each for subject, each in known.items() if each.pending}


def approve(known: Mapping[str, Pinned], subjects: Collection[str]) -> dict[str, Pinned]:
    """Returns the texts with the pending ones of some subjects approved."""
    return {
        subject: Pinned(each.pending) if each.pending and subject in subjects else each
        for subject, each in known.items()
    }


def canonical(declaration: Mapping[str, Any], keys: Iterable[str] = _TOOL) -> str:
    """Returns the same text for the same declaration, however its keys are ordered. ASCII, surrogates included."""
    chosen = {key: declaration[key] for key in keys if declaration.get(key) not in (None, "", {})}
    return json.dumps(chosen, sort_keys=True, separators=(",", ":"))


def _lines(canonical: str) -> list[str]:
    if not canonical:
        return []
    text = json.dumps(json.loads(canonical), indent=1, sort_keys=True, ensure_ascii=False)
    return escape_unsafe(text).splitlines()


log = logging.getLogger("toolbus.pins")


def _read_earlier(path: Path) -> Mapping[str, Any]:
    """Reads ``pins.db`` of earlier releases."""
    with earlier_database(path, application_id=0x54427069, versions=1) as connection:
        return earlier_fingerprints(connection, path)


def earlier_fingerprints(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    """Returns the rows of a table of earlier releases, by the key that they have in the store."""
    rows = {}
    for *key, approved, pending, checksum in connection.execute("SELECT * FROM fingerprints"):
        texts = (*key, approved, pending)
        if checksum != checksum_of(*(each.encode("utf-8", "surrogatepass") for each in texts)):
            log.error("the fingerprint of %s of source %s in %s is damaged", key[2], key[0], path)
            approved = ""
        rows[json.dumps(key)] = {"approved": approved, "pending": pending}
    return rows


FINGERPRINTS = Kind(  # by source, command and subject, as JSON
    "pins",
    needed=False,
    without="start without the approvals of plugins: those pinned to block wait for `toolbus access approve`",
    blank={},
    shared="settings",
    earlier=Earlier("pins.db", _read_earlier),
)


class Fingerprints:
    """The fingerprints in a store, read once; subclasses may store more with them.

    Its methods may be called from any thread; those of a large source take some milliseconds to be written.

    Args:
        store: None: they last as long as the process.
        approved: called with a source for which another bus of the store trusts something else now.

    Attributes:
        kind: of the rows.

    Raises:
        SetupError: from the constructor; a file of an earlier release cannot be used now, or is another program's.
    """

    kind = FINGERPRINTS

    def __init__(self, store: Store | None = None, approved: Callable[[str], object] = lambda source: None) -> None:
        self._store = store or Store.of(None)
        self._approved = approved
        self._guard = threading.RLock()
        self._known: dict[tuple[str, str], dict[str, Pinned]] = {}  # by source and command, then by subject
        self._load()
        self._store.on_change(self.kind, self._changed)

    def _load(self) -> None:
        for key, fields in self._store.load(self.kind).items():
            with suppress(ValueError, TypeError):  # a damaged key
                self._read(tuple(json.loads(key)), fields)

    def _changed(self) -> None:
        """Takes over what another bus changed. What it sees declared is no matter of this bus; what it trusts is."""
        with self._guard:
            before, self._known = self._known, {}
            self._load()
            known = self._known
        for key, subjects in known.items():
            former = before.get(key, {})
            if any(each.approved != former.get(name, Pinned()).approved for name, each in subjects.items()):
                self._approved(key[0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._store.place}>"

    @property
    def was_damaged(self) -> bool:
        """Whether earlier fingerprints were lost."""
        return self.kind.name in self._store.lost

    def fingerprints(self, source: str, command: str = "") -> dict[str, Pinned]:
        """Returns the fingerprints of a source, by subject.

        Args:
            command: the digest of the command line of a mount; empty: of other sources.
        """
        with self._guard:
            return dict(sorted(self._known.get((source, command), {}).items()))

    def save_fingerprints(self, source: str, command: str, known: Mapping[str, Pinned]) -> None:
        """Replaces the fingerprints of a source.

        Raises:
            WriteFailed: they could not be written; the earlier ones stay.
        """
        with self._guard:
            before = self._known.get((source, command), {})
            rows = {
                json.dumps([source, command, subject]): {"approved": each.approved, "pending": each.pending}
                for subject, each in known.items()
                if before.get(subject) != each
            }
            stale = [json.dumps([source, command, subject]) for subject in before if subject not in known]
            self._store.write(self.kind, rows, stale)
            self._known[source, command] = dict(known)

    def sources(self) -> list[str]:
        with self._guard:
            return list(dict.fromkeys(source for (source, _), known in self._known.items() if known))

    def _read(self, key: tuple[str, ...], fields: Mapping[str, Any]) -> None:
        source, command, subject = key
        pinned = Pinned(fields.get("approved", ""), fields.get("pending", ""))
        self._known.setdefault((source, command), {})[subject] = pinned


FIRST_SECONDS = 60.0  # so long all tools of a new source are trusted: it may register them one by one
MAX_SOURCES = 1_000  # with fingerprints: a pattern matches names that any program may choose
MAX_TOOLS = 2_000  # of one source


class Pins(Pinning):
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
        self._store = Fingerprints()
        self._first_seen: dict[str, float] = {}  # by source, when its first tool was seen; of this run

    def __repr__(self) -> str:
        return f"<Pins {list_names([*self._exact, *(f'{stem}*' for stem in self._patterns)])}>"

    def __bool__(self) -> bool:
        return bool(self._exact or self._patterns)

    def open(self, store: Store, approved: Callable[[str], object] = lambda source: None) -> None:
        """Persists fingerprints from now on. Does nothing where no source is pinned.

        Args:
            approved: as of `Fingerprints`.

        Raises:
            SetupError: a file of an earlier release cannot be used.
        """
        if self:
            self._store = Fingerprints(store, approved)

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
        texts = {subject: canonical(_declaration(tool)) for subject, tool in seen.items()}
        new = {subject: text for subject, text in texts.items() if subject not in known}
        trusts_new = accepted or self._is_first(source, known)
        fitting = dict(islice(new.items(), self._room(source, known, new)))
        old = review(
            {subject: known[subject] for subject in texts if subject in known},
            {subject: text for subject, text in texts.items() if subject in known},
            pin,
        )
        first = review({}, fitting, pin, trusts_first=trusts_new)
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

    def warnings(self, source: str, tools: Iterable[Key]) -> dict[Key, str]:
        """Returns the warnings about tools that a source offers although they changed."""
        if self.pin_of(source) != "warn":
            return {}
        waiting = pending(self._store.fingerprints(source))
        warning = f"changed since source {quote(source)} was trusted: `toolbus access approve {source}` shows how"
        return {key: warning for key in tools if subject_of(*key) in waiting}

    # -- approving ---------------------------------------------------------------------------------------------------

    def sources(self) -> list[str]:
        return [source for source in self._store.sources() if self.pin_of(source)] if self else []

    def known(self, source: str) -> Mapping[str, Pinned] | None:
        """Returns the fingerprints of a source; None where it is not pinned."""
        return self._store.fingerprints(source) if self.pin_of(source) else None

    def approve(self, source: str, subjects: Collection[str]) -> None:
        """Trusts the pending declarations of some subjects.

        Raises:
            WriteFailed: it could not be written; nothing has changed.
        """
        known = self._store.fingerprints(source)
        self._store.save_fingerprints(source, "", approve(known, subjects))

    # -- storing -------------------------------------------------------------------------------------------------

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
        except WriteFailed as error:
            log.error("the fingerprints of source %s could not be stored: %s", source, error)

    def _report(self, source: str, pin: Pin, reviews: Iterable[Review]) -> None:
        news = [subject for review in reviews for subject in review.news]
        if news:
            subjects, becomes = list_names(news), "waits for an approval" if pin == "block" else "is offered"
            text = "changed source=%r what=%s and %s: see `toolbus access approve %s`"
            log.warning(text, source, subjects, becomes, source)
            self._audit.record("change", target=source, why=subjects, source=source)


def subject_of(name: str, role: str | None) -> str:
    """Returns the subject of a tool of a plugin; a name may be declared for several roles."""
    return tool_subject(f"{name} (role {role})" if role else name)


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
        f"`toolbus access approve {source} {shlex.quote(name)}`"
    )
