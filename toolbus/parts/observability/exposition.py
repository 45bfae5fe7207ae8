"""Writes metrics as Prometheus and other collectors read them: OpenMetrics 1.0, and the text format 0.0.4.

Pure: families in, text out. Names and labels of ours are trusted; the values of labels may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from toolbus.bus.web_paths import quality_of

Kind = Literal["counter", "gauge", "histogram", "summary", "info"]

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = tuple(2.0**exponent for exponent in range(-10, 8))  # seconds: 1 ms to 128 s
# The lines of a histogram, with NUL for the text before each bound: one operation fills in all numbers.
_BUCKETS = "\n".join(f'\0le="{bound}"}} %d' for bound in (*map(repr, BOUNDS), "+Inf"))
_UNITS = ("seconds", "bytes")


class Exemplar(NamedTuple):
    """One call of a bucket: its trace, its seconds, and when it ended, in seconds since the epoch."""

    trace_id: str
    seconds: float
    ended: float


class Sample(NamedTuple):
    """One value of a family with its labels."""

    value: float
    labels: Mapping[str, str]


class Durations(NamedTuple):
    """One histogram of a family, or one summary, which has no buckets.

    Attributes:
        counts: how many took at most so many seconds as `BOUNDS` say; empty for a summary.
        observed, total: of all: how many, and their sum in seconds.
        exemplars: by the number of a bucket; that of the last bound + 1 is the one without a bound.
    """

    labels: Mapping[str, str]
    counts: Sequence[int]
    observed: int
    total: float
    exemplars: Mapping[int, Exemplar] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: without the suffixes of its samples, such as ``_total``.
        help: a sentence.
    """

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample | Durations]


def content_type_for(accept: str) -> str:
    """Returns the format that a client prefers, by its Accept header; OpenMetrics where both are welcome."""
    openmetrics = text = -1.0
    for part in (accept or "*/*").lower().split(","):
        media, _, parameters = part.partition(";")
        quality = quality_of(parameters)
        media = media.strip()
        if media in ("application/openmetrics-text", "*/*"):
            openmetrics = max(openmetrics, quality)
        if media in ("text/plain", "text/html", "text/*", "*/*"):  # a browser shows plain text
            text = max(text, quality)
    return TEXT if text > openmetrics or openmetrics <= 0.0 else OPENMETRICS


def write(families: Sequence[Family], content_type: str) -> bytes:
    """Returns families in one of the two formats."""
    is_openmetrics = content_type == OPENMETRICS
    lines: list[str] = []
    for family in families:
        if family.samples:
            _write_family(lines, family, is_openmetrics)
    if is_openmetrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode("utf-8", "replace")


def _write_family(lines: list[str], family: Family, is_openmetrics: bool) -> None:
    name, kind = family.name, family.kind
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    shown = name if is_openmetrics else name + suffix
    shown_kind = "gauge" if kind == "info" and not is_openmetrics else kind
    text = _escaped(family.help) if is_openmetrics else _escaped(family.help).replace('\\"', '"')
    lines += (f"# TYPE {shown} {shown_kind}", f"# HELP {shown} {text}")
    unit = name.rpartition("_")[2]
    if is_openmetrics and unit in _UNITS:
        lines.append(f"# UNIT {name} {unit}")
    for sample in family.samples:
        labels = _labels(sample.labels)
        if isinstance(sample, Sample):
            lines.append(f"{name}{suffix}{'{' + labels + '}' if labels else ''} {_number(sample.value)}")
        else:
            _write_durations(lines, name, labels, sample, is_openmetrics)


def _write_durations(lines: list[str], name: str, labels: str, durations: Durations, is_openmetrics: bool) -> None:
    if durations.counts:
        bucket = f"{name}_bucket{{{labels}{',' if labels else ''}"
        text = _BUCKETS % (*durations.counts, durations.observed)
        if is_openmetrics and durations.exemplars:
            each = text.split("\n")
            for index, one in durations.exemplars.items():
                each[index] += f' # {{trace_id="{one.trace_id}"}} {one.seconds!r} {one.ended!r}'
            text = "\n".join(each)
        lines.append(text.replace("\0", bucket))
    braces = f"{{{labels}}}" if labels else ""
    lines += (f"{name}_count{braces} {durations.observed}", f"{name}_sum{braces} {_number(durations.total)}")


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')  # a quarter of what a table takes


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return "NaN" if value != value else repr(value)
