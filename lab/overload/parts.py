"""Lists the kinds of overload: who offers how much to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORK, ROOM = 0.02, 8  # seconds of a call, and calls at once, of the plugin with a capacity of its own
SHARED_WORK, SHARED_ROOM = 0.5, 256  # of a plugin with slots enough that some stay free for other callers
CALLBACK_WORK, CALLBACK_ROOM = 1.0, 256
REST_WORK = 0.4  # few enough refusals for the gateway to have time to spare, which costs ten times what gRPC does
WINDOW = 256  # of hosts that fill the bus
MODEST = "modest"  # a host on the SDK beside a greedy one
RUDE = "rude"  # a host that keeps to no window
MAX_WAIT = 1.0  # of calls in the windows of hosts
WAITING = ("--max-wait", str(MAX_WAIT))
DECLARED = ("--max-in-flight", str(WINDOW), *WAITING)
POLITE = ("--window", str(WINDOW))


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of overload.

    Attributes:
        hosts: by name, the way in which each calls, and its options.
        work: seconds of a call in the plugin.
        plugin: its way; ``raw`` costs nothing, so that it is the bus that is full.
        in_flight: calls with which the capacity is measured, of each host.
        room: calls at once that the plugin takes, unless its way sets them.
        max_refused: of 100 calls of the modest host, which does not send them again; None: no rule.
    """

    title: str
    hosts: Mapping[str, tuple[str, ...]]
    work: float = WORK
    plugin: str = "sdk"
    in_flight: int = ROOM
    room: int = ROOM
    max_refused: float | None = None

    @property
    def fills_bus(self) -> bool:
        """Whether it is the bus that is full: then its capacity is measured again afterwards."""
        return self.plugin == "raw"

    @property
    def over_rest(self) -> bool:
        return any(way == "rest" for way, *_ in self.hosts.values())

    @property
    def on_sdk(self) -> bool:
        """Whether a host on the SDK calls, whose calls may run out of time between two attempts."""
        return any(way == "sdk" for way, *_ in self.hosts.values())

    @property
    def waits_in_hosts(self) -> bool:
        """Whether calls wait in the windows of their hosts, so that those never sent are offered, too."""
        return all("--max-wait" in options for options in self.hosts.values())


def _shared(greedy: int, max_refused: float) -> Part:
    """Returns a part in which no host sends a call again, so that it shows the first attempts."""
    hosts = {**{f"greedy-{n}": ("stream",) for n in range(greedy)}, MODEST: ("stream",)}
    title = f"a plugin with room for {SHARED_ROOM}: a modest host beside {greedy} greedy"
    return Part(title, hosts, SHARED_WORK, in_flight=SHARED_ROOM, room=SHARED_ROOM, max_refused=max_refused)


ONE_HOST = {"host": ("stream",)}
PARTS = {
    "plugin": Part("one host, a plugin with room for 8", ONE_HOST),
    "hosts": Part("8 hosts, a plugin with room for 8", {f"host-{n}": ("stream",) for n in range(8)}),
    "fair": Part("a greedy host beside a modest one on the SDK", {"greedy": ("stream",), MODEST: ("sdk", *WAITING)}),
    "shared-by-2": _shared(1, max_refused=5.0),
    "shared-by-4": _shared(3, max_refused=10.0),
    "sdk": Part("hosts on the SDK, which call again in time", {f"host-{n}": ("sdk", *WAITING) for n in range(2)}),
    "callback": Part("a slow plugin behind a callback URL", ONE_HOST, CALLBACK_WORK, "callback", CALLBACK_ROOM),
    "bus": Part(
        "more than the bus itself can take",
        {**{f"polite-{n}": ("stream", *DECLARED, *POLITE) for n in range(2)}, RUDE: ("stream", *DECLARED)},
        *(0.0, "raw", WINDOW),
    ),
    "rest": Part("POST /api/tools/invoke, a plugin with room for 8", {"host": ("rest",)}, REST_WORK),
    "flood": Part(
        "more requests than the gateway can take",
        {f"host-{n}": ("rest", *POLITE, *WAITING) for n in range(2)},
        *(0.0, "raw", WINDOW),
    ),
}
