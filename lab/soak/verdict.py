"""Whether what a soak sampled is what a bus should look like: steady. Pure: series in, sentences out.

Growth is the larger of two figures, since each is blind to what the other sees. The median of the slopes between all
pairs of points (Theil and Sen) is that of a leak, however noisy, and a step in the middle hardly moves it. The median
of the last fifth less that of the first shows steps, and understates a slope by a fifth. Spikes move neither, unless
they fill half of the first or the last fifth.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.soak.sample import Record, Sample

STRICT_SECONDS = 300.0  # a shorter soak ends while caches still fill
WARM_UP_SHARE, WARM_UP_SECONDS = 0.2, 180.0
FIFTHS = 5
SHORT = " (a short soak)"
MAX_POINTS = 60  # of a slope: 1,770 pairs; more points are joined first
MORE_MEMORY, MORE_MEMORY_SHORT = 0.02, 0.25
# Connections are opened for calls that come at once, so their number swings with what else the machine does.
MORE_FILES, MORE_FILES_SHARE, MORE_THREADS = 10.0, 0.25, 3.0
# What may be left once all have gone: connections to callback URLs that are kept for a while, threads for later work.
MORE_LEFT = {"files": 10, "threads": 10}
# What else a machine does makes calls slower most of the time. A slow bus is so in its best seconds, too.
MORE_LATENCY, MORE_LATENCY_MS, MORE_LATENCY_SHORT_MS = 0.5, 1.0, 1000.0
STRETCHES = 10  # of a soak, of each of which the best second counts


@dataclass(frozen=True, slots=True)
class Finding:
    """One question to a soak, and its answer.

    Attributes:
        found: what was measured, in words.
        bound: what is allowed.
    """

    what: str
    found: str
    bound: str
    good: bool


def warm_up(seconds: float) -> float:
    """Returns how long a soak of a length only fills caches, and is not judged."""
    return min(WARM_UP_SHARE * seconds, WARM_UP_SECONDS)


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Returns by how much a series (x, y) rises from its beginning to its end, in the unit of y."""
    return max(slope(points), fifths(points)) if len(points) >= 2 else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of Theil and Sen times the length of the series."""
    joined = thinned(points, MAX_POINTS)
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.combinations(joined, 2)]
    return statistics.median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0


def fifths(points: Sequence[tuple[float, float]]) -> float:
    """Returns the median of the last fifth less that of the first."""
    count = max(1, len(points) // FIFTHS)
    return statistics.median(y for _, y in points[-count:]) - statistics.median(y for _, y in points[:count])


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Returns at most so many points: medians of neighbours."""
    size = -(-len(points) // most) or 1
    return [
        (statistics.median(x for x, _ in part), statistics.median(y for _, y in part))
        for part in (points[at : at + size] for at in range(0, len(points), size))
    ]


def judge(record: Record) -> list[Finding]:
    """Returns the answers to all questions."""
    begin = warm_up(record.seconds)
    judged = [sample for sample in record.samples if sample.at >= begin]
    return [*_grown(judged, record.seconds >= STRICT_SECONDS), *left(record), *_done(record)]


def left(record: Record) -> list[Finding]:
    """Judges what the bus still holds once everybody has gone."""
    found = []
    for name, after in record.after.items():
        before, more = record.before[name], MORE_LEFT.get(name)
        good = after == before if more is None else after <= before + more
        bound = f"{before} as before" if more is None else f"≤ {before + more}"
        found.append(Finding(f"{name}, all gone", str(after), bound, good))
    return found


def _grown(judged: Sequence[Sample], strict: bool) -> list[Finding]:
    """Judges what must not grow."""
    if len(judged) < FIFTHS:
        said = f"{len(judged)} samples after the warm-up"
        return [Finding("length", said, f"at least {FIFTHS}", False)]
    memory = _relative([(each.at, each.rss_mb) for each in judged])
    most = MORE_MEMORY if strict else MORE_MEMORY_SHORT
    found = [Finding("memory", f"{memory:+.2%}", f"≤ {most:+.0%}{'' if strict else SHORT}", memory <= most)]
    for what, least, share in (("files", MORE_FILES, MORE_FILES_SHARE), ("threads", MORE_THREADS, 0.0)):
        points = [(each.at, float(getattr(each, what))) for each in judged]
        rise, more = growth(points), max(least, share * beginning(points))
        found.append(Finding(what, f"{rise:+.1f}", f"≤ {more:+.0f}", rise <= more))
    return [*found, _slower([(each.at, each.p50_ms) for each in judged if each.p50_ms], strict)]


def _slower(called: Sequence[tuple[float, float]], strict: bool) -> Finding:
    """Judges whether calls have become slower."""
    what = "latency, p50 of the best seconds"
    if not called:
        return Finding(what, "no calls", "calls", False)
    size = -(-len(called) // STRETCHES)
    best = [min(called[at : at + size], key=lambda point: point[1]) for at in range(0, len(called), size)]
    rise, first = growth(best), beginning(best)
    most = max(MORE_LATENCY * first, MORE_LATENCY_MS) if strict else MORE_LATENCY_SHORT_MS
    return Finding(
        what, f"{rise:+.2f} ms on {first:.2f} ms", f"≤ {most:+.2f} ms{'' if strict else SHORT}", rise <= most
    )


def beginning(points: Sequence[tuple[float, float]]) -> float:
    """Returns the median of the first fifth of a series."""
    return statistics.median(y for _, y in points[: max(1, len(points) // FIFTHS)])


def _relative(points: Sequence[tuple[float, float]]) -> float:
    return growth(points) / beginning(points)


def _done(record: Record) -> list[Finding]:
    """Judges whether everything was played, and without a fault."""
    never = Finding("kinds that never were", ", ".join(record.never) or "0", "0", not record.never)
    return [never, Finding("faults", str(record.fault_count), "0", record.fault_count == 0)]
