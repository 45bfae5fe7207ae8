"""Says everything that is known of one line of a table: of a tool, a source, a call with its nested calls, an error.

Texts are as the bus sent them: what draws them cleans them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from toolbus.parts.console.top import units
from toolbus.parts.console.top.bus_state import BARS, BusState, is_failure
from toolbus.parts.console.top.views import CALLS, CallLine, FailureLine, Selection, SourceLine, ToolLine, select

Fact: TypeAlias = tuple[str, str]
"""What it is, and its value; a label of "" continues the fact before it."""

MAX_TREE = 200  # calls of a tree
MAX_NEWEST = 10  # calls of a tool
_OF_SESSION = (*("state", "kind", "identity", "peer"), *("in_flight", "max_in_flight", "pending", "stuck", "tools"))


def title_of(line: Any) -> str:
    match line:
        case ToolLine():
            return f"Tool {line.tool.name}"
        case SourceLine():
            return f"Source {line.name}"
        case CallLine():
            return f"Call of {line.call.get('name', '')}"
        case _:
            return f"Errors of {line.newest.get('name', '')}"


def facts_of(line: Any, state: BusState, now: float) -> list[Fact]:
    """Returns what is known of a line now; it may have changed since the line was made."""
    match line:
        case ToolLine():
            return _of_tool(line, state, now)
        case SourceLine():
            return _of_source(line, state)
        case CallLine():
            return _of_call(_newest_of(line, state, now), state, now)
        case _:
            return _of_failure(line, state, now)


def _of_tool(line: ToolLine, state: BusState, now: float) -> list[Fact]:
    tool = state.tools.get(line.tool.key, line.tool)
    facts = [
        ("name", tool.name),
        ("source", tool.source),
        ("calls", units.count(tool.calls)),
        ("errors", units.count(tool.failed)),
        ("calls/s", f"{units.rate(tool.trail.rate(now))}  {units.sparkline(tool.trail.course(now), BARS)}"),
        ("p50, p95", f"{units.duration(tool.p50)}, {units.duration(tool.p95)}"),
        ("last call", units.clock(tool.last_ended)),
    ]
    calls = select(CALLS, state, now, Selection())
    own = [each for each in calls if (str(each.call.get("source", "")), str(each.call.get("name", ""))) == tool.key]
    facts += _column("newest calls", [_short(each) for each in own[:MAX_NEWEST]])
    failures = [each for key, each in state.failures.items() if key[:2] == tool.key]
    facts += _column("errors seen", [f"{each.count} × {each.newest['outcome'].lower()}" for each in failures])
    return facts


def _of_source(line: SourceLine, state: BusState) -> list[Fact]:
    entry = state.sources.get(line.name, line.entry)
    facts = [("source", line.name), *((_label(field), _value(entry[field])) for field in entry if field != "source")]
    sessions = [each for each in state.sessions.values() if each.get("source") == line.name]
    for session in sessions:
        facts += [("", ""), ("session", str(session.get("session", "")))]
        facts += [
            (_label(field), _value(session[field])) for field in _OF_SESSION if session.get(field) not in (None, "")
        ]
    return facts


def _of_failure(line: FailureLine, state: BusState, now: float) -> list[Fact]:
    failure = state.failures.get(line.key, line.failure)
    count = f"{units.count(failure.count)} since this program began to read; the newest one:"
    newest = CallLine(failure.newest, False, failure.newest.get("seconds"))
    return [("errors", count), ("", ""), *_of_call(newest, state, now)]


def _newest_of(line: CallLine, state: BusState, now: float) -> CallLine:
    """Returns a call as it is known now: one that ran may have ended."""
    known = select(CALLS, state, now, Selection())
    return next((each for each in known if each.key == line.key), line)


def _of_call(line: CallLine, state: BusState, now: float) -> list[Fact]:
    call = line.call
    failure: Mapping[str, Any] = call.get("failure") or {}
    limit = failure.get("limit")
    facts = [("outcome", line.outcome), ("duration", units.duration(line.seconds)), ("stage", line.stage or "-")]
    if failure:
        facts += [
            ("message", str(failure.get("message") or "- (the bus does not record contents)")),
            ("retry safe", _value(failure.get("retry_safe"))),
            ("limit", _limit(limit)),
        ]
    facts += [
        *((_label(field), str(call[field])) for field in _OF_CALL if call.get(field)),
        ("started", units.clock(call.get("started"))),
    ]
    if line.running and call.get("deadline") is not None:
        left = float(call["deadline"]) - now
        facts.append(("deadline", f"in {units.duration(left)}" if left > 0 else "passed"))
    if not line.running:
        facts.append(("sizes", f"{call.get('arguments_size', 0)} in, {call.get('output_size', 0)} out (characters)"))
    facts += _column("repairs", [f"{each['path']}: {each['from']} to {each['to']}" for each in call.get("repairs", ())])
    facts += [(field, str(call[field])) for field in ("arguments", "output") if call.get(field) is not None]
    tree = list(nested_calls(line, state, now))
    return facts + (_column("calls", tree) if len(tree) > 1 else [])


_OF_CALL = ("name", "source", "caller", "user_id", "call_id", "id", "parent", "trace_id", "round", "order")


def nested_calls(line: CallLine, state: BusState, now: float) -> Iterator[str]:
    """Yields the lines of the tree of calls that a call belongs to; `→` stands before the call itself."""
    lines = {str(each.call["id"]): each for each in select(CALLS, state, now, Selection()) if each.call.get("id")}
    lines.setdefault(str(line.call.get("id", "")), line)
    children: dict[str, list[CallLine]] = {}
    for each in sorted(lines.values(), key=lambda each: each.call.get("started") or 0.0):
        children.setdefault(str(each.call.get("parent") or ""), []).append(each)
    root, seen = line, {line.key}
    while (above := lines.get(str(root.call.get("parent") or ""))) is not None and above.key not in seen:
        root = above
        seen.add(root.key)
    waiting: list[tuple[CallLine, str, str]] = [(root, "", "")]  # what stands before it, and before its children
    drawn: set[tuple[str, ...]] = set()  # ids that go round in a circle end here
    while waiting and len(drawn) < MAX_TREE:
        each, before, below = waiting.pop()
        if each.key in drawn:
            continue
        drawn.add(each.key)
        yield f"{before}{'→ ' if each.key == line.key else ''}{_short(each)}"
        for number, child in enumerate(reversed(children.get(str(each.call.get("id") or "-"), []))):
            mark, line_below = ("├─ ", "│  ") if number else ("└─ ", "   ")  # the last one comes first here
            waiting.append((child, below + mark, below + line_below))


def _short(line: CallLine) -> str:
    parts = [str(line.call.get("name", "")), line.outcome, units.duration(line.seconds)]
    if line.running or is_failure(line.call):
        parts.append(line.stage)
    return "  ".join(part for part in parts if part)


def _column(label: str, values: list[str]) -> list[Fact]:
    return [(label if not number else "", value) for number, value in enumerate(values)]


def _limit(limit: Any) -> str:
    if isinstance(limit, Mapping):
        return f"{limit.get('name')} = {limit.get('value')}"
    return units.UNKNOWN


def _label(field: str) -> str:
    return (field if field in ("call_id", "trace_id") else field.removesuffix("_id")).replace("_", " ")


def _value(value: Any) -> str:
    match value:
        case True:
            return "yes"
        case False:
            return "no"
        case None:
            return units.UNKNOWN
        case _:
            return str(value)
