"""Hands recordings of calls to operators who read them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from toolbus.bus.access.identity import principal_of
from toolbus.bus.core import Core, Room
from toolbus.common.text import list_names, quote
from toolbus.errors import InvalidRequest
from toolbus.parts.recordings.recording import MAX_RECORDINGS, READ_SECONDS, Recorder, Recording
from toolbus.sdk import ToolScope, llm_tool

MAX_WAIT_SECONDS = 30.0
LOOK_SECONDS = 5.0  # between two looks for recordings that are not read


class RecordingsRoom(Room):
    """The recordings of one bus; without any, calls do not come here."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._recorder = Recorder(core.calls.dispatcher)
        self._draining = False

    def tools(self) -> Iterable[Callable[..., Any]]:
        return [self.record_calls]

    async def start(self) -> None:
        """Begins to look for recordings that are not read."""
        self.repeat(LOOK_SECONDS, self._drop_unread, "looked for recordings that are not read")

    async def drain(self) -> None:
        """Ends the recordings: a reader that waits would hold the shutdown up."""
        self._draining = True
        for recording in self._recorder.recordings.values():
            recording.wake()

    async def stop(self) -> None:
        """Drops what nobody has read."""
        for name in list(self._recorder.recordings):
            self._recorder.end(name)

    @llm_tool(
        description="Records calls with their arguments and results, without what is named like a secret. Begins a "
        "recording, or reads one that has begun; it ends when nobody reads it.",
        read_only=True,
        allow_repeat=True,
    )
    async def record_calls(
        self,
        scope: ToolScope,
        recording: Annotated[str, "The recording to read; without it, a new one begins."] = "",
        tools: Annotated[list[str] | None, "Patterns of the tools, NAME or SOURCE:NAME."] = None,
        sources: Annotated[list[str] | None, "Patterns of the sources of tools."] = None,
        wait_seconds: float = 10.0,
    ) -> dict[str, Any]:
        """Reads what was recorded since the last read, or begins.

        Args:
            wait_seconds: how long it waits for a call, at most 30 s.

        The answer is `recording`, `calls` and `lost`, the number of calls that a slow reader missed.
        Neither tools nor sources means all of them.
        """
        recordings = self._recorder.recordings
        if not recording:
            self._drop_unread()
            if len(recordings) >= MAX_RECORDINGS:
                raise InvalidRequest(f"{MAX_RECORDINGS} recordings run already: wait until one of them has ended")
            name, chosen = secrets.token_hex(8), [*(tools or ()), *(sources or ())]
            what = list_names(chosen) if chosen else "everything"
            with self.core.audit.operation("calls.record", principal_of(scope), target=what):
                self._recorder.begin(name, Recording(tools or (), sources or ()))
            return {"recording": name, "calls": [], "lost": 0}
        if recording not in recordings:
            raise InvalidRequest(
                f"there is no recording {quote(recording)}: nobody read it for {READ_SECONDS:g} s, or the bus was "
                "restarted; begin a new one"
            )
        read = recordings[recording]
        wait = 0.0 if self._draining else min(max(wait_seconds, 0.0), MAX_WAIT_SECONDS)
        calls = await read.read(wait)
        return {"recording": recording, "calls": calls, "lost": read.lost}

    def _drop_unread(self) -> None:
        ended = time.monotonic() - READ_SECONDS
        for name, recording in list(self._recorder.recordings.items()):
            if recording.read_at < ended:
                self._recorder.end(name)
