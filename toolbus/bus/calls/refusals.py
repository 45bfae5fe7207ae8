"""Builds the errors of calls that the bus refuses: each names the value, the rule and how to fix it.

Backpressure is here too: a full caller or tool is OVERLOADED at once, with a hint when to retry.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from toolbus.bus.access.quota import CALLS_PER_SECOND, Quota
from toolbus.bus.calls.call import Caller
from toolbus.bus.calls.call_records import More
from toolbus.bus.catalog.entry import Declaration, Entry, has_room
from toolbus.bus.catalog.schema import ArgumentChecker
from toolbus.common.text import quote
from toolbus.errors import CallError, Code, Stage
from toolbus.protocol.tool import MAX_CALL_ID, Limits, Tool
from toolbus.v1 import tool_pb2 as pb

MAX_RETRY_SECONDS = 86_400.0  # of a tool's own hint when to retry: a day
RETRY_SECONDS = 0.05  # the hint when to retry at a full handler: about as long as a call takes
AWAY_SECONDS = 60.0  # the hint for a tool of another bus that is away: its caller learns it now, and does not wait
MAX_TOOLS_SHOWN = 20  # names of known tools in the error for an unknown one


class Refused(Exception):
    """A call that is not sent; becomes its result. One that depends on the tool or caller only serves many calls."""

    def __init__(self, code: Code, message: str, **more: Any) -> None:
        self.error = CallError(code, message, stage=Stage.NOT_DISPATCHED, **more)
        self.record: More | None = None  # what its records say; made for the first call
        super().__init__(message)

    @cached_property
    def result(self) -> pb.ToolResult:
        """The result on the wire, but for the call's id."""
        return pb.ToolResult(is_error=True, error=self.error.to_wire())


def bounded_hint(seconds: float) -> float:
    """Returns a tool's own hint when to retry, bounded: 0 (no hint) to a day."""
    return min(seconds, MAX_RETRY_SECONDS) if seconds > 0 else 0.0  # NaN counts as no hint


def lacks_permission(source: str) -> str:
    """Returns why a source may not offer tools, as a sentence."""
    return f"source {source!r} lacks the permission 'tools': an operator grants it with `toolbus access grant {source}`"


def bad_call_id(call_id: str) -> Refused:
    """Refuses a call_id that is empty, too long, or in flight already."""
    if not call_id:
        return Refused(Code.INVALID_ARGUMENTS, "call_id is empty: give each call an id of its own")
    if len(call_id) > MAX_CALL_ID:
        return Refused(Code.INVALID_ARGUMENTS, f"call_id has {len(call_id)} characters: use at most {MAX_CALL_ID}")
    return Refused(
        Code.INVALID_ARGUMENTS,
        f"call_id {call_id!r} is already in flight on this stream: give each call an id of its own",
    )


@runtime_checkable
class Advising(Protocol):
    """A handler whose operator can decide that its arguments are not checked; `advice` says how, as a clause."""

    advice: str


def invalid(text: str, arguments: object, checker: ArgumentChecker, declaration: Declaration) -> Refused:
    """Refuses arguments that are not an object, or break the schema."""
    if type(arguments) is not dict:
        return Refused(Code.INVALID_ARGUMENTS, f"the arguments are {quote(text)}, they must be a JSON object")
    advice = next((f" ({each.advice})" for each in declaration.handlers if isinstance(each, Advising)), "")
    return Refused(Code.INVALID_ARGUMENTS, checker.explain(arguments) + advice)


def must_fit(text: str, context: pb.CallContext | None, more: int, name: str, largest: int) -> None:
    """Refuses arguments that are larger than the plugin can receive.

    Args:
        more: characters of what comes in addition to them.
    """
    size = len(text.encode()) + (context.ByteSize() if context is not None else 0) + 4 * more
    if size > largest:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"the arguments have {size} bytes; the plugin of {name!r} receives at most {largest}: send less",
            limit=("max_message_bytes", largest),
        )


def declared_as(entry: Entry, schema_hash: str) -> Declaration:
    """Returns the declaration that a caller knows by its hash, if a live session still offers it.

    Raises:
        Refused: the tool has changed since.
    """
    declaration = entry.declarations.get(schema_hash)
    if declaration is not None:
        return declaration
    raise Refused(
        Code.CATALOG_STALE,
        f"tool {entry.name!r} has changed since it was listed"
        f"{explain_change(entry.former.get(schema_hash), entry.tool)}. List the tools again and call it as it is now.",
    )


