"""Runs turns of a conversation: sends requests to a model and runs its tool calls until it answers (`ToolLoop`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from toolbus.dialects.dialect import ToolChoice
from toolbus.dialects.tool_choice import chosen_names
from toolbus.functions.call_context import CallContext
from toolbus.loop.approval import Approval, Approve, check_hook
from toolbus.loop.deferred_tools import DeferredTools
from toolbus.loop.endpoint import Endpoint, check_endpoint
from toolbus.loop.export_cache import ExportCache
from toolbus.loop.loop_events import Finished, LoopEvent
from toolbus.loop.loop_settings import LoopSettings
from toolbus.loop.loop_tools import LoopTools
from toolbus.loop.model_client import ModelClient, Notify
from toolbus.loop.repeat_guard import RepeatGuard
from toolbus.loop.result_cut import ResultCutter
from toolbus.loop.round_calls import CallRunner
from toolbus.loop.router import Rule, in_order
from toolbus.loop.tool_source import ToolSource, source_of
from toolbus.loop.turn_reply import Messages, Reply, conversation
from toolbus.loop.turn_run import TurnRun
from toolbus.search import IndexCache
from toolbus.text import quote


class ToolLoop:
    """Answers users with a model and the tools of a source. One loop may run several conversations at the same time.

    Args:
        source: a `toolbus.Bus`, a `toolbus.Host`, or any `ToolSource`.
        endpoint: the model; see `toolbus.loop.endpoint_of`.
        context: the context of the calls.
        rules: make calls before the first request to the model, if the user's message matches.
        pinned: names of the tools that are offered from the start; the model finds the others with `search_tools`.
            None offers every tool, if the provider takes so many in one request.
        approve: is called before each call of a tool for which `LoopSettings.needs_approval` holds, by default
            destructive ones. Takes an `ApprovalRequest`, returns a `Decision` or an awaitable of one; a plain function
            runs on the event loop and must not block it. None: calls need no approval.

    Raises:
        TypeError: from the constructor, if `pinned` is one text.
        SetupError: from the constructor, if `approve` is not a function or `endpoint` not an endpoint.
    """

    def __init__(
        self,
        source: Any,
        endpoint: Endpoint,
        settings: LoopSettings | None = None,
        *,
        context: CallContext | None = None,
        rules: Iterable[Rule] = (),
        pinned: Sequence[str] | None = None,
        approve: Approve | None = None,
    ) -> None:
        if isinstance(pinned, str):  # it would be read as a list of letters
            raise TypeError(f"pinned is {quote(pinned)}, one text: give a list of names, [{quote(pinned)}]")
        self.endpoint = check_endpoint(endpoint)
        self.settings = settings or LoopSettings()
        self.source: ToolSource = source if isinstance(source, ToolSource) else source_of(source, context=context)
        self._context = context if context is not None else getattr(self.source, "context", None)
        self._rules = in_order(rules)
        self._pinned = None if pinned is None else tuple(pinned)
        self._approve = None if approve is None else check_hook(approve)
        self._indexes = IndexCache(self.settings.embedder)  # shared by all conversations
        self._model_client = ModelClient(endpoint, ResultCutter(self.settings.result_bytes or 0))
        self._exports = ExportCache(
            self.source,
            endpoint.dialect,
            self.settings.list_timeout,
            self.settings.max_tools,
            self._model_client.refused,
        )

    def __repr__(self) -> str:
        return f"<ToolLoop {self.endpoint!r} {self.source!r}>"

    @property
    def takes_tools(self) -> bool:
        """Whether the endpoint takes tools: False after it has refused them, which are then not offered again."""
        return self._model_client.takes_tools

    async def run(
        self, messages: Messages, *, context: CallContext | None = None, tool_choice: ToolChoice = "auto"
    ) -> Reply:
        """Runs one turn. Cancelling it cancels the calls that are in flight.

        Args:
            messages: the user's message, or a whole conversation: dicts with role and content, the items of an earlier
                reply, or both.
            context: of this turn; None means the context of the loop.
            tool_choice: for the first request of the turn: `auto`, `none`, `required`, or the name of the tool that the
                model has to call.

        Raises:
            InvalidRequest: the conversation is empty or invalid; `tool_choice` names no offered tool, or the dialect
                does not have it.
            PeerLost, RequestError: the tools cannot be listed.
            EndpointError: the provider reported an error, or its answer broke off.
            Exception: any error of the endpoint's client.
        """
        return await self._turn(messages, context, tool_choice, None)

    async def stream(
        self, messages: Messages, *, context: CallContext | None = None, tool_choice: ToolChoice = "auto"
    ) -> AsyncGenerator[LoopEvent, None]:
        """Runs one turn as `run` does. Yields its events, `Finished` last. Closing the iterator cancels the turn."""
        events: asyncio.Queue[LoopEvent | None] = asyncio.Queue()
        turn = asyncio.ensure_future(self._turn(messages, context, tool_choice, events.put_nowait))
        turn.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield Finished(turn.result())
        finally:
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)

    async def _turn(
        self, messages: Messages, context: CallContext | None, tool_choice: ToolChoice, notify: Notify | None
    ) -> Reply:
        items = conversation(messages)
        deferred = None if self._pinned is None else self._deferred(self._pinned)
        runner = CallRunner(
            self.source,
            self.settings,
            self._context if context is None else context,
            LoopTools(self.settings, deferred, items, also=chosen_names(tool_choice), automatic=self._deferred),
            RepeatGuard(self.settings.repeats),
            notify,
            None if self._approve is None else Approval(self._approve, self.settings.needs_approval, notify),
        )
        run = TurnRun(self._model_client, self._exports, runner, items, notify)
        return await run.reply(self._rules, tool_choice)

    def _deferred(self, pinned: Iterable[str] | None = None) -> DeferredTools:
        """Returns deferred mode for one turn. By default it pins the tools of rules, so that rules can call them."""
        names = (rule.tool for rule in self._rules) if pinned is None else pinned
        return DeferredTools(names, cache=self._indexes)
