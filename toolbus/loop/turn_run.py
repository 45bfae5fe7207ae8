"""Runs one turn of a conversation: round after round, from the user's message to the reply."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from toolbus.dialects.conversation import Answered, Answers, HistoryItem, Message, ModelCall, Turn, Usage
from toolbus.dialects.dialect import ToolChoice
from toolbus.dialects.endings import end_text
from toolbus.dialects.export import Export
from toolbus.dialects.provider_results import object_of
from toolbus.dialects.tool_choice import forces_call
from toolbus.errors import Code
from toolbus.loop.export_cache import ExportCache
from toolbus.loop.loop_events import LoopEvent, RoundEnded, RoundRetried, RoundStarted, TextDelta
from toolbus.loop.model_client import ModelClient, Notify
from toolbus.loop.result_cut import cut_text
from toolbus.loop.round_calls import CallRunner
from toolbus.loop.router import Rule, route
from toolbus.loop.turn_reply import CallDone, Reply, Stopped, last_user_text, refusal
from toolbus.tool import Result

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
        self._notify = notify or _ignore
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
        export, text = self._export, last_user_text(self._items)
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
        turn, self._export = await self._model_client.ask(
            self._items, self._export, choice, self._notify, lambda: self._exports.export(self._runner.loop_tools)
        )
        if turn.usage is not None:
            self._usage = turn.usage if self._usage is None else self._usage + turn.usage
        return turn

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
        text, reason = self._text + turn.text, ""
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
        if text := self._text + turn.text:
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


def _ignore(event: LoopEvent) -> None:
    """Receives the events of a turn that is not streamed."""


def _direct_reply_text(result: Result) -> str:
    """Returns the text of a direct reply: for an object its error or note, if it has one."""
    output = {} if result.content else object_of(result)
    texts = (output.get(key) for key in _TEXT_KEYS)
    return next((text for text in texts if text and isinstance(text, str)), result.text)


def _stop_text(turn: Turn) -> str:
    """Returns why a turn ended, for a log: the provider's stop reason, without texts of the answer."""
    is_empty = not turn.text.strip() and not turn.calls
    return ", ".join(filter(None, (turn.stop, "the answer is empty" if is_empty else "")))
