"""Limits what one identity uses of the bus: calls a second, and calls in flight.

The rate is a GCRA, the generic cell rate algorithm (ITU-T I.371): a leaky bucket whose whole state is one moment. It is
checked once for a message of calls, not for each call.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from toolbus.bus.access.identity import Identity
from toolbus.common.newest import NewestCache

CALLS_PER_SECOND = "calls_per_second"  # the name of the limit, in errors
BURST_SECONDS = 2.0  # an identity that has been silent for so long may make the calls of that time at once
MAX_REMEMBERED = 1_000  # identities whose rate is remembered without a caller, so that reconnecting gains nothing
_ROUNDING = 1e-6  # of a call: what floating point may take from one that is due


class HasCalls(Protocol):
    """A caller, as a quota sees it."""

    @property
    def in_flight(self) -> Sized:
        """Its calls in flight."""


class Quota:
    """The limits that the callers of one identity share; without limits it allows everything.

    Args:
        burst_seconds: of silence, after which the calls of that time may be made at once.

    Attributes:
        rate: calls a second; None: no limit.
        in_flight_limit: calls at the same time; None: no limit.
        callers: those whose calls in flight count.
    """

    def __init__(
        self, rate: float | None = None, in_flight_limit: int | None = None, burst_seconds: float = BURST_SECONDS
    ) -> None:
        self.callers: WeakSet[HasCalls] = WeakSet()
        self._burst_seconds = burst_seconds
        self._full_at = 0.0  # when the whole burst may be made again
        self.change(rate, in_flight_limit)

    def __repr__(self) -> str:
        return f"<Quota rate={self.rate} in_flight={self.in_flight_limit} callers={len(self.callers)}>"

    def change(self, rate: float | None, in_flight_limit: int | None) -> None:
        """Sets other limits; what was used under the old ones counts."""
        self.rate = rate
        self.in_flight_limit = in_flight_limit
        self._interval = 1.0 / rate if rate else 0.0  # seconds for each call; 0: no limit
        self._burst = max(1.0, rate * self._burst_seconds) if rate else 0.0  # calls

    def take(self, count: int, now: float) -> tuple[int, float]:
        """Takes calls out of the rate.

        Returns:
            How many may be made now; and in how many seconds the others may, or as many of them as a burst has: 0.0
            where all may be made now.
        """
        interval = self._interval
        if not interval:
            return count, 0.0
        full_at = max(self._full_at, now)
        due = self._burst - (full_at - now) / interval
        passed = max(0, min(count, int(due + _ROUNDING)))
        self._full_at = full_at + passed * interval
        if passed == count:
            return count, 0.0
        return passed, max(min(count - passed, self._burst) - (due - passed), _ROUNDING) * interval

    @property
    def free(self) -> int | None:
        """How many more calls may be in flight now; None: any number."""
        if self.in_flight_limit is None:
            return None
        return max(0, self.in_flight_limit - sum(len(caller.in_flight) for caller in self.callers))


class Quotas:
    """The quotas of all identities, by name."""

    def __init__(self) -> None:
        self._quotas: WeakValueDictionary[str, Quota] = WeakValueDictionary()  # those that a caller has
        self._newest: NewestCache[str, Quota] = NewestCache(MAX_REMEMBERED)

    def __repr__(self) -> str:
        return f"<Quotas identities={len(self._quotas)}>"

    def of(self, identity: Identity) -> Quota | None:
        """Returns the quota that an identity's callers share, with the limits of its scopes; None without limits."""
        scopes = identity.scopes
        quota = self._quotas.get(identity.name)
        # One with 0 calls in flight is denied each call, which is not a matter of quotas.
        rate, in_flight = (scopes.rate, scopes.in_flight or None) if scopes is not None else (None, None)
        if quota is not None:
            quota.change(rate, in_flight)
        elif rate is None and in_flight is None:
            return None
        else:
            self._quotas[identity.name] = quota = Quota(rate, in_flight)
        self._newest[identity.name] = quota
        return quota

    def join(self, identity: Identity, caller: HasCalls) -> Quota | None:
        """Returns the same quota, in which the calls of a caller count from now on."""
        quota = self.of(identity)
        if quota is not None:
            quota.callers.add(caller)
        return quota
