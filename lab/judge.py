"""Holds what a run measured against its bounds: verdicts for counts, figures without a verdict for the machine's pace.

A count (done twice, lost, never answered, still growing) does not depend on the machine: a broken bound fails
the run. A time does, so it is shown and fails nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.load.workload import quantile

MAX_POINTS = 60  # of a slope: 1,770 pairs; more points are joined first
FIFTHS = 5
Series = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule or one figure.

    Attributes:
        bound: what the rule allows; empty for a figure, which has no verdict.
        measured: what was found, with its unit.
    """

    what: str
    bound: str
    measured: str
    good: bool = True

    @property
    def word(self) -> str:
        """How it ended; empty for a figure."""
        return ("good" if self.good else "BROKEN") if self.bound else ""


def figure(what: str, measured: float, unit: str = "", digits: int = 1) -> Verdict:
    """Returns a figure without a verdict."""
    return Verdict(what, "", f"{measured:,.{digits}f} {unit}".strip())


def milliseconds(what: str, seconds: Iterable[float], share: float) -> Verdict:
    """Returns a quantile of times as a figure."""
    return figure(what, quantile(seconds, share) * 1e3, "ms")


def at_most(what: str, bound: float, measured: float, unit: str = "") -> Verdict:
    """Judges a figure that must not be above a bound; NaN is."""
    return Verdict(what, f"≤ {bound:,.0f} {unit}".strip(), f"{measured:,.1f} {unit}".strip(), measured <= bound)


def none(what: str, count: int) -> Verdict:
    """Judges what must not happen at all."""
    return Verdict(what, "0", f"{count:,}", count == 0)


def some(what: str, count: int) -> Verdict:
    """Judges what must happen at least once."""
    return Verdict(what, "≥ 1", f"{count:,}", count > 0)


@dataclass(slots=True)
class Cases:
    """Collects the cases of one rule.

    Attributes:
        judged: how many cases there were; a rule without cases has shown nothing.
        broken: a sentence for each case that broke the rule.
    """

    rule: str
    judged: int = 0
    broken: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, rule: str, findings: Iterable[str | None]) -> Cases:
        """Collects all cases of a rule; None is one that fulfils it."""
        judged = [*findings]
        return cls(rule, len(judged), [finding for finding in judged if finding is not None])

    def take(self, finding: str | None) -> None:
        """Counts one case; None means that it fulfils the rule."""
        self.judged += 1
        if finding is not None:
            self.broken.append(finding)


# -- growth ----------------------------------------------------------------------------------------------------------


def growth(points: Series) -> float:
    """Returns by how much a series (x, y) rises from its beginning to its end, in the unit of y.

    The larger of two figures, since each is blind to what the other sees. The slope of Theil and Sen is that of a leak,
    however noisy, and a step in the middle hardly moves it. The median of the last fifth less that of the first shows
    steps, and understates a slope by a fifth. Spikes move neither, unless they fill half of the first or last fifth.
    """
    return max(slope(points), fifths(points)) if len(points) >= 2 else 0.0


def slope(points: Series) -> float:
    """Returns the slope of Theil and Sen (the median between all pairs of points) times the length of the series."""
    joined = thinned(points, MAX_POINTS)
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.combinations(joined, 2)]
    return statistics.median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0


def fifths(points: Series) -> float:
    """Returns the median of the last fifth less that of the first."""
    count = max(1, len(points) // FIFTHS)
    return statistics.median(y for _, y in points[-count:]) - beginning(points)


def beginning(points: Series) -> float:
    """Returns the median of the first fifth of a series."""
    return statistics.median(y for _, y in points[: max(1, len(points) // FIFTHS)])


def thinned(points: Series, limit: int) -> list[tuple[float, float]]:
    """Returns at most so many points: medians of neighbours."""
    size = -(-len(points) // limit) or 1
    return [
        (statistics.median(x for x, _ in part), statistics.median(y for _, y in part))
        for part in (points[at : at + size] for at in range(0, len(points), size))
    ]
