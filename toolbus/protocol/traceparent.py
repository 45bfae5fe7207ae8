"""Reads and writes W3C trace context, level 1: which span of which trace a call belongs to.

https://www.w3.org/TR/trace-context-1/ has the rules. A header that breaks them counts as missing: no
call fails because of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TRACESTATE = 512  # bytes; the standard asks to pass on at least as many
_LENGTH = 55  # of version 00; later versions may be longer
_MAX_LENGTH = 512  # of a version that is not known here
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
# Matches what version 00 writes, without taking it apart: the trace is `[3:35]` of it, the span `[36:52]`, and the last
# digit says whether it is sampled.
is_plain = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
MAX_MEMBERS = 32  # of a tracestate
_MEMBER = re.compile(
    r"(?:[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_NO_TRACE, NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1  # the only flag of level 1


class TraceContext(NamedTuple):
    """A span of a trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        sampled: whether the span is recorded.
        text: as ``traceparent`` has it, in version 00.
    """

    trace_id: str
    span_id: str
    sampled: bool
    text: str

    @classmethod
    def of(cls, trace_id: str, span_id: str, *, sampled: bool) -> TraceContext:
        """Returns the context of a span."""
        return cls(trace_id, span_id, sampled, f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}")


def read_traceparent(text: str) -> TraceContext | None:
    """Reads a ``traceparent``; returns None where it breaks the standard.

    Of a version that is not known, the part that version 00 has is read, and is written as version 00 again.
    """
    if not _LENGTH <= len(text) <= _MAX_LENGTH or (match := _FORM.fullmatch(text)) is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or trace_id == _NO_TRACE or span_id == NO_SPAN:
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    if version == "00":
        return None if more else TraceContext(trace_id, span_id, sampled, text)
    return TraceContext.of(trace_id, span_id, sampled=sampled)


def read_tracestate(text: str) -> str:
    """Returns a ``tracestate`` unchanged; "" where it is too long, or a header cannot hold it."""
    return text if len(text) <= MAX_TRACESTATE and text.isascii() and text.isprintable() else ""


def is_tracestate(text: str) -> bool:
    """Tells whether a ``tracestate`` has the form of the standard.

    OpenTelemetry logs a warning with the text of any other: a caller could fill the log of others.
    """
    members = [member for each in text.split(",") if (member := each.strip(" \t"))]
    return len(members) <= MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
