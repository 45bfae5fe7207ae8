"""Reads recordings, and compares what a tool answered then with what it answers now."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from toolbus.common.text import list_names, parse_json, quote, shorten
from toolbus.errors import InvalidRequest

FORMAT = "toolbus-recording"
VERSION = 1
MAX_LINE = 1 << 20  # characters of a line; a recorded call has at most a fourth
MAX_SHOWN = 60  # characters of a value in a difference
MAX_DIFFERENCES = 20  # of one call
SLOWER_BY = 0.02  # seconds: what takes this much longer at least may be called slower

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class RecordingLine:
    """One call of a recording.

    Attributes:
        schema: the hash of the tool's declaration then.
        result: what it answered, as `recording.described` has it.
        seconds: how long the caller waited.
        line: where it stands in the file, from 1.
        unplayable: why it cannot be played; "" where it can.
    """

    tool: str
    source: str
    schema: str
    arguments: Mapping[str, Any]
    user_id: str
    result: Mapping[str, Any]
    seconds: float
    line: int
    unplayable: str


def read_recording(path: Path) -> list[RecordingLine]:
    """Reads the calls of a file that `toolbus record` has written.

    Raises:
        InvalidRequest: it is no such file; the text names the line.
        OSError: it cannot be read.
    """
    calls = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number in itertools.count(1):
            text = file.readline(MAX_LINE)
            if not text:
                break
            if not text.endswith("\n") and len(text) < MAX_LINE and number > 1:
                break  # the last line of a recording that was cut off
            try:
                line = parse_json(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                raise InvalidRequest(f"{path}, line {number}: {quote(shorten(text.strip(), 60))} is no JSON object")
            if number == 1:
                if line.get("format") != FORMAT or line.get("version") != VERSION:
                    raise InvalidRequest(
                        f'{path} does not begin with {{"format":"{FORMAT}","version":{VERSION}}}: give a file that '
                        "`toolbus record` has written"
                    )
                continue
            calls.append(_call(line, path, number))
    if not calls:
        raise InvalidRequest(f"{path} has no calls: record while tools are called, as in `toolbus record calls.jsonl`")
    return calls


def _call(line: Mapping[str, Any], path: Path, number: int) -> RecordingLine:
    kinds = {"tool": str, "source": str, "schema": str, "result": dict, "seconds": int | float}
    wrong = [key for key, kind in kinds.items() if not isinstance(line.get(key), kind)]
    if wrong:
        raise InvalidRequest(f"{path}, line {number}: {list_names(wrong)} is missing, or of another type")
    arguments: Any = line.get("arguments")
    unplayable = ""
    if line.get("hidden"):
        unplayable = "its arguments have secrets, which a recording leaves out"
    elif not isinstance(arguments, dict) or arguments.keys() == {"too_long", "sha256"}:
        arguments, unplayable = {}, "its arguments are too long, or no JSON object"
    user_id = str(line.get("user_id") or "")
    tool, source, schema = (line[key] for key in ("tool", "source", "schema"))
    return RecordingLine(
        tool, source, schema, arguments, user_id, line["result"], float(line["seconds"]), number, unplayable
    )


# -- differences -----------------------------------------------------------------------------------------------------


class Volatile:
    """The fields that may differ from one call to the next.

    Args:
        patterns: names with dots between, as in `output.items.*.id`: `*` stands for one name or index, `**` for any
            number of them. A word without a dot is the name of a field anywhere.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [tuple(each.split(".")) if "." in each else ("**", each) for each in patterns]

    def __contains__(self, path: Path_) -> bool:
        names = tuple(map(str, path))
        return any(_fits(pattern, names) for pattern in self._patterns)


def _fits(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_fits(pattern[1:], names[skipped:]) for skipped in range(len(names) + 1))
    return bool(names) and pattern[0] in ("*", names[0]) and _fits(pattern[1:], names[1:])


_ABSENT = object()


def differences(before: Any, after: Any, volatile: Volatile, path: Path_ = ()) -> Iterator[str]:
    """Yields how two values differ, one sentence for each place; numbers are equal by their value."""
    if path and path in volatile:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key, _ABSENT), after.get(key, _ABSENT), volatile, (*path, key))
    elif isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(itertools.zip_longest(before, after, fillvalue=_ABSENT)):
            yield from differences(one, other, volatile, (*path, index))
    elif isinstance(before, bool) is not isinstance(after, bool) or before != after:
        yield f"{'.'.join(map(str, path))}: {_shown(before)} became {_shown(after)}"


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else shorten(json.dumps(value, ensure_ascii=False), MAX_SHOWN)


# -- the report ------------------------------------------------------------------------------------------------------

EQUAL, CHANGED, FAILED, SKIPPED = "equal", "changed", "failed", "skipped"


@dataclass(slots=True)
class ReplayResult:
    """What one recorded call came to.

    Attributes:
        outcome: equal, changed, failed (it ended otherwise than then: with an error, or without one) or skipped.
        notes: the differences, or why it was skipped.
        seconds: how long it took now.
    """

    call: RecordingLine
    outcome: str
    notes: Sequence[str] = ()
    seconds: float = 0.0


def judged(call: RecordingLine, result: Mapping[str, Any], seconds: float, volatile: Volatile) -> ReplayResult:
    """Compares a result with the recorded one."""
    found = list(itertools.islice(differences(call.result, result, volatile), MAX_DIFFERENCES))
    code_then, code_now = (each.get("error", {}).get("code") for each in (call.result, result))
    outcome = EQUAL if not found else CHANGED if code_then == code_now else FAILED
    return ReplayResult(call, outcome, found, seconds)


@dataclass(slots=True)
class ToolReport:
    """The calls of one tool as it was declared then.

    Attributes:
        schema_now: the hash of its declaration now; "" where it is not offered.
    """

    tool: str
    schema: str
    schema_now: str
    played: list[ReplayResult] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Returns how many calls came to an outcome."""
        return sum(each.outcome == outcome for each in self.played)

    @property
    def medians(self) -> tuple[float, float] | None:
        """How long its calls took then and take now, in seconds; None where nothing was played."""
        both = [(each.call.seconds, each.seconds) for each in self.played if each.outcome in (EQUAL, CHANGED)]
        return (median(then for then, _ in both), median(now for _, now in both)) if both else None

    @property
    def ratio(self) -> float | None:
        """How many times as long its calls take now."""
        return None if self.medians is None else self.medians[1] / max(self.medians[0], 1e-6)

    def is_slower(self, ratio: float) -> bool:
        """Tells whether its calls take more than so many times as long, and 20 ms more at least."""
        then, now = self.medians or (0.0, 0.0)
        return now > then * ratio and now - then > SLOWER_BY

    def described(self, slower: float) -> dict[str, Any]:
        """Returns it as a JSON object."""
        counts = {outcome: self.count(outcome) for outcome in (EQUAL, CHANGED, FAILED, SKIPPED)}
        schemas = {"schema": self.schema, "schema_now": self.schema_now}
        calls = [
            {"line": each.call.line, "outcome": each.outcome, "notes": list(each.notes)}
            for each in self.played
            if each.outcome != EQUAL
        ]
        times = {"ratio": None if self.ratio is None else round(self.ratio, 3), "slower": self.is_slower(slower)}
        return {"tool": self.tool, **schemas, "calls": len(self.played), **counts, **times, "not_equal": calls}
