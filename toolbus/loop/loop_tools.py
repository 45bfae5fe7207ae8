"""Answers the loop's own tools: requests for more rounds, and search for tools that are not offered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence

from toolbus.dialects.conversation import HistoryItem, Turn
from toolbus.errors import Code
from toolbus.loop.deferred_tools import MAX_INJECTED_AT_ONCE, DeferredTools
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.turn_reply import refusal
from toolbus.search_tool import REQUEST_TOOL_INJECTION, SEARCH_TOOLS
from toolbus.text import shorten
from toolbus.tool import Result, Tool

EXTEND_TOOL_LOOP = "extend_tool_loop"
EXTENSION_DEFAULT = 5


class RoundBudget:
    """The number of rounds of a turn, and the tool by which a model requests more."""

    def __init__(self, settings: LoopSettings) -> None:
        self.rounds = settings.rounds
        self._max_extension = settings.extension_most
        self._max_rounds = max(settings.rounds_most, settings.rounds)
        self._tool = extension_tool(settings)

    @property
    def tool(self) -> Tool:
        """The tool's declaration; it stays the same during a turn, for prompt caches."""
        return self._tool

    def extend(self, arguments_json: str) -> Result:
        """Answers a call of the tool."""
        arguments = json.loads(arguments_json)
        rounds = arguments.get("rounds") if isinstance(arguments, dict) else None
        if rounds is None:
            rounds = min(EXTENSION_DEFAULT, self._max_extension)
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= self._max_extension:
            return refusal(
                Code.INVALID_ARGUMENTS,
                f"rounds is {shorten(json.dumps(rounds))}, it must be from 1 to {self._max_extension}",
            )
        granted = min(rounds, self._max_rounds - self.rounds)
        if granted <= 0:
            return refusal(
                Code.OVERLOADED,
                f"this turn already has {self._max_rounds} rounds, the maximum: answer with what you have",
            )
        self.rounds += granted
        return Result(output_json=json.dumps({"granted": granted, "rounds_in_all": self.rounds}))


def extension_tool(settings: LoopSettings) -> Tool:
    """Returns the declaration of `extend_tool_loop`."""
    rounds = {
        "type": "integer",
        "minimum": 1,
        "maximum": settings.extension_most,
        "default": min(EXTENSION_DEFAULT, settings.extension_most),
        "description": "How many more rounds",
    }
    return Tool(
        EXTEND_TOOL_LOOP,
        f"You may call tools in {settings.rounds} rounds before you have to answer. Call this together with your other "
        "calls when the task needs more of them. Do NOT call it when you can answer already.",
        json.dumps({"type": "object", "properties": {"rounds": rounds}}),
    )


class LoopTools:
    """The loop's own tools in one turn, and in deferred mode the choice among the tools of the source.

    Args:
        deferred: None where every tool is offered.
        items: the conversation so far: the tools that it called are offered again.
        also: names of tools that are offered from the start; unknown ones are ignored.
    """

    def __init__(
        self,
        settings: LoopSettings,
        deferred: DeferredTools | None,
        items: Iterable[HistoryItem] = (),
        *,
        also: Iterable[str] = (),
    ) -> None:
        self.extension = RoundBudget(settings)
        self._deferred = deferred
        self._tools: tuple[Tool, ...] = (self.extension.tool,) if settings.extension else ()
        self._answers: dict[str, Callable[[str], Result]] = {}
        if settings.extension:
            self._answers[EXTEND_TOOL_LOOP] = self.extension.extend
        if deferred is not None:
            self._answers |= {SEARCH_TOOLS: deferred.search, REQUEST_TOOL_INJECTION: deferred.inject}

        called = (call.name for item in items if isinstance(item, Turn) for call in item.calls if call.known)
        # Names to inject as soon as the catalog is known.
        self._to_inject = list(dict.fromkeys(name for name in (*called, *also) if name not in self._answers))

    @property
    def injected(self) -> tuple[str, ...] | None:
        """The requested names; None where every tool is offered. The export depends on it."""
        return None if self._deferred is None else self._deferred.injected

    def use_catalog(self, tools: Iterable[Tool]) -> None:
        """Takes the current catalog, which calls of the loop's tools then search."""
        if self._deferred is None:
            return
        self._deferred.offered(self._without_hidden(tools))
        while self._to_inject:
            self._deferred.inject({"names": self._to_inject[:MAX_INJECTED_AT_ONCE]})
            del self._to_inject[:MAX_INJECTED_AT_ONCE]

    def offered(self, tools: Iterable[Tool]) -> Sequence[Tool]:
        """Returns the tools of a catalog that the model is offered. The loop's tools hide others of their name."""
        visible = self._without_hidden(tools)
        return [*self._tools, *(visible if self._deferred is None else self._deferred.offered(visible))]

    def _without_hidden(self, tools: Iterable[Tool]) -> list[Tool]:
        return [tool for tool in tools if tool.name not in self._answers]

    async def answer(self, name: str, arguments_json: str) -> Result | None:
        """Answers a call of one of the loop's tools; None where it is not one of them."""
        answer = self._answers.get(name)
        if answer is None:
            return None
        if name == SEARCH_TOOLS:  # it may have to index and embed a whole catalog
            return await asyncio.to_thread(answer, arguments_json)
        return answer(arguments_json)
