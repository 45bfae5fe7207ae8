"""Defines the results of a run of a council: the outcome of each tool, skipped tools, and the whole deliberation."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.newest import NewestCache, NewestCacheBySize
from toolbus.common.text import join_surrogates, list_names, shorten
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.call_context import ContextMessage
from toolbus.parts.council.settings import MAX_RETENTION, CouncilSettings, Member
from toolbus.protocol.tool import MIB


class TimedOut(ToolBusError):
    """A tool exceeded its timeout; the text is exactly the one that extensions know."""

    def __init__(self, bare_name: str) -> None:
        super().__init__(f"Tool invocation '{bare_name}' timed out")


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """One tool that one member ran.

    Attributes:
        tool: as it was assigned; unique together with the member.
        display_name: for people and for the deliberation block.
        content: the tool's result as text; "" if it failed.
        error: why it failed, a sentence; "" if it succeeded.
        seconds: how long it took.
        variable: the name under which the host stores its content; "" if it does not.
        deliberates: whether its content belongs in the deliberation block.
        timeout_seconds: the timeout, if it was exceeded; else 0.
    """

    member_id: str
    member_name: str
    tool: str
    display_name: str
    success: bool
    content: str = ""
    error: str = ""
    seconds: float = 0.0
    variable: str = ""
    deliberates: bool = True
    timeout_seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Member and tool: the outcome of a retry replaces the one with the same key."""
        return self.member_id, self.tool

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it, under the names that extensions know."""
        record: dict[str, Any] = {
            "memberId": self.member_id,
            "memberName": self.member_name,
            "toolName": self.tool,
            "toolDisplayName": self.display_name,
            "success": self.success,
            "content": self.content,
            "durationMs": round(self.seconds * 1000),
        }
        if not self.success:
            record["error"] = self.error
            if self.timeout_seconds:
                record["timeoutMs"] = round(self.timeout_seconds * 1000)
        if self.variable:
            record["resultVariable"] = self.variable
        return record


@dataclass(frozen=True, slots=True)
class MissingTool:
    """A tool of a participant that did not exist when the run started.

    Attributes:
        tool: as it is assigned.
        why: the reason, a sentence.
    """

    member_id: str
    tool: str
    why: str

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it."""
        return {"memberId": self.member_id, "toolName": self.tool, "why": self.why}


@dataclass(frozen=True, slots=True)
class Deliberation:
    """A whole run of a council.

    Attributes:
        run_id: of the run; a retry has the same.
        outcomes: in the order of members and of their tools.
        block: the text for the main model.
        variables: contents by the name under which the host stores them.
        seconds: how long the run took.
        reused: whether it is the result of an earlier run, returned since nothing had changed.
        history: a text of earlier turns' results for the main model; may be "".
        skipped: tools that did not exist; they have no outcome.
    """

    run_id: str
    outcomes: tuple[ToolOutcome, ...]
    block: str
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    reused: bool = False
    history: str = ""
    skipped: tuple[MissingTool, ...] = ()

    @property
    def failed(self) -> tuple[ToolOutcome, ...]:
        """The outcomes that may be retried."""
        return tuple(each for each in self.outcomes if not each.success)

    def chosen(self, only: Iterable[tuple[str, str]] | None) -> set[tuple[str, str]]:
        """Returns which failed tools a retry runs again, as (member id, tool).

        Args:
            only: the selected ones; None means all failed ones.

        Raises:
            SetupError: it is empty, or names a tool that did not fail in this run.
        """
        failed = {outcome.key: None for outcome in self.failed}
        if only is None:
            return set(failed)
        selected = dict.fromkeys((member_id, tool) for member_id, tool in only)
        failures = f"failed in this run: {list_names(map(_key_text, failed))}"
        if not selected:
            raise SetupError(f"only is empty: leave it out to retry all; {failures}")
        if others := [_key_text(key) for key in selected if key not in failed]:
            raise SetupError(f"only names {list_names(others)}, which did not fail in this run: {failures}")
        return set(selected)

    @property
    def characters(self) -> int:
        """The approximate number of characters in memory: contents are in the block again."""
        of_outcomes = sum(len(each.content) + len(each.error) for each in self.outcomes)
        of_skipped = sum(len(each.tool) + len(each.why) for each in self.skipped)
        return len(self.block) + len(self.history) + of_outcomes + of_skipped

    def described(self) -> dict[str, Any]:
        """Returns the record as JSON shows it, under the names that extensions know."""
        failed = len(self.failed)
        return {
            "runId": self.run_id,
            "generationId": self.run_id,  # as the events name it
            "results": [outcome.described() for outcome in self.outcomes],
            "deliberation": self.block,
            "history": self.history,
            "namedResults": dict(self.variables),
            "totalDurationMs": round(self.seconds * 1000),
            "successCount": len(self.outcomes) - failed,
            "failedCount": failed,
            "reused": self.reused,
            "skipped": [each.described() for each in self.skipped],
        }


def _key_text(key: tuple[str, str]) -> str:
    return shorten(" ".join(key), 160)


# Members do not get their own earlier results, since models repeat their own texts. The main model gets them, as a
# block beside the deliberation.

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


log = logging.getLogger("toolbus.extension")


@dataclass(frozen=True, slots=True)
class CouncilStarted:
    """At least one member takes part."""

    run_id: str
    chat_id: str
    member_count: int

    def described(self) -> dict[str, Any]:
        """Returns the event as JSON shows it, under the names that extensions know; so below."""
        return {**_head("COUNCIL_STARTED", self.run_id, self.chat_id), "memberCount": self.member_count}


