"""The part in which somebody does not read its stream: what it costs others, in one run.

A third of the run without it, a third beside one that is sent as much and reads it, a third beside it: megabytes cost
the bus and the machine something whoever they are for, and what is judged is what it costs that nobody reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from lab.benchmarks.children import Child
from lab.overload.judge import PEAK_MIB, Verdict, most, none, weight
from lab.overload.load import OK, Phase, Schedule, quantile
from lab.overload.stage import HEAD_START, Seen, Stage
from lab.overload.watch import Watch

KINDS = ("host", "plugin", "watcher")
NAME = "slow"
GONE = ("NOT_SERVING", "NOT_FOUND")  # what health says of a source that has no session
READER = "reader"  # who is sent as much
THIRDS = 3
LEAST_SECONDS = 5.0  # of a third, in which 64 MiB have to be sent
LEAST_JUDGED_SECONDS = 2.0  # beside somebody slow, however soon the bus lets go of it
RATE = 100.0  # calls a second of each of the others
OTHERS = 2
TIMES_P50, TIMES_P99 = 1.5, 1.5  # of what it is beside the one that reads
SLACK_P50, SLACK_P99 = 0.005, 0.05  # seconds
CLOSED_SECONDS = 10.0  # until 64 MiB wait for it
KEPT_MIB = 64.0  # of what was sent to it that may stay with the process, for the next such time


@dataclass(slots=True)
class Beside:
    """What was seen of others beside one that does not read.

    Attributes:
        ending: how its stream ended, as it saw it when it read at last.
        closed_at: seconds until the bus had let go of it; infinite where it never did.
        early: how often health said that it was gone while it still read.
    """

    kind: str
    seen: Seen
    ending: str
    closed_at: float
    early: int = 0


async def play(kind: str, stage: Stage, third: float) -> Beside:
    """Plays so long without anybody, so long beside one that reads, and so long beside the slow one."""
    await asyncio.to_thread(stage.plugin, "tools", way="raw")
    reader, slow = await _attached(stage, READER, kind, "--reads"), await _attached(stage, NAME, kind)
    for number in range(OTHERS):
        await asyncio.to_thread(stage.host, f"host-{number}")
    watch = Watch(stage.grpc, stage.http, ("tools", NAME), stage.bus.pid)
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(HEAD_START)
        whole = Schedule([Phase(RATE, THIRDS * third)])
        watch.began_at = stage.begin(dict.fromkeys(stage.hosts, whole))
        await asyncio.sleep(third - watch.now)
        stage.tell(READER)
        await asyncio.sleep(2 * third - watch.now)
        reader.ask_to_end()
        stage.tell(NAME)
        answers = await stage.answers(whole.seconds)
        slow.ask_to_end()
        ending = await asyncio.to_thread(slow.line)
        await watch.settled(KEPT_MIB)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    seen = Seen(RATE * OTHERS, (third, whole.seconds), answers, array("d"), watch)
    begun = 2 * third
    gone = [look.at for look in watch.looks if NAME in look.what and look.at > begun and look.said in GONE]
    early = [look for look in watch.looks if NAME in look.what and look.at + look.seconds < begun and look.said in GONE]
    return Beside(kind, seen, ending, min(gone, default=math.inf) - begun, len(early))


async def _attached(stage: Stage, name: str, kind: str, *more: str) -> Child:
    child = stage.nursery.start(name, stage.command("slow", stage.grpc, str(stage.folder), name, "--kind", kind, *more))
    await asyncio.to_thread(child.line)
    return child


def judge(beside: Beside) -> list[Verdict]:
    """Applies every rule."""
    return [*_others(beside), *_ending(beside), *_weight(beside)]


def _others(beside: Beside) -> Iterator[Verdict]:
    """Compares calls while the slow one was there with as many seconds beside the one that reads."""
    seen = beside.seen
    third, whole = seen.phases
    there = min(third, max(beside.closed_at, LEAST_JUDGED_SECONDS))
    everything = [answer for each in seen.answers.values() for answer in each]
    alone, reading, slow = (
        [answer.seconds for answer in everything if begin <= answer.due < begin + length]
        for begin, length in ((0.0, third), (third, there), (2 * third, there))
    )
    late = 2 * quantile([late for at, late in seen.watch.late if at >= third], 0.99)  # the machine itself, both ways
    stretch = seen.watch.stretch(third, whole)
    yield none("others' calls that failed", sum(answer.code != OK for answer in everything))
    for name, share, times, slack in (
        ("p50", 0.5, TIMES_P50, SLACK_P50),
        ("p99", 0.99, TIMES_P99, SLACK_P99),
    ):
        without, aim, now = (quantile(seconds, share) for seconds in (alone, reading, slow))
        yield Verdict(f"others' {name} with neither", "", f"{without * 1e3:.1f} ms", True)
        told = f"{now * 1e3:.1f} ms, {now / aim:.2f} ×" if aim else "nothing"
        more = slack * stretch + late
        bound = f"≤ {times:g} × {aim * 1e3:.1f} ms of the one that reads + {more * 1e3:.0f} ms"
        yield Verdict(f"others' {name} beside it", bound, told, now <= times * aim + more)


def _ending(beside: Beside) -> Iterator[Verdict]:
    yield none("it was gone before it stopped reading", beside.early)
    if beside.kind == "watcher":  # it is sent the next change once it has read the one before, so nothing piles up
        return
    yield most("closed after", CLOSED_SECONDS, beside.closed_at, "s")
    named = "RESOURCE_EXHAUSTED" in beside.ending and "waiting_bytes" in beside.ending
    yield Verdict("it is told why", "RESOURCE_EXHAUSTED, waiting_bytes", beside.ending[:60] or "nothing", named)


def _weight(beside: Beside) -> Iterator[Verdict]:
    yield from weight(beside.seen, PEAK_MIB, KEPT_MIB)
