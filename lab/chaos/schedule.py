"""Plans what happens to whom and when. The same seed, length and cast make the same schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lab.chaos.cast import BUS, Kind, Part

ROUND_SECONDS = 60.0
CALM_SECONDS = 14.0  # at the end of a round: everything is whole again, and judged
FIRST_SECONDS = 1.0
GAP_SECONDS = 1.6  # between two events, on average
LONGEST_FREEZE = (24.0, 25.0)  # a plugin that hangs for so long is offline after 22 s


class Act(Enum):
    """What is done to a part. For how long is the event's business."""

    KILL = "kill"  # SIGKILL, and started again
    DRAIN = "drain"  # SIGTERM, and started again
    FREEZE = "freeze"  # SIGSTOP, then SIGCONT
    KILL_CHILD = "kill the children of"  # the processes that run drop-in tools; `toolbus run` starts them again
    FREEZE_CHILD = "freeze the children of"
    DELAY = "delay"  # of a line: every piece arrives later
    STALL = "stall"  # nothing passes, then everything that waited
    CUT = "cut"  # half-open: nothing passes any more, neither end notices, then it is reset
    RESET = "reset"  # RST to both ends
    REFUSE = "refuse"  # RST, and the port is closed
    STARVE = "starve"  # never planned: the machine had no processor for it


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens.

    Attributes:
        at: seconds from the beginning of its round.
        seconds: until it is undone.
    """

    at: float
    part: str
    act: Act
    seconds: float

    def __str__(self) -> str:
        return f"{self.act.value} {self.part}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


@dataclass(frozen=True, slots=True)
class Round:
    """A time of trouble and a calm after it, in which the bus is compared with what it should be."""

    number: int
    seconds: float  # of trouble
    calm_seconds: float
    events: tuple[Event, ...]


# Kind → (act, how often beside the others, shortest, longest).
_ACTS: dict[Kind, tuple[tuple[Act, int, float, float], ...]] = {
    Kind.PLUGIN: (
        (Act.KILL, 6, 0.1, 8.0),
        (Act.DRAIN, 3, 0.1, 3.0),
        (Act.FREEZE, 3, 0.3, 3.0),
        (Act.FREEZE, 2, 9.5, 14.0),
        (Act.FREEZE, 1, *LONGEST_FREEZE),
    ),
    Kind.FOLDER: (
        (Act.KILL_CHILD, 4, 0.0, 0.0),
        (Act.KILL, 2, 0.1, 4.0),
        (Act.DRAIN, 2, 0.1, 3.0),
        (Act.FREEZE_CHILD, 2, 0.3, 14.0),
    ),
    Kind.CALLBACK: ((Act.KILL, 4, 0.1, 8.0), (Act.DRAIN, 2, 0.1, 3.0), (Act.FREEZE, 3, 0.3, 6.0)),
    Kind.HOST: ((Act.KILL, 2, 0.1, 2.0), (Act.DRAIN, 2, 0.1, 2.0), (Act.FREEZE, 2, 0.3, 5.0)),
    Kind.MAIN_SERVER: ((Act.KILL, 2, 0.1, 5.0), (Act.FREEZE, 2, 0.3, 6.0)),
    Kind.LINE: (
        (Act.DELAY, 3, 2.0, 8.0),
        (Act.STALL, 2, 0.5, 6.0),
        (Act.STALL, 1, *LONGEST_FREEZE),
        (Act.CUT, 2, 1.0, 12.0),
        (Act.RESET, 3, 0.0, 0.0),
        (Act.REFUSE, 2, 0.5, 4.0),
    ),
}
_OFTEN = {Kind.PLUGIN: 2, Kind.FOLDER: 2}  # how often a part is chosen, beside the others
# The bus has to live through several rounds for its memory to be compared: it ends in two of four.
_OF_BUS = (Act.KILL, Act.FREEZE, Act.FREEZE, Act.DRAIN)
_BUS_SECONDS = {Act.KILL: (0.1, 6.0), Act.FREEZE: (1.0, 6.0), Act.DRAIN: (0.1, 3.0)}
# How long a part is left alone afterwards. `toolbus run` gives up a child that dies 5 times within 30 s.
_REST_SECONDS = {Kind.FOLDER: 9.0}
_REST_OF_OTHERS = 5.0


def plan(seed: int, seconds: float, parts: Sequence[Part], round_seconds: float = ROUND_SECONDS) -> list[Round]:
    count = max(1, round(seconds / round_seconds))
    length = seconds / count
    calm = min(CALM_SECONDS, length / 3)
    return [_round(seed, number, length - calm, calm, parts) for number in range(count)]


def _round(seed: int, number: int, seconds: float, calm: float, parts: Sequence[Part]) -> Round:
    rng = random.Random(f"{seed}/{number}")
    act = _OF_BUS[(seed + number) % len(_OF_BUS)]
    shortest, longest = _BUS_SECONDS[act]
    lasts = min(rng.uniform(shortest, longest), seconds / 3)
    # Early in the round: a hang of 22 s can only be timed where nothing happens to the bus meanwhile.
    events = [Event(rng.uniform(FIRST_SECONDS, seconds / 3), BUS, act, lasts)]
    others = [part for part in parts if part.kind is not Kind.BUS]
    free_at = dict.fromkeys((part.name for part in others), FIRST_SECONDS)
    at = FIRST_SECONDS
    while (at := at + rng.expovariate(1 / GAP_SECONDS)) < seconds:
        free = [part for part in others if free_at[part.name] <= at]
        if not free:
            continue
        part = rng.choices(free, [_OFTEN.get(part.kind, 1) for part in free])[0]
        fitting = [each for each in _ACTS[part.kind] if at + each[2] < seconds]
        if not fitting:
            continue
        act, _, shortest, longest = rng.choices(fitting, [each[1] for each in fitting])[0]
        lasts = rng.uniform(shortest, min(longest, seconds - at))
        events.append(Event(at, part.name, act, lasts))
        free_at[part.name] = at + lasts + _REST_SECONDS.get(part.kind, _REST_OF_OTHERS)
    return Round(number + 1, seconds, calm, tuple(sorted(events, key=lambda event: event.at)))
