"""Plays the part in which a peer does not read its stream, and judges what that costs others.

The run has three parts: without it, beside a peer that is sent as much and reads it, and beside the slow reader. The
second part shows the cost of the megabytes, so that the third shows the cost of their not being read.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from lab.child import Child
from lab.judge import Verdict, figure, none, some
from lab.ledger import OK
from lab.load.schedule import Phase, Schedule, let_begin
from lab.load.workload import quantile
from lab.overload.run import Recording, Run
from lab.overload.watch import PEAK_MIB, Watch
from lab.stage import Stage, until_async

NAME = "slow"
DISCONNECTED = ("NOT_SERVING", "NOT_FOUND")  # the health of a source that has no session
READER = "reader"  # which is sent as much
THIRDS = 3
MIN_SECONDS = 5.0  # of a third, in which 64 MiB have to be sent
MIN_COMPARED_SECONDS = 2.0  # beside the slow one, however soon the bus closes it
RATE = 100.0  # calls a second of each of the others
OTHERS = 2
CLOSED_SECONDS = 30.0  # until which 64 MiB wait for it on any machine
GROWTH_MIB = 64.0  # of what was sent to it that may stay with the process, for the next such time


@dataclass(slots=True)
class Beside:
    """What was seen of others beside one that does not read.

    Attributes:
        ending: how its stream ended, as it saw it when it read at last.
        closed_at: seconds until the bus had closed it; infinite where it never did.
        early: how often health showed it as disconnected while it still read.
    """

    kind: str
    seen: Recording
    ending: str
    closed_at: float
    early: int = 0


async def play(kind: str, stage: Stage, third: float, settle: float = 30.0) -> Beside:
    """Plays the three parts.

    Args:
        third: seconds of each part.
        settle: seconds in which the bus may give back memory.
    """
    run = await asyncio.to_thread(Run, stage)
    run.plugins["tools"] = stage.module("load.plugin", run.grpc, "--source", "tools")
    reader, slow = _idle_reader(run, READER, kind, "--reads"), _idle_reader(run, NAME, kind)
    await asyncio.to_thread(run.start_hosts, {f"host-{number}": ("stream",) for number in range(OTHERS)})
    for child in (run.plugins["tools"], reader, slow):
        await asyncio.to_thread(child.line)
    watch = Watch(run.bus, run.grpc, run.http, ("tools", NAME))
    async with watch.running():
        whole = Schedule([Phase(RATE, THIRDS * third)])
        watch.began_at = run.begin(dict.fromkeys(run.hosts, whole))
        await asyncio.sleep(third - watch.now)
        let_begin(run.folder, READER)
        await asyncio.sleep(2 * third - watch.now)
        reader.terminate()
        begun = watch.now
        let_begin(run.folder, NAME)
        answers = await run.answers(whole.seconds)
        await until_async(lambda: kind == "watcher" or _disconnected(watch, begun), begun + CLOSED_SECONDS - watch.now)
        slow.terminate()
        ending = await asyncio.to_thread(slow.line)
        await watch.settled(GROWTH_MIB, settle)
    seen = Recording([RATE * OTHERS], (third, whole.seconds), answers, array("d"), watch)
    early = [
        look
        for look in watch.looks
        if NAME in look.what and look.at + look.seconds < begun and look.answer in DISCONNECTED
    ]
    return Beside(kind, seen, ending, min(_disconnected(watch, begun), default=math.inf) - begun, len(early))


def _disconnected(watch: Watch, begun: float) -> list[float]:
    """Returns when health showed that the slow reader had no session any more."""
    return [look.at for look in watch.looks if NAME in look.what and look.at > begun and look.answer in DISCONNECTED]


def _idle_reader(run: Run, name: str, kind: str, *more: str) -> Child:
    return run.stage.module("overload.idle_reader", run.grpc, str(run.folder), name, "--kind", kind, *more)


def judge(beside: Beside) -> list[Verdict]:
    return [*_others(beside), *_ending(beside), *beside.seen.watch.growth(beside.seen.phases[0], PEAK_MIB, GROWTH_MIB)]


def _others(beside: Beside) -> Iterator[Verdict]:
    """Compares calls beside the slow one with as many seconds beside the one that reads."""
    seen = beside.seen
    third, whole = seen.phases
    compared = min(third, max(beside.closed_at, MIN_COMPARED_SECONDS))
    every = [*seen.every_answer]
    yield none("others' calls that failed", sum(answer.code != OK for answer in every))
    yield some("others' calls that succeeded", sum(answer.code == OK for answer in every))
    neither, reading, slow = (
        [answer.seconds for answer in every if begin <= answer.due < begin + length]
        for begin, length in ((0.0, third), (third, compared), (2 * third, compared))
    )
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        without, with_reader, with_slow = (quantile(seconds, share) * 1e3 for seconds in (neither, reading, slow))
        text = f"{without:.1f} ms, {with_reader:.1f} ms, {with_slow:.1f} ms: {with_slow / with_reader:.2f} ×"
        yield Verdict(f"others' {name} with neither, beside one that reads, beside the slow one", "", text)
    yield from seen.watch.pace(third, whole)


def _ending(beside: Beside) -> Iterator[Verdict]:
    yield none("health that shows it as gone before it stops reading", beside.early)
    if beside.kind == "watcher":  # it is sent the next change once it has read the one before, so nothing piles up
        return
    yield some("closed by the bus", int(math.isfinite(beside.closed_at)))
    yield figure("closed after", beside.closed_at, "s")
    names_limit = "RESOURCE_EXHAUSTED" in beside.ending and "waiting_bytes" in beside.ending
    yield Verdict("it learns why", "RESOURCE_EXHAUSTED, waiting_bytes", beside.ending[:60] or "nothing", names_limit)
