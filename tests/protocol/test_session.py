from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.errors import ProtocolError
from toolbus.protocol.limits import Timings
from toolbus.protocol.session import FRAME_BYTES, FRAME_ITEMS, READING_ORDER, Outbox, Pool, Pulse, Session, Side, State
from toolbus.protocol.tool import KIB, MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


def bus_side(now: float = 0.0) -> Session[wire.InvokeResponse]:
    return Session(Side.BUS, wire.InvokeResponse, now)


def live(now: float = 0.0) -> Session[wire.InvokeResponse]:
    session = bus_side(now)
    session.open(256, 0)
    return session


def request(*arms: str) -> wire.InvokeRequest:
    frame = wire.InvokeRequest()
    for arm in arms:
        if arm == "attach":
            frame.attach.source = "s"
        elif arm == "heartbeat":
            frame.heartbeat.sequence = 1
        elif arm == "drain":
            frame.drain.reason = "bye"
        else:
            getattr(frame, arm).add(call_id="1")
    return frame


def put(outbox: Outbox[wire.InvokeResponse], size: int, call_id: str = "1") -> None:
    outbox.room(size).calls.add(call_id=call_id, arguments_json="x" * size)


def frames(outbox: Outbox[wire.InvokeResponse]) -> list[wire.InvokeResponse]:
    return list(iter(outbox.take, None))


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", list(itertools.permutations(("calls", "progress", "results", "cancels"), 4))[::5])
def test_fields_are_read_in_one_order_however_the_frame_was_filled(arms: tuple[str, ...]) -> None:
    session = bus_side()
    read = [arm for arm, _ in session.receive(request("drain", *arms, "heartbeat", "attach"), 0.0)]
    assert read == ["attach", "calls", "progress", "results", "cancels", "heartbeat", "drain"]
    assert read == [arm for arm in READING_ORDER if arm in read]


def test_the_fields_of_a_bus_are_read_attached_first_then_events_then_calls() -> None:
    peer: Session[wire.InvokeRequest] = Session(Side.PEER, wire.InvokeRequest, 0.0)
    frame = wire.InvokeResponse(
        drain=wire.Drain(reason="x"),
        results=[pb.ToolResult()],
        progress=[pb.ToolProgress()],
        calls=[pb.ToolCall()],
        events=[wire.Event()],
        attached=wire.Attached(session_id="s"),
    )
    read = [arm for arm, _ in peer.receive(frame, 0.0)]
    assert read == ["attached", "events", "calls", "progress", "results", "drain"]


@pytest.mark.parametrize("first", ["calls", "results", "heartbeat", "drain", "empty"])
def test_a_first_message_without_attach_is_refused_with_the_rule(first: str) -> None:
    session = bus_side()
    with pytest.raises(ProtocolError, match=rf"first message.*'{first}'.*must hold 'attach'"):
        session.receive(request(*([] if first == "empty" else [first])), 0.0)


def test_the_peer_refuses_a_first_message_without_attached() -> None:
    peer: Session[wire.InvokeRequest] = Session(Side.PEER, wire.InvokeRequest, 0.0)
    with pytest.raises(ProtocolError, match="must hold 'attached'"):
        peer.receive(wire.InvokeResponse(calls=[pb.ToolCall()]), 0.0)


def test_the_first_message_may_carry_calls_beside_its_attach() -> None:
    assert [arm for arm, _ in bus_side().receive(request("calls", "attach"), 0.0)] == ["attach", "calls"]


def test_an_attach_after_a_drain_is_refused_and_a_result_is_not() -> None:
    session = live()
    session.leave()
    assert [arm for arm, _ in session.receive(request("results", "calls"), 0.0)] == ["calls", "results"]
    with pytest.raises(ProtocolError, match="'attach' may not arrive while the stream is leaving"):
        session.receive(request("attach"), 0.0)


def test_an_attach_that_crossed_our_drain_is_accepted() -> None:
    session = live()
    session.send_drain("requested")
    session.leave()
    assert [arm for arm, _ in session.receive(request("attach"), 0.0)] == ["attach"]
    session.end()
    assert session.receive(request("attach"), 0.0) == []


def test_what_arrives_after_the_end_is_ignored() -> None:
    session = live()
    session.end()
    assert session.receive(request("calls", "results", "drain"), 0.0) == []


# -- slices ----------------------------------------------------------------------------------------------------------


