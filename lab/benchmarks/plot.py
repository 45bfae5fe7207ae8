"""A line chart as SVG: axes logarithmic, or the upright one only; each line named at its end, for light and dark pages.

Knows nothing of what it draws. Colours are told apart by the colour-blind; rivals' lines are dashed besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 860, 470
LEFT, RIGHT, TOP, BOTTOM = 74, 190, 48, 58
LABEL_HEIGHT = 15
MARGIN = 1.25  # of the largest over the highest point, and of the smallest under the lowest
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
STYLE = """
  .page { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, sans-serif } .grid { stroke: #d8dee4 }
  .title { font-size: 15px; font-weight: 600 } .note { fill: #59636e; font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .note { fill: #9198a1 }
  }
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn.

    Attributes:
        lines: by name, the points (x, y), all above 0; the first line is drawn on top.
        ticks: what stands below which x.
        note: a small line at the bottom: how to repeat it.
        dashed: the lines that are.
        linear_x: whether equal steps of x are equally wide; x may be 0 then.
    """

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    ticks: Mapping[float, str]
    note: str = ""
    dashed: frozenset[str] = field(default_factory=frozenset)
    linear_x: bool = False


def svg(chart: Chart) -> str:
    """Returns the picture."""
    xs, ys = [*chart.ticks], [y for points in chart.lines.values() for _, y in points]
    across = (_Even if chart.linear_x else _Scale)(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _Scale(min(ys) / MARGIN, max(ys) * MARGIN, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        text(LEFT, 26, chart.title, "title"),
        *_axes(chart, across, up),
        *_lines(chart, across, up),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Scale:
    """Places a figure on an axis by its logarithm."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high, self._begin, self._end = low, high, begin, end

    def __call__(self, figure: float) -> float:
        whole = math.log(self.high / self.low) or 1.0
        return self._begin + math.log(figure / self.low) / whole * (self._end - self._begin)

    def marks(self) -> list[float]:
        """Returns round figures to mark: powers of ten, and 2 and 5 times those where there are few."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            marks = [step * 10.0**power for power in powers for step in steps]
            inside = [mark for mark in marks if self.low <= mark <= self.high]
            if len(inside) >= 3:
                break
        return inside


class _Even(_Scale):
    """Places a figure on an axis by itself."""

    def __call__(self, figure: float) -> float:
        whole = (self.high - self.low) or 1.0
        return self._begin + (figure - self.low) / whole * (self._end - self._begin)


def _axes(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for mark in up.marks():
        y = up(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{mark:,.10g}", anchor="end"))
    for tick, name in chart.ticks.items():
        x = across(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(text(x, HEIGHT - BOTTOM + 17, name, anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 34, chart.x_title, anchor="middle"))
    parts.append(text(LEFT, TOP - 6, chart.y_title))
    parts.append(text(LEFT, HEIGHT - 8, chart.note, "note"))
    return parts


def _lines(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    drawn, ends = [], []
    for number, (name, points) in enumerate(chart.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [(across(x), up(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        width = 3 if number == 0 else 1.8
        dashes = ' stroke-dasharray="5 3"' if name in chart.dashed else ""
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>' + dots)
        ends.append((placed[-1], name, colour))
    return [*reversed(drawn), *_names(ends)]


def _names(ends: Sequence[tuple[tuple[float, float], str, str]]) -> list[str]:
    """Writes names beside the ends of lines, pushed apart where they would cover each other."""
    parts = []
    ordered = sorted(ends, key=lambda end: end[0][1])
    at = [y for (_, y), _, _ in ordered]
    for place in range(1, len(at)):
        at[place] = max(at[place], at[place - 1] + LABEL_HEIGHT)
    lowest = HEIGHT - BOTTOM
    for place in reversed(range(len(at))):
        at[place] = min(at[place], lowest - (len(at) - 1 - place) * LABEL_HEIGHT)
    beside = WIDTH - RIGHT + 22
    for ((x, y), name, colour), label in zip(ordered, at, strict=True):
        parts.append(
            f'<polyline points="{x + 4:.1f},{y:.1f} {beside - 4},{label:.1f}" fill="none" stroke="{colour}" '
            'stroke-width="0.7"/>'
        )
        parts.append(f'<text x="{beside}" y="{label + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    return parts


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Returns a line of text at a place."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
