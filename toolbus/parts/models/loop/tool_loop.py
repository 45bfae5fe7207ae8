"""Runs turns of a conversation: sends requests to a model and runs its tool calls until it answers (`ToolLoop`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from toolbus.common.text import clean_line, quote, shorten
from toolbus.errors import Code
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.conversation import (
    Answered,
    Answers,
    Delta,
    HistoryItem,
    Message,
    ModelCall,
    Turn,
    Usage,
)
from toolbus.parts.models.dialects.dialect import ToolChoice
from toolbus.parts.models.dialects.endings import end_text
from toolbus.parts.models.dialects.export import Export, LeftOut
from toolbus.parts.models.dialects.provider_results import object_of
from toolbus.parts.models.dialects.tool_choice import chosen_names, follows, forces_call
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.parts.models.loop.approval import Approval, Approve, RepeatGuard, allow_all, ask_or_refuse, check_hook
from toolbus.parts.models.loop.endpoint import Endpoint, check_endpoint
from toolbus.parts.models.loop.export_cache import ExportCache
from toolbus.parts.models.loop.links import LinkFilter
from toolbus.parts.models.loop.loop_events import (
    Finished,
    LoopEvent,
    ReasoningDelta,
    RoundEnded,
    RoundRetried,
    RoundStarted,
    TextDelta,
    ToolsLeftOut,
    ToolsRefused,
)
from toolbus.parts.models.loop.loop_settings import MIN_TOOLS, LoopSettings
from toolbus.parts.models.loop.loop_tools import DeferredTools, LoopTools
from toolbus.parts.models.loop.result_cut import ResultCutter, cut_text
from toolbus.parts.models.loop.round_calls import CallRunner
from toolbus.parts.models.loop.structured_answer import OutputMismatch, OutputType
from toolbus.parts.models.loop.tool_refusal import (
    MAX_PROBES,
    EndpointRefusals,
    refuses_tools,
    schema_refusal,
    tool_limit,
    without,
)
from toolbus.parts.models.loop.tool_source import Rule, ToolSource, in_order, route, source_of
from toolbus.parts.models.loop.turn_reply import (
    CallDone,
    Messages,
    Reply,
    Stopped,
    conversation,
    refusal,
    user_text,
    without_calls,
)
from toolbus.parts.models.search import IndexCache
from toolbus.protocol.tool import Result, Tool
from toolbus.sdk.notification import Notification

if TYPE_CHECKING:
    from toolbus.sdk import Host  # loading it takes gRPC, which a loop without a bus does not need

Notify = Callable[[LoopEvent], object]
Renew = Callable[[], Awaitable[Export]]

MAX_REQUESTS = 64  # of one answer, each without one more tool: an endpoint may name them one by one
MAX_WHY = 300  # characters of an endpoint's error
_NOTIFIED = "[A notification of {0}, not written by the user]\n{1}"
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
            loose: declarations, by their schema_hash, that are not strict and have a plain schema.
        """
        turn = Turn()
        if export is not None:
            export = self.refused.relaxed(export, self.endpoint.dialect, loose)
        request = self.endpoint.dialect.request(items, export, choice)
        async for piece in self.endpoint.answer(request, export.names if export is not None else NameTable.empty()):
            if isinstance(piece, Turn):
                turn = piece
            else:
                on_delta(piece)
        return turn

    async def refuses(self, tools: Sequence[Tool], loose: Set[str]) -> bool:
        """Tells whether the endpoint refuses a declaration among these, by a separate short request.

        Args:
            loose: as for `send`.

        Raises:
            Exception: any other error of the endpoint's client.
        """
        export = self.refused.relaxed(self.endpoint.dialect.export(tools), self.endpoint.dialect, loose)
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
        self._loose: set[str] = set()  # the hashes of declarations that are no longer strict, and plain
        self._guess: set[str] | None = (
            None  # of these, the ones of an error that named no tool; None until there is one
        )
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
                        "%r takes %d tools only where they are not strict and in the keywords that grammars take",
                        self._client.endpoint,
                        len(self._loose),
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
        changeable = self._changeable(export, tools or export.kept.values())
        if changeable and (tools or self._guess is None):  # a tool with a looser schema is better than none
            self._loose |= changeable
            if not tools:
                self._guess = changeable
            return export
        if not tools:
            self._loose -= self._guess or set()  # it did not help
            self._guess = set()
            log.warning("%r refuses a tool and does not say which: short requests find it", self._client.endpoint)
            try:
                halving = await self._refused.find(export, lambda group: self._client.refuses(group, self._loose))
            except Exception as other:
                log.info("cannot find out which tool %r refuses: %s", self._client.endpoint, type(other).__name__)
                return None
            tools = [*halving.found, *halving.undecided]
            # A single one was refused with a looser declaration too, by the guess.
            if len(tools) > 1 and (changeable := self._changeable(export, halving.found)):
                self._loose |= changeable
                return export
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

    def _changeable(self, export: Export, tools: Iterable[Tool]) -> set[str]:
        """Returns which of these tools have a looser declaration, by their schema_hash."""
        dialect = self._client.endpoint.dialect
        others = self._loose | {tool.schema_hash for tool in tools}
        now, then = (self._refused.relaxed(export, dialect, loose).tools for loose in (self._loose, others))
        return {each for each, one, other in zip(export.hashes.values(), now, then, strict=True) if one != other}

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


