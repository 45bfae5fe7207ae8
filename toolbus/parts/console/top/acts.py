"""Says what a key does to the bus: which of its tools is called, what its user types first, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from toolbus.common.text import clean_line
from toolbus.sdk import Host

Row: TypeAlias = Mapping[str, Any]


class Notice(NamedTuple):
    """What is said of an act that was tried."""

    title: str
    text: str
    severity: Literal["information", "warning", "error"] = "information"


@dataclass(frozen=True, slots=True)
class Act:
    """What an operator does to what a line shows.

    Attributes:
        verb: what it does, for a heading: `Drain`.
        name: of what it is done to, as the bus sent it; it is typed before.
        warning: what comes of it.
        failed: the title where nothing came of it.
        tool, arguments: what is called.
        told: what is said of the answer.
    """

    verb: str
    name: str
    warning: str
    failed: str
    tool: str
    arguments: Row
    told: Callable[[Row], Notice]

    async def carry_out(self, host: Host) -> Notice:
        """Does it; returns what came of it."""
        result = await host.call(self.tool, dict(self.arguments))
        if result.is_error:
            text = result.error.message if result.error is not None else result.text
            return Notice(self.failed, clean_line(text), "error")
        return self.told(result.output)


def drain_of(source: str) -> Act:
    """Returns the drain of a source."""
    name = clean_line(source)
    failed = f"{name} was not drained"

    def told(answer: Row) -> Notice:
        if not answer["sessions"]:
            return Notice(failed, "it has no session", "warning")
        return Notice(f"draining {name}", f"sessions: {answer['sessions']}")

    warning = (
        "Its sessions take no new calls, finish those in flight and close. The plugin does not come back by itself."
    )
    return Act("Drain", source, warning, failed, "toolbus:drain", {"source": source}, told)


def cancel_of(call: Row) -> Act:
    """Returns the cancelling of a call that runs."""
    name = clean_line(str(call.get("name", "")))

    def told(answer: Row) -> Notice:
        return Notice(f"the call of {name} is cancelled", f"caller: {clean_line(str(answer['caller']))}")

    warning = "Its caller gets the error CANCELLED at once. The tool may have done a part of its work."
    arguments = {"id": str(call.get("id", ""))}
    return Act("Cancel", name, warning, f"the call of {name} was not cancelled", "toolbus:cancel_call", arguments, told)
