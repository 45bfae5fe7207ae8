"""A soak as SVG: memory, latency and load over time, one panel below the other, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

from lab.benchmarks.plot import COLOURS, STYLE, text
from lab.soak.sample import Sample
from lab.soak.verdict import thinned, warm_up

WIDTH, LEFT, RIGHT = 860, 74, 150
TOP, PANEL, GAP, BOTTOM = 48, 170, 40, 58
MAX_POINTS = 240  # of a line: more are medians of neighbours
LABEL_HEIGHT = 16
MARGIN = 0.1  # of a panel, over the highest and under the lowest point
MORE_STYLE = ".warm-up { fill: #818b98; opacity: 0.15 }"
Look = Callable[[Sample], float]


class Scale(Enum):
    """How the upward axis of a panel is divided."""

    FROM_ZERO = "from zero"
    FITTING = "from the lowest to the highest point"
    LOGARITHMIC = "by its logarithm, for what may be a hundred times as much the next second"


@dataclass(frozen=True, slots=True)
class Panel:
    """What one panel shows: lines by name, in one unit.

    Attributes:
        scale: where the axis begins, and what is equally far apart on it.
    """

    title: str
    lines: Mapping[str, Look]
    scale: Scale


PANELS = (
    Panel(
        "memory of the bus, MB",
        {"resident": lambda s: s.rss_mb, "shared out": lambda s: s.pss_mb, "its own": lambda s: s.uss_mb},
        Scale.FITTING,
    ),
    Panel(
        "latency of calls, ms",
        {
            "stream p99": lambda s: s.p99_ms,
            "stream p50": lambda s: s.p50_ms,
            "REST p50": lambda s: s.rest_p50_ms,
            "callback p50": lambda s: s.callback_p50_ms,
        },
        Scale.LOGARITHMIC,
    ),
    Panel(
        "load, each second",
        {"calls": lambda s: s.calls, "visits × 10": lambda s: s.visits * 10, "open files": lambda s: s.files},
        Scale.FROM_ZERO,
    ),
)


def svg(samples: Sequence[Sample], command: str) -> str:
    """Returns the picture."""
    height = TOP + len(PANELS) * (PANEL + GAP) - GAP + BOTTOM
    title = "A bus under steady load"
    longest = max((sample.at for sample in samples), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}{MORE_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        text(LEFT, 22, title, "title"),
    ]
    for number, panel in enumerate(PANELS):
        parts += _panel(panel, samples, TOP + number * (PANEL + GAP), longest)
    below = height - BOTTOM
    parts += [text(_across(at, longest), below + 17, name, anchor="middle") for at, name in _moments(longest)]
    parts += [
        text((LEFT + WIDTH - RIGHT) / 2, below + 34, "minutes" if longest >= 120 else "seconds", anchor="middle"),
        text(LEFT, height - 8, f"Medians of neighbouring seconds; grey: warm-up. Repeat with: {command}", "note"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, samples: Sequence[Sample], top: float, longest: float) -> list[str]:
    lines = {
        name: thinned([(each.at, look(each)) for each in samples if look(each)], MAX_POINTS)
        for name, look in panel.lines.items()
    }
    drawn = [y for points in lines.values() for _, y in points] or [1.0, 2.0]
    place = math.log10 if panel.scale is Scale.LOGARITHMIC else float
    low = 0.0 if panel.scale is Scale.FROM_ZERO else place(min(drawn))
    edge = (place(max(drawn)) - low) * MARGIN or 0.5
    low, high = (low if panel.scale is Scale.FROM_ZERO else low - edge), place(max(drawn)) + edge

    def up(y: float) -> float:
        return top + PANEL * (high - place(y)) / (high - low)

    warm = _across(warm_up(longest), longest) - LEFT
    parts = [
        f'<rect class="warm-up" x="{LEFT}" y="{top}" width="{warm:.1f}" height="{PANEL}"/>',
        text(LEFT, top - 6, panel.title),
    ]
    for mark in _powers(low, high) if panel.scale is Scale.LOGARITHMIC else _marks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(mark):.1f}" y2="{up(mark):.1f}"/>')
        parts.append(text(LEFT - 8, up(mark) + 4, f"{mark:,.10g}", anchor="end"))
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number]
        path = " ".join(f"{_across(x, longest):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        beside = top + (number + 1) * LABEL_HEIGHT
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{beside}" style="fill:{colour}">{escape(name)}</text>')
    return parts


def _across(at: float, longest: float) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * at / longest


def _moments(longest: float) -> list[tuple[float, str]]:
    """Returns what stands below which second."""
    unit = 60.0 if longest >= 120 else 1.0
    return [(mark * unit, f"{mark:g}") for mark in _marks(0.0, longest / unit)]


def _powers(low: float, high: float) -> list[float]:
    """Returns the powers of ten between two logarithms, and 2 and 5 times those where there are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1.0,), (1.0, 2.0, 5.0)):
        marks = [step * 10.0**power for power in powers for step in steps if low <= math.log10(step) + power <= high]
        if len(marks) >= 3:
            break
    return marks


def _marks(low: float, high: float) -> list[float]:
    """Returns three to eight round figures between two."""
    step = 1e-3
    while (high - low) / step > 8:
        step *= 2.5 if f"{step:.0e}".startswith("2") else 2
    first = -(-low // step)
    return [round((first + number) * step, 6) for number in range(int((high - first * step) / step) + 1)]