def test_a_frame_holds_at_most_128_items() -> None:
    outbox = live().outbox
    for _ in range(300):
        put(outbox, 1)
    assert [len(frame.calls) for frame in frames(outbox)] == [128, 128, 44]


def test_a_frame_of_larger_items_ends_at_one_mebibyte() -> None:
    outbox = live().outbox
    for _ in range(10):
        put(outbox, 300 * KIB)
    taken = frames(outbox)
    assert [len(frame.calls) for frame in taken] == [3, 3, 3, 1]
    assert all(frame.ByteSize() <= FRAME_BYTES for frame in taken)


def test_an_item_of_six_megabytes_travels_alone_and_holds_up_nothing() -> None:
    outbox = live().outbox
    put(outbox, 1)
    put(outbox, 6 * MIB)
    put(outbox, 1)
    assert [len(frame.calls) for frame in frames(outbox)] == [1, 1, 1]


def test_frames_stay_below_what_the_peer_can_receive_whatever_the_text_is() -> None:
    session = bus_side()
    session.open(256, 4 * MIB)
    for _ in range(200):
        text = "\U0001f600" * (8 * KIB)  # four bytes each
        session.outbox.room(len(text)).results.add(call_id="1", output_json=text)
    assert max(frame.ByteSize() for frame in frames(session.outbox)) <= 4 * MIB


@given(st.integers(8 * KIB, 8 * MIB), st.lists(st.integers(0, 64 * KIB), max_size=300))
def test_frames_stay_below_any_limit_that_each_item_fits(limit: int, sizes: list[int]) -> None:
    session = bus_side()
    session.open(256, limit)
    for size in sizes:
        put(session.outbox, min(size, session.max_item_bytes - 100))
    taken = frames(session.outbox)
    assert sum(len(frame.calls) for frame in taken) == len(sizes)
    assert all(1 <= len(frame.calls) <= FRAME_ITEMS and frame.ByteSize() <= limit for frame in taken)


@pytest.mark.parametrize("takes", [True, False])
def test_an_early_writer_may_take_each_complete_frame_before_the_next_is_opened(takes: bool) -> None:
    session = bus_side()
    outbox, taken = session.outbox, list[wire.InvokeResponse]()
    outbox.write_early(8, lambda: taken.extend(frames(outbox) if takes else []))
    session.open(256, 4 * MIB)
    for number in range(30):
        put(outbox, 100, str(number))
    assert [len(frame.calls) for frame in taken] == ([8, 8, 8] if takes else [])
    assert outbox.opened - outbox.taken == (1 if takes else 4)
    taken += frames(outbox)
    assert [call.call_id for frame in taken for call in frame.calls] == [str(number) for number in range(30)]
    assert (bool(outbox), outbox.backlog) == (False, 0)


def test_an_early_frame_takes_up_to_a_quarter_of_many_calls_under_way() -> None:
    session, full = bus_side(), list[int]()
    outbox = session.outbox
    outbox.write_early(8, lambda: full.extend(len(frame.calls) for frame in frames(outbox)))
    session.open(4096, 4 * MIB)
    for count, items in ((31, 8), (80, 20), (4000, FRAME_ITEMS - 1)):  # of 1 MiB, as 4 MiB less an item's overhead hold
        session.pending.update(dict.fromkeys(map(str, range(count))))
        frames(outbox)
        full.clear()
        for _ in range(items + 1):
            put(outbox, 100)
        assert full == [items]


def test_the_writer_is_woken_once_for_what_waits_and_never_waits_to_fill_a_frame() -> None:
    outbox = live().outbox
    woken: list[int] = []
    outbox.wake = lambda: woken.append(1)
    for _ in range(200):
        put(outbox, 1)
    assert len(woken) == 1
    frame = outbox.take()
    assert frame is not None
    assert len(frame.calls) == 128
    frames(outbox)
    put(outbox, 1)
    assert len(woken) == 2


def test_items_put_while_a_frame_is_being_written_go_into_the_next_one() -> None:
    outbox = live().outbox
    put(outbox, 1, "a")
    first = outbox.take()
    put(outbox, 1, "b")
    assert first is not None
    assert [call.call_id for call in first.calls] == ["a"]
    assert [[call.call_id for call in frame.calls] for frame in frames(outbox)] == [["b"]]


def test_what_comes_after_a_seal_is_in_a_later_frame() -> None:
    outbox = live().outbox
    put(outbox, 1, "a")
    outbox.seal()
    put(outbox, 1, "b")
    assert [[call.call_id for call in frame.calls] for frame in frames(outbox)] == [["a"], ["b"]]