log = logging.getLogger("toolbus.loop")

_NOT_RUN = ("refused", "failed")  # endings of an answer whose calls are not made
_TEXT_KEYS = ("error", "note")  # keys of a tool's output object whose text is for the user


class TurnRun:
    """The state of one turn; used once.

    Args:
        notify: receives the events, on this event loop; None if the turn is not streamed.
    """

    def __init__(
        self,
        model_client: ModelClient,
        exports: ExportCache,
        runner: CallRunner,
        items: Sequence[HistoryItem],
        notify: Notify | None,
    ) -> None:
        self._model_client = model_client
        self._exports = exports
        self._runner = runner
        self._settings = runner.settings
        self._items = list(items)
        self._notify = notify or (lambda event: None)
        self._is_streamed = notify is not None
        self._calls: list[CallDone] = []
        self._round = 0  # requests to the model so far, without those that repeat one
        self._text = ""  # the model's text before it paused
        self._usage: Usage | None = None  # of all requests; None until the provider gave one
        self._cut = False  # whether its last answer was truncated
        self._export: Export | None = None  # the offered tools; None: no tools
        self._earlier: list[Export] = []  # those of earlier rounds, the newest first

    async def reply(self, rules: Sequence[Rule], choice: ToolChoice = "auto") -> Reply:
        """Sends requests and runs the model's calls until it replies.

        Args:
            choice: of the first request; ``none`` also disables the rules.

        Raises:
            InvalidRequest: the choice is not possible with the endpoint and the offered tools.
        """
        await self._update_export()
        if forces_call(choice):  # before anything runs: writing an empty request checks the choice
            self._model_client.endpoint.dialect.request((), self._export, choice)
        routed = self._routed(rules) if choice != "none" else None
        if routed is not None:
            if (text := await self._call(Turn(calls=(routed,)))) is not None:
                return self._reply_with(text, "direct_reply")
            await self._update_export()
        while self._round < self._runner.loop_tools.extension.rounds:
            turn = await self._ask(choice)
            has_more = self._round < self._runner.loop_tools.extension.rounds or self._settings.forced_answer
            if turn.ending == "paused" and not turn.calls and has_more:
                self._text += turn.text
                choice = "none" if choice == "none" else "auto"
                continue
            if not turn.calls or turn.ending in _NOT_RUN:
                return self._answered(turn, "answered")
            if choice == "none":
                return self._not_converged(turn)
            choice = "auto"  # a model that must call in every request could never answer
            self._text = ""  # like all text before calls, it is not the answer
            if (text := await self._call(turn)) is not None:
                return self._reply_with(text, "direct_reply")
            await self._update_export()
        if not self._settings.forced_answer:
            return self._reply_with(self._settings.no_convergence_text, "no_convergence")
        turn = await self._ask("none")
        if not turn.calls or turn.ending in _NOT_RUN:
            return self._answered(turn, "round_limit")
        return self._not_converged(turn)

    async def _update_export(self) -> None:
        """Exports the current catalog: at first, and after calls, which take time and may inject tools."""
        if self._model_client.takes_tools:
            before, self._export = self._export, await self._exports.export(self._runner.loop_tools)
            if before is not None and before is not self._export:
                self._earlier.insert(0, before)
        else:
            self._export = None

    def _routed(self, rules: Sequence[Rule]) -> ModelCall | None:
        """Returns the call of the first rule that matches the user's message."""
        export, text = self._export, user_text(self._items[-1])
        if export is None or not text:
            return None
        routed = route(rules, text, export.kept, self._settings.may_route)
        if routed is None:
            return None
        name, arguments_json = routed
        # Every provider accepts an id of nine letters and digits; the number makes it differ from earlier ones.
        call_id = f"routed{len(self._items) % 1000:03d}"
        return ModelCall(call_id, name, arguments_json, wire_name=export.names.wire(name))

    async def _ask(self, choice: ToolChoice) -> Turn:
        """Sends one more request to the model, with the last export."""
        self._round += 1
        hidden = self._runner.loop_tools.hidden
        self._notify(RoundStarted(self._round, self._export, forced=choice == "none", hidden=hidden))
        turn = await self._send(choice)
        for _ in range(self._settings.retries):
            if not turn.retry or (
                self._is_streamed and turn.text.strip()
            ):  # a text that was shown cannot be taken back
                break
            log.info("the answer of %r is requested again: %s", self._model_client.endpoint, _stop_text(turn))
            self._notify(RoundRetried(self._round, turn))
            turn = await self._send(choice)
        self._cut = turn.cut
        self._items.append(turn)
        self._notify(RoundEnded(self._round, turn))
        return turn

    async def _send(self, choice: ToolChoice) -> Turn:
        links, notify = self._links(), self._notify

        def show(event: LoopEvent) -> None:
            if links is not None and isinstance(event, TextDelta):
                links.stream(event.text, lambda text: self._notify(TextDelta(text)))
            else:
                self._notify(event)

        if links is not None:
            notify = show
        turn, self._export = await self._model_client.ask(
            self._items, self._export, choice, notify, lambda: self._exports.export(self._runner.loop_tools)
        )
        if links is not None:
            links.finish(lambda text: self._notify(TextDelta(text)))
        if turn.usage is not None:
            self._usage = turn.usage if self._usage is None else self._usage + turn.usage
        return turn

    def _links(self) -> LinkFilter | None:
        """Returns what filters the links of an answer to the conversation so far; None where they stay."""
        unknown = self._settings.unknown_links
        return LinkFilter(self._items, unknown) if unknown != "keep" else None

    def _shown(self, turn: Turn) -> str:
        """Returns the text of the model's answer for the user; the conversation has it as the model wrote it."""
        text, links = self._text + turn.text, self._links()
        return text if links is None else links.filtered(text)

    async def _call(self, turn: Turn) -> str | None:
        """Runs the calls of a turn. Returns the reply if all calls were of direct_reply tools and succeeded."""
        if not self._round:
            self._items.append(turn)
        done = await self._runner.run(turn.calls, self._export, self._round, self._earlier)
        self._calls += done
        self._items.append(Answers(tuple(each.answered for each in done)))
        tools = {} if self._export is None else self._export.kept
        if all(each.outcome == "ok" and each.name in tools and tools[each.name].direct_reply for each in done):
            return "\n\n".join(_direct_reply_text(each.result) for each in done)
        return None

    def _answered(self, turn: Turn, stopped: Stopped) -> Reply:
        """Ends with the model's last answer, whole or not. Calls in it are not made."""
        text, reason = self._shown(turn), ""
        if turn.ending != "complete":
            stopped, reason = turn.ending, end_text(turn)
        elif not text.strip() and self._calls:
            stopped = "no_summary"
        elif not text.strip() and turn.reason:
            stopped, reason = "failed", end_text(turn)
        if stopped in ("refused", "failed", "paused"):  # without texts of the model or its provider: they are content
            log.warning("%r gave no whole answer, it is %s: %s", self._model_client.endpoint, stopped, _stop_text(turn))
        if turn.calls:
            result = refusal(Code.CANCELLED, f"the call was not made, because its answer is incomplete: {reason}")
            self._items.append(Answers(tuple(Answered(call, result) for call in turn.calls)))
        if text.strip() or not self._calls:
            return self._reply(text, stopped, reason)
        return self._reply_with(self._settings.no_summary_text, stopped, reason)

    def _not_converged(self, turn: Turn) -> Reply:
        """Ends with a model that requests tools even in the forced answer."""
        result = refusal(Code.OVERLOADED, "no more tools are called in this turn: answer with what you have")
        self._items.append(Answers(tuple(Answered(call, result) for call in turn.calls)))
        if text := self._shown(turn):
            return self._reply(text, "no_convergence")
        return self._reply_with(self._settings.no_convergence_text, "no_convergence")

    def _reply_with(self, text: str, stopped: Stopped, reason: str = "") -> Reply:
        """Ends with a text that is not the model's; the conversation has it as an answer of the model.

        The conversation gets a huge result cut, as in the answer to its call.
        """
        if text:
            self._items.append(Message("assistant", cut_text(text, self._settings.result_bytes or 0)))
            self._notify(TextDelta(text))
        return self._reply(self._text + text, stopped, reason)

    def _reply(self, text: str, stopped: Stopped, reason: str = "") -> Reply:
        return Reply(text, tuple(self._items), tuple(self._calls), self._round, stopped, self._cut, reason, self._usage)


