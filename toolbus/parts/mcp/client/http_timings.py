"""Defines the timeouts and pauses of a connection to an MCP server over HTTP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpTimings:
    """Lengths of time, in seconds.

    Attributes:
        gate: how long the first calls of a legacy session wait for the standing stream.
        handshake: the timeout of a new handshake after the server has lost the session.
        retry: before a stream is resumed, if the server sends no interval.
        min_retry, max_retry: bounds of the server's interval.
        first_backoff: before a failed stream is opened again; doubled up to max_retry.
        steady: a stream that was open for so long has not failed when it ends.
        drain: how long a stream may stay open after its answer.
        cancel: before the connection of a cancelled legacy request is closed, so that the notification arrives first.
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

    def pause(self, interval: float | None) -> float:
        """Returns how long to wait before a stream is resumed; `interval` is the server's, None if it sent none."""
        return min(max(self.retry if interval is None else interval, self.min_retry), self.max_retry)
