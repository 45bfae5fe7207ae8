"""Asks a program before a call is made: its hook lets the call run, refuses it or changes its arguments.

Every failure refuses the call. A call runs only with arguments that the hook has seen: they are written from the values
that the hook got, so that a tool that reads JSON in another way gets the same values. `ask_on_terminal` is a hook for
programs with a console.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.terminal_input import read_line
from toolbus.common.text import clean_line, dump_json, escape_surrogates, escape_unsafe, quote, shorten
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.call_context import CallContext
from toolbus.parts.models.dialects.conversation import ModelCall
from toolbus.protocol.tool import CallError, Result, Tool

Key: TypeAlias = tuple[str, str]

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical_json(arguments: Any) -> str:
    """Returns arguments as a text that is the same for the same call, whatever the order of keys and white space."""
    return _CANONICAL.encode(arguments)


class RepeatGuard:
    """Counts the successful calls of one turn. Calls that tools make themselves are not counted.

    Args:
        allowed: how often the same call may succeed; 0: any number of times.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._succeeded: Counter[Key] = Counter()  # by tool and canonical arguments

    def __repr__(self) -> str:
        return f"<RepeatGuard allowed={self._allowed} seen={len(self._succeeded)}>"

    def key(self, tool: Tool, arguments: Any) -> Key | None:
        """Returns the key that repeated calls share, whatever the order of keys and white space; None: not guarded."""
        if not self._allowed or tool.allow_repeat:
            return None
        return tool.name, canonical_json(arguments)

    def refusal(self, key: Key) -> Result | None:
        """Returns the error that replaces another run; None where the call may run."""
        times = self._succeeded[key]
        if times < self._allowed:
            return None
        error = CallError(
            Code.REPEATED,
            f"{key[0]} has already answered this same call {times} times and was not run again: "
            "its result stands above. Use it, or call with other arguments.",
            Stage.NOT_DISPATCHED,
            limit=("repeats", float(self._allowed)),
        )
        return Result(is_error=True, error=error)

    def ended(self, key: Key, result: Result) -> None:
        """Counts a call that succeeded; one that failed or asks may be tried as often as the rounds allow."""
        if not result.is_error and result.error is None and not result.asks:
            self._succeeded[key] += 1


log = logging.getLogger("toolbus.loop")

NOT_APPROVED = "not_approved"  # `CallError.reason` of calls that were refused here

Decision: TypeAlias = bool | str | Mapping[str, Any]
"""The answer of a hook: True runs the call, False refuses it, a text refuses it and is the reason for the model, a
mapping runs it with these arguments instead of the model's."""


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A call that waits for the hook.

    Attributes:
        tool: as it was offered to the model.
        call: as the model wrote it.
        arguments: the values that the tool gets. To change them, a hook returns others; changes of these are ignored.
        round: the number of the round; 0 for a call of a rule; in a realtime session the number of the response.
        order: its place among the calls of the round, from 0.
        context: on whose behalf it is made; None if the program has set no context.
    """

    tool: Tool
    call: ModelCall
    arguments: Any
    round: int
    order: int
    context: CallContext | None = None


Approve: TypeAlias = Callable[[ApprovalRequest], Decision | Awaitable[Decision]]


@dataclass(frozen=True, slots=True)
class Approved:
    """A call that may run, with its arguments as JSON; `edited`: they are not the model's."""

    arguments_json: str
    edited: bool = False


@dataclass(frozen=True, slots=True)
class ApprovalRequested:
    """A call waits for the hook, which is called next."""

    request: ApprovalRequest


@dataclass(frozen=True, slots=True)
class ApprovalGiven:
    """The hook has answered; `decision` is None if it failed, which refuses the call."""

    request: ApprovalRequest
    decision: Decision | None

    @property
    def approved(self) -> bool:
        """Whether the call runs."""
        return self.decision is True or isinstance(self.decision, Mapping)


ApprovalEvent: TypeAlias = ApprovalRequested | ApprovalGiven


def is_destructive(tool: Tool) -> bool:
    """Tells whether a tool is declared destructive."""
    return tool.annotations.destructive is True