def _direct_reply_text(result: Result) -> str:
    """Returns the text of a direct reply: for an object its error or note, if it has one."""
    output = {} if result.shown[1] else object_of(result)
    texts = (output.get(key) for key in _TEXT_KEYS)
    return next((text for text in texts if text and isinstance(text, str)), result.text)


def _stop_text(turn: Turn) -> str:
    """Returns why a turn ended, for a log: the provider's stop reason, without texts of the answer."""
    is_empty = not turn.text.strip() and not turn.calls
    return ", ".join(filter(None, (turn.stop, "the answer is empty" if is_empty else "")))


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
            runs on the event loop and must not block it. None asks at the terminal, and refuses such calls where there
            is none; `allow_all` runs them all.

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
        self._approve = ask_or_refuse if approve is None else check_hook(approve)
        self._indexes = IndexCache(self.settings.embedder)  # shared by all conversations
        self._model_client = ModelClient(endpoint, ResultCutter(self.settings.result_bytes or 0))
        self._exports = ExportCache(
            self.source,
            endpoint.dialect,
            self.settings.list_timeout,
            self.settings.max_tools,
            self._model_client.refused,
            self._pinned or (),
        )

    def __repr__(self) -> str:
        return f"<ToolLoop {self.endpoint!r} {self.source!r}>"

    @property
    def takes_tools(self) -> bool:
        """Whether the endpoint takes tools: False after it has refused them, which are then not offered again."""
        return self._model_client.takes_tools

    async def run(
        self,
        messages: Messages,
        *,
        context: CallContext | None = None,
        tool_choice: ToolChoice = "auto",
        output_type: Any = None,
    ) -> Reply:
        """Runs one turn. Cancelling it cancels the calls that are in flight.

        Args:
            messages: the user's message, or a whole conversation: dicts with role and content, the items of an earlier
                reply, or both.
            context: of this turn; None means the context of the loop.
            tool_choice: for the first request of the turn: `auto`, `none`, `required`, or the name of the tool that the
                model has to call.
            output_type: the type of `Reply.output`: a dataclass, a TypedDict, a pydantic model or another hint. The
                model is told its JSON Schema, and an answer that does not fit is sent back once.

        Raises:
            InvalidRequest: the conversation is empty or invalid; `tool_choice` or `pinned` names no offered tool, or
                the dialect does not have the choice.
            OutputMismatch: the answer does not fit the output type; the error has the reply.
            SetupError: JSON Schema cannot describe the output type.
            PeerLost, RequestError: the tools cannot be listed.
            EndpointError: the provider reported an error, or its answer broke off.
            Exception: any error of the endpoint's client.
        """
        if output_type is None:
            return await self._turn(messages, context, tool_choice, None)
        wanted = OutputType(output_type)
        first = await self._turn([*conversation(messages), wanted.instruction], context, tool_choice, None)
        try:
            return replace(first, output=wanted.read(first.text))
        except ValueError as error:
            if first.stopped != "answered":
                raise OutputMismatch(f"the turn ended as {first.stopped!r}", first) from None
            items = [*first.items, wanted.repair(str(error))]
        repaired = await self._turn(items, context, "none", None)
        calls, rounds = (*first.calls, *repaired.calls), first.rounds + repaired.rounds
        reply = replace(repaired, calls=calls, rounds=rounds)
        try:
            return replace(reply, output=wanted.read(reply.text))
        except ValueError as error:
            raise OutputMismatch(str(error), reply) from None

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

    async def follow(
        self, host: Host, messages: list[HistoryItem], *, user: str = "", context: CallContext | None = None
    ) -> AsyncGenerator[Reply, None]:
        """Follows the notifications of plugins, for ever; yields the reply of each turn that one of them starts.

        One that wants `reply` starts a turn, one that wants `context` is read with the next turn; others are left to
        `host.notifications`. Those that come during a turn wait for its end, of several with one `coalesce_key` in
        their data the newest.

        Args:
            messages: the conversation; it grows by the notifications and the turns. The program may add to it between
                two replies, and runs its own turns then.
            user: whose conversation it is: notifications for other users are ignored; "" takes those for everyone only.
            context: as of `run`.

        Raises:
            PeerLost: the host is closed.
            Exception: as `run`.
        """
        waiting: dict[object, Notification] = {}
        arrived = asyncio.Event()

        async def read() -> None:
            async for each in host.notifications():
                if each.user in ("", user) and each.wants != "nothing":
                    key = each.data.get("coalesce_key")
                    key = each.number if key is None else (each.source, str(key))
                    waiting.pop(key, None)
                    waiting[key] = each
                    arrived.set()

        reading = asyncio.ensure_future(read())
        reading.add_done_callback(lambda _: arrived.set())
        try:
            while True:
                if not reading.done():  # it may have ended together with the last notification
                    await arrived.wait()
                arrived.clear()
                batch = list(waiting.values())
                waiting.clear()
                messages += [Message("user", _NOTIFIED.format(each.source, each.text)) for each in batch]
                if any(each.wants == "reply" for each in batch):
                    reply = await self.run(messages, context=context)
                    messages[:] = reply.items
                    yield reply
                elif reading.done():
                    reading.result()
                    return
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

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
            None if self._approve is allow_all else Approval(self._approve, self.settings.needs_approval, notify),
        )
        run = TurnRun(self._model_client, self._exports, runner, items, notify)
        return await run.reply(self._rules, tool_choice)

    def _deferred(self, pinned: Iterable[str] | None = None) -> DeferredTools:
        """Returns deferred mode for one turn. By default it pins the tools of rules, so that rules can call them."""
        names = (rule.tool for rule in self._rules) if pinned is None else pinned
        return DeferredTools(names, cache=self._indexes)
