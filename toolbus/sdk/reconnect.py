"""Reconnects: makes attempt after attempt with backoff between them, until the connection is to end for good."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import grpc

from toolbus.errors import PeerLost, ToolBusError
from toolbus.sdk.attempt import FATAL, Attempt, AttemptEnd, error_of
from toolbus.sdk.connection_settings import ConnectionTimings
from toolbus.text import clean_line

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

# Reasons of the bus's drain after which this peer must not come back.
_FINAL_DRAINS = {
    "replaced": "another process attached with the same source and instance",
    "requested": "an operator asked this peer to disconnect",
}


class Reconnect:
    """The attempts of one connection. Everything runs on its loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._failures = 0  # attempts in a row that never were live for long
        self._absence_logged = False  # whether the log has already reported that there is no bus

    async def run(self) -> ToolBusError | None:
        """Makes attempts until the connection closes (None) or must end; then returns why."""
        connection = self._connection

        def closing() -> bool:
            return connection.closing

        while not closing():
            attempt = Attempt(connection.settings, connection.loop)
            end = await connection.run_attempt(attempt)
            if closing():
                break
            if (error := self._final_error(attempt, end)) is not None:
                return error
            self.lost(end)
            await connection.changes.until(closing, self._pause(end))
        return None

    def connected(self) -> None:
        """Notes that the bus has answered an attach."""
        self._absence_logged = False

    def lost(self, end: AttemptEnd) -> None:
        """Notes that an attempt has ended and another will follow; logs it, a missing bus only once."""
        address = self._connection.settings.address
        self._connection.calls.no_bus_reason = end.cause
        if end.seconds >= 0:
            self._absence_logged = False
            log.warning("lost the bus at %s: %s; reconnecting", address, clean_line(end.cause))
        elif not self._absence_logged:
            self._absence_logged = True
            log.warning("no bus at %s yet: %s; retrying until there is one", address, clean_line(end.cause))

    def _final_error(self, attempt: Attempt, end: AttemptEnd) -> ToolBusError | None:
        """Returns why no further attempt may follow, and logs it; None where one may."""
        connection = self._connection
        source, address = connection.settings.source, connection.settings.address
        if attempt.drain_reason in _FINAL_DRAINS:
            reason = _FINAL_DRAINS[attempt.drain_reason]
            error: ToolBusError = PeerLost(f"{source!r} disconnected from the bus at {address} for good: {reason}")
            log.warning("%s", error)
            return error
        if attempt.fatal_error is not None:
            log.error("%s", clean_line(str(attempt.fatal_error)))
            return attempt.fatal_error
        if end.seconds >= 0 or end.code not in FATAL:
            return None
        text = end.text or end.code.name
        if end.code is grpc.StatusCode.UNIMPLEMENTED:
            text = f"the server at {address} is not a toolbus: check the address ({text})"
        error = error_of(end.code, text)
        log.error("the bus at %s refuses %s: %s", address, source, clean_line(str(error)))
        connection.delegate.refused([tool.name for tool in connection.delegate.tools()], text)
        return error

    def _pause(self, end: AttemptEnd) -> float:
        timings = self._connection.settings.timings
        self._failures = 0 if end.seconds >= timings.steady else self._failures + 1
        return backoff(end.code, self._failures, timings)


def backoff(code: grpc.StatusCode, failures: int, timings: ConnectionTimings) -> float:
    """Returns the seconds to wait before the next attempt: exponential, with full jitter.

    Args:
        code: the status of the last attempt; a bus that is there and refuses this peer is retried less often.
        failures: attempts in a row that failed.
    """
    longest, first = timings.max_pause, timings.first_pause
    if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK):
        longest, first = timings.max_refused_pause, 10 * timings.first_pause
    return random.uniform(0.0, min(longest, first * 2 ** min(failures, 20)))
