"""Decides when a plugin or host connects again: attempts one after the other, the pauses between them, the last error.

`Connection` runs each attempt. A reconnect uses the credential file as it is then, and sends no token to a program of
another user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from toolbus.common.local_users import Address, listener_owner, show_user, unmapped_uid
from toolbus.common.text import clean_line
from toolbus.errors import PeerLost, SetupError, ToolBusError
from toolbus.functions.workers import ChangeSignal, Workers
from toolbus.sdk.attempt import FATAL, Attempt, AttemptEnd, Delegate, error_of
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import ConnectionSettings, ConnectionTimings, diagnose
from toolbus.sdk.outgoing_calls import OutgoingCalls

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

PROBE_SECONDS = 15.0  # for all of a probe

# Statuses of a bus that cannot take this peer now; all others also come from gRPC libraries and proxies.
_LONG_PAUSES = ("RESOURCE_EXHAUSTED", "INTERNAL")

# Reasons of the bus's drain after which this peer must not come back.
_FINAL_DRAINS = {
    "replaced": "another process attached with the same source and instance",
    "requested": "an operator asked this peer to disconnect",
}


class Reconnect:
    """The attempts of one connection. Everything runs on its loop.

    Args:
        calls: get the reason why there is no bus, for their error texts.
        changes: fires when the connection changes, `ending` included.
        run_attempt: runs an attempt from its handshake to its end.

    Attributes:
        ending: whether this peer ends the connection.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        delegate: Delegate,
        calls: OutgoingCalls,
        changes: ChangeSignal,
        run_attempt: Callable[[Attempt], Awaitable[AttemptEnd]],
    ) -> None:
        self.ending = False
        self._settings = settings
        self._delegate = delegate
        self._calls = calls
        self._changes = changes
        self._run_attempt = run_attempt
        self._failures = 0  # attempts in a row without a steady session
        self._absence_logged = False  # whether the log has reported that there is no bus
        self._credential: Credential | None = settings.credential  # as its file had it last
        self._renewal_error = ""  # why the credential file could not be read the last time
        self._diagnosed = ""  # grpc's text when the server was probed last
        self._diagnosis = ""  # the result of that probe; "" if it found nothing, or before the first
        self._foreign_owner: int | None = None  # another user that the log has named as the owner of the bus
        self._withheld_from: int | None = None  # the user of whom the log has reported that its program gets no token
        self._key_ended = False  # whether the last session ended because the bus no longer accepts its key

    async def run(self) -> ToolBusError | None:
        """Makes attempts until the connection closes, and returns None; or until it must end, and returns why."""
        while not self.ending:
            attempt = Attempt(self._settings, asyncio.get_running_loop(), self._usable_credential())
            end = await self._run_attempt(attempt)
            if self._is_ending():
                break
            if (error := self._final_error(attempt, end)) is not None:
                return error
            end = await self._explained(end)
            self.lost(end)
            await self._changes.until(self._is_ending, self._pause(end))
        return None

    def end(self) -> None:
        """Makes no attempt after the current one."""
        self.ending = True

    def _is_ending(self) -> bool:
        return self.ending

    def connected(self) -> None:
        """Resets the state of failures after the bus has answered an attach; warns of a foreign owner."""
        self._absence_logged = False
        self._diagnosed = self._diagnosis = ""
        address = self._settings.bus
        owner = foreign_owner(address)
        if owner not in (None, self._foreign_owner):
            self._foreign_owner = owner
            log.warning(
                "the program that listens at %s belongs to %s, not to this program's %s, and can read everything that "
                "is sent to it. If it is not your bus, use another address, or a unix socket in a directory of yours",
                address,
                show_user(owner),
                show_user(os.geteuid()),
            )

    def lost(self, end: AttemptEnd) -> None:
        """Logs that an attempt has ended and another will follow; a missing bus only once."""
        address = self._settings.address
        self._calls.no_bus_reason = end.cause
        if end.seconds >= 0:
            self._absence_logged = False
            log.warning("lost the bus at %s: %s; reconnecting", address, clean_line(end.cause))
        elif not self._absence_logged:
            self._absence_logged = True
            log.warning("not attached to the bus at %s yet: %s; retrying", address, clean_line(end.cause))
        self._changes.notify()

    def _final_error(self, attempt: Attempt, end: AttemptEnd) -> ToolBusError | None:
        """Returns why no further attempt may follow, and logs it; None if one may."""
        source, address = self._settings.source, self._settings.address
        if attempt.drain_reason in _FINAL_DRAINS:
            reason = _FINAL_DRAINS[attempt.drain_reason]
            error: ToolBusError = PeerLost(f"{source!r} disconnected from the bus at {address} for good: {reason}")
            log.warning("%s", error)
            return error
        if attempt.fatal_error is not None:
            log.error("%s", clean_line(str(attempt.fatal_error)))
            return attempt.fatal_error
        key_ended_again = end.seconds >= 0 and self._key_ended_again(end)
        if end.code not in FATAL:
            return None
        if end.code == "UNAUTHENTICATED" and end.seconds >= 0 and not key_ended_again:
            return None
        text = end.text or end.code
        if end.code == "UNAUTHENTICATED":
            of = attempt.credential
            text += f" ({of.place})" if of is not None else " (no credential: name its file in TOOLBUS_CREDENTIAL)"
        if end.code == "UNIMPLEMENTED":
            text = f"the server at {address} is not a toolbus: check the address ({text})"
        error = error_of(end.code, text)
        log.error("the bus at %s refuses %s: %s", address, source, clean_line(str(error)))
        self._delegate.refused([tool.name for tool in self._delegate.tools()], text)
        return error

    def _key_ended_again(self, end: AttemptEnd) -> bool:
        """Tells whether the bus ended two sessions in a row because it does not accept their key.

        After the first one the peer attaches once more, with the credential file as it is then.
        """
        before = self._key_ended and end.seconds < self._settings.timings.steady
        self._key_ended = end.code == "UNAUTHENTICATED"
        return before and self._key_ended

    def _renewed_credential(self) -> Credential | None:
        """Returns the credential as its file has it now, or as before if the file cannot be used."""
        if self._credential is not None:
            try:
                renewed = self._credential.renewed()
                renewed.check_for(self._settings.bus)
            except SetupError as error:
                if str(error) != self._renewal_error:
                    self._renewal_error = str(error)
                    log.warning("%s; using the credential that was read before", error)
            else:
                self._renewal_error = ""
                if renewed != self._credential:
                    self._credential, self._diagnosed = renewed, ""
        return self._credential

    def _usable_credential(self) -> Credential | None:
        """Returns the credential for the next attempt; None if another user's program would get its token."""
        credential, bus = self._renewed_credential(), self._settings.bus
        if credential is None or not credential.token or (owner := foreign_owner(bus)) is None:
            return credential
        if owner != self._withheld_from:
            self._withheld_from = owner
            log.warning(
                "the token of %s is not sent to %s: the program that listens there belongs to %s; use a tls: or mtls: "
                "address, at which a certificate proves the bus",
                *(credential.place, bus, show_user(owner)),
            )
        return None

    async def _explained(self, end: AttemptEnd) -> AttemptEnd:
        """Returns the end of an attempt, with the reason that a probe finds if grpc does not know it.

        The server is probed once for each text of grpc, until the bus answers or the credential changes.
        """
        if not end.unexplained:
            return end
        if end.cause != self._diagnosed:
            self._diagnosed, self._diagnosis = end.cause, await self._probe(end.cause)
        return replace(end, text=self._diagnosis, probed=True) if self._diagnosis else end

    async def _probe(self, cause: str) -> str:
        worker = Workers(1, "toolbus-probe")
        probe = asyncio.create_task(worker.run(partial(diagnose, self._settings.bus, self._credential, cause)))
        probe.add_done_callback(lambda _: self._changes.notify())
        await self._changes.until(lambda: self.ending or probe.done(), PROBE_SECONDS)
        worker.stop()
        if not probe.done():
            probe.cancel()
            return ""
        if (fault := probe.exception()) is not None:
            log.error("a fault of the SDK in the probe of a server", exc_info=fault)
            return ""
        return probe.result()

    def _pause(self, end: AttemptEnd) -> float:
        timings = self._settings.timings
        if end.seconds >= timings.steady:
            self._failures = 0
        pause = backoff(self._failures, timings, refused=end.probed or end.code in _LONG_PAUSES)
        self._failures += 1
        return pause


