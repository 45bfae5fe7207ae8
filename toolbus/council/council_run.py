"""Defines the records of a council's run: its request, and the finished run for retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.council.council import Council
from toolbus.council.deliberation import Deliberation
from toolbus.council.scene import Scene
from toolbus.functions.call_context import ContextMessage


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run as a client requested it.

    Attributes:
        council: with the settings and members of this run.
        ignored: the unknown keys of the request.
    """

    council: Council
    messages: tuple[ContextMessage, ...]
    scene: Scene
    user_id: str
    attributes: Mapping[str, str]
    regenerates: bool
    ignored: tuple[str, ...]


@dataclass(slots=True)
class FinishedRun:
    """A run that has ended.

    Attributes:
        deliberation: replaced by each retry.
        retry_lock: held by a running retry, so that two retries do not overwrite each other's outcomes.
        ended: when the first run ended, in seconds since the epoch.
    """

    request: RunRequest
    deliberation: Deliberation
    retry_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: float = field(default_factory=time.time)

    def described(self) -> dict[str, Any]:
        """Returns the entry of a list of runs, without results."""
        run = self.deliberation
        members = [outcome.member_name for outcome in run.outcomes] or [skipped.member_id for skipped in run.skipped]
        return {
            "runId": run.run_id,
            "chatId": self.request.scene.chat_id,
            "ended": round(self.ended, 3),
            "members": list(dict.fromkeys(members)),
            "totalDurationMs": round(run.seconds * 1000),
            "successCount": len(run.outcomes) - len(run.failed),
            "failedCount": len(run.failed),
            "skippedCount": len(run.skipped),
        }

    @property
    def characters(self) -> int:
        """The number of characters that it holds in memory."""
        request = self.request
        texts = [each.content for each in request.messages]
        texts += [request.scene.persona, request.scene.character, request.scene.world_info]
        texts += request.attributes.values()
        for member in request.council.settings.members:
            texts += [member.role, member.definition, member.personality, member.behavior, *member.tools]
        return sum(map(len, texts)) + self.deliberation.characters
