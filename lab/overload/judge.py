"""What has to be true of an overload, judged on what was seen: each rule yields verdicts with bound and measure.

Bounds are those of a bus that has a processor for itself. Here it shares them with hosts, plugins and whatever runs: so
bounds of time are stretched by how much longer than alone it took for its work, as the kernel counted, and what the
machine was late by itself is added: by a metronome, and by how late it woke hosts. Both stand in the table. What a full
bus has to do is less by the same measure, beside what it was while its capacity was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from lab.overload.load import NEVER_SENT, OK, Answer, quantile
from lab.overload.parts import BYSTANDER, CALM_SHARE, GROWTH_MIB, PATIENCE, TIMES, Part
from lab.overload.stage import Seen
from toolbus.errors import Code

REFUSED_SECONDS = 0.05  # how long a refusal takes where the bus has time to spare
HEALTH_SECONDS = 0.25  # how long nearly all answers about health take, and
HEALTH_WORST = 2.0  # all: probes that operators write give up after 1 to 10 s
NOTICED_SECONDS = 1.0  # from a plugin's death until its health says so
PEAK_MIB = 256.0  # and during it: what `held_bytes` lets it hold
MAX_STRETCH = 4.0  # beyond which a run says nothing about the bus: others had the processor
GOODPUT = 0.6  # of the capacity, that is still done beside refusing
OFFERED = 0.9  # of TIMES the capacity, without which a run shows nothing
CALM_GOOD = 0.95  # of the calls after the load; a machine that stands still for a moment bunches the rest
MODEST_HOST = "modest"  # on the SDK, which asks again for a second: it has bounds of its own
MODEST = 0.95  # of its calls that succeed beside a greedy host
ON_SDK = ("sdk", "fair")  # parts with a host on the SDK, whose calls may run out of time between two attempts


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule, applied to one part."""

    what: str
    bound: str
    measured: str
    kept: bool

    @property
    def word(self) -> str:
        """How it ended; nothing for what is shown and not judged."""
        return ("kept" if self.kept else "BROKEN") if self.bound else ""


def judge(part: Part, seen: Seen) -> list[Verdict]:
    """Applies every rule."""
    return [verdict for rule in RULES for verdict in rule(part, seen)]


def most(what: str, bound: float, measured: float, unit: str = "ms") -> Verdict:
    """A figure that may not be above a bound; NaN is."""
    return Verdict(what, f"≤ {bound:,.0f} {unit}", f"{measured:,.1f} {unit}", measured <= bound)


def least(what: str, bound: float, measured: float, unit: str = "") -> Verdict:
    """A figure that may not be below a bound; NaN is."""
    return Verdict(what, f"≥ {bound:,.4g}{unit}", f"{measured:,.4g}{unit}", measured >= bound)


def none(what: str, measured: int) -> Verdict:
    """Something that may not be there."""
    return Verdict(what, "0", f"{measured:,}", measured == 0)


def answers(seen: Seen, phase: str, hosts: Collection[str] | None = None) -> Iterator[Answer]:
    """Yields the answers to calls that were due ``before``, during the ``load`` or ``after`` it.

    Args:
        hosts: whose answers count; None for those of all.
    """
    calm, loaded = seen.phases
    low, high = {"before": (0.0, calm), "load": (calm, loaded), "after": (loaded, math.inf)}[phase]
    counted = [each for host, each in seen.answers.items() if hosts is None or host in hosts]
    return (answer for each in counted for answer in each if low <= answer.due < high)


def groups(part: Part, seen: Seen) -> Iterator[tuple[str, Collection[str], int]]:
    """Yields those whose waiting is judged together: what follows their name, who, and how much is on the way.

    The modest host has bounds of its own, since it asks again for what was refused.
    """
    yield "", [host for host in seen.answers if host not in part.on_the_way and host != MODEST_HOST], 0
    for host, on_the_way in part.on_the_way.items():
        yield f", of {host!r}", [host], on_the_way


