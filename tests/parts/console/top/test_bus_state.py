"""The state of a bus, from its digests."""

from tests.parts.console.top.digests import BEGAN, change, digest, ended, failed, running, session, source, tool
from toolbus.parts.console.top.bus_state import MAX_CALLS, BusState


def test_changes_add_to_what_a_full_digest_said() -> None:
    state = BusState()
    state.apply(digest(7, tools=[tool("a", 3), tool("b", 1)], sources=[source()], sessions=[session("s1")]))
    state.apply(change(8, tools=[tool("a", 5, 1)], running=[running("r1")], rate=4.0))
    assert {key: (each.calls, each.failed) for key, each in state.tools.items()} == {
        ("weather", "a"): (5, 1),
        ("weather", "b"): (1, 0),
    }
    assert state.tools["weather", "a"].trail.rate(state.at) == 4.0
    assert (state.number, state.at) == (8, BEGAN + 104)
    assert state.running_of() == {("weather", "get_weather"): 1}
    state.apply(change(9, closed=["s1"], gone=["weather"]))
    assert (state.sessions, state.sources, state.tools) == ({}, {}, {})


def test_the_same_digest_again_changes_nothing() -> None:
    state = BusState()
    state.apply(digest(7, rate=4.0))
    state.apply(change(7, rate=4.0, lost=5))
    assert (list(state.rates), state.lost) == ([4.0], 0)


def test_a_full_digest_replaces_what_is_gone_and_keeps_the_course_of_what_is_not() -> None:
    state = BusState()
    state.apply(digest(1, tools=[tool("a", 3), tool("b", 1)], sessions=[session("s1")], calls=[ended(1)]))
    state.apply(digest(9, tools=[tool("a", 7)], calls=[ended(2), ended(1)]))
    assert list(state.tools) == [("weather", "a")]
    assert state.tools["weather", "a"].trail.rate(state.at) == 1.0
    assert state.sessions == {}
    assert list(state.calls) == [1, 2]


def test_another_instance_of_the_bus_begins_anew() -> None:
    state = BusState()
    state.apply(digest(50, tools=[tool("a", 3)], calls=[failed(9)], lost=4))
    state.apply(digest(1, instance="two", tools=[tool("a", 0)], calls=[ended(1)]))
    assert (list(state.calls), state.failures, state.lost) == ([1], {}, 0)
    assert state.tools["weather", "a"].trail.rate(state.at) is None


def test_failures_are_counted_by_tool_and_outcome() -> None:
    state = BusState()
    state.apply(digest(1, calls=[failed(3), failed(2, outcome="TOOL"), failed(1), ended(4, outcome="INPUT_REQUIRED")]))
    state.apply(change(2, calls=[failed(5, outcome="TOOL"), failed(3)]))
    assert {key[2]: (each.count, each.newest["number"]) for key, each in state.failures.items()} == {
        "UNAVAILABLE": (2, 3),
        "TOOL": (2, 5),
    }
    assert next(reversed(state.failures))[2] == "TOOL"


def test_ended_calls_are_remembered_up_to_a_limit() -> None:
    state = BusState()
    state.apply(digest(1, calls=[ended(number) for number in range(MAX_CALLS + 20, 0, -1)]))
    assert len(state.calls) == MAX_CALLS
    assert next(iter(state.calls)) == 21


def test_what_the_bus_leaves_out_stays_unknown() -> None:
    state = BusState()
    state.apply({"number": 1, "full": True, "at": BEGAN, "tools": [["s", "t", None, None, None, None, None]]})
    assert state.tools["s", "t"].calls is None
    assert state.bus.get("loop_lag") is None
