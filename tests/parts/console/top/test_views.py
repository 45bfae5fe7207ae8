"""The tables: cells, order, filter."""

import pytest

from tests.parts.console.top.digests import change, digest, ended, failed, running, session, source, tool
from toolbus.parts.console.top.bus_state import BARS, BusState
from toolbus.parts.console.top.views import CALLS, ERRORS, SOURCES, TOOLS, VIEWS, Selection, View, select

ALL = Selection()


def _cells(view: View, state: BusState, selection: Selection = ALL) -> list[dict[str, str]]:
    lines = select(view, state, state.at, selection)
    return [{column.title: column.cell(line) for column in view.columns} for line in lines]


@pytest.fixture
def state() -> BusState:
    state = BusState()
    tools = [tool("slow", 4, 2, p95=3.0), tool("often", 40, 1, p95=0.02), tool("never", 0), tool("other", 4, of="maps")]
    tools.append(tool("toolbus:digest", 99, of="toolbus"))  # the reader's own calls, which no table shows
    state.apply(digest(1, tools=tools, sources=[source(), source("maps", kind="function", sessions=0)]))
    state.apply(change(2, tools=[tool("often", 60, 1, p95=0.02)], running=[running("r1", "slow")], calls=[failed(1)]))
    return state


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("", ["often", "slow", "other", "never"]),
        ("calls", ["often", "slow", "other", "never"]),
        ("errors", ["slow", "often", "never", "other"]),
        ("p95", ["slow", "other", "often", "never"]),
        ("in-flight", ["slow", "often", "never", "other"]),
        ("name", ["never", "often", "other", "slow"]),
    ],
)
def test_tools_are_sorted_by_a_column(state: BusState, sort: str, names: list[str]) -> None:
    assert [row["NAME"] for row in _cells(TOOLS, state, Selection(sort))] == names


def test_a_reversed_order_leaves_the_unknown_at_the_end(state: BusState) -> None:
    rows = _cells(TOOLS, state, Selection("p95", reverse=True))
    assert [row["NAME"] for row in rows] == ["often", "other", "slow", "never"]


def test_a_tool_shows_its_figures(state: BusState) -> None:
    row = _cells(TOOLS, state)[0]
    figures = {"CALLS/S": "40", "CALLS": "60", "ERRORS": "1", "P50": "12 ms", "P95": "20 ms", "IN FLIGHT": "0"}
    assert row | figures | {"NAME": "often", "SOURCE": "weather"} == row
    assert len(row["LAST MINUTE"]) == BARS


def test_a_filter_finds_all_of_its_words_in_any_case(state: BusState) -> None:
    assert [row["NAME"] for row in _cells(TOOLS, state, Selection(filter="WEATHER slow"))] == ["slow"]
    assert [row["NAME"] for row in _cells(TOOLS, state, Selection(source="maps"))] == ["other"]
    assert [row["SOURCE"] for row in _cells(SOURCES, state, Selection(filter="function"))] == ["maps"]
    assert not _cells(CALLS, state, Selection(source="maps"))


def test_a_source_sums_up_its_sessions_and_a_program_that_only_calls_is_one_too() -> None:
    state = BusState()
    sessions = [session("s1", in_flight=3), session("s2", in_flight=1), session("s3", "host:chat", tools=0)]
    state.apply(digest(1, sources=[source(sessions=2)], sessions=sessions))
    chat, weather = _cells(SOURCES, state)
    assert (weather["IN FLIGHT"], weather["SESSIONS"], weather["STATE"]) == ("4/128", "2", "attached")
    assert (chat["SOURCE"], chat["SESSIONS"], chat["KIND"]) == ("host:chat", "1", "peer")


def test_running_calls_stand_before_ended_ones_the_oldest_and_the_newest_first() -> None:
    state = BusState()
    state.apply(digest(1, running=[running("r1"), running("r2", stage="STARTED")], calls=[ended(2), failed(1)]))
    rows = _cells(CALLS, state)
    assert [row["CALL"] for row in rows] == ["call-r1", "call-r2", "c2", "c1"]
    assert [row["OUTCOME"] for row in rows] == ["running", "running", "ok", "unavailable"]
    assert [row["STAGE"] for row in rows] == ["sent", "started", "-", "sent"]
    assert [row["DURATION"] for row in rows] == ["2.5 s", "2.5 s", "250 ms", "250 ms"]


def test_an_error_says_what_a_caller_may_do() -> None:
    state = BusState()
    state.apply(digest(1, calls=[failed(2), failed(1), ended(3, outcome="TOOL")]))
    tool_error, unavailable = _cells(ERRORS, state)
    assert (unavailable["ERRORS"], unavailable["STAGE"], unavailable["RETRY SAFE"]) == ("2", "sent", "no")
    assert unavailable["MESSAGE"] == "the plugin is gone"
    assert (tool_error["STAGE"], tool_error["RETRY SAFE"], tool_error["MESSAGE"]) == ("–", "–", "-")


def test_words_of_columns_are_unique_and_each_table_has_one_that_takes_the_rest_of_the_width() -> None:
    for view in VIEWS:
        assert len({column.word for column in view.columns}) == len(view.columns)
        assert sum(not column.width for column in view.columns) == 1