def test_a_call_is_recalled_while_its_frame_waits_and_not_afterwards() -> None:
    outbox = live().outbox
    put(outbox, 1, "a")
    put(outbox, 1, "b")
    number = outbox.opened
    outbox.seal()
    put(outbox, 1, "c")
    assert outbox.recall(number, "a")
    assert not outbox.recall(number, "a")
    assert not outbox.recall(number, "c")
    assert [[call.call_id for call in frame.calls] for frame in frames(outbox)] == [["b"], ["c"]]
    assert not outbox.recall(number, "b")


@given(st.lists(st.tuples(st.sampled_from(["put", "seal", "take", "recall"]), st.integers(0, 40_000)), max_size=60))
def test_waiting_bytes_tell_what_waits_and_return_to_nothing(steps: list[tuple[str, int]]) -> None:
    outbox = live().outbox
    waiting: list[tuple[int, str]] = []
    for index, (step, size) in enumerate(steps):
        if step == "put":
            put(outbox, size, str(index))
            waiting.append((outbox.opened, str(index)))
        elif step == "seal":
            outbox.seal()
        elif step == "recall" and waiting:
            number, call_id = waiting.pop(size % len(waiting))
            assert outbox.recall(number, call_id) == (number > outbox.taken)
        elif step == "take" and outbox.take() is not None:
            waiting = [(number, call_id) for number, call_id in waiting if number > outbox.taken]
        assert outbox.waiting_bytes == sum(frame.ByteSize() for frame, _ in outbox._frames)
        assert len(outbox._frames) == outbox.opened - outbox.taken
    left = [call.call_id for frame in frames(outbox) for call in frame.calls]
    assert left == [call_id for _, call_id in waiting]
    assert outbox.waiting_bytes == 0


class Weightless:
    """A frame that cannot tell how many bytes it has."""

    def __init__(self) -> None:
        self.calls = self.results = self

    def add(self) -> None:
        """Takes an item."""


def test_the_backlog_is_told_without_a_look_at_what_waits_and_is_about_that_or_more() -> None:
    outbox: Outbox[Any] = Outbox(Weightless)
    assert outbox.backlog == 0
    for number in range(1, 50):
        outbox.room(100)
        assert outbox.backlog == number * outbox.least
    real = live().outbox
    for size in (1, 100_000, 700_000, 700_000, 5):
        put(real, size, str(size))
        assert real.backlog + KIB >= real.waiting_bytes
    frames(real)
    assert real.backlog == 0


def test_an_outbox_above_its_limit_is_reported_and_discarding_empties_it() -> None:
    outbox = live().outbox
    outbox.max_bytes = 3 * MIB
    floods: list[int] = []
    outbox.flooded = lambda: floods.append(1)
    for _ in range(3):
        put(outbox, 1 * MIB)
    assert not floods
    for _ in range(2):
        put(outbox, 1 * MIB)
    assert floods
    outbox.discard()
    assert (outbox.waiting_bytes, outbox.take(), bool(outbox)) == (0, None, False)
    put(outbox, 5, "after")
    assert [call.call_id for frame in frames(outbox) for call in frame.calls] == ["after"]


# -- heartbeats ------------------------------------------------------------------------------------------------------


def ladder(session: Session[Any], until: float, step: float = 0.5) -> list[tuple[float, Pulse]]:
    """Judges a silent peer every half second; returns when what changed."""
    pulses: list[tuple[float, Pulse]] = []
    for tick in range(round(until / step) + 1):
        pulse = session.pulse(tick * step)
        if pulse is not Pulse.FINE:
            pulses.append((tick * step, pulse))
        if pulse is Pulse.GONE:
            break
    return pulses


def test_a_peer_with_pending_calls_is_suspect_after_3_s_hung_after_5_s_and_gone_after_21_s() -> None:
    session = live()
    session.pending["1"] = object()
    expected = [(1.0 * n, Pulse.PROBE) for n in range(1, 21)] + [(21.0, Pulse.GONE)]
    expected[2], expected[4] = (3.0, Pulse.SUSPECT), (5.0, Pulse.HUNG)
    assert ladder(session, 60) == expected
    assert session.suspect
    assert not session.takes_calls


