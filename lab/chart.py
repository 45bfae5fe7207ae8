"""Draws line charts as SVG, one panel below the other, for light and dark pages.

Each line has its name at its end; colour-blind readers can distinguish the colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

WIDTH, LEFT, RIGHT = 860, 74, 190
TOP, GAP, BOTTOM = 48, 40, 58
ONLY_PANEL, PANEL = 364, 170  # heights: of the only panel, and of one among several
LABEL_HEIGHT = 15
MARGIN = 0.05  # of a panel, over the highest and under the lowest point
MAX_DOTS = 20  # points of a line that are marked; more would cover it
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
STYLE = """
  .page { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, sans-serif } .grid { stroke: #d8dee4 }
  .title { font-size: 15px; font-weight: 600 } .note { fill: #59636e; font-size: 11px }
  .shade { fill: #818b98; opacity: 0.15 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .note { fill: #9198a1 }
  }
"""
Points = Sequence[tuple[float, float]]


class Scale(Enum):
    """How an axis is divided."""

    LOGARITHMIC = "by its logarithm"
    FITTING = "from the lowest to the highest point"
    FROM_ZERO = "from zero"


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines in one unit.

    Attributes:
        lines: by name, the points (x, y); above 0 where the scale is logarithmic. The first line is drawn on top.
    """

    title: str
    lines: Mapping[str, Points]
    scale: Scale = Scale.LOGARITHMIC


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels over one common axis.

    Attributes:
        ticks: the label below each marked x; the axis reaches from the first to the last.
        note: a small line at the bottom: how to repeat it.
        dashed: the names of dashed lines.
        shaded_to: the x up to which the background is grey.
    """

    title: str
    x_title: str
    panels: Sequence[Panel]
    ticks: Mapping[float, str]
    note: str = ""
    dashed: frozenset[str] = frozenset()
    x_scale: Scale = Scale.LOGARITHMIC
    shaded_to: float | None = None


class _Axis:
    """Places figures between two ends."""

    def __init__(self, scale: Scale, figures: Sequence[float], ends: tuple[float, float], margin: float) -> None:
        self._place = math.log10 if scale is Scale.LOGARITHMIC else float
        low = 0.0 if scale is Scale.FROM_ZERO else self._place(min(figures))
        high = self._place(max(figures))
        edge = ((high - low) * margin or 0.5) if margin else 0.0
        self._low, self._high = low if scale is Scale.FROM_ZERO else low - edge, high + edge
        self._begin, self._end = ends
        self._is_logarithmic = scale is Scale.LOGARITHMIC

    def __call__(self, figure: float) -> float:
        length = (self._high - self._low) or 1.0
        return self._begin + (self._place(figure) - self._low) / length * (self._end - self._begin)

    def marks(self) -> list[float]:
        """Returns round figures to mark, about three to eight."""
        if not self._is_logarithmic:
            return round_marks(self._low, self._high)
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            marks = [step * 10.0**power for power in powers for step in steps]
            inside = [mark for mark in marks if self._low <= math.log10(mark) <= self._high]
            if len(inside) >= 3:
                break
        return inside


def round_marks(low: float, high: float) -> list[float]:
    """Returns three to eight round figures between two."""
    step = 1e-3
    while (high - low) / step > 8:
        step *= 2.5 if f"{step:.0e}".startswith("2") else 2
    first = -(-low // step)
    return [round((first + number) * step, 6) for number in range(int((high - first * step) / step) + 1)]


def svg(chart: Chart) -> str:
    panel_height = ONLY_PANEL if len(chart.panels) == 1 else PANEL
    bottom = TOP + len(chart.panels) * (panel_height + GAP) - GAP
    height = bottom + BOTTOM
    across = _Axis(chart.x_scale, [*chart.ticks], (LEFT, WIDTH - RIGHT), 0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(chart.title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        _text(LEFT, 24, chart.title, "title"),
    ]
    for number, panel in enumerate(chart.panels):
        top = TOP + number * (panel_height + GAP)
        parts += _panel(chart, panel, across, top, top + panel_height)
    parts += [_text(across(x), bottom + 17, name, anchor="middle") for x, name in chart.ticks.items()]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, chart.x_title, anchor="middle"))
    parts += [_text(LEFT, height - 8, chart.note, "note"), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(chart: Chart, panel: Panel, across: _Axis, top: float, bottom: float) -> Iterator[str]:
    figures = [y for points in panel.lines.values() for _, y in points] or [1.0, 2.0]
    up = _Axis(panel.scale, figures, (bottom, top), MARGIN)
    yield _text(LEFT, top - 6, panel.title)
    if chart.shaded_to is not None:
        width = across(chart.shaded_to) - LEFT
        yield f'<rect class="shade" x="{LEFT}" y="{top}" width="{width:.1f}" height="{bottom - top}"/>'
    for mark in up.marks():
        yield _line(LEFT, up(mark), WIDTH - RIGHT, up(mark), 'class="grid"')
        yield _text(LEFT - 8, up(mark) + 4, f"{mark:,.10g}", anchor="end")
    for x in chart.ticks:
        yield _line(across(x), top, across(x), bottom, 'class="grid"')
    ends = []
    lines = []
    for number, (name, points) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(across(x), up(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        width = 3 if number == 0 and len(places) <= MAX_DOTS else 1.8
        dashes = ' stroke-dasharray="5 3"' if name in chart.dashed else ""
        line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
        dots = places if len(places) <= MAX_DOTS else ()
        lines.append(line + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots))
        ends.append((places[-1] if places else (WIDTH - RIGHT, top), name, colour))
    yield from reversed(lines)
    yield from _labels(ends, bottom)


def _labels(ends: Sequence[tuple[tuple[float, float], str, str]], bottom: float) -> Iterator[str]:
    """Yields names beside the ends of lines, pushed apart where they would cover each other."""
    ordered = sorted(ends, key=lambda end: end[0][1])
    at = [y for (_, y), _, _ in ordered]
    for place in range(1, len(at)):
        at[place] = max(at[place], at[place - 1] + LABEL_HEIGHT)
    for place in reversed(range(len(at))):
        at[place] = min(at[place], bottom - (len(at) - 1 - place) * LABEL_HEIGHT)
    beside = WIDTH - RIGHT + 22
    for ((x, y), name, colour), label in zip(ordered, at, strict=True):
        yield _line(x + 4, y, beside - 4, label, f'stroke="{colour}" stroke-width="0.7"')
        yield f'<text x="{beside}" y="{label + 4:.1f}" style="fill:{colour}">{escape(name)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
