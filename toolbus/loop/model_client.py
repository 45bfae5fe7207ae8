"""Sends the requests of a conversation to the model, and remembers whether the model takes tools."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from toolbus.dialects.conversation import Delta, HistoryItem, Turn
from toolbus.dialects.dialect import ToolChoice
from toolbus.dialects.export import Export
from toolbus.dialects.tool_choice import follows, forces_call
from toolbus.dialects.wire_names import NameTable
from toolbus.loop.endpoint import Endpoint
from toolbus.loop.loop_events import LoopEvent, ReasoningDelta, TextDelta, ToolsRefused
from toolbus.loop.tool_refusal import refuses_tools
from toolbus.loop.turn_reply import without_calls

log = logging.getLogger("toolbus.loop")

Notify = Callable[[LoopEvent], object]


class ModelClient:
    """Sends requests to the model of an endpoint, and remembers whether it takes tools."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.takes_tools = True  # until the endpoint refuses them

    async def ask(
        self, items: Sequence[HistoryItem], export: Export | None, choice: ToolChoice, notify: Notify
    ) -> Turn:
        """Sends the conversation. Returns the model's answer.

        Raises:
            Exception: any error of the endpoint's client; a refusal of tools instead repeats the request without them,
                unless the choice forces a call.
        """
        answer_began = False

        def on_delta(delta: Delta) -> None:
            nonlocal answer_began
            answer_began = True
            notify(TextDelta(delta.text) if delta.kind == "text" else ReasoningDelta(delta.text))

        if self.takes_tools:
            try:
                turn = await self._send(items, export, choice, on_delta)
                if not follows(turn, choice):
                    log.warning(
                        "%r did not follow tool_choice %r, which its server may not know", self.endpoint, choice
                    )
                return turn
            except Exception as error:
                if answer_began or export is None or not export.tools or not refuses_tools(error):
                    raise
                if forces_call(choice):
                    raise  # an answer without tools is not what the program asked for
                # A request that forbids tools may be refused by a model that takes tools otherwise.
                self.takes_tools = choice == "none"
                log.warning("%r takes no tools: the request is repeated without tools", self.endpoint)
                notify(ToolsRefused(error))
        return await self._send(without_calls(items), None, "auto", on_delta)

    async def _send(
        self, items: Sequence[HistoryItem], export: Export | None, choice: ToolChoice, on_delta: Callable[[Delta], None]
    ) -> Turn:
        dialect = self.endpoint.dialect
        request = dialect.request(items, export, choice)
        turn = Turn()
        async for piece in self.endpoint.answer(request, export.names if export is not None else NameTable.empty()):
            if isinstance(piece, Turn):
                turn = piece
            else:
                on_delta(piece)
        return turn
