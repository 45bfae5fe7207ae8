from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import TraceState

from toolbus.protocol.traceparent import TraceContext, is_tracestate, read_traceparent, read_tracestate

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"), [(SAMPLED, True), (f"00-{TRACE}-{SPAN}-00", False), (f"00-{TRACE}-{SPAN}-03", True)]
)
def test_a_traceparent_is_read_and_stays_as_it_was_written(text: str, sampled: bool) -> None:
    assert read_traceparent(text) == TraceContext(TRACE, SPAN, sampled, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-1-2-01",
        SAMPLED.upper(),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"{SAMPLED}-more",
        f"{SAMPLED} ",
        f"{SAMPLED}\n",
        f" {SAMPLED}",
        f"00-{TRACE}-{SPAN}-0g",
        f"0-{TRACE}-{SPAN}-001",
        f"00_{TRACE}_{SPAN}_01",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 1_000,
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",
    ],
)
def test_a_traceparent_that_breaks_the_standard_counts_as_none(text: str) -> None:
    assert read_traceparent(text) is None


@pytest.mark.parametrize("text", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes-later"])
def test_of_a_later_version_that_is_read_which_ours_has(text: str) -> None:
    assert read_traceparent(text) == TraceContext(TRACE, SPAN, True, SAMPLED)


@given(st.text())
def test_no_text_makes_the_reader_fail(text: str) -> None:
    read_traceparent(text)
    read_tracestate(text)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_reads_back(trace: int, span: int, sampled: bool) -> None:
    context = TraceContext.of(f"{trace:032x}", f"{span:016x}", sampled=sampled)
    assert read_traceparent(context.text) == context


@pytest.mark.parametrize(
    ("text", "read"), [("a=1,b=2", "a=1,b=2"), ("x" * 513, ""), ("a=1\r\nEvil: 1", ""), ("a=\u00e9", "")]
)
def test_a_tracestate_is_passed_on_unread_unless_it_is_no_header_or_too_long(text: str, read: str) -> None:
    assert read_tracestate(text) == read


@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        ("", True),
        ("a=1, vendor@x=2,", True),
        (",".join(f"k{n}=1" for n in range(32)), True),
        (",".join(f"k{n}=1" for n in range(33)), False),
        ("A=1", False),
        ("what=is=this", False),
        ("no member at all", False),
    ],
)
def test_a_tracestate_without_the_form_of_the_standard_is_recognized(text: str, has_form: bool) -> None:
    assert is_tracestate(text) == has_form


@given(st.text(alphabet="ab1=,@ -*\t", max_size=40))
def test_of_what_has_the_form_opentelemetry_warns_of_nothing(text: str) -> None:
    with patch("opentelemetry.trace.span._logger.warning") as warning:
        if is_tracestate(text):
            TraceState.from_header([text])
    warning.assert_not_called()