@dataclass(frozen=True, slots=True)
class MemberDone:
    """All tools of a member have ended; members that run in parallel end in any order."""

    run_id: str
    chat_id: str
    member: Member
    outcomes: tuple[ToolOutcome, ...]

    def described(self) -> dict[str, Any]:
        return {
            **_head("COUNCIL_MEMBER_DONE", self.run_id, self.chat_id),
            "memberId": self.member.id,
            "memberName": self.member.name,
            "memberItemId": self.member.item_id,
            "memberAvatarUrl": self.member.avatar_url,
            "results": [outcome.described() for outcome in self.outcomes],
        }


@dataclass(frozen=True, slots=True)
class CouncilCompleted:
    """All members are done.

    Attributes:
        result_count: outcomes, failed ones included.
    """

    run_id: str
    chat_id: str
    seconds: float
    result_count: int

    def described(self) -> dict[str, Any]:
        return {
            **_head("COUNCIL_COMPLETED", self.run_id, self.chat_id),
            "totalDurationMs": round(self.seconds * 1000),
            "resultCount": self.result_count,
        }


_OF_FAILED = ("memberId", "memberName", "toolName", "toolDisplayName", "error")


@dataclass(frozen=True, slots=True)
class ToolsFailed:
    """Some tools failed. Follows `CouncilCompleted`; the host uses the other results, or retries."""

    run_id: str
    chat_id: str
    failed: tuple[ToolOutcome, ...]
    success_count: int

    @property
    def failed_count(self) -> int:
        """How many failed."""
        return len(self.failed)

    def described(self) -> dict[str, Any]:
        return {
            **_head("COUNCIL_TOOLS_FAILED", self.run_id, self.chat_id),
            "failedTools": [
                {key: shown[key] for key in _OF_FAILED} for shown in map(ToolOutcome.described, self.failed)
            ],
            "successCount": self.success_count,
            "failedCount": self.failed_count,
        }


CouncilEvent: TypeAlias = CouncilStarted | MemberDone | CouncilCompleted | ToolsFailed
OnEvent: TypeAlias = Callable[[CouncilEvent], object]  # sync or async


def _head(event: str, run_id: str, chat_id: str) -> dict[str, Any]:
    return {"event": event, "generationId": run_id, "chatId": chat_id}


async def notify(on_event: OnEvent | None, event: CouncilEvent, seconds: float) -> None:
    """Sends an event to a host; an error of its handler, or a timeout after ``seconds``, is logged and ends nothing."""
    if on_event is None:
        return
    try:
        pending = on_event(event)
        if inspect.isawaitable(pending):
            async with asyncio.timeout(seconds):
                await pending
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        log.warning("on_event of a council was cancelled at %s", type(event).__name__)
    except Exception:
        log.exception("on_event of a council failed at %s", type(event).__name__)


_TEXT_PARTS = (None, "text", "input_text", "output_text")  # as the providers call them; some do not


@dataclass(frozen=True, slots=True)
class Scene:
    """Texts of the host besides the messages. Tools get each text that is not empty and that the settings allow.

    Attributes:
        chat_id: of the conversation, for events, history and regenerated replies.
        persona: the character that the user plays.
        character: the character that the main model plays.
        world_info: facts about the world.
    """

    chat_id: str = ""
    persona: str = ""
    character: str = ""
    world_info: str = ""


NO_SCENE = Scene()


def text_of_content(content: Any) -> str:
    """Returns the text of a message's content: the text parts, a line each; other parts are ignored."""
    if isinstance(content, str):
        return join_surrogates(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        return ""
    return "\n".join(filter(None, (_part_text(part) for part in content)))


def context_messages(
    messages: Iterable[Mapping[str, Any] | ContextMessage], settings: CouncilSettings, scene: Scene = NO_SCENE
) -> tuple[ContextMessage, ...]:
    """Returns the messages for tools: the scene as system messages, then the newest messages, oldest first."""
    shown = [each if isinstance(each, ContextMessage) else message_of(each) for each in messages]
    if settings.exclude_latest_user_message:
        latest = next((index for index in reversed(range(len(shown))) if shown[index].role == "user"), None)
        shown = [each for index, each in enumerate(shown) if index != latest]
    return (*_scene_messages(scene, settings), *shown[-settings.sidecar_context_window :])


def message_of(message: Any) -> ContextMessage:
    """Reads a message as providers write it; any other value becomes a message without content."""
    if not isinstance(message, Mapping):
        return ContextMessage("user", text_of_content(message))
    role, name = message.get("role"), message.get("name")
    if role == "model":  # as Gemini's API has it, with `parts` for the content
        role = "assistant"
    return ContextMessage(
        role=join_surrogates(role) if isinstance(role, str) and role else "user",
        content=text_of_content(message.get("parts") if message.get("content") is None else message["content"]),
        name=join_surrogates(name) if isinstance(name, str) else "",
    )


def _scene_messages(scene: Scene, settings: CouncilSettings) -> Iterable[ContextMessage]:
    for included, heading, text in (
        (settings.include_user_persona, "User persona", scene.persona),
        (settings.include_character_info, "Character", scene.character),
        (settings.include_world_info, "World info", scene.world_info),
    ):
        if included and text.strip():
            yield ContextMessage("system", join_surrogates(f"## {heading}\n{text.strip()}"))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return join_surrogates(part)
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return "" if part.get("thought") else join_surrogates(part["text"])  # Gemini marks thoughts so
    return ""
