"""What happens while a council runs, as it happens. Nothing waits for an answer: a host that wants to stop cancels."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolbus.council.cancellation import being_cancelled
from toolbus.council.council_result import ToolOutcome
from toolbus.council.member import Member

ANSWER_SECONDS = 5.0  # that an async on_event has for one event

log = logging.getLogger("toolbus.extension")


@dataclass(frozen=True, slots=True)
class CouncilStarted:
    """The dice have fallen and at least one member takes part."""

    run_id: str
    chat_id: str
    member_count: int

    def described(self) -> dict[str, Any]:
        """Returns the event as JSON shows it, under the names that extensions know; so below."""
        return {**_head("COUNCIL_STARTED", self.run_id, self.chat_id), "memberCount": self.member_count}


@dataclass(frozen=True, slots=True)
class MemberDone:
    """All tools of a member have ended; members that run side by side end in any order."""

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
    """Some tools failed, after `CouncilCompleted`; the host goes on with what there is, or has them retried."""

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


async def tell(on_event: OnEvent | None, event: CouncilEvent) -> None:
    """Tells a host what happened; what it does then is its own affair."""
    if on_event is None:
        return
    try:
        answer = on_event(event)
        if inspect.isawaitable(answer):
            async with asyncio.timeout(ANSWER_SECONDS):
                await answer
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        log.warning("a council's on_event broke off at %s", type(event).__name__)
    except Exception:
        log.exception("a council's on_event failed at %s", type(event).__name__)
