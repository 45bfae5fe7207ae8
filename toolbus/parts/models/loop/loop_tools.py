"""Answers the loop's own tools: requests for more rounds, and search for tools that are not offered."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from toolbus.common.text import repair_utf8, shorten
from toolbus.errors import Code
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem, Turn
from toolbus.parts.models.dialects.provider_results import object_of
from toolbus.parts.models.loop.loop_settings import LoopSettings
from toolbus.parts.models.loop.turn_reply import refusal, user_text
from toolbus.parts.models.search import (
    REQUEST_TOOL_INJECTION,
    SEARCH_TOOLS,
    IndexCache,
    ToolIndex,
    search_arguments,
    search_tool,
)
from toolbus.protocol.tool import Annotations, Result, Tool

# `DeferredTools` offers two tools of its own, `search_tools` and `request_tool_injection`, and answers them. It does
# not know where tools come from or how they are called.

MAX_INJECTED_AT_ONCE = 20
MAX_INJECTED = 128  # where the provider has no limit: a model chooses worse among more
SUGGESTED = 8  # tools for each message of the user
MAX_SUGGESTED = 48  # injected tools, above which no more are suggested without others leaving
MAX_NAME = 200  # characters of an unknown name that an answer repeats
MAX_CORRECTED = 5  # unknown names that get similar ones: comparing with 1,000 names takes 5 ms


def injection_tool() -> Tool:
    """Returns the declaration of `request_tool_injection`."""
    names = {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": MAX_INJECTED_AT_ONCE,
        "description": f"Names exactly as {SEARCH_TOOLS} returned them",
    }
    return Tool(
        name=REQUEST_TOOL_INJECTION,
        description=(
            f"Add tools to your list by name. Call this after {SEARCH_TOOLS} found a tool that you need; "
            "you can call the added tools from your next turn on. "
            "Do NOT call it for tools that are in your list already, and never with a name that you guessed. "
            "It runs nothing: the task is not done until you call the added tool itself."
        ),
        parameters_json=json.dumps({"type": "object", "properties": {"names": names}, "required": ["names"]}),
        annotations=Annotations(idempotent=True, destructive=False),
    )


class DeferredTools:
    """The offered tools of one conversation in deferred mode. For one thread at a time, apart from `search`.

    The order suits prompt caches: tools that were offered before come first, injected tools follow. A tool that leaves
    the catalog is offered again when it returns.

    Args:
        pinned: names that are offered from the start, if the catalog has them; the first ones if not all fit.
        cache: shared by the conversations of a program, so that a catalog is indexed once; None: a new one.

    Attributes:
        limit: how many tools are offered at most, these two included; None: the pinned ones and MAX_INJECTED. Pinned
            tools leave room for MAX_INJECTED_AT_ONCE others, or for half of the limit. If injected tools do not fit,
            those that were requested or called least recently are removed.
        unpinned: how many pinned tools of the catalog do not fit.
    """

    def __init__(
        self, pinned: Iterable[str] = (), *, cache: IndexCache | None = None, limit: int | None = None
    ) -> None:
        self.limit = limit
        self._pinned = tuple(dict.fromkeys(pinned))
        self._injected: dict[str, int] = {}  # name → when it was needed last, in the order of the first requests
        self._clock = itertools.count()
        self._cache = cache or IndexCache()
        self._own = {tool.name: tool for tool in (search_tool(self._cache.modes), injection_tool())}
        self._tools: dict[str, Tool] = {}  # the catalog of the last call of `offered`, replaced as a whole
        self._shown: frozenset[str] = frozenset()  # the pinned tools of that catalog that fit
        self.unpinned = 0

    def __repr__(self) -> str:
        return f"DeferredTools({len(self._pinned)} pinned, {len(self._injected)} injected of {len(self._tools)} tools)"

    @property
    def injected(self) -> tuple[str, ...]:
        """The names that were injected and are still offered, in the order of the requests."""
        return tuple(self._injected)

    @property
    def hidden(self) -> int:
        """How many tools of the catalog are not offered."""
        return len(self._tools) - len(self._shown) - sum(name in self._tools for name in self._injected)

    def offered(self, tools: Iterable[Tool]) -> list[Tool]:
        """Returns the offered tools of a catalog. `search` and `inject` then use this catalog.

        The two tools of this mode come first, then the pinned ones in the order of the catalog, then the injected
        ones. A tool of the catalog with the name of one of the two is hidden.
        """
        catalog: dict[str, Tool] = {}
        for tool in tools:
            if tool.name not in self._own:
                catalog.setdefault(tool.name, tool)
        self._tools = catalog
        present = [name for name in self._pinned if name in catalog]
        count = len(present)
        if self.limit is not None:
            room = self.limit - len(self._own)
            present = present[: room - min(MAX_INJECTED_AT_ONCE, room // 2)]
        self._shown = frozenset(present)
        self.unpinned = count - len(present)
        for name in self._shown & self._injected.keys():
            del self._injected[name]
        self._evict(self._room)
        pinned = [tool for name, tool in self._tools.items() if name in self._shown]
        injected = [self._tools[name] for name in self._injected if name in self._tools]
        return [*self._own.values(), *pinned, *injected]

    @property
    def _room(self) -> int:
        """How many tools can be injected."""
        return MAX_INJECTED if self.limit is None else self.limit - len(self._own) - len(self._shown)

    def _evict(self, room: int) -> list[str]:
        """Removes the injected tools that were needed least recently, until so many are left. Returns their names."""
        surplus = len(self._injected) - room
        if surplus <= 0:
            return []
        oldest = sorted(self._injected, key=self._injected.__getitem__)[:surplus]
        for name in oldest:
            del self._injected[name]
        return oldest

    def offer(self, names: Iterable[str]) -> list[str]:
        """Injects tools that the catalog has; a tool that is already injected counts as needed now.

        Returns the names of the tools that were removed for them.
        """
        for name in names:
            if name in self._tools and name not in self._shown:
                self._injected[name] = next(self._clock)
        return self._evict(self._room)

    def suggest(self, text: str) -> None:
        """Injects the tools that match a user's message. Call it before the first request of a turn only.

        The search takes too long for an event loop. If too many tools are offered, half of them are removed at once:
        each removal invalidates a provider's prompt cache.
        """
        results = self._index().search(text, top_k=SUGGESTED)["results"]
        names = [result["name"] for result in results]
        self.offer(name for name in names if name in self._injected)
        new = [name for name in names if name not in self._injected and name not in self._shown]
        limit = min(MAX_SUGGESTED, self._room)
        if len(self._injected) + len(new) > limit:
            self._evict(limit // 2)
        self.offer(new[: max(0, limit - len(self._injected))])

    def search(self, arguments: Mapping[str, Any] | str) -> Result:
        """Answers a call of `search_tools`; arguments may be the model's JSON text. May be called from any thread."""
        try:
            query, options = search_arguments(_object(arguments))
        except ValueError as error:
            return _failure(str(error))
        return _answer(self._index().search(query, **options))

    def inject(self, arguments: Mapping[str, Any] | str) -> Result:
        """Answers a call of `request_tool_injection`; arguments may be the model's JSON text."""
        try:
            names = _injection_arguments(_object(arguments))
        except ValueError as error:
            return _failure(str(error))
        injected: list[str] = []
        already: list[str] = []
        unknown: dict[str, list[str]] = {}  # with similar names
        for name in names:
            if name in self._own or name in self._shown or (name in self._tools and name in self._injected):
                already.append(name)
            elif name in self._tools:
                injected.append(name)
            else:
                name = repair_utf8(name[:MAX_NAME])
                unknown[name] = self._similar(name) if len(unknown) < MAX_CORRECTED else []
        removed = self.offer([*already, *injected])
        answer: dict[str, Any] = {"injected": injected, "already_offered": already, "unknown": unknown}
        if removed:
            answer["no_longer_offered"] = removed  # may hold requested ones, if the limit is small
            answer["injected"] = [name for name in injected if name not in removed]
        if injected or already:
            return _answer({"success": True, **answer})
        why = f"no tool has such a name: use one of the names listed under unknown, or one that {SEARCH_TOOLS} found"
        return _answer({"success": False, "error": why, **answer})

    def _index(self) -> ToolIndex:
        tools = self._tools  # once: another call may replace it meanwhile
        revision = tuple((tool.name, tool.schema_hash) for tool in tools.values())
        return self._cache.index_of(revision, tools.values())

    def _similar(self, name: str) -> list[str]:
        """Returns names with a similar spelling, else names that share a word."""
        similar = difflib.get_close_matches(name, self._tools, n=3)
        return similar or [hit["name"] for hit in self._index().search(name, mode="bm25", top_k=3)["results"]]


