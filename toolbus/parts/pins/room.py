"""Shows operators which tools of plugins and mounted MCP servers changed since they were trusted, and approves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from toolbus.bus.access.identity import principal_of
from toolbus.bus.core import Core, Room
from toolbus.common.text import list_names, quote
from toolbus.errors import InvalidRequest
from toolbus.parts.pins import pins
from toolbus.parts.pins.pins import Pinned, Pins
from toolbus.parts.pins.settings import PinSettings
from toolbus.sdk import ToolScope, llm_tool


@runtime_checkable
class Approver(Protocol):
    """Approves changes of some sources."""

    def approvable(self) -> Iterable[str]:
        """Names the sources that have fingerprints."""

    def known(self, source: str) -> Mapping[str, Pinned] | None:
        """Returns the fingerprints of a source; None for a source of another approver."""

    async def approve(self, source: str, subjects: Collection[str]) -> None:
        """Trusts the pending declarations of some subjects, and puts them in force."""

    def tool_of(self, subject: str) -> str:
        """Returns a tool's name on the bus; "" for other subjects."""


class PluginApprover:
    """Approves changes of plugins: in sessions, and with callback URLs."""

    def __init__(self, core: Core, pins: Pins) -> None:
        self._core = core
        self._pins = pins

    def approvable(self) -> Iterable[str]:
        """Names the pinned sources that have fingerprints."""
        return self._pins.sources()

    def known(self, source: str) -> Mapping[str, Pinned] | None:
        """Returns the fingerprints of a pinned source, after its refused tools were reviewed again."""
        if self._pins.pin_of(source) is None:
            return None
        self._core.sessions.presence.approved(source)  # of two sessions one may have declared what is trusted since
        return self._pins.known(source)

    async def approve(self, source: str, subjects: Collection[str]) -> None:
        """Trusts the pending declarations of some subjects, and offers the tools that were refused for them."""
        self._pins.approve(source, subjects)
        self._core.sessions.presence.approved(source)

    def tool_of(self, subject: str) -> str:
        """Returns the name of a tool, without its role."""
        return subject.removeprefix(pins.tool_subject("")).partition(" (role ")[0]


class PinsRoom(Room):
    """The approvals of one bus, and the fingerprints of plugins."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._pins = Pins(core.config.part(PinSettings).pins, core.audit)
        self._plugins = PluginApprover(core, self._pins)
        core.calls.dispatcher.seams.pins = self._pins
        self._approving = asyncio.Lock()

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tools of this room."""
        return [self.approvals, self.approve]

    async def open(self) -> None:
        """Restores the fingerprints of pinned sources, and persists those to come."""
        self._pins.open(self.core.program.store, self.core.sessions.presence.approved)

    @llm_tool(
        description="Shows what sources (plugins that the configuration pins, mounted MCP servers) declare otherwise "
        "than when they were trusted: the difference, and a fingerprint for approve.",
        read_only=True,
    )
    async def approvals(self, source: str = "") -> dict[str, Any]:
        """Shows changes.

        Args:
            source: one source; "" for all.
        """
        self._find(source)
        return {
            "changes": [
                {
                    "source": name,
                    "subject": subject,
                    "tool": approver.tool_of(subject),
                    "fingerprint": pins.digest_of(each.pending),
                    "approved": each.fingerprint,
                    "difference": each.difference(),
                }
                for name, approver, known in self._known(source)
                for subject, each in pins.pending(known).items()
            ]
        }

    @llm_tool(description="Trusts what a source declares now, where that differs from what was trusted before.")
    async def approve(
        self, scope: ToolScope, source: str, tool: str = "", expected: list[str] | None = None
    ) -> dict[str, Any]:
        """Approves changes.

        Args:
            source: a plugin's source, or a mount.
            tool: one tool, by its name on the bus, or a subject such as `instructions`; "" for all.
            expected: the fingerprints that were shown; a change that came since then is not approved. null: any.
        """
        async with self._approving:
            self._find(source)
            waiting = [
                (approver, subject, each)
                for _, approver, known in self._known(source)
                for subject, each in pins.pending(known).items()
            ]
            chosen = [
                item
                for item in waiting
                if not tool or tool in (item[1], item[0].tool_of(item[1]), item[1].removeprefix(pins.tool_subject("")))
            ]
            names = [subject for _, subject, _ in waiting]
            if tool and not chosen:
                raise InvalidRequest(
                    f"nothing of {quote(tool)} waits for an approval in source {source}; what does: {list_names(names)}"
                )
            if expected is not None:
                chosen = [item for item in chosen if pins.digest_of(item[2].pending) in expected]
            subjects = [subject for _, subject, _ in chosen]
            with self.core.audit.operation("approve", principal_of(scope), target=source, why=list_names(subjects)):
                for approver in {id(item[0]): item[0] for item in chosen}.values():
                    await approver.approve(source, [item[1] for item in chosen if item[0] is approver])
        return {"source": source, "approved": subjects, "waiting": [each for each in names if each not in subjects]}

    @property
    def _approvers(self) -> list[Approver]:
        return [self._plugins, *self.core.rooms.providers(Approver)]

    def _known(self, source: str) -> Iterator[tuple[str, Approver, Mapping[str, Pinned]]]:
        for approver in self._approvers:
            for name in [source] if source else approver.approvable():
                known = approver.known(name)
                if known is not None:
                    yield name, approver, known

    def _find(self, source: str) -> None:
        """Checks that a source is pinned or a mount."""
        if source and not any(True for _ in self._known(source)):
            raise InvalidRequest(
                f"source {quote(source)} is neither pinned nor a mount, so none of its changes waits: name it in "
                "[pins] of the configuration"
            )
