"""One turn of a conversation: round after round, from what the user said to the reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from toolbus.dialects.conversation import Answered, Answers, Delta, HistoryItem, Message, ModelCall, Turn
from toolbus.dialects.dialect import ToolChoice
from toolbus.dialects.export import Export
from toolbus.dialects.result_text import object_of, text_of
from toolbus.dialects.wire_names import NameTable
from toolbus.errors import Code
from toolbus.loop.endpoint import Endpoint
from toolbus.loop.export_cache import Offering
from toolbus.loop.loop_events import LoopEvent, ReasoningDelta, RoundEnded, RoundStarted, TextDelta, ToolsRefused
from toolbus.loop.round_calls import Caller
from toolbus.loop.router import Rule, route
from toolbus.loop.tool_refusal import refuses_tools
from toolbus.loop.turn_reply import CallDone, Reply, Stopped, last_words, refused, without_calls
from toolbus.tool import Result

log = logging.getLogger("toolbus.loop")

_FOR_USERS = ("error", "note")  # keys of an object under which a tool says in words what happened

Say = Callable[[LoopEvent], object]


class ModelClient:
    """Asks the model of an endpoint, and remembers whether it takes tools."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.takes_tools = True  # until the endpoint says otherwise

    async def ask(self, items: Sequence[HistoryItem], export: Export | None, choice: ToolChoice, say: Say) -> Turn:
        """Sends the conversation. Returns what the model said.

        Raises:
            Exception: whatever the endpoint's client raises; but where it refuses tools, it is asked without them.
        """
        heard = False

        def hear(delta: Delta) -> None:
            nonlocal heard
            heard = True
            say(TextDelta(delta.text) if delta.kind == "text" else ReasoningDelta(delta.text))

        if self.takes_tools:
            try:
                return await self._send(items, export, choice, hear)
            except Exception as error:
                if heard or export is None or not export.tools or not refuses_tools(error):
                    raise
                # A model that may not use tools just now and has no words for that still takes them.
                self.takes_tools = choice == "none"
                log.warning("%r takes no tools: asking without them", self.endpoint)
                say(ToolsRefused(error))
        return await self._send(without_calls(items), None, "auto", hear)

    async def _send(
        self, items: Sequence[HistoryItem], export: Export | None, choice: ToolChoice, hear: Callable[[Delta], None]
    ) -> Turn:
        dialect = self.endpoint.dialect
        request = dialect.request(items, export, choice)
        turn = Turn()
        async for piece in self.endpoint.answer(request, export.names if export is not None else NameTable.empty()):
            if isinstance(piece, Turn):
                turn = piece
            else:
                hear(piece)
        return turn


class Run:
    """The state of one turn; made for one, used once.

    Args:
        say: hears what happens, on this loop.
    """

    def __init__(
        self, asker: ModelClient, offering: Offering, caller: Caller, items: Sequence[HistoryItem], say: Say
    ) -> None:
        self._asker = asker
        self._offering = offering
        self._caller = caller
        self._settings = caller.settings
        self._items = list(items)
        self._say = say
        self._calls: list[CallDone] = []
        self._round = 0  # how often the model was asked
        self._cut = False  # whether its last answer was
        self._export: Export | None = None  # what it is offered; None: no tools

    async def reply(self, rules: Sequence[Rule]) -> Reply:
        """Asks and calls until there is a reply."""
        await self._offer()
        routed = self._routed(rules)
        if routed is not None:
            if (text := await self._call(Turn(calls=(routed,)))) is not None:
                return self._told(text, "direct_reply")
            await self._offer()
        while self._round < self._caller.own.extension.rounds:
            turn = await self._ask("auto")
            if not turn.calls:
                return self._answered(turn, "answered")
            if (text := await self._call(turn)) is not None:
                return self._told(text, "direct_reply")
            await self._offer()
        if not self._settings.forced_answer:
            return self._told(self._settings.no_convergence_text, "no_convergence")
        turn = await self._ask("none")
        if not turn.calls:
            return self._answered(turn, "round_limit")
        return self._unheard(turn)

    async def _offer(self) -> None:
        """Looks what there is to be offered: at first, and after calls, which take time and may ask for tools."""
        self._export = await self._offering.export(self._caller.own) if self._asker.takes_tools else None

    def _routed(self, rules: Sequence[Rule]) -> ModelCall | None:
        """Returns the call of the first rule that fits what the user said."""
        export, text = self._export, last_words(self._items)
        if export is None or not text:
            return None
        found = route(rules, text, export.kept, self._settings.may_route)
        if found is None:
            return None
        name, arguments_json = found
        # Nine letters and digits are an id that every provider takes; the number tells it from earlier ones.
        call_id = f"routed{len(self._items) % 1000:03d}"
        return ModelCall(call_id, name, arguments_json, wire_name=export.names.wire(name))

    async def _ask(self, choice: ToolChoice) -> Turn:
        """Asks the model once more, with what was offered last."""
        self._round += 1
        self._say(RoundStarted(self._round, self._export, forced=choice == "none"))
        turn = await self._asker.ask(self._items, self._export, choice, self._say)
        if not self._asker.takes_tools:
            self._export = None
        self._cut = turn.cut
        self._items.append(turn)
        self._say(RoundEnded(self._round, turn))
        return turn

    async def _call(self, turn: Turn) -> str | None:
        """Runs the calls of a turn. Returns the reply where they are one by themselves."""
        if not self._round:
            self._items.append(turn)
        done = await self._caller.run(turn.calls, self._export, self._round)
        self._calls += done
        self._items.append(Answers(tuple(Answered(each.call, each.result) for each in done)))
        kept = {} if self._export is None else self._export.kept
        if all(each.outcome == "ok" and each.name in kept and kept[each.name].direct_reply for each in done):
            return "\n\n".join(_shown(each.result) for each in done)
        return None

    def _answered(self, turn: Turn, stopped: Stopped) -> Reply:
        """Ends with what the model said."""
        if turn.text or not self._calls:
            return self._reply(turn.text, stopped)
        return self._told(self._settings.no_summary_text, "no_summary")

    def _unheard(self, turn: Turn) -> Reply:
        """Ends with a model that wants tools even though it was told to answer in words."""
        refusal = refused(Code.OVERLOADED, "no more tools are called in this turn: answer with what you have")
        self._items.append(Answers(tuple(Answered(call, refusal) for call in turn.calls)))
        if turn.text:
            return self._reply(turn.text, "no_convergence")
        return self._told(self._settings.no_convergence_text, "no_convergence")

    def _told(self, text: str, stopped: Stopped) -> Reply:
        """Ends with words that are not the model's; it finds them in the conversation as if they were."""
        if text:
            self._items.append(Message("assistant", text))
            self._say(TextDelta(text))
        return self._reply(text, stopped)

    def _reply(self, text: str, stopped: Stopped) -> Reply:
        return Reply(text, tuple(self._items), tuple(self._calls), self._round, stopped, self._cut)


def _shown(result: Result) -> str:
    """Returns what a user reads of a direct reply: of an object what it says in words, if it says something."""
    said = {} if result.content else object_of(result)
    return next((said[key] for key in _FOR_USERS if said.get(key) and isinstance(said[key], str)), text_of(result))
