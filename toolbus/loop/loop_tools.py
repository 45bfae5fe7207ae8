"""The tools of the loop itself: asking for more rounds, and finding tools that are not shown. They call nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from toolbus.dialects.conversation import HistoryItem, Turn
from toolbus.errors import Code
from toolbus.loop.deferred_tools import MAX_INJECTED_AT_ONCE, Deferred
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.turn_reply import refused
from toolbus.search import REQUEST_TOOL_INJECTION, SEARCH_TOOLS
from toolbus.tool import Result, Tool

EXTEND_TOOL_LOOP = "extend_tool_loop"
EXTENSION_DEFAULT = 5


class RoundBudget:
    """How many rounds a turn has, and the tool by which a model asks for more."""

    def __init__(self, settings: LoopSettings) -> None:
        self.rounds = settings.rounds
        self._most = settings.extension_most
        self._in_all = max(settings.rounds_most, settings.rounds)
        self._tool = extension_tool(settings)

    @property
    def tool(self) -> Tool:
        """Its declaration; the same throughout a turn, for the sake of prompt caches."""
        return self._tool

    def ask(self, arguments_json: str) -> Result:
        """Answers a call of the tool."""
        wanted = json.loads(arguments_json)
        rounds = wanted.get("rounds") if isinstance(wanted, dict) else None
        if rounds is None:
            rounds = min(EXTENSION_DEFAULT, self._most)
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= self._most:
            return refused(
                Code.INVALID_ARGUMENTS, f"rounds is {json.dumps(rounds)[:80]}, it must be from 1 to {self._most}"
            )
        granted = min(rounds, self._in_all - self.rounds)
        if granted <= 0:
            return refused(
                Code.OVERLOADED,
                f"this turn already has {self._in_all} rounds, and gets no more: answer with what you have",
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


class OwnTools:
    """What one run offers beside the tools of its source, and the choice among those.

    Args:
        deferred: None where every tool is offered.
        items: the conversation so far: what it has called before is offered again.
    """

    def __init__(self, settings: LoopSettings, deferred: Deferred | None, items: Iterable[HistoryItem] = ()) -> None:
        self.extension = RoundBudget(settings)
        self._deferred = deferred
        self._tools: tuple[Tool, ...] = (self.extension.tool,) if settings.extension else ()
        self._answers: dict[str, Callable[[str], Result]] = {}
        if settings.extension:
            self._answers[EXTEND_TOOL_LOOP] = self.extension.ask
        if deferred is not None:
            self._answers |= {SEARCH_TOOLS: deferred.search, REQUEST_TOOL_INJECTION: deferred.inject}

        called = (call for item in items if isinstance(item, Turn) for call in item.calls if call.known)
        # Names that are still to be asked for, once the catalog is known.
        self._recalled = list(dict.fromkeys(call.name for call in called if call.name not in self._answers))

    @property
    def chosen(self) -> tuple[str, ...] | None:
        """Names that were asked for; None where there is nothing to choose. What is offered follows from it."""
        return None if self._deferred is None else self._deferred.injected

    def see(self, tools: Iterable[Tool]) -> None:
        """Takes the catalog as it is now, which calls of the loop's tools then search."""
        if self._deferred is None:
            return
        self._deferred.offered(self._others(tools))
        while self._recalled:
            self._deferred.inject({"names": self._recalled[:MAX_INJECTED_AT_ONCE]})
            del self._recalled[:MAX_INJECTED_AT_ONCE]

    def offered(self, tools: Iterable[Tool]) -> Sequence[Tool]:
        """Returns what the model is to see of a catalog. Tools of the loop hide others of their name."""
        others = self._others(tools)
        return [*self._tools, *(others if self._deferred is None else self._deferred.offered(others))]

    def _others(self, tools: Iterable[Tool]) -> list[Tool]:
        return [tool for tool in tools if tool.name not in self._answers]

    def answer(self, name: str, arguments_json: str) -> Result | None:
        """Answers a call of one of the loop's tools; None where it is not one of them."""
        answer = self._answers.get(name)
        return None if answer is None else answer(arguments_json)
