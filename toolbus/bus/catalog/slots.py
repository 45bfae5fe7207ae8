"""Shares the slots of a handler among its callers, by dynamic thresholds.

A handler has as many slots as calls that it takes at once (`max_in_flight`). The bus has no queue, so without a rule a
caller that calls a hundred times as often gets nearly all of them. The rule bounds what a caller holds by what is free,
so that a few slots stay free for other callers, whatever the others want: A. K. Choudhury and E. L. Hahne, "Dynamic
queue length thresholds for shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998.
"""

from __future__ import annotations

# A caller may hold THRESHOLD / n times as many slots as are free, where n callers hold some. So the greedy ones among
# them leave about one slot of 33 free, however many they are, and a tool with up to 32 slots keeps none free. A fixed
# factor would leave the more unused the fewer callers there are: 8, which three greedy callers ask for, a ninth of the
# slots beside one.
THRESHOLD = 32
SHARED_SECONDS = 60.0  # how long a handler counts as shared after two callers met there


class Slots:
    """Counts how many slots of a handler each caller holds, and decides how many more it may take.

    A caller that has met no other there lately may take all slots. The dispatcher counts runs of calls, not each call,
    and keeps account of a run that it has not counted here yet.

    Attributes:
        held: slots by caller, without those that hold none. Their sum is the number of the handler's pending calls.
    """

    __slots__ = ("_shared_until", "held")

    def __init__(self) -> None:
        self.held: dict[object, int] = {}
        self._shared_until = 0.0  # until when a caller leaves some slots for others

    def __repr__(self) -> str:
        return f"<Slots held={sum(self.held.values())} callers={len(self.held)}>"

    def offer(self, caller: object, free: int, now: float) -> int:
        """Returns how many of the free slots a caller may take now; where one is free, a caller that holds none may."""
        held = self.held.get(caller, 0)
        callers = len(self.held) + (not held)
        if callers > 1:
            self._shared_until = now + SHARED_SECONDS
        elif now >= self._shared_until:
            return free
        left = THRESHOLD * free - callers * held
        return -(-left // (THRESHOLD + callers)) if left > 0 else 0

    def take(self, caller: object, count: int) -> None:
        """Counts slots that a caller has taken."""
        self.held[caller] = self.held.get(caller, 0) + count

    def release(self, caller: object, count: int) -> None:
        """Counts slots that a caller has given back."""
        left = self.held[caller] - count
        if left:
            self.held[caller] = left
        else:
            del self.held[caller]
