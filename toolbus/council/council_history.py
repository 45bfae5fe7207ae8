"""Stores the results of a council in earlier turns of each chat, in memory, for the main model.

Members do not get their own earlier results, since models repeat their own texts. The main model gets them, as a block
beside the deliberation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolbus.council.deliberation import ToolOutcome
from toolbus.council.member import MAX_RETENTION, Member
from toolbus.newest import NewestCache, NewestCacheBySize
from toolbus.tool import MIB

MAX_ENTRY_CHARACTERS = 4000
MAX_ENTRIES_PER_CHAT = 200
MAX_CHATS = 1000
MAX_REPLACED = 1000  # run ids
MAX_CHARACTERS = 32 * MIB  # of all chats; the newest chat stays even if it has more
_PREFACE = """## Previous Council Deliberations

These come from earlier turns of this chat and are here so that plans and threads are not lost. They have been used \
already: do not repeat them, do not write in their style, and follow the conversation where it has moved on."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One earlier result, truncated.

    Attributes:
        run_id: of its run; "" if unknown: the entry is then never removed with a replaced run.
    """

    member_id: str
    member_name: str
    tool: str
    display_name: str
    content: str
    run_id: str = ""


class CouncilHistory:
    """The earlier results of each chat, in memory; a host persists them with `entries` and `restore`."""

    def __init__(self, most_chats: int = MAX_CHATS, max_characters: int = MAX_CHARACTERS) -> None:
        """Creates an empty history.

        Args:
            most_chats: how many it holds; the least recently used chat is evicted first.
            max_characters: of all entries; the newest chat stays even if it has more.
        """
        self._chats = NewestCacheBySize[str, tuple[HistoryEntry, ...]](most_chats, max_characters, _characters)
        self._last_runs = NewestCache[str, str](most_chats)  # by chat, the run that started last
        self._replaced: deque[str] = deque(maxlen=MAX_REPLACED)  # runs whose reply was replaced

    def __repr__(self) -> str:
        return f"<CouncilHistory chats={len(self._chats)} entries={sum(map(len, self._chats.values()))}>"

    def entries(self, chat_id: str) -> tuple[HistoryEntry, ...]:
        """Returns the entries of a chat, oldest first."""
        return self._chats.get(chat_id, ())

    def restore(self, chat_id: str, entries: Sequence[HistoryEntry]) -> None:
        """Replaces the entries of a chat by those that a host has persisted."""
        self._store(chat_id, tuple(entries))
        self._last_runs.pop(chat_id, None)
        if entries and entries[-1].run_id:
            self._last_runs[chat_id] = entries[-1].run_id

    def begin(self, chat_id: str, run_id: str, *, replaces: bool = False) -> None:
        """Records the start of a run.

        Args:
            replaces: whether it replaces the chat's last run, whose reply is regenerated: the entries of that run are
                dropped, and later results of it are not recorded.
        """
        last = self._last_runs.get(chat_id, "")
        if replaces and last:
            if last != run_id:  # hosts may choose their own ids
                self._replaced.append(last)
            self._store(chat_id, tuple(entry for entry in self.entries(chat_id) if entry.run_id != last))
        self._last_runs[chat_id] = run_id

    def record(
        self, chat_id: str, members: Iterable[Member], outcomes: Iterable[ToolOutcome], run_id: str = ""
    ) -> None:
        """Adds successful results as `history_retention` of their member allows, and removes old ones.

        Args:
            run_id: of the run; the results of a replaced run are not added.
        """
        if run_id in self._replaced:
            return
        limits = {
            (member.id, tool): min(member.history_retention.get(tool, 0), MAX_RETENTION)
            for member in members
            for tool in member.tools
        }
        added = [
            HistoryEntry(
                each.member_id, each.member_name, each.tool, each.display_name, _truncated(each.content.strip()), run_id
            )
            for each in outcomes
            if each.success and each.content.strip() and limits.get(each.key, 0) > 0
        ]
        entries: deque[HistoryEntry] = deque()
        counts: dict[tuple[str, str], int] = {}
        for entry in reversed((*self.entries(chat_id), *added)):
            if run_id and entry.run_id == run_id:  # a replaced run must not evict the entries before it
                entries.appendleft(entry)
                continue
            key = entry.member_id, entry.tool
            counts[key] = counts.get(key, 0) + 1
            if counts[key] <= limits.get(key, MAX_RETENTION):  # entries of members that are not in this run stay
                entries.appendleft(entry)
        self._store(chat_id, tuple(entries))

    def block(self, chat_id: str, members: Iterable[Member]) -> str:
        """Returns the Markdown for the main model; "" if the chat has no entries for these members."""
        entries = self.entries(chat_id)
        sections = []
        for member in members:
            for tool in member.tools:
                limit = min(member.history_retention.get(tool, 0), MAX_RETENTION)
                of_tool = [each for each in entries if (each.member_id, each.tool) == (member.id, tool)]
                of_tool = of_tool[-limit:] if limit > 0 else []
                for age, entry in zip(range(len(of_tool), 0, -1), of_tool, strict=True):
                    ago = "1 deliberation ago" if age == 1 else f"{age} deliberations ago"
                    sections.append(f"### {ago} - {entry.member_name} / {entry.display_name}\n{entry.content}")
        return "\n\n".join((_PREFACE, *sections)) if sections else ""

    def _store(self, chat_id: str, entries: tuple[HistoryEntry, ...]) -> None:
        if entries:
            self._chats[chat_id] = entries[-MAX_ENTRIES_PER_CHAT:]
        else:
            self._chats.pop(chat_id, None)


def _characters(entries: Iterable[HistoryEntry]) -> int:
    return sum(len(each.content) for each in entries)


def _truncated(text: str) -> str:
    return text if len(text) <= MAX_ENTRY_CHARACTERS else f"{text[:MAX_ENTRY_CHARACTERS].rstrip()}\n[truncated]"
