"""Holds the lengths of time of a connection to an MCP server over HTTP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpTimings:
    """Lengths of time, in seconds.

    Attributes:
        gate: how long the first calls of a legacy session wait for the standing stream.
        handshake: to open a session in place of one that is gone.
        retry: before a stream is resumed, where the server does not say.
        min_retry, max_retry: bounds of what a server may say.
        first_backoff: before a stream that failed is opened again; doubled up to max_retry.
        steady: how long a stream has to stay open, so that its end is not a failure.
        drain: how long a stream may go on behind its answer, before its connection is closed.
        cancel: how long a cancelled request of the legacy era may go on, so that the notification arrives first.
    """

    gate: float = 2.0
    handshake: float = 10.0
    retry: float = 1.0
    min_retry: float = 0.1
    max_retry: float = 30.0
    first_backoff: float = 0.25
    steady: float = 10.0
    drain: float = 1.0
    cancel: float = 1.0

    def pause(self, wanted: float | None) -> float:
        """Returns how long to wait before a stream is resumed, where the server wants this many seconds."""
        return min(max(self.retry if wanted is None else wanted, self.min_retry), self.max_retry)
