"""Notifies a host of the events of a council's run. A run waits only until a timeout for the host's handler."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolbus.cancellation import is_being_cancelled
from toolbus.council.deliberation import ToolOutcome
from toolbus.council.member import Member

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
                {
                    "memberId": each.member_id,
                    "memberName": each.member_name,
                    "toolName": each.tool,
                    "toolDisplayName": each.display_name,
                    "error": each.error,
                }
                for each in self.failed
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
