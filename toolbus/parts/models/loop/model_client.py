"""Sends the requests of a conversation to the model, without the tools that its endpoint refuses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import Literal

from toolbus.common.text import clean_line, shorten
from toolbus.parts.models.dialects.conversation import Delta, HistoryItem, Message, Turn
from toolbus.parts.models.dialects.dialect import ToolChoice
from toolbus.parts.models.dialects.export import Export, LeftOut
from toolbus.parts.models.dialects.tool_choice import chosen_names, follows, forces_call
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.parts.models.loop.endpoint import Endpoint
from toolbus.parts.models.loop.endpoint_refusals import MAX_PROBES, EndpointRefusals, without
from toolbus.parts.models.loop.loop_events import LoopEvent, ReasoningDelta, TextDelta, ToolsLeftOut, ToolsRefused
from toolbus.parts.models.loop.loop_settings import MIN_TOOLS
from toolbus.parts.models.loop.result_cut import ResultCutter
from toolbus.parts.models.loop.tool_refusal import refuses_tools, schema_refusal, strict_of, tool_limit
from toolbus.parts.models.loop.turn_reply import without_calls
from toolbus.protocol.tool import Tool

log = logging.getLogger("toolbus.loop")

Notify = Callable[[LoopEvent], object]
Renew = Callable[[], Awaitable[Export]]

MAX_REQUESTS = 64  # of one answer, each without one more tool: an endpoint may name them one by one
MAX_WHY = 300  # characters of an endpoint's error
_PROBE = (Message("user", "Answer with OK."),)


class ModelClient:
    """Sends requests to the model of an endpoint, and stores the endpoint's refusals.

    Args:
        cutter: cuts huge results of a conversation.

    Attributes:
        takes_tools: False once the endpoint has refused tools.
        refused: the tools that it refused, and their number.
    """

    def __init__(self, endpoint: Endpoint, cutter: ResultCutter) -> None:
        self.endpoint = endpoint
        self._cutter = cutter
        self.takes_tools = True  # until the endpoint refuses them
        self.refused = EndpointRefusals()

    async def ask(
        self, items: Sequence[HistoryItem], export: Export | None, choice: ToolChoice, notify: Notify, renew: Renew
    ) -> tuple[Turn, Export | None]:
        """Sends the conversation. Returns the model's answer, and the offered tools.

        After a refusal of some tools, or of their number, the request is repeated without them; after a refusal of all
        tools it is repeated without tools, unless the choice forces a call.

        Args:
            renew: exports the catalog again, after the endpoint has refused the number of tools.

        Raises:
            Exception: any other error of the endpoint's client.
        """
        items = self._cutter.cut_items(items)
        refuses_all = False
        if self.takes_tools:
            request = _Request(self, items, choice, notify)
            try:
                turn, export = await request.answer(export, renew)
            except Exception as error:
                if request.answer_began or export is None or not export.tools or not refuses_tools(error):
                    raise
                if forces_call(choice):
                    raise  # the program requires a call, which an answer without tools cannot have
                # A request that forbids tools may be refused by a model that takes tools otherwise.
                refuses_all = choice != "none"
                log.warning("%r takes no tools: the request is repeated without tools", self.endpoint)
                notify(ToolsRefused(error))
            else:
                if not follows(turn, choice):
                    log.warning(
                        "%r did not follow tool_choice %r, which its server may not know", self.endpoint, choice
                    )
                return turn, export
        turn = await self.send(without_calls(items), None, "auto", _Request(self, items, choice, notify).on_delta)
        if refuses_all:  # only now: an error without tools too had another cause
            self.takes_tools = False
        return turn, export if self.takes_tools else None

    async def send(
        self,
        items: Sequence[HistoryItem],
        export: Export | None,
        choice: ToolChoice,
        on_delta: Callable[[Delta], None],
        loose: Set[str] = frozenset(),
    ) -> Turn:
        """Sends one request. Returns the answer to it.

        Args:
            loose: declarations, by their schema_hash, that are not strict.
        """
        turn = Turn()
        if export is not None:
            export = self.refused.relaxed(export, loose)
        request = self.endpoint.dialect.request(items, export, choice)
        async for piece in self.endpoint.answer(request, export.names if export is not None else NameTable.empty()):
            if isinstance(piece, Turn):
                turn = piece
            else:
                on_delta(piece)
        return turn

    async def refuses(self, tools: Sequence[Tool]) -> bool:
        """Tells whether the endpoint refuses a declaration among these, by a separate short request.

        Raises:
            Exception: any other error of the endpoint's client.
        """
        export = self.refused.relaxed(self.endpoint.dialect.export(tools))
        request = self.endpoint.dialect.request(_PROBE, export)
        try:
            async with contextlib.aclosing(self.endpoint.answer(request, export.names)) as pieces:
                async for _ in pieces:
                    break  # any answer means that the tools were accepted
        except Exception as error:
            if schema_refusal(error, export) is None:
                raise
            return True
        return False


class _Request:
    """One answer of the model, for which several requests may be needed."""

    def __init__(self, client: ModelClient, items: Sequence[HistoryItem], choice: ToolChoice, notify: Notify) -> None:
        self._client = client
        self._refused = client.refused
        self._items = items
        self._choice = choice
        self._notify = notify
        self._whys: dict[Tool, str] = {}  # tools that are not in the request, and why
        self._undecided: set[Tool] = set()  # of these, tools that may not be refused at all
        self._loose: set[str] = set()  # the hashes of declarations that are no longer strict
        self._guess: set[str] = set()  # of these, the ones of an error that named no tool
        self.answer_began = False

    def on_delta(self, delta: Delta) -> None:
        self.answer_began = True
        self._notify(TextDelta(delta.text) if delta.kind == "text" else ReasoningDelta(delta.text))

    async def answer(self, export: Export | None, renew: Renew) -> tuple[Turn, Export | None]:
        """Returns the answer, and the tools that were offered in the end."""
        strict, max_tools, first = self._refused.strict, self._refused.max_tools, export
        refusal: Exception | None = None
        requests = 0
        while True:
            requests += 1
            try:
                turn = await self._client.send(self._items, export, self._choice, self.on_delta, self._loose)
            except Exception as error:
                renewed = None
                if not (self.answer_began or export is None or not export.tools or refuses_tools(error)):
                    renewed = await self._repaired(error, export, renew) if requests < MAX_REQUESTS else None
                if renewed is None:
                    self._refused.strict, self._refused.max_tools = strict, max_tools  # their changes did not help
                    if self._whys and first is not None and schema_refusal(error, first) is not None:
                        self._refused.give_up(first)
                    raise
                export, refusal = renewed, error
            else:
                if self._loose:
                    self._refused.loosen(self._loose)
                    log.warning(
                        "%r takes %d tools only where they are not strict", self._client.endpoint, len(self._loose)
                    )
                if self._whys and refusal is not None:
                    self._remember(refusal)
                return turn, export

    async def _repaired(self, error: Exception, export: Export, renew: Renew) -> Export | None:
        """Returns an export without the tools that an error refuses; None if it does not identify any."""
        limit = tool_limit(error)
        if limit is not None and MIN_TOOLS <= limit < len(export.tools):
            self._refused.max_tools = limit
            return without(self._client.endpoint.dialect, await renew(), self._whys)
        refusal = schema_refusal(error, export)
        if refusal is None or self._refused.is_hopeless(export):
            return None
        if refusal.strict:
            return self._relax("absent" if refusal.strict == "key" else "off", export)
        tools = [export.kept[name] for name in refusal.names]
        strict = self._strict_among(export, tools or export.kept.values())
        if strict and (tools or not self._guess):  # a tool that is not strict is better than none
            self._loose |= strict
            self._guess |= set() if tools else strict
            return export
        if not tools:
            self._loose -= self._guess  # it did not help
            log.warning("%r refuses a tool and does not say which: short requests find it", self._client.endpoint)
            try:
                halving = await self._refused.find(export, self._client.refuses)
            except Exception as other:
                log.info("cannot find out which tool %r refuses: %s", self._client.endpoint, type(other).__name__)
                return None
            tools = [*halving.found, *halving.undecided]
            self._undecided.update(halving.undecided)
            if not tools and MIN_TOOLS <= halving.accepted < len(export.tools):
                self._refused.max_tools = halving.accepted
                log.warning(
                    "%r refuses %d tools only together: %d are offered at once, and the model searches the others",
                    self._client.endpoint,
                    len(export.tools),
                    halving.accepted,
                )
                return without(self._client.endpoint.dialect, await renew(), self._whys)
            if not tools:
                self._refused.give_up(export)
        if not tools or set(chosen_names(self._choice)) & {tool.name for tool in tools}:
            return None
        words = shorten(clean_line(str(error)), MAX_WHY)
        for tool in tools:
            known = "the endpoint refuses it" if tool not in self._undecided else "the endpoint may refuse it"
            self._whys[tool] = f"{known}: {words}"
        return without(self._client.endpoint.dialect, export, self._whys)

    def _strict_among(self, export: Export, tools: Iterable[Tool]) -> set[str]:
        """Returns which of these tools are declared strict, by their schema_hash."""
        declarations = self._refused.relaxed(export, self._loose).tools
        strict = {
            schema_hash
            for declaration, schema_hash in zip(declarations, export.hashes.values(), strict=True)
            if strict_of(declaration)
        }
        return strict & {tool.schema_hash for tool in tools}

    def _relax(self, strict: Literal["off", "absent"], export: Export) -> Export | None:
        if self._refused.strict in (strict, "absent"):
            return None  # it is already set
        self._refused.strict = strict
        log.warning("%r refuses strict declarations: the request is repeated without", self._client.endpoint)
        return export

    def _remember(self, error: Exception) -> None:
        """The endpoint accepted the request without these tools."""
        decided = {tool: why for tool, why in self._whys.items() if tool not in self._undecided}
        self._refused.remember(decided)
        for tool, why in decided.items():
            log.warning("tool %r is not offered to %r: %s", tool.name, self._client.endpoint, why)
        if self._undecided:
            log.warning(
                "%d more tools were left out of one request to %r: it refuses some of them, which %d requests could "
                "not find; the search continues with the next request",
                len(self._undecided),
                self._client.endpoint,
                MAX_PROBES,
            )
        left_out = tuple(LeftOut(tool.name, why) for tool, why in self._whys.items())
        self._notify(ToolsLeftOut(left_out, error))
