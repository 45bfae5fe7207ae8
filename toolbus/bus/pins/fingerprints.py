"""Notices that a source changed what it declares after somebody trusted it.

What is seen first is trusted. A later change is offered and marked (`warn`), or waits for an approval (`block`). The
fingerprint is of what a model reads: name, title, description, schemas, hints; icons and `_meta` do not count. Pure:
where fingerprints are stored is known to `fingerprint_file`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolbus.text import escape_surrogates, escape_unsafe

Pin = Literal["warn", "block"]
PINS: tuple[Pin, ...] = ("warn", "block")
INSTRUCTIONS = "instructions"  # the subject of what a server says to models beside its tools
MAX_SUBJECTS = 20_000  # of one mount; of what it declares no longer the rest is forgotten
MAX_SHOWN_LINES = 400  # of one difference
_TOOL = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_PROMPT = ("name", "title", "description", "arguments")


@dataclass(frozen=True, slots=True)
class Pinned:
    """What is known of one subject: a tool, a prompt or the instructions.

    Attributes:
        approved: the canonical text that is trusted; "" where none is yet.
        pending: the canonical text that the server declares instead; "" where it declares what is trusted.
    """

    approved: str = ""
    pending: str = ""

    @property
    def fingerprint(self) -> str:
        """The SHA-256, in hex, of what is trusted; "" where nothing is."""
        return digest_of(self.approved) if self.approved else ""

    def difference(self) -> str:
        """Returns what an approval would change, as lines of a difference."""
        before, after = (_lines(text) for text in (self.approved, self.pending))
        lines = list(difflib.unified_diff(before, after, "approved", "declared now", lineterm="", n=2))
        if len(lines) > MAX_SHOWN_LINES:
            lines[MAX_SHOWN_LINES:] = [f"… {len(lines) - MAX_SHOWN_LINES} more lines"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Review:
    """What came of comparing.

    Attributes:
        pinned: what is known now, to be stored.
        news: the subjects whose change was not known before.
        blocked: the subjects that must not be offered.
    """

    pinned: Mapping[str, Pinned]
    news: tuple[str, ...] = ()
    blocked: frozenset[str] = frozenset()


def tool_subject(name: str) -> str:
    """Returns the subject of a tool, by the server's own name for it."""
    return f"tool:{escape_surrogates(name)}"


def prompt_subject(name: str) -> str:
    """Returns the subject of a prompt."""
    return f"prompt:{escape_surrogates(name)}"


def subjects_of(
    tools: Iterable[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]] = (), instructions: str = ""
) -> dict[str, str]:
    """Returns the canonical text of each thing that a server declares; of equal names the first."""
    seen: dict[str, str] = {}
    for declaration in tools:
        seen.setdefault(tool_subject(str(declaration.get("name"))), canonical(declaration))
    for declaration in prompts:
        seen.setdefault(prompt_subject(str(declaration.get("name"))), canonical(declaration, _PROMPT))
    if instructions:
        seen[INSTRUCTIONS] = json.dumps(instructions)
    return seen


def digest_of(canonical: str) -> str:
    """Returns the fingerprint of a canonical text: SHA-256 in hex."""
    return hashlib.sha256(canonical.encode()).hexdigest()


def review(known: Mapping[str, Pinned], seen: Mapping[str, str], pin: str, *, trusts_first: bool = True) -> Review:
    """Compares what a server declares with what was trusted.

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
    # What is gone is remembered: a tool that comes back changed is a changed tool.
    gone = [(subject, each) for subject, each in known.items() if subject not in pinned]
    pinned.update((subject, replace(each, pending="")) for subject, each in gone[: max(0, room)] if each.approved)
    blocked = frozenset(subject for subject in seen if pinned[subject].pending) if blocks else frozenset()
    return Review(pinned, tuple(news), blocked)


def pending(known: Mapping[str, Pinned]) -> dict[str, Pinned]:
    """Returns what waits for an approval, or is marked as changed."""
    return {subject: each for subject, each in known.items() if each.pending}


def approve(known: Mapping[str, Pinned], subjects: Collection[str]) -> dict[str, Pinned]:
    """Returns what is known after what is pending of some subjects was approved."""
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