class Approval:
    """Asks one hook, about one call at a time: a person answers one question after the other. For one event loop.

    Args:
        needed: tells whether calls of a tool need approval.
        notify: receives the events; None: no receiver.
        remembers: whether a call that was refused is refused again without the hook, as long as this object exists.
    """

    def __init__(
        self,
        hook: Approve,
        needed: Callable[[Tool], bool],
        notify: Callable[[ApprovalEvent], object] | None = None,
        *,
        remembers: bool = True,
    ) -> None:
        self._hook = hook
        self._needed = needed
        self._notify = notify
        self._remembers = remembers
        self._refused: set[tuple[str, str]] = set()  # tool and arguments of the calls that were refused
        self._lock = asyncio.Lock()  # one question at a time, in the order in which the calls came

    def needs(self, tool: Tool) -> bool:
        """Tells whether a tool's calls need approval; they do if the program's own choice fails."""
        try:
            return bool(self._needed(tool))
        except Exception:
            log.exception("needs_approval failed for %s: its call needs approval", quote(tool.name))
            return True

    async def decide(self, request: ApprovalRequest) -> Approved | Result:
        """Returns the arguments of the call if it may run, or the error that replaces its result.

        Cancelling it cancels the hook.
        """
        try:
            arguments_json = escape_surrogates(dump_json(request.arguments))  # before the hook has them
        except (TypeError, ValueError, RecursionError) as error:
            return _refusal(request, f"its arguments cannot be shown ({error})", "Send simpler arguments.")
        key = (request.tool.name, canonical_json(request.arguments))  # before the hook can change them
        async with self._lock:
            if key in self._refused:
                return _refusal(request, "the same call was refused before in this turn", _GO_ON)
            self._report(ApprovalRequested(request))
            decision, outcome = await self._ask(request, arguments_json)
            if self._remembers and decision is not None and not isinstance(outcome, Approved):
                self._refused.add(key)
            self._report(ApprovalGiven(request, decision))
            return outcome

    def _report(self, event: ApprovalEvent) -> None:
        if self._notify is not None:
            self._notify(event)

    async def _ask(self, request: ApprovalRequest, arguments_json: str) -> tuple[Decision | None, Approved | Result]:
        """Calls the hook. Returns its answer, None if it failed, and the arguments or the refusal."""
        try:
            answer = self._hook(request)
            decision: Any = await answer if inspect.isawaitable(answer) else answer
            if decision is True:
                return True, Approved(arguments_json)
            if isinstance(decision, Mapping):
                edited_json = escape_surrogates(dump_json(dict(decision)))
                return decision, Approved(edited_json, edited=edited_json != arguments_json)
            if decision is False or isinstance(decision, str):
                why = f"it was refused: {decision}" if decision else "the user refused this call"
                return decision, _refusal(request, why, _GO_ON)
            log.error(
                "the approval of %s returned %s: the call is refused; return True, False, a text for the model or "
                "arguments",
                quote(request.tool.name),
                shorten(repr(decision)),
            )
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            log.warning("the approval of %s was cancelled: the call is refused", quote(request.tool.name))
        except TimeoutError as error:  # of the hook itself: the loop sets none
            log.warning("the approval of %s timed out%s: the call is refused", quote(request.tool.name), _detail(error))
        except Exception:
            log.exception("the approval of %s failed: the call is refused", quote(request.tool.name))
        return None, _refusal(request, "its approval failed", _GO_ON)


_GO_ON = "Do not make the same call again: tell the user what you wanted to do, or continue without it."


def check_hook(hook: Approve) -> Approve:
    """Returns the `approve` of a program.

    Raises:
        SetupError: it cannot be called.
    """
    if not callable(hook):
        raise SetupError(f"approve is {hook!r}: give a function that takes an ApprovalRequest")
    return hook


def _detail(error: Exception) -> str:
    return f" ({shorten(str(error))})" if str(error) else ""


def _refusal(request: ApprovalRequest, why: str, advice: str) -> Result:
    text = f"{request.tool.name} was not run: {why}. {advice}"
    return Result(
        is_error=True, error=CallError(Code.PERMISSION_DENIED, text, Stage.NOT_DISPATCHED, reason=NOT_APPROVED)
    )


MAX_SHOWN_ARGUMENTS = 10_000  # characters: a person does not read more than a few screens

_YES, _NO = frozenset(("y", "yes")), frozenset(("", "n", "no"))


async def ask_on_terminal(request: ApprovalRequest) -> Decision:
    """Shows a call to the person at the terminal. Returns their answer: yes, no, or a text for the model.

    Lines that were typed or pasted before the question are discarded: they do not answer it. Without a terminal the
    call is refused.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        return "the user cannot be asked, since the program has no terminal"
    _discard_input()
    print(f"\n{_described(request)}", file=sys.stderr, flush=True)
    line = await read_line("Run it? y: yes; Enter: no; or write what to do instead:")
    answer = "" if line is None else clean_line(line)
    if answer.lower() in _YES:
        return True
    return False if answer.lower() in _NO else f"the user wrote: {answer}"


async def ask_or_refuse(request: ApprovalRequest) -> Decision:
    """Asks at the terminal; refuses the call in a program without one, and says how to allow it."""
    if sys.stdin is not None and sys.stdin.isatty():
        return await ask_on_terminal(request)
    log.warning("%s was not run: it needs approval. %s", quote(request.tool.name), _HOW_TO_ALLOW)
    return f"this program cannot ask anyone. Its author has to choose: {_HOW_TO_ALLOW}"


def allow_all(request: ApprovalRequest) -> Decision:
    """Runs every call without a question: give it as `approve` where destructive tools may run."""
    return True


_HOW_TO_ALLOW = "pass approve= to ToolLoop, a function that decides, or allow_all to run every call"


def _described(request: ApprovalRequest) -> str:
    """Returns a call as a person reads it; no text of a model or a plugin can change the terminal."""
    arguments = escape_unsafe(json.dumps(request.arguments, ensure_ascii=False, indent=2))
    if len(arguments) > MAX_SHOWN_ARGUMENTS:
        left_out = len(arguments) - MAX_SHOWN_ARGUMENTS
        arguments = f"{arguments[:MAX_SHOWN_ARGUMENTS]}\n… and {left_out} more characters"
    danger = ", which may destroy data" if request.tool.annotations.destructive is True else ""
    return f"The model wants to call {clean_line(request.tool.name)}{danger}:\n{arguments}"


def _discard_input() -> None:
    """Discards lines of the terminal that were not read."""
    try:
        import termios

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    except ImportError:  # Windows, whose console has its own functions
        import msvcrt

        while msvcrt.kbhit():  # type: ignore[attr-defined]
            msvcrt.getwch()  # type: ignore[attr-defined]
