"""Holds the lengths of time of the connection to a main server, in seconds, each next to its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamTimings:
    """How long the upstream waits. Tests give tiny values.

    Attributes:
        poll_seconds: between two listings of a quiet server: lost registrations are repeated then.
        debounce_seconds: after a change, so that a plugin that registers its tools one by one causes few listings.
        first_backoff_seconds, max_backoff_seconds: before the retry of an unreachable server; doubles in between.
        request_seconds: timeout of a whole exchange; REST-11 says that a server responds well within it.
        retry_seconds: until a refused registration is retried unchanged.
        first_retry_seconds: the same after a request without a response; doubles up to ``retry_seconds``.
    """

    poll_seconds: float = 2.0
    debounce_seconds: float = 0.05
    first_backoff_seconds: float = 0.25
    max_backoff_seconds: float = 5.0
    request_seconds: float = 5.0
    retry_seconds: float = 60.0
    first_retry_seconds: float = 2.0


DEFAULT_TIMINGS = UpstreamTimings()
