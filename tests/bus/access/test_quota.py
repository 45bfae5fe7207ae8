"""A quota lets through what its rate and its calls in flight allow, and says when more may come."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tests.support.core_model import Core, StreamDouble, codes, tool
from toolbus.bus.access.identity import Globs, Identity, Principal, Scopes
from toolbus.bus.access.quota import BURST_SECONDS, MAX_REMEMBERED, Quota, Quotas
from toolbus.errors import Code
from toolbus.protocol.limits import Limits
from toolbus.v1 import tool_pb2 as pb

EVERY = Globs(["*"])
TICK = Fraction(1, 4096)  # times and rates of which floating point holds every sum exactly


def scopes(rate: float | None = None, in_flight: int | None = None, sessions: int | None = None) -> Scopes:
    return Scopes(EVERY, EVERY, EVERY, users=EVERY, level=100, rate=rate, in_flight=in_flight, sessions=sessions)


def identity(name: str = "bot", **limits: float) -> Identity:
    return Identity(name, scopes(**limits), "k1")  # type: ignore[arg-type]  # one dict of numbers


class Bucket:
    """A bucket of calls that fills evenly: what a rate with a burst means, written down as simply as possible."""

    def __init__(self, rate: Fraction) -> None:
        self.rate, self.size = rate, max(Fraction(1), rate * int(BURST_SECONDS))
        self.calls, self.at = self.size, Fraction(0)

    def take(self, count: int, now: Fraction) -> tuple[int, Fraction]:
        self.calls = min(self.size, self.calls + (now - self.at) * self.rate)
        self.at = now
        passed = min(count, math.floor(self.calls))
        self.calls -= passed
        missing = min(Fraction(count - passed), self.size) - self.calls
        return passed, missing / self.rate if passed < count else Fraction(0)


steps = st.lists(st.tuples(st.integers(0, 3 * 4096), st.integers(0, 300)), max_size=50)


@given(st.integers(-3, 8), steps)
def test_a_quota_passes_what_a_bucket_holds_and_says_when_the_rest_may_come(
    power: int, taken: list[tuple[int, int]]
) -> None:
    rate, now = Fraction(2) ** power, Fraction(0)
    bucket, quota = Bucket(rate), Quota(float(rate))
    for pause, count in taken:
        now += pause * TICK
        passed, wait = bucket.take(count, now)
        assert quota.take(count, float(now)) == (passed, float(wait))


@given(st.floats(0.01, 1e6), st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1_000)), max_size=50))
def test_at_any_rate_the_rest_may_come_when_the_quota_says(rate: float, taken: list[tuple[float, int]]) -> None:
    quota, now = Quota(rate), 1e5
    for pause, count in taken:
        now += pause
        passed, wait = quota.take(count, now)
        assert (wait == 0.0) == (passed == count)
        if passed < count:
            now += wait * (1 + 1e-6) + 1e-6
            rest = min(count - passed, int(max(1.0, rate * BURST_SECONDS)))
            assert quota.take(rest, now)[0] == rest


@given(st.floats(0.01, 1e4), st.lists(st.floats(0, 5), min_size=1, max_size=50))
def test_no_pattern_of_calls_gets_more_than_the_rate_and_one_burst(rate: float, pauses: list[float]) -> None:
    quota, now, passed = Quota(rate), 0.0, 0
    for pause in pauses:
        now += pause
        passed += quota.take(1 << 20, now)[0]
    assert passed <= max(1.0, rate * BURST_SECONDS) + rate * now + 1


def test_a_quota_without_a_rate_passes_everything() -> None:
    assert Quota().take(1_000_000, 0.0) == (1_000_000, 0.0)


def test_an_identity_without_limits_has_no_quota() -> None:
    quotas = Quotas()
    assert quotas.of(Identity("", None)) is None
    assert quotas.of(identity()) is None
    assert quotas.of(Identity("reader", scopes(in_flight=0))) is None


def test_reconnecting_gains_no_calls() -> None:
    quotas = Quotas()
    for others in (0, MAX_REMEMBERED - 1):
        quota = quotas.of(identity(rate=1.0))
        assert quota is not None
        assert quota.take(5, 100.0)[0] == (2 if not others else 0)
        for number in range(others):
            quotas.of(identity(f"other-{number}", rate=1.0))


def test_narrower_scopes_hold_for_callers_that_are_there_and_wider_ones_too() -> None:
    quotas = Quotas()
    quota = quotas.of(identity(rate=100.0))
    assert quota is not None
    quotas.of(identity(rate=1.0, in_flight=3))
    assert (quota.take(10, 100.0)[0], quota.free) == (2, 3)
    quotas.of(identity())
    assert (quota.take(10, 100.0)[0], quota.free) == (10, None)


# -- at the dispatcher ------------------------------------------------------------------------------------------------


def attach(core: Core, who: Identity, source: str = "bot", **more: str) -> StreamDouble:
    stream = core.stream()
    stream.peer.principal = Principal(identity=who)
    stream.attach(source, **more)
    return stream


def core_with_a_tool() -> Core:
    core = Core()
    core.plugin("p", tool("t"))
    return core


def send(stream: StreamDouble, count: int, first: int = 0) -> dict[str, Code]:
    calls = [pb.ToolCall(call_id=str(first + number), name="t", arguments_json="{}") for number in range(count)]
    stream.send(calls=calls)
    return codes(stream)


def test_calls_beyond_the_rate_of_an_identity_are_refused_with_a_hint() -> None:
    core = core_with_a_tool()
    stream = attach(core, identity(rate=4.0))
    stream.send(calls=[pb.ToolCall(call_id=str(number), name="t", arguments_json="{}") for number in range(10)])
    refused = {result.call_id: result.error for result in stream.read("results")}
    assert list(refused) == ["8", "9"]
    error = refused["8"]
    assert (error.code, error.stage, error.retry_safe) == (Code.OVERLOADED, pb.CALL_STAGE_NOT_DISPATCHED, True)
    assert (error.limit.name, error.limit.value, error.retry_after_seconds) == ("calls_per_second", 4.0, 0.5)
    assert error.message == "identity 'bot' (key k1) may make 4 calls a second, and makes more: try again later"
    core.advance(0.5)
    assert send(stream, 3, first=20) == {"22": Code.OVERLOADED}


def test_the_sessions_of_an_identity_share_its_rate_and_its_calls_in_flight() -> None:
    core = core_with_a_tool()
    who = identity(rate=4.0, in_flight=6)
    first, second = attach(core, who), attach(core, who, "other")
    assert send(first, 5) == {}
    assert send(second, 5) == {str(number): Code.OVERLOADED for number in (1, 2, 3, 4)}
    first.end()
    assert send(second, 2, first=10) == {}, "the calls of a session that ended count no more"
    assert send(second, 1, first=20) == {"20": Code.OVERLOADED}, "the rate counts them"


def test_an_error_about_calls_in_flight_names_the_identity_and_its_limit() -> None:
    core = core_with_a_tool()
    stream = attach(core, identity(in_flight=1))
    stream.send(calls=[pb.ToolCall(call_id=call_id, name="t", arguments_json="{}") for call_id in "ab"])
    (result,) = stream.read("results")
    assert (result.call_id, result.error.limit.name, result.error.limit.value) == ("b", "calls_in_flight", 1)
    assert "identity 'bot' (key k1) may have 1 calls in flight over all its sessions" in result.error.message


def test_other_scopes_of_an_attached_session_hold_at_once() -> None:
    core = core_with_a_tool()
    stream = attach(core, identity())
    assert send(stream, 5) == {}
    core.presence.refresh_identities(lambda _: identity(in_flight=6), core.now)
    assert send(stream, 2, first=10) == {"11": Code.OVERLOADED}


def test_an_identity_has_no_more_sessions_than_it_may() -> None:
    core = core_with_a_tool()
    who = identity(sessions=1)
    first = attach(core, who, instance="a")
    refused = attach(core, who, instance="b")
    assert refused.status is not None
    assert refused.status[0] == "RESOURCE_EXHAUSTED"
    assert "identity 'bot' (key k1) has 1 sessions" in refused.status[1]
    second = attach(core, who, instance="a")
    assert second.status is None, "a session that takes over needs no room"
    assert first.ended
    assert attach(core, who, instance="b").status is not None
    second.end()
    assert attach(core, who, instance="b").status is None


def test_an_identity_whose_scopes_state_no_number_leaves_most_sessions_to_others() -> None:
    core = Core(limits=Limits(sessions=40))
    who = identity()
    for name in "ab":
        assert attach(core, who, instance=name).status is None
    refused = attach(core, who, instance="c")
    assert refused.status is not None
    assert "has 2 sessions" in refused.status[1]
