"""Answers the loop's own tools: requests for more rounds, and search for tools that are not offered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from toolbus.dialects.conversation import Answered, Answers, HistoryItem, Turn
from toolbus.dialects.provider_results import object_of
from toolbus.errors import Code
from toolbus.loop.deferred_tools import DeferredTools
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.turn_reply import refusal, user_text
from toolbus.search_tool import REQUEST_TOOL_INJECTION, SEARCH_TOOLS
from toolbus.text import shorten
from toolbus.tool import Result, Tool

EXTEND_TOOL_LOOP = "extend_tool_loop"
EXTENSION_DEFAULT = 5
MESSAGES = 10  # tools are suggested for the user's newest messages: this number, and up to twice as many


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
        "calls when the task needs more of them. Do NOT call it when you can already answer.",
        json.dumps({"type": "object", "properties": {"rounds": rounds}}),
    )


class LoopTools:
    """The loop's own tools in one turn, and in deferred mode the choice among the tools of the source.

    Deferred mode begins by itself with a catalog of more tools than the provider takes, and then lasts until the end
    of the turn. The offered tools depend only on the conversation, so they are the same after a restart, and in the
    same order for the provider's prompt cache.

    Args:
        deferred: None if every tool is offered.
        items: the conversation so far: the tools that it called or requested are offered again.
        also: names of tools that are offered from the start; unknown ones are ignored.
        automatic: creates the mode when it begins by itself; None: it does not.
    """

    def __init__(
        self,
        settings: LoopSettings,
        deferred: DeferredTools | None,
        items: Iterable[HistoryItem] = (),
        *,
        also: Iterable[str] = (),
        automatic: Callable[[], DeferredTools] | None = None,
    ) -> None:
        self.extension = RoundBudget(settings)
        self._settings = settings
        self._deferred: DeferredTools | None = None  # None if every tool is offered
        self._automatic = automatic
        self._suggests = False  # whether the mode began by itself
        self._tools: tuple[Tool, ...] = (self.extension.tool,) if settings.extension else ()
        self._answers: dict[str, Callable[[str], Result]] = {}
        if settings.extension:
            self._answers[EXTEND_TOOL_LOOP] = self.extension.extend
        self._items = tuple(items)
        self._also = tuple(also)
        self._is_new = True  # whether the tools that the conversation needs are not offered yet
        if deferred is not None:
            self._defer(deferred)

    def _defer(self, deferred: DeferredTools) -> None:
        self._deferred = deferred
        self._answers |= {SEARCH_TOOLS: deferred.search, REQUEST_TOOL_INJECTION: deferred.inject}

    @property
    def injected(self) -> tuple[str, ...] | None:
        """The injected names; None if every tool is offered. The export depends on it."""
        return None if self._deferred is None else self._deferred.injected

    @property
    def limited(self) -> bool:
        """Whether deferred mode began by itself."""
        return self._suggests

    @property
    def hidden(self) -> int:
        """How many tools of the catalog the model is not offered, but finds with `search_tools`."""
        return 0 if self._deferred is None else self._deferred.hidden

    @property
    def unpinned(self) -> int:
        """How many pinned tools are not offered, because the provider does not take so many."""
        return 0 if self._deferred is None else self._deferred.unpinned

    async def use_catalog(self, tools: Sequence[Tool], max_tools: int | None = None) -> None:
        """Takes the current catalog, which calls of the loop's tools then search.

        Args:
            max_tools: how many tools the provider takes; None: any number.
        """
        too_many = max_tools is not None and len(self._tools) + len(tools) > max_tools
        if self._deferred is None and self._automatic is not None and too_many:
            self._defer(self._automatic())
            self._suggests = True
        if self._deferred is None:
            return
        self._deferred.limit = None if max_tools is None else max_tools - len(self._tools)
        self._deferred.offered(self._without_hidden(tools))
        if self._is_new:
            self._is_new = False
            for need in needs_of(self._items, requests=self._settings.keep_injected):
                if isinstance(need, tuple):
                    self._deferred.offer(need)
                elif self._suggests:
                    await asyncio.to_thread(self._deferred.suggest, need)
            self._deferred.offer(self._also)

    def offered(self, tools: Iterable[Tool]) -> Sequence[Tool]:
        """Returns the offered tools of a catalog. The loop's tools hide others with their names."""
        visible = self._without_hidden(tools)
        return [*self._tools, *(visible if self._deferred is None else self._deferred.offered(visible))]

    def _without_hidden(self, tools: Iterable[Tool]) -> list[Tool]:
        return [tool for tool in tools if tool.name not in self._answers]

    async def answer(self, name: str, arguments_json: str) -> Result | None:
        """Answers a call of one of the loop's tools; None for any other tool."""
        answer = self._answers.get(name)
        if answer is None:
            if self._deferred is not None:
                self._deferred.offer([name])  # it is in use, so it is not the next to leave
            return None
        if name == SEARCH_TOOLS:  # it may have to index and embed a whole catalog
            return await asyncio.to_thread(answer, arguments_json)
        return answer(arguments_json)


def needs_of(items: Sequence[HistoryItem], *, requests: bool) -> Iterator[str | tuple[str, ...]]:
    """Yields the names of tools that a conversation used and the newest user messages, in their order.

    Args:
        requests: whether to include tools that the model requested and did not call.
    """
    messages = sum(bool(user_text(item)) for item in items)
    old = max(0, (messages - 1) // MESSAGES * MESSAGES - MESSAGES)
    for item in items:
        if isinstance(item, Turn):
            yield tuple(call.name for call in item.calls if call.known and call.name != REQUEST_TOOL_INJECTION)
        elif isinstance(item, Answers):
            if requests:
                yield tuple(name for each in item.answered for name in _injected_by(each))
        elif text := user_text(item):
            old -= 1
            if old < 0:
                yield text


def _injected_by(answered: Answered) -> list[str]:
    """Returns the names that a call of `request_tool_injection` added."""
    if answered.call.name != REQUEST_TOOL_INJECTION or not answered.call.known:
        return []
    output = object_of(answered.result)
    names = [name for key in ("injected", "already_offered") for name in _list(output.get(key))]
    return [name for name in names if isinstance(name, str)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