@pytest.mark.parametrize("step", [0.3, 0.499, 0.51])
def test_ticks_that_miss_the_moment_do_not_add_up(step: float) -> None:
    session = live()
    session.pending["1"] = object()
    when = {pulse: at for at, pulse in ladder(session, 60, step)}
    assert when[Pulse.SUSPECT] <= 3.0 + step
    assert when[Pulse.HUNG] <= 5.0 + step
    assert when[Pulse.GONE] <= 21.0 + step


@pytest.mark.parametrize("idle_for", [0.0, 0.5, 4.0, 9.5])
def test_a_call_on_a_peer_that_was_idle_has_5_to_6_s_whenever_it_hung(idle_for: float) -> None:
    session = live()
    assert ladder(session, idle_for) == []
    session.pending["1"] = object()
    moments = (idle_for + 0.5 * tick for tick in range(1, 20))
    hung = next(now for now in moments if session.pulse(now) is Pulse.HUNG)
    assert 5.0 <= hung - idle_for <= 5.5


@pytest.mark.parametrize(
    ("missed", "missed_gone", "expected"),
    [
        (1, 1, [(1.0, Pulse.PROBE), (2.0, Pulse.GONE)]),
        (1, 2, [(1.0, Pulse.PROBE), (2.0, Pulse.HUNG), (3.0, Pulse.GONE)]),
        (2, 3, [(1.0, Pulse.PROBE), (2.0, Pulse.SUSPECT), (3.0, Pulse.HUNG), (4.0, Pulse.GONE)]),
    ],
)
def test_how_many_heartbeats_may_be_missed_is_configured(
    missed: int, missed_gone: int, expected: list[tuple[float, Pulse]]
) -> None:
    timings = Timings(missed_heartbeats=missed, missed_heartbeats_gone=missed_gone)
    session = Session(Side.BUS, wire.InvokeResponse, 0.0, timings)
    session.open(256, 0)
    session.pending["1"] = object()
    assert ladder(session, 60) == expected
    assert session.suspect is (missed_gone > 1)


def test_a_process_that_was_late_itself_gives_its_peers_that_time() -> None:
    session, delayed = live(), live()
    for each in (session, delayed):
        each.pending["1"] = object()
        ladder(each, 3.0)
    delayed.delay_pulse(2.0)
    assert [at for at, pulse in ladder(session, 60) if pulse is Pulse.HUNG] == [5.0]
    assert delayed.pulse(5.5) is Pulse.FINE
    assert (delayed.pulse(6.0), delayed.pulse(7.0)) == (Pulse.PROBE, Pulse.HUNG)


def test_an_idle_peer_gets_a_heartbeat_every_10_s_and_every_second_once_it_stops_answering() -> None:
    assert [when for when, _ in ladder(live(), 60)] == [10.0 + 1.0 * n for n in range(21)]


def test_an_idle_peer_that_answers_gets_a_heartbeat_every_10_s_only() -> None:
    session = live()
    moments = []
    for tick in range(1, 121):
        if session.pulse(tick * 0.5) is Pulse.PROBE:
            moments.append(tick * 0.5)
            session.receive(request("heartbeat"), tick * 0.5)
    assert moments == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


@pytest.mark.parametrize("arm", ["results", "calls", "progress", "heartbeat"])
def test_any_frame_counts_as_an_answer_to_a_heartbeat(arm: str) -> None:
    session = live()
    session.pending["1"] = object()
    moments = []
    for tick in range(1, 71):
        if session.pulse(tick * 0.5) is not Pulse.FINE:
            moments.append(tick * 0.5)
        assert session.missed == 0
        session.receive(request(arm), tick * 0.5)
    assert moments == [10, 20, 30]  # so that the peer, which hears nothing else, knows that the bus is there


@pytest.mark.parametrize("written_at", [0.01, 0.46, 3.3])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_peer_that_only_sends_hears_something_every_10_s_and_a_tick(written_at: float, calls: int) -> None:
    session, step = live(), 0.47
    session.pending.update({str(number): object() for number in range(calls)})
    heard: list[float] = []
    for tick in range(1, 120):
        now = tick * step
        if now > written_at and not heard:
            put(session.outbox, 1)
            frames(session.outbox)
            heard.append(written_at)
        session.receive(request("progress"), now - 0.001)
        session.pulse(now)
        heard += [now for _ in frames(session.outbox)]
    assert len(heard) > 5
    assert all(later - earlier <= 10.0 + step for earlier, later in itertools.pairwise(heard))


