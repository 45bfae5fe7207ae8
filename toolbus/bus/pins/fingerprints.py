"""Detects that a source changed its declarations since they were trusted.

The first declarations are trusted. A later change is offered and marked (`warn`), or waits for an approval (`block`).
The fingerprint covers what a model reads: name, title, description, schemas, hints; not icons and `_meta`. Pure:
`fingerprint_file` stores fingerprints.
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
    """Returns the subject of a prompt."""
    return f"prompt:{escape_surrogates(name)}"


def subjects_of(
    tools: Iterable[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]] = (), instructions: str = ""
) -> dict[str, str]:
    """Returns the canonical text of each declaration of a server, by subject; of equal names the first."""
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