def lateness(part: Part, seen: Seen) -> float:
    """How late the machine was during the load: twice the metronome, since a call has two ends, and late hosts.

    Not how late calls were sent: a bus that does not read holds up what is written to it.
    """
    calm, loaded = seen.phases
    metronome, hosts = (
        [seconds for at, seconds in late if calm <= at < loaded] for late in (seen.watch.late, seen.late)
    )
    return 2 * quantile(metronome, 0.99) + (quantile(hosts, 0.99) if part.quick and hosts else 0.0)


def in_time(part: Part, seen: Seen, on_the_way: int = 0) -> float:
    """How long a call may take: what its window allows twice over, what it waits in its host, and the machine.

    Args:
        on_the_way: calls before it that the bus has not read.
    """
    calls = 2 * (part.window + on_the_way)
    return stretched(calls / seen.pace + REFUSED_SECONDS, seen) + part.waits + lateness(part, seen)


def stretched(seconds: float, seen: Seen) -> float:
    """How long the bus may take for what takes it so long alone on the machine."""
    return seconds * seen.watch.stretch(*seen.phases)


def offers(part: Part, seen: Seen) -> Iterator[Verdict]:
    """The load is as heavy as it says."""
    # Where hosts keep to their windows, what is due waits in them, and counts.
    due = (answer for answer in answers(seen, "load") if answer.code != NEVER_SENT or not part.quick)
    sent = sum(answer.calls for answer in due)
    offered = sent / (seen.phases[1] - seen.phases[0]) / seen.capacity
    capacity = ", then ".join(f"{each.calls_per_second:,.0f}" for each in seen.measured) or f"{seen.capacity:,.0f}"
    yield Verdict("the capacity", "", f"{capacity} calls/s", True)
    yield Verdict("late by the machine alone", "", f"{lateness(part, seen) * 1e3:,.0f} ms", True)
    yield most("the bus's work took, for the machine", MAX_STRETCH, seen.watch.stretch(*seen.phases), "× as long")
    yield least("offered, times the capacity", TIMES * OFFERED, offered, " ×")


def accepted(part: Part, seen: Seen) -> Iterator[Verdict]:
    """What is accepted is done in bounded time, and so much of it as if nothing else were asked."""
    for whose, hosts, on_the_way in groups(part, seen):
        done = [answer.seconds for answer in answers(seen, "load", hosts) if answer.code == OK]
        yield most(f"p99 of the accepted{whose}", in_time(part, seen, on_the_way) * 1e3, quantile(done, 0.99) * 1e3)
    share = sum(answer.code == OK for answer in answers(seen, "load")) / (seen.phases[1] - seen.phases[0]) / seen.pace
    yield least("done under load, of the capacity", goodput(part, seen), share, " ×")


def goodput(part: Part, seen: Seen) -> float:
    """What has to be done of the capacity; of a full bus less where it got less of a processor than for the measure."""
    return GOODPUT * min(1.0, seen.stretch / seen.watch.stretch(*seen.phases)) if part.fills_bus else GOODPUT


def refused(part: Part, seen: Seen) -> Iterator[Verdict]:
    """What is refused is refused at once, says all it should, and is never run; what is done is run once."""
    known = {OK, NEVER_SENT, Code.OVERLOADED.value} | ({Code.DEADLINE_EXCEEDED.value} if part.name in ON_SDK else set())
    refusal = Code.OVERLOADED.value
    no = [answer for answer in answers(seen, "load") if answer.code == refusal]
    if part.quick:
        bound = stretched(REFUSED_SECONDS, seen) + lateness(part, seen)
        yield most("p99 of the refused", bound * 1e3, quantile([each.seconds for each in no], 0.99) * 1e3)
    else:
        for whose, hosts, on_the_way in groups(part, seen):
            waited = [answer.seconds for answer in answers(seen, "load", hosts) if answer.code == refusal]
            if waited:
                bound = in_time(part, seen, on_the_way)
                yield most(f"p99 of the refused{whose}", bound * 1e3, quantile(waited, 0.99) * 1e3)
    yield none("refused without limit or hint", sum(each.hint <= 0 for each in no))
    ran = Counter(int(number) for number in seen.ran)
    everything = [answer for each in seen.answers.values() for answer in each]
    turned_away = {answer.number for answer in everything if answer.code == refusal}
    yield none("refused, and run all the same", len(turned_away & ran.keys()))
    sent = {answer.number for answer in everything if answer.code != NEVER_SENT}
    yield none("run, and sent by nobody", len(ran.keys() - sent))
    yield none("done, but not run once", sum(ran[each.number] != 1 for each in everything if each.code == OK))
    yield none("ended in anything else", sum(each.code not in known for each in everything))