def foreign_owner(address: BusAddress, owner_of: Callable[[Address], int | None] = listener_owner) -> int | None:
    """Returns the uid of another user, not root, whose program listens at the address of a bus.

    It knows only the address: grpcio does not report the local port of a connection.

    Returns:
        None for this user and root, if the system does not report the owner, and if something else proves the bus: a
        certificate, the directory of a unix socket.
    """
    if address.tls or address.is_unix or not address.is_local:
        return None
    hosts = ("127.0.0.1", "::1") if address.host.lower() == "localhost" else (address.host,)
    owners = [owner_of((host, address.port)) for host in hosts]
    return next((owner for owner in owners if owner and owner not in (os.geteuid(), unmapped_uid())), None)


def backoff(failures: int, timings: ConnectionTimings, *, refused: bool) -> float:
    """Returns the seconds to wait before the next attempt: exponential, with jitter.

    Args:
        failures: attempts in a row that failed before the last one.
        refused: whether the bus is there and refuses this peer; the pauses are longer then, and none is near 0.
    """
    longest, first = timings.max_pause, timings.first_pause
    if refused:
        longest, first = timings.max_refused_pause, 10 * timings.first_pause
    pause = min(longest, first * 2 ** min(failures, 20))
    return random.uniform(pause / 2 if refused else 0.0, pause)
