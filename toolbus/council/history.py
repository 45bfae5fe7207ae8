"""What a council said in earlier turns of a chat, for the main model.

A member is never shown its own earlier results: models that see them say them again. They go to whoever writes the
reply, as a block beside the deliberation.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolbus.council.council_result import ToolOutcome
from toolbus.council.member import MAX_RETENTION, Member
from toolbus.tool import MIB

ENTRY_CHARACTERS = 4000
ENTRIES_OF_CHAT = 200
CHATS_KEPT = 1000
REPLACED_KEPT = 1000  # run ids
MAX_CHARACTERS = 32 * MIB  # of all chats; the newest is kept whatever it has
_PREFACE = """## Previous Council Deliberations

These come from earlier turns of this chat and are here so that plans and threads are not lost. They have been used \
already: do not repeat them, do not write in their style, and follow the conversation where it has moved on."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One earlier result, cut to what is kept of it.

    Attributes:
        run_id: of the run that it comes from; "" where that is not known, it is never taken for an abandoned one then.
    """

    member_id: str
    member_name: str
    tool: str
    display_name: str
    content: str
    run_id: str = ""


class CouncilHistory:
    """The earlier results of each chat, in memory; `entries` and `restore` let a host keep them elsewhere."""

    def __init__(self, most_chats: int = CHATS_KEPT) -> None:
        """Makes an empty one.

        Args:
            most_chats: kept; the one that was not used for longest goes first.
        """
        self._max_chats = most_chats
        self._chats: OrderedDict[str, tuple[HistoryEntry, ...]] = OrderedDict()  # oldest entry first
        self._characters = 0  # of all entries
        self._last: OrderedDict[str, str] = OrderedDict()  # by chat, the run that began last
        self._replaced: deque[str] = deque(maxlen=REPLACED_KEPT)  # runs whose reply was abandoned

    def __repr__(self) -> str:
        return f"<CouncilHistory chats={len(self._chats)} entries={sum(map(len, self._chats.values()))}>"

    def entries(self, chat_id: str) -> tuple[HistoryEntry, ...]:
        """Returns what is kept of a chat, oldest first."""
        return self._chats.get(chat_id, ())

    def restore(self, chat_id: str, entries: Sequence[HistoryEntry]) -> None:
        """Takes what a host kept of a chat, in place of what is here."""
        self._keep(chat_id, tuple(entries))
        self._last.pop(chat_id, None)
        if entries and entries[-1].run_id:
            self._began(chat_id, entries[-1].run_id)

    def begin(self, chat_id: str, run_id: str, *, replaces: bool = False) -> None:
        """Takes down that a run begins.

        Args:
            replaces: it takes the place of the chat's last run, whose reply is abandoned: what that said is forgotten,
                and what a retry of it may still say is not kept.
        """
        last = self._last.get(chat_id, "")
        if replaces and last:
            if last != run_id:  # hosts may choose ids of their own
                self._replaced.append(last)
            self._keep(chat_id, tuple(entry for entry in self.entries(chat_id) if entry.run_id != last))
        self._began(chat_id, run_id)

    def record(
        self, chat_id: str, members: Iterable[Member], outcomes: Iterable[ToolOutcome], run_id: str = ""
    ) -> None:
        """Adds what succeeded, as far as its member and tool are to be remembered, and lets go of what is too old.

        Args:
            run_id: of the run; nothing is added of one that was replaced.
        """
        if run_id in self._replaced:
            return
        most = {
            (member.id, tool): min(member.history_retention.get(tool, 0), MAX_RETENTION)
            for member in members
            for tool in member.tools
        }
        added = [
            HistoryEntry(
                each.member_id, each.member_name, each.tool, each.display_name, _cut(each.content.strip()), run_id
            )
            for each in outcomes
            if each.success and each.content.strip() and most.get(each.key, 0) > 0
        ]
        kept: deque[HistoryEntry] = deque()
        seen: dict[tuple[str, str], int] = {}
        for entry in reversed((*self.entries(chat_id), *added)):
            if run_id and entry.run_id == run_id:  # it may be replaced: what it would push out is then needed again
                kept.appendleft(entry)
                continue
            key = entry.member_id, entry.tool
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= most.get(key, MAX_RETENTION):  # members that were not asked for keep what they have
                kept.appendleft(entry)
        self._keep(chat_id, tuple(kept))

    def block(self, chat_id: str, members: Iterable[Member]) -> str:
        """Returns the Markdown for the main model; "" where there is nothing to remember."""
        entries = self.entries(chat_id)
        parts = []
        for member in members:
            for tool in member.tools:
                most = min(member.history_retention.get(tool, 0), MAX_RETENTION)
                of_tool = [each for each in entries if (each.member_id, each.tool) == (member.id, tool)]
                of_tool = of_tool[-most:] if most > 0 else []
                for age, entry in zip(range(len(of_tool), 0, -1), of_tool, strict=True):
                    ago = "1 deliberation ago" if age == 1 else f"{age} deliberations ago"
                    parts.append(f"### {ago} - {entry.member_name} / {entry.display_name}\n{entry.content}")
        return "\n\n".join((_PREFACE, *parts)) if parts else ""

    def _began(self, chat_id: str, run_id: str) -> None:
        self._last[chat_id] = run_id
        self._last.move_to_end(chat_id)
        while len(self._last) > self._max_chats:
            self._last.popitem(last=False)

    def _keep(self, chat_id: str, entries: tuple[HistoryEntry, ...]) -> None:
        self._characters -= _characters(self._chats.pop(chat_id, ()))
        if entries:
            self._chats[chat_id] = entries[-ENTRIES_OF_CHAT:]
            self._characters += _characters(self._chats[chat_id])
        while len(self._chats) > 1 and (len(self._chats) > self._max_chats or self._characters > MAX_CHARACTERS):
            self._characters -= _characters(self._chats.popitem(last=False)[1])


def _characters(entries: Iterable[HistoryEntry]) -> int:
    return sum(len(each.content) for each in entries)


def _cut(text: str) -> str:
    return text if len(text) <= ENTRY_CHARACTERS else f"{text[:ENTRY_CHARACTERS].rstrip()}\n[truncated]"
