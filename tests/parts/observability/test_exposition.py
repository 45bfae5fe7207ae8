"""Tests that what is written reads back as it was meant, by the parsers of Prometheus' own client, whatever names
hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from toolbus.parts.observability.exposition import (
    BOUNDS,
    OPENMETRICS,
    TEXT,
    Durations,
    Exemplar,
    Family,
    Sample,
    content_type_for,
    write,
)

NASTY = [
    'a"b',
    "a\nb",
    "# EOF",
    '\\"} 1\n# EOF\n',
    "\\n",
    "a\\",
    "{}",
    'x",tool="y',
    "",
    "a\r\nb",
    "\x00",
    "é日本",
    "\u2028",
]
COUNTS = [*range(1, len(BOUNDS) + 1)]


def in_both(families: list[Family]) -> list[tuple[str, list[tuple[str, dict[str, str], float]]]]:
    """Returns the samples that both parsers read: of each format its text, and (name, labels, value)."""
    texts = [
        (write(families, kind).decode(), read) for kind, read in ((OPENMETRICS, read_openmetrics), (TEXT, read_text))
    ]
    return [
        (text, [(each.name, each.labels, each.value) for family in read(text) for each in family.samples])
        for text, read in texts
    ]


@given(st.text() | st.sampled_from(NASTY), st.text() | st.sampled_from(NASTY), st.integers(0, 2**53))
def test_labels_read_back_as_they_were(source: str, tool: str, count: int) -> None:
    source, tool = (text.encode("utf-8", "replace").decode() for text in (source, tool))
    labels = {"source": source, "tool": tool}
    families = [
        Family("calls", "counter", "Calls.", [Sample(count, labels)]),
        Family("took_seconds", "histogram", "Times.", [Durations(labels, COUNTS, 99, 1.5)]),
        Family("up", "gauge", "Up.", [Sample(1, {})]),
    ]
    for _, samples in in_both(families):
        assert ("calls_total", labels, count) in samples
        assert ("took_seconds_bucket", labels | {"le": "+Inf"}, 99) in samples
        assert ("took_seconds_sum", labels, 1.5) in samples
        assert ("up", {}, 1) in samples
        assert len(samples) == 1 + len(BOUNDS) + 3 + 1


@given(st.text())
def test_help_is_one_line(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    for _, samples in in_both([Family("up", "gauge", text, [Sample(1, {})])]):
        assert samples == [("up", {}, 1)]


def test_each_kind_is_declared_as_its_format_wants_it() -> None:
    families = [
        Family("c", "counter", "A.", [Sample(1, {})]),
        Family("b", "info", "B.", [Sample(1, {"version": "1"})]),
        Family("s_seconds", "summary", "C.", [Durations({}, (), 3, 0.5)]),
        Family("empty", "gauge", "D.", []),
    ]
    openmetrics, text = (text for text, _ in in_both(families))
    assert openmetrics == (
        "# TYPE c counter\n# HELP c A.\nc_total 1\n"
        '# TYPE b info\n# HELP b B.\nb_info{version="1"} 1\n'
        "# TYPE s_seconds summary\n# HELP s_seconds C.\n# UNIT s_seconds seconds\n"
        "s_seconds_count 3\ns_seconds_sum 0.5\n# EOF\n"
    )
    assert text == (
        "# TYPE c_total counter\n# HELP c_total A.\nc_total 1\n"
        '# TYPE b_info gauge\n# HELP b_info B.\nb_info{version="1"} 1\n'
        "# TYPE s_seconds summary\n# HELP s_seconds C.\ns_seconds_count 3\ns_seconds_sum 0.5\n"
    )


def test_infinity_and_nan_are_written_by_their_names() -> None:
    for _, samples in in_both(
        [Family("g", "gauge", "G.", [Sample(math.inf, {"n": "1"}), Sample(math.nan, {"n": "2"})])]
    ):
        assert samples[0][2] == math.inf
        assert math.isnan(samples[1][2])


def test_an_exemplar_names_the_trace_of_a_call_in_its_bucket() -> None:
    short, long = Exemplar("ab" * 16, 0.003, 1_790_000_000.5), Exemplar("cd" * 16, 200.0, 1_790_000_001.0)
    exemplars = {2: short, len(BOUNDS): long}
    families = [Family("took_seconds", "histogram", "T.", [Durations({"tool": "t"}, COUNTS, 99, 1.5, exemplars)])]
    read = [each for family in read_openmetrics(write(families, OPENMETRICS).decode()) for each in family.samples]
    found = {each.labels["le"]: each.exemplar for each in read if each.exemplar}
    assert found.keys() == {"0.00390625", "+Inf"}
    assert found["+Inf"].labels == {"trace_id": "cd" * 16}
    assert (found["0.00390625"].value, float(found["0.00390625"].timestamp)) == (0.003, 1_790_000_000.5)
    assert "trace_id" not in write(families, TEXT).decode()  # that format has none


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", OPENMETRICS),
        ("*/*", OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", OPENMETRICS),
        ("application/openmetrics-text;q=0,text/plain", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=oops", TEXT),
        ("text/plain", TEXT),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;q=0.5", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/json", TEXT),
    ],
)
def test_the_format_is_what_the_client_prefers(accept: str, expected: str) -> None:
    assert content_type_for(accept) == expected