def no_room(entry: Entry, declaration: Declaration, caller: Caller) -> Refused:
    """Refuses a call of a tool whose sessions do not answer, are full, or have what is free for other callers."""
    answering = [handler for handler in declaration.handlers if handler.takes_calls]
    if not answering:
        return Refused(
            Code.UNAVAILABLE,
            f"tool {entry.name!r} does not answer: its plugin has stopped answering heartbeats, try again later",
            retry_safe=True,
            retry_after_seconds=1.0,
        )
    room = sum(handler.max_in_flight for handler in answering)
    if any(map(has_room, answering)):
        held = sum(handler.slots.held.get(caller.budget, 0) for handler in answering)
        calls = f"{held} of the {room} calls in flight that tool {entry.name!r} takes"
        return overloaded(
            f"{caller.source!r} has {calls}, its share: the rest is for other callers", ("calls_in_flight", held)
        )
    return overloaded(f"tool {entry.name!r} has {room} calls in flight, all that it takes", ("calls_in_flight", room))


def window_full(source: str, limit: int) -> Refused:
    """Refuses a call of a caller that has as many calls in flight as it may."""
    return overloaded(f"{source!r} has {limit} calls in flight on this session, its limit", ("calls_in_flight", limit))


def identity_full(caller: Caller, quota: Quota) -> Refused:
    """Refuses a call of an identity that has as many calls in flight as it may."""
    limit = quota.in_flight_limit or 0
    reason = f"{caller.principal.identity.shown} may have {limit} calls in flight over all its sessions, and has them"
    return overloaded(reason, ("calls_in_flight", limit))


def too_fast(caller: Caller, quota: Quota, wait: float) -> Refused:
    """Refuses a call of an identity that makes more calls a second than it may.

    Args:
        wait: seconds until it may make more.
    """
    rate = quota.rate or 0.0
    reason = f"{caller.principal.identity.shown} may make {rate:g} calls a second, and makes more"
    return overloaded(reason, (CALLS_PER_SECOND, rate), wait)


def over_budget(caller: Caller, held: int, limits: Limits) -> Refused:
    """Refuses a call for which the bus would hold too many bytes, in all or for its caller's source.

    Args:
        held: bytes of arguments that it would hold in all.
    """
    if held > limits.held_bytes:
        return overloaded("the bus holds as many bytes of arguments as it may", ("held_bytes", limits.held_bytes))
    return overloaded(
        f"the bus holds as many bytes of arguments as it may for {caller.source!r}",
        ("held_bytes_per_source", limits.held_bytes_per_source),
    )


def overloaded(reason: str, limit: tuple[str, float], retry_after_seconds: float = RETRY_SECONDS) -> Refused:
    """Refuses a call because a limit is reached for the moment (backpressure)."""
    return Refused(
        Code.OVERLOADED,
        f"{reason}: try again later",
        retry_safe=True,
        limit=limit,
        retry_after_seconds=retry_after_seconds,
    )


def clamped_timeout(timeout: float, longest: float) -> float:
    """Returns a timeout of at most ``longest``, and refuses one that is not positive."""
    if timeout > 0.0:
        return min(timeout, longest)
    raise Refused(
        Code.INVALID_ARGUMENTS, f"timeout_seconds is {timeout:g}: use more than 0, or 0 for the tool's own timeout"
    )


def explain_change(before: Tool | None, after: Tool) -> str:
    """Returns what changed between two declarations, for the caller that knows the older one; "" where it is lost."""
    if before is None:
        return ""
    changes = []
    if before.description != after.description:
        changes.append("its description")
    old, new = before.parameters, after.parameters
    required = set(_names(new.get("required")))
    reported: set[str] = set()  # arguments that were added or removed: their being required needs no line of its own
    for keyword in ("properties", "required"):
        before_value, value = old.get(keyword), new.get(keyword)
        old_names, new_names = set(_names(before_value)) - reported, set(_names(value)) - reported
        added, removed = new_names - old_names, old_names - new_names
        changes += [f"new {'required ' if name in required else ''}argument {name!r}" for name in sorted(added)]
        noun = "argument" if keyword == "properties" else "required argument"
        changes += [f"no {noun} {name!r} any more" for name in sorted(removed)]
        reported |= added | removed
        if isinstance(before_value, dict) and isinstance(value, dict):
            changes += [
                f"other rules for {name!r}"
                for name in sorted(old_names & new_names)
                if before_value[name] != value[name]
            ]
    if not changes and old != new:
        changes.append("its parameters")
    return ": " + ", ".join(changes) if changes else ""


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, dict | list) else []