def _object(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """Returns a model's arguments without null values, because some providers make every parameter required."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON ({error}): send one JSON object") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments are {reprlib.repr(arguments)}, they must be one JSON object")
    return {name: value for name, value in arguments.items() if value is not None}


def _injection_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the requested names without duplicates; a single name may come without a list."""
    if "names" not in arguments:
        raise ValueError(f"names is missing: give a list of tool names that {SEARCH_TOOLS} found")
    names = arguments["names"]
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"names is {reprlib.repr(names)}, it must be a list of tool names: use names that {SEARCH_TOOLS} found"
        )
    names = list(dict.fromkeys(names))
    if len(names) > MAX_INJECTED_AT_ONCE:
        raise ValueError(
            f"names has {len(names)} names, at most {MAX_INJECTED_AT_ONCE} are added at once: name the ones you need"
        )
    return names


def _failure(why: str) -> Result:
    return _answer({"success": False, "error": why})


def _answer(output: Mapping[str, Any]) -> Result:
    return Result(output_json=json.dumps(output, ensure_ascii=False), is_error=not output["success"])


EXTEND_TOOL_LOOP = "extend_tool_loop"
EXTENSION_DEFAULT = 5
MESSAGES = 10  # tools are suggested for the user's newest messages: this number, and up to twice as many


class RoundBudget:
    """The number of rounds of a turn, and the tool by which a model requests more."""

    def __init__(self, settings: LoopSettings) -> None:
        self.rounds = settings.rounds
        self._max_extension = settings.extension_most
        self._max_rounds = max(settings.rounds_most, settings.rounds)
        count = {
            "type": "integer",
            "minimum": 1,
            "maximum": settings.extension_most,
            "default": min(EXTENSION_DEFAULT, settings.extension_most),
            "description": "How many more rounds",
        }
        self.tool = Tool(  # it stays the same during a turn, for prompt caches
            EXTEND_TOOL_LOOP,
            f"You may call tools in {settings.rounds} rounds before you have to answer. Call this together with your "
            "other calls when the task needs more of them. Do NOT call it when you can already answer.",
            json.dumps({"type": "object", "properties": {"rounds": count}}),
        )

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

    Attributes:
        limited: whether deferred mode began by itself.
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
        self.limited = False
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
            self.limited = True
        if self._deferred is None:
            return
        self._deferred.limit = None if max_tools is None else max_tools - len(self._tools)
        self._deferred.offered(self._without_hidden(tools))
        if self._is_new:
            self._is_new = False
            for need in needs_of(self._items, requests=self._settings.keep_injected):
                if isinstance(need, tuple):
                    self._deferred.offer(need)
                elif self.limited:
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
    lists = (output.get(key) for key in ("injected", "already_offered"))
    return [name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)]
