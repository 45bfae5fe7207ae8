"""The part in which somebody does not read its stream: what it costs others, in one run with and without it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from overload.judge import PEAK_MIB, Verdict, most, none, weight
from overload.load import OK, Phase, Schedule, quantile
from overload.parts import Plan
from overload.stage import HEAD_START, Seen, Stage
from overload.watch import Watch

KINDS = ("host", "plugin", "watcher")
NAME = "slow"
RATE = 100.0  # calls a second of each of the others
OTHERS = 2
TIMES_P50, TIMES_P99 = 2.0, 3.0  # of what it is without the slow one
SLACK_P50, SLACK_P99 = 0.005, 0.05  # seconds: a frame of 1 MB takes the bus and the machine some
CLOSED_SECONDS = 10.0  # until 64 MiB wait for it
KEPT_MIB = 64.0  # of what was sent to it that may stay with the process, for the next such time


@dataclass(slots=True)
class Beside:
    """What was seen of others beside one that does not read.

    Attributes:
        ending: how its stream ended, as it saw it when it read at last.
        closed_at: when the bus had let go of it; infinite where it never did.
    """

    kind: str
    seen: Seen
    ending: str
    closed_at: float


async def play(kind: str, stage: Stage, plan: Plan) -> Beside:
    """Plays so long without the slow one and so long with it."""
    await asyncio.to_thread(stage.plugin, "tools", way="raw")
    slow = stage.nursery.start("slow", stage.command("slow", stage.grpc, str(stage.folder), NAME, "--kind", kind))
    await asyncio.to_thread(slow.line)
    for number in range(OTHERS):
        await asyncio.to_thread(stage.host, f"host-{number}")
    watch = Watch(stage.grpc, stage.http, ("tools", NAME), stage.bus.pid)
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(HEAD_START)
        half = Schedule([Phase(RATE, 2 * plan.seconds)])
        watch.began_at = stage.begin(dict.fromkeys(stage.hosts, half))
        await asyncio.sleep(plan.seconds - watch.now)
        stage.tell(NAME)
        answers = await stage.answers(half.seconds)
        slow.ask_to_end()
        ending = await asyncio.to_thread(slow.line)
        await watch.settled(KEPT_MIB)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    seen = Seen(RATE * OTHERS, (plan.seconds, half.seconds), answers, array("d"), watch)
    gone = [look.at for look in watch.looks if NAME in look.what and look.at > plan.seconds and look.said != "SERVING"]
    return Beside(kind, seen, ending, min(gone, default=math.inf))


def judge(beside: Beside) -> list[Verdict]:
    """Applies every rule."""
    return [*_others(beside.seen), *_ending(beside), *_weight(beside)]


def _others(seen: Seen) -> Iterator[Verdict]:
    half, _ = seen.phases
    everything = [answer for each in seen.answers.values() for answer in each]
    without = [answer.seconds for answer in everything if answer.due < half]
    beside = [answer.seconds for answer in everything if answer.due >= half]
    late = 2 * quantile([late for at, late in seen.watch.late if at >= half], 0.99)  # the machine itself, both ways
    stretch = seen.watch.stretch(half, seen.phases[1])
    yield none("others' calls that failed", sum(answer.code != OK for answer in everything))
    for name, share, times, slack in (
        ("p50", 0.5, TIMES_P50, SLACK_P50),
        ("p99", 0.99, TIMES_P99, SLACK_P99),
    ):
        alone, now = quantile(without, share), quantile(beside, share)
        told = f"{now * 1e3:.1f} ms, {now / alone:.2f} ×" if alone else "nothing"
        more = slack * stretch + late
        bound = f"≤ {times:g} × {alone * 1e3:.1f} ms + {more * 1e3:.0f} ms"
        yield Verdict(f"others' {name} beside it", bound, told, now <= times * alone + more)


def _ending(beside: Beside) -> Iterator[Verdict]:
    if beside.kind == "watcher":  # it is sent the next change once it has read the one before, so nothing piles up
        return
    half = beside.seen.phases[0]
    yield most("closed after", CLOSED_SECONDS, beside.closed_at - half, "s")
    named = "RESOURCE_EXHAUSTED" in beside.ending and "waiting_bytes" in beside.ending
    yield Verdict("it is told why", "RESOURCE_EXHAUSTED, waiting_bytes", beside.ending[:60] or "nothing", named)


def _weight(beside: Beside) -> Iterator[Verdict]:
    yield from weight(beside.seen, PEAK_MIB, KEPT_MIB)
