"""Judges whether a soak was steady: what must not grow, what must be released at the end, and what must never happen.

Pure: a record in, verdicts out. Latency depends on the machine and is a figure.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.judge import FIFTHS, Series, Verdict, beginning, growth, none, some
from lab.soak.sample import Record, Sample

STRICT_SECONDS = 300.0  # a shorter soak ends while caches still fill and connections are still opened
LOADED_SECONDS = 30.0  # a shorter soak may end while a bus on a busy machine still loads code: its memory is a figure
WARM_UP_SHARE, WARM_UP_SECONDS = 0.2, 180.0
SHORT = " (a short soak)"
MAX_MEMORY_GROWTH, MAX_MEMORY_GROWTH_SHORT = 0.02, 0.25
# Connections are opened for calls that come at once, so their number swings with what else the machine does: by name,
# the growth that is allowed, at least; the same as a share; and that of a short soak.
MAX_GROWTH = {"files": (10.0, 0.25, 100.0), "threads": (3.0, 0.0, 30.0)}
# What may be left once all programs have disconnected: idle connections to callback URLs, threads for later work.
MAX_LEFT = {"files": 10, "threads": 10}
STRETCHES = 10  # of a soak, of each of which the best second counts: other work makes calls slower most of the time


def warm_up(seconds: float) -> float:
    """Returns how long a soak of a length only fills caches, and is not judged."""
    return min(WARM_UP_SHARE * seconds, WARM_UP_SECONDS)


def judge(record: Record) -> list[Verdict]:
    begin = warm_up(record.seconds)
    judged = [sample for sample in record.samples if sample.at >= begin]
    strict, loaded = record.seconds >= STRICT_SECONDS, record.seconds >= LOADED_SECONDS
    return [*_grown(judged, strict, loaded), *left(record), *_done(record)]


def left(record: Record) -> list[Verdict]:
    """Judges what the bus still holds once all programs have disconnected."""
    verdicts = []
    for name, after in record.after.items():
        before, more = record.before[name], MAX_LEFT.get(name)
        good = after == before if more is None else after <= before + more
        bound = f"{before} as before" if more is None else f"≤ {before + more}"
        verdicts.append(Verdict(f"{name}, all gone", bound, str(after), good))
    return verdicts


def _grown(judged: Sequence[Sample], strict: bool, loaded: bool) -> list[Verdict]:
    """Judges what must not grow."""
    if len(judged) < FIFTHS:
        return [Verdict("length", f"at least {FIFTHS}", f"{len(judged)} samples after the warm-up", False)]
    note = "" if strict else SHORT
    series = [(each.at, each.rss_mb) for each in judged]
    memory, limit = growth(series) / beginning(series), MAX_MEMORY_GROWTH if strict else MAX_MEMORY_GROWTH_SHORT
    if loaded:
        verdicts = [Verdict("memory", f"≤ {limit:+.0%}{note}", f"{memory:+.2%}", memory <= limit)]
    else:
        verdicts = [Verdict("memory", "", f"{memory:+.2%}")]
    for what, (fixed, share, short) in MAX_GROWTH.items():
        points = [(each.at, float(getattr(each, what))) for each in judged]
        rise, more = growth(points), max(fixed, share * beginning(points)) if strict else short
        verdicts.append(Verdict(what, f"≤ {more:+.0f}{note}", f"{rise:+.1f}", rise <= more))
    called = [(each.at, each.p50_ms) for each in judged if each.p50_ms]
    return [*verdicts, some("samples with calls over the stream", len(called)), *_slower(called)]


def _slower(called: Series) -> list[Verdict]:
    """Shows how much slower calls have become in the best seconds, which other work of a machine hardly changes."""
    if not called:
        return []
    size = -(-len(called) // STRETCHES)
    best = [min(called[at : at + size], key=lambda point: point[1]) for at in range(0, len(called), size)]
    return [Verdict("p50 of the best seconds", "", f"{growth(best):+.2f} ms on {beginning(best):.2f} ms")]


def _done(record: Record) -> list[Verdict]:
    """Judges whether everything was played, and without a fault."""
    never = Verdict("kinds that never were", "0", ", ".join(record.never) or "0", not record.never)
    return [never, none("faults", record.fault_count)]
