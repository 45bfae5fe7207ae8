"""Judges an overload by what was counted; how long things took is shown in figures, and fails nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from lab.judge import Verdict, at_most, figure, milliseconds, none, some
from lab.ledger import NEVER_SENT, OK
from lab.load.workload import quantile
from lab.overload.parts import MODEST, RUDE, Part
from lab.overload.run import BYSTANDER, Recording
from lab.overload.watch import COMMAND, HEALTHY
from toolbus.errors import Code

REFUSED = Code.OVERLOADED.value


def judge(part: Part, seen: Recording) -> list[Verdict]:
    return [verdict for rule in RULES for verdict in rule(part, seen)]


def groups(seen: Recording) -> Iterator[tuple[str, list[str]]]:
    """Yields the hosts whose times are shown together, with what follows the name of a figure."""
    yield "", [host for host in seen.answers if host not in (RUDE, MODEST)]
    if RUDE in seen.answers:
        yield f", of {RUDE!r}", [RUDE]


def offers(part: Part, seen: Recording) -> Iterator[Verdict]:
    """How heavy the load was, and how busy the machine."""
    calm, loaded = seen.phases
    due = (answer for answer in seen.answers_in("load") if answer.code != NEVER_SENT or part.waits_in_hosts)
    offered = sum(answer.calls for answer in due) / (loaded - calm) / seen.capacities[0]
    capacities = ", then ".join(f"{each:,.0f}" for each in seen.capacities)
    yield Verdict("the capacity", "", f"{capacities} calls/s")
    yield figure("offered, times the capacity", offered, "×")
    yield from seen.watch.pace(calm, loaded)


def accepted(part: Part, seen: Recording) -> Iterator[Verdict]:
    """Calls are accepted all the time, however many are refused."""
    calm, loaded = seen.phases
    done = sum(answer.code == OK for answer in seen.answers_in("load"))
    yield some("accepted during the load", done)
    yield figure("done during the load, of the capacity", done / (loaded - calm) / seen.capacity, "×", 2)
    for whose, hosts in groups(seen):
        times = [answer.seconds for answer in seen.answers_in("load", hosts) if answer.code == OK]
        yield milliseconds(f"p99 of the accepted{whose}", times, 0.99)


def refused(part: Part, seen: Recording) -> Iterator[Verdict]:
    """A refusal has all that it must have, and its call never runs; what is done has run once."""
    refusals = [answer for answer in seen.answers_in("load") if answer.code == REFUSED]
    turned_away = sum(answer.calls for answer in seen.answers_in("load") if answer.code != OK)
    yield some("turned away during the load", turned_away)
    for whose, hosts in groups(seen):
        times = [answer.seconds for answer in seen.answers_in("load", hosts) if answer.code == REFUSED]
        if times:
            yield milliseconds(f"p99 of the refused{whose}", times, 0.99)
    yield none("refused without limit or hint", sum(each.hint <= 0 for each in refusals))
    ran = Counter(int(number) for number in seen.ran)
    every = [*seen.every_answer]
    yield none(
        "refused, and run all the same", len({each.number for each in every if each.code == REFUSED} & ran.keys())
    )
    yield none("run, and sent by no host", len(ran.keys() - {each.number for each in every if each.code != NEVER_SENT}))
    yield none("done, but not run once", sum(ran[each.number] != 1 for each in every if each.code == OK))
    known = {OK, NEVER_SENT, REFUSED, *([Code.DEADLINE_EXCEEDED.value] if part.on_sdk else [])}
    yield none("never answered, or with another error", sum(each.code not in known for each in every))


def health(part: Part, seen: Recording) -> Iterator[Verdict]:
    """Health is true; a plugin that dies is noticed."""
    calm, loaded = seen.phases
    looks = [look for look in seen.watch.looks if BYSTANDER not in look.what]
    yield none("health that was false", sum(look.answer not in HEALTHY for look in looks))
    times = [look.seconds for look in looks if calm <= look.at < loaded and look.what != COMMAND]
    yield milliseconds("p99 of health", times, 0.99)
    yield milliseconds("slowest health", times, 1.0)
    bystander = [look for look in seen.watch.looks if BYSTANDER in look.what]
    early = sum(look.answer != "SERVING" for look in bystander if look.at + look.seconds < seen.killed_at)
    noticed = [look.at + look.seconds - seen.killed_at for look in bystander if look.answer == "NOT_SERVING"]
    yield none("health that shows a live plugin as dead", early)
    yield some("health that shows a dead plugin", len(noticed))
    yield figure("a plugin's death is in its health after", min(noticed, default=math.nan) * 1e3, "ms")


def recovery(part: Part, seen: Recording) -> Iterator[Verdict]:
    """After the load the bus is as before."""
    after = sorted(seen.answers_in("after"), key=lambda answer: answer.due)
    later = after[len(after) // 2 :]  # earlier ones may meet what is still in flight or waits in hosts
    done = [answer for answer in after if answer.code == OK]
    yield some("that succeed after the load", len(done))
    first = min((answer.ended for answer in done), default=math.nan) - seen.phases[1]
    yield figure("the first success after the load", first * 1e3, "ms")
    good = [answer.seconds for answer in later if answer.code == OK]
    share = len(good) / max(sum(answer.calls for answer in later), 1)
    yield figure("share that succeeds in the second half of the calm", share, "", 3)
    before = [answer.seconds for answer in seen.answers_in("before") if answer.code == OK]
    yield figure("p50 then, over that before", quantile(good, 0.5) / quantile(before, 0.5), "×", 2)
    yield from seen.watch.growth(seen.phases[0])


def fairness(part: Part, seen: Recording) -> Iterator[Verdict]:
    """A modest host keeps its service beside greedy ones."""
    if MODEST in seen.answers:
        its = [*seen.answers_in("load", [MODEST])]
        done = [answer.seconds for answer in its if answer.code == OK]
        yield some("the modest host's calls that succeed", len(done))
        yield figure("share of the modest host's calls that succeed", len(done) / max(len(its), 1), "", 3)
        yield milliseconds("the modest host's p99", done, 0.99)
        if part.max_refused is not None:
            refused_ones = sum(answer.code == REFUSED for answer in its)
            percent = 100.0 * refused_ones / max(len(its), 1)
            yield at_most(
                "the modest host's calls that are refused at the first attempt", part.max_refused, percent, "%"
            )


RULES = (offers, accepted, refused, health, recovery, fairness)
