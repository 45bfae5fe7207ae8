"""Defines all lengths of time and numbers of tokens of councils, with their reasons.

They include the defaults of `CouncilSettings` and `SidecarSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass

# -- settings: their defaults ----------------------------------------------------------------------------------------

TOOL_SECONDS = 30.0  # for each tool, instead of the tool's own timeout
LEAST_TOOL_SECONDS = 15.0  # in less time, tools that ask a model themselves rarely finish
TEMPERATURE = 0.7
TOP_P = 0.9
ANSWER_TOKENS = 1024  # of one answer of the model

# -- plans: the arguments that a model writes ------------------------------------------------------------------------

PLAN_TEMPERATURE = 0.2  # at most: arguments should be right, not original
PLAN_TOKENS_PER_SECOND = 10  # of the tool's timeout: the speed of a slow model; a plan must leave time for the call
LEAST_PLAN_TOKENS = 128
REPAIR_TOKENS = 192  # for the second question, about missing arguments

# -- attempts --------------------------------------------------------------------------------------------------------

ATTEMPTS = 3  # of a prompt tool


@dataclass(frozen=True, slots=True)
class CouncilTimings:
    """Timeouts and pauses of a council that are not settings, in seconds. Tests use tiny values.

    Attributes:
        event_seconds: timeout of an async ``on_event`` for one event, so that a stuck host blocks no run.
        extra_seconds: above the timeout of a tool, for a source that does not enforce it; a bus does.
        backoff_seconds: before the second attempt of a prompt tool; increases by this before each further one.
        answer_seconds: timeout of one question to a sidecar's server, from connecting to the end of its answer; the
            timeout of the tool is shorter.
        connect_seconds: the part of it for connecting.
    """

    event_seconds: float = 5.0
    extra_seconds: float = 1.0
    backoff_seconds: float = 0.5
    answer_seconds: float = 120.0
    connect_seconds: float = 10.0


COUNCIL_TIMINGS = CouncilTimings()


def plan_tokens(timeout_seconds: float, max_tokens: int) -> int:
    """Returns how many tokens a plan of arguments may have.

    Args:
        timeout_seconds: of the tool.
        max_tokens: of one answer.
    """
    return min(max_tokens, max(LEAST_PLAN_TOKENS, int(timeout_seconds * PLAN_TOKENS_PER_SECOND)))