def test_a_peer_that_is_written_to_and_answers_gets_no_heartbeat() -> None:
    session = live()
    for tick in range(1, 60):
        put(session.outbox, 1)
        frames(session.outbox)
        session.receive(request("results"), float(tick))
        assert session.pulse(float(tick)) is Pulse.FINE


def test_a_hung_peer_is_gone_in_time_whether_or_not_the_writer_is_stuck() -> None:
    ends = []
    for stuck in (True, False):
        session = live()
        session.pending["1"] = object()
        for tick in range(100):
            if session.pulse(tick * 0.5) is Pulse.GONE:
                ends.append(tick * 0.5)
                break
            if not stuck:
                frames(session.outbox)
    assert ends == [21.0, 21.0]


def test_a_frame_ends_the_suspicion_and_the_count_starts_anew() -> None:
    session = live()
    session.pending["1"] = object()
    ladder(session, 20)
    session.receive(request("results"), 20.0)
    assert session.takes_calls
    assert session.missed == 0
    pulses = [session.pulse(20.0 + tick * 0.5) for tick in range(1, 7)]
    assert pulses.index(Pulse.SUSPECT) == 5


def test_a_half_closed_peer_gets_no_heartbeat() -> None:
    session = live()
    session.in_flight["1"] = object()
    session.close_half()
    assert ladder(session, 120) == []
    assert not session.takes_calls


def test_a_stream_that_has_not_opened_or_has_ended_gets_no_heartbeat() -> None:
    ended = live()
    ended.end()
    assert ladder(bus_side(), 60) == ladder(ended, 60) == []


def test_a_restarted_pulse_forgets_what_was_missed() -> None:
    session = live()
    session.pending["1"] = object()
    ladder(session, 20)
    session.restart_pulse(1_000.0)
    assert session.pulse(1_000.5) is Pulse.PROBE  # the peer has heard nothing all the while
    assert session.pulse(1_001.0) is Pulse.FINE
    assert session.missed == 0
    assert session.pulse(1_001.5) is Pulse.PROBE
    assert session.missed == 1


def test_heartbeats_are_numbered_and_echoed_as_they_are() -> None:
    session = live()
    session.pulse(10.0)
    session.pulse(12.0)
    peer: Session[wire.InvokeRequest] = Session(Side.PEER, wire.InvokeRequest, 0.0)
    sent = [frame.heartbeat for frame in frames(session.outbox)]
    assert sent[-1].sequence == 2
    peer.send_alone(sent[-1])
    echo = peer.outbox.take()
    assert echo is not None
    assert echo.heartbeat.sequence == 2


# -- the life of a stream --------------------------------------------------------------------------------------------


def test_a_drain_is_sent_once_and_ends_a_frame() -> None:
    session = live()
    session.send_drain("shutdown", 5.0)
    session.send_drain("requested")
    put(session.outbox, 1)
    taken = frames(session.outbox)
    assert [frame.drain.reason for frame in taken] == ["shutdown", ""]
    assert len(taken[1].calls) == 1


def test_a_leaving_peer_gets_no_new_calls_and_is_idle_once_no_call_is_left() -> None:
    session = live()
    session.pending["1"] = object()
    session.leave()
    assert not session.takes_calls
    assert not session.idle
    session.pending.clear()
    assert session.idle


def test_ending_returns_the_pending_calls_and_those_in_flight_once() -> None:
    session = live()
    session.pending["1"], session.in_flight["a"] = "pending", "asked"
    assert session.end() == (["pending"], ["asked"])
    assert session.end() == ([], [])
    assert session.state is State.CLOSED
    assert not session.takes_calls


def test_when_all_outboxes_together_hold_too_much_the_fullest_is_flooded_and_not_the_one_that_grew() -> None:
    pool = Pool(3_000_000)
    flooded: list[str] = []
    boxes: dict[str, Outbox[wire.InvokeResponse]] = {}
    for name in ("slow", "quick"):
        boxes[name] = Outbox(wire.InvokeResponse)
        boxes[name].pool = pool
        boxes[name].flooded = functools.partial(flooded.append, name)

    def put(name: str, size: int) -> None:
        boxes[name].room(size).results.add(output_json="x" * size)

    for _ in range(4):
        put("slow", 900_000)
    assert not flooded
    for _ in range(4):
        put("quick", 200_000)
        boxes["quick"].seal()
    assert set(flooded) == {"slow"}
    for box in boxes.values():
        box.discard()
    assert (pool.bytes, pool.outboxes) == (0, {})
