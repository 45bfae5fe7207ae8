"""Configures a loop with one frozen record; `SYNCHRONET` has the settings of the chat of Synchronet BBS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolbus.common.reader import Reader
from toolbus.errors import SetupError
from toolbus.parts.models.embeddings import EmbedderChoice
from toolbus.parts.models.loop.approval import is_destructive
from toolbus.parts.models.loop.links import UNKNOWN_LINKS, UnknownLinks
from toolbus.parts.models.loop.result_cut import MIN_RESULT_BYTES
from toolbus.parts.models.loop.tool_source import comes_from_no_file
from toolbus.protocol.tool import KIB, MAX_TIMEOUT_SECONDS, Tool

MIN_TOOLS = 8  # three of them may be the loop's own
_COUNTS = {  # the least and the most of each
    **dict.fromkeys(("rounds", "max_parallel", "max_calls"), (1, None)),
    **dict.fromkeys(("repeats", "retries"), (0, None)),
    "extension_most": (1, 20),
    "rounds_most": (1, 25),
}


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The limits and texts of one turn of a conversation: from a user's message to the reply.

    Attributes:
        rounds: how often the model may request tools.
        forced_answer: whether the model, after those rounds, gets one more request without tools; else
            `no_convergence_text` is the reply.
        max_parallel: calls of one answer that run at the same time; 1 runs them in their order.
        max_calls: calls of one answer that are run; further ones are refused.
        repeats: how often the same call may succeed within a turn; 0 means any number of times.
        extension: whether the model is offered `extend_tool_loop`, to request more rounds.
        extension_most: rounds that it may request at once.
        rounds_most: rounds in all, requested ones included.
        call_timeout: seconds for each call; None means the tool's own.
        list_timeout: seconds to wait for the catalog; after them the last known catalog is used.
        no_convergence_text: the reply if the model requests tools even after the last round; may be "".
        no_summary_text: the reply if the model's answer is empty after it used tools; may be "".
        embedder: compares the meanings of tools for `search_tools`; None means that of the extra `semantic`, if it is
            installed; False disables the comparison.
        may_route: which tools the rules of a loop may call; by default all but those of files in a drop-in folder,
            which the author of the rules has not reviewed.
        max_tools: how many tools a request may offer; None means the number of the endpoint's dialect, and 0 any
            number. Of a larger catalog some are offered, and the model finds the others with `search_tools`.
        keep_injected: whether tools that a model requested with `request_tool_injection` stay offered in later turns
            of the conversation, also those that it did not call.
        needs_approval: which tools' calls wait for the `approve` of a loop or session, if it has one.
        retries: how often, in each round, the same request is sent again if the model's answer is empty or could not be
            read by its provider; 0 means never.
        result_bytes: how much of one result the model gets, in bytes of UTF-8; 0 and None mean all of it. The default
            is about 16,000 tokens of English: half the context of many local models, an eighth of a provider's.
        unknown_links: what becomes of links in the model's answer that stand in no result of a tool and no message of
            the user or program: `keep`, `mark` or `remove`. A stream then shows a word when it has ended.

    Raises:
        SetupError: from the constructor, if a value breaks its rule.
    """

    rounds: int = 3
    forced_answer: bool = True
    max_parallel: int = 16
    max_calls: int = 128
    repeats: int = 2
    extension: bool = False
    extension_most: int = 20
    rounds_most: int = 25
    call_timeout: float | None = None
    list_timeout: float = 10.0
    no_convergence_text: str = ""
    no_summary_text: str = ""
    embedder: EmbedderChoice = None
    may_route: Callable[[Tool], bool] = comes_from_no_file
    max_tools: int | None = None
    keep_injected: bool = True
    needs_approval: Callable[[Tool], bool] = is_destructive
    retries: int = 1
    result_bytes: int | None = 64 * KIB
    unknown_links: UnknownLinks = "keep"

    def __post_init__(self) -> None:
        for name, bounds in _COUNTS.items():
            object.__setattr__(self, name, Reader(getattr(self, name), name).whole(*bounds))
        for name in ("list_timeout", "call_timeout", "max_tools", "result_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int | float) and (value is not None or name == "list_timeout"):
                raise SetupError(f"{name} is {value!r}, it must be a number")
        if self.call_timeout is not None and not 0 < self.call_timeout <= MAX_TIMEOUT_SECONDS:
            raise SetupError(
                f"call_timeout is {self.call_timeout:g}, it must be above 0 and at most {MAX_TIMEOUT_SECONDS:g}; "
                "None means each tool's own timeout"
            )
        if not self.list_timeout > 0:
            raise SetupError(f"list_timeout is {self.list_timeout:g}, it must be above 0")
        if self.max_tools is not None and self.max_tools != 0 and self.max_tools < MIN_TOOLS:
            raise SetupError(
                f"max_tools is {self.max_tools}, it must be {MIN_TOOLS} or more, since the loop has tools of its own; "
                "0 means any number, and None that of the endpoint's dialect"
            )
        if self.result_bytes and self.result_bytes < MIN_RESULT_BYTES:
            raise SetupError(
                f"result_bytes is {self.result_bytes}, it must be {MIN_RESULT_BYTES} or more; 0 means any number"
            )
        if self.unknown_links not in UNKNOWN_LINKS:
            raise SetupError(f"unknown_links is {self.unknown_links!r}, it must be one of {', '.join(UNKNOWN_LINKS)}")
        for choice in ("may_route", "needs_approval"):
            if not callable(getattr(self, choice)):
                raise SetupError(
                    f"{choice} is {getattr(self, choice)!r}: give a function that takes a tool and returns True or "
                    "False, such as lambda tool: True"
                )
        if not self.forced_answer and not self.no_convergence_text:
            raise SetupError("forced_answer is off, so the reply after the last round is no_convergence_text: set it")


# As in the chat of Synchronet BBS: four requests to the model, all with tools and none repeated, and its two texts.
SYNCHRONET = LoopSettings(
    rounds=4,
    forced_answer=False,
    max_parallel=1,
    retries=0,
    no_convergence_text="(tool-call loop did not converge -- try rephrasing)",
    no_summary_text="(I got the data but did not produce a summary -- try rephrasing the question.)",
)