def health(part: Part, seen: Seen) -> Iterator[Verdict]:
    """Health says what is the case, in time; a plugin that dies is noticed."""
    calm, loaded = seen.phases
    looks = [look for look in seen.watch.looks if BYSTANDER not in look.what]
    good = {"SERVING", "200", "exit 0"}
    yield none("health that was false", sum(look.said not in good for look in looks))
    told = [look.seconds for look in looks if calm <= look.at < loaded and look.what != "toolbus health"]
    late = lateness(part, seen)
    yield most("p99 of health", (stretched(HEALTH_SECONDS, seen) + late) * 1e3, quantile(told, 0.99) * 1e3)
    yield most("slowest health", (stretched(HEALTH_WORST, seen) + late) * 1e3, max(told, default=math.nan) * 1e3)
    killed = seen.notes["killed_at"]
    of = [look for look in seen.watch.looks if BYSTANDER in look.what]
    noticed = min((look.at + look.seconds for look in of if look.said == "NOT_SERVING"), default=math.inf) - killed
    early = sum(look.said != "SERVING" for look in of if look.at + look.seconds < killed)
    yield none("a plugin said to be dead that is not", early)
    yield most("a plugin's death is in its health", (stretched(NOTICED_SECONDS, seen) + late) * 1e3, noticed * 1e3)


def recovery(part: Part, seen: Seen) -> Iterator[Verdict]:
    """After the load the bus is as before."""
    after = sorted(answers(seen, "after"), key=lambda answer: answer.due)
    later = after[len(after) // 2 :]  # those before may meet what is still in flight or waits in hosts
    first = min((answer.ended for answer in after if answer.code == OK), default=math.inf) - seen.phases[1]
    pause = len(seen.answers) / (seen.capacity * CALM_SHARE)
    yield most("the first success after the load", (in_time(part, seen) + pause) * 1e3, first * 1e3)
    good = sum(answer.code == OK for answer in later) / max(sum(answer.calls for answer in later), 1)
    yield least("that succeed in the second half of the calm", CALM_GOOD, good)
    before = quantile([answer.seconds for answer in answers(seen, "before") if answer.code == OK], 0.5)
    again = quantile([answer.seconds for answer in later if answer.code == OK], 0.5)
    yield most("p50 then, twice that before", (2 * before + 0.02 + lateness(part, seen)) * 1e3, again * 1e3)
    yield from weight(seen)


def weight(seen: Seen, peak: float = PEAK_MIB, kept: float = GROWTH_MIB) -> Iterator[Verdict]:
    """The bus weighs no more than it may."""
    calm = [mib for at, mib in seen.watch.memory if at < seen.phases[0]]
    begun, ended = min(calm), seen.watch.memory[-1][1]
    highest = max(mib for _, mib in seen.watch.memory)
    yield most("the bus grew, at the most", peak, highest - begun, "MiB")
    yield most("the bus grew, for good", kept, ended - begun, "MiB")


def fairness(part: Part, seen: Seen) -> Iterator[Verdict]:
    """A modest host keeps its service beside a greedy one."""
    if MODEST_HOST not in seen.answers:
        return
    calm, loaded = seen.phases
    its = [answer for answer in seen.answers[MODEST_HOST] if calm <= answer.due < loaded]
    done = [answer.seconds for answer in its if answer.code == OK]
    yield least("the modest host's calls that succeed", MODEST, len(done) / max(len(its), 1))
    bound = in_time(part, seen) + PATIENCE
    yield most("the modest host's p99", bound * 1e3, quantile(done, 0.99) * 1e3)


RULES: tuple[Callable[[Part, Seen], Iterable[Verdict]], ...] = (offers, accepted, refused, health, recovery, fairness)
