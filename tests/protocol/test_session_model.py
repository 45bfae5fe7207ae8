"""A session against a model that is as plain as it can be written, under whatever happens to a stream.

The file is long because a model and what is done to it belong together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.examples import examples
from toolbus.errors import ProtocolError
from toolbus.protocol.limits import Timings
from toolbus.protocol.session import MAX_ITEMS, Outbox, Pool, Pulse, Session, Side, State
from toolbus.protocol.tool import KIB, MIB
from toolbus.v1 import tool_bus_service_pb2 as wire

TICK = 0.5
MAX_WAITING = 600 * KIB
POOL_BYTES = 800 * KIB
ITEMS = ("calls", "progress", "results", "cancels")
# As docs/protocol.md has it: what a message is read as, and what each side may say.
ORDER = ("attach", "attached", "events", *ITEMS, "heartbeat", "drain")
FROM = {Side.BUS: {*ORDER} - {"attached", "events"}, Side.PEER: {*ORDER} - {"attach"}}  # by who reads it
MESSAGE = {Side.BUS: wire.InvokeRequest, Side.PEER: wire.InvokeResponse}
WRITTEN = {Side.BUS: wire.InvokeResponse, Side.PEER: wire.InvokeRequest}


@dataclass
class Frame:
    """A message that waits: what is in it, and how much it still takes."""

    items: list[tuple[str, str, int]] = field(default_factory=list)  # (kind, id, characters)
    left: int = 0  # what it still takes

    def fill(self, message: Any) -> Any:
        """Returns it as a message."""
        for kind, call_id, size in self.items:
            fill(message, kind, call_id, size)
        return message

    @property
    def size(self) -> int:
        """Its bytes as a message: a field of a list costs what it costs alone, of heartbeats there is one at most."""
        beats = [item for item in self.items if item[0] == "heartbeat"]
        return sum(size_of(*item) for item in self.items if item not in beats[:-1])


def fill(message: Any, kind: str, call_id: str, size: int) -> None:
    """Puts an item into a message."""
    if kind == "calls":
        message.calls.add(call_id=call_id, arguments_json="x" * size)
    elif kind == "results":
        message.results.add(call_id=call_id, output_json="x" * size)
    elif kind == "heartbeat":
        message.heartbeat.sequence = int(call_id)
    else:
        message.drain.reason = call_id


@functools.lru_cache(maxsize=10_000)
def size_of(kind: str, call_id: str, size: int) -> int:
    """Returns the bytes of a message with one item; both sides number the fields of these alike."""
    message = wire.InvokeResponse()
    fill(message, kind, call_id, size)
    return message.ByteSize()


class SessionModel:
    """What a session promises: messages as lists, the peer's silence as a history."""

    def __init__(self, side: Side, now: float, grew: Callable[[SessionModel, int], None]) -> None:
        self.side = side
        self.grew = grew  # told when another message is begun, with the bytes of the one before
        self.state = "opening"
        self.half_closed = self.suspect = self.drained = False
        self.max_in_flight = 0
        self.frame_bytes = MIB
        self.frames: list[Frame] = []
        self.taken = 0
        self.pending: dict[str, int] = {}  # id → the number of its frame
        self.in_flight: set[str] = set()
        self.heard = self.probed = now
        self.wrote = self.judged = now  # nothing was written since; when the silence was judged last
        self.busy_since: float | None = None  # the first tick since which calls were pending
        self.unanswered = 0  # heartbeats since the last message
        self.seen_taken = 0  # messages written when the silence was judged last
        self.probes = 0
        self.woken = 0

    @property
    def takes_calls(self) -> bool:
        return self.state == "live" and not self.suspect and not self.half_closed

    @property
    def number(self) -> int:
        """The number of the newest message."""
        return self.taken + len(self.frames)

    def put(self, kind: str, call_id: str, size: int, room: int) -> None:
        needed = max(room, self.frame_bytes // 128)
        last = self.frames[-1] if self.frames else None
        if last is None or needed > last.left:
            self.woken += not self.frames
            full, last = last, Frame(left=self.frame_bytes)
            self.frames.append(last)
            if full is not None:
                self.grew(self, full.size)
        last.items.append((kind, call_id, size))
        last.left -= needed

    def sizes(self) -> list[int]:
        return [frame.size for frame in self.frames]

    def hear(self, arms: dict[str, int], now: float) -> list[str] | None:
        """Returns the arms in the order in which they are read; None where the stream must end."""
        self.heard, self.unanswered, self.suspect = now, 0, False
        opening = "attach" if self.side is Side.BUS else "attached"
        if self.state == "closed":
            return []
        if self.state == "opening" and opening not in arms:
            return None
        crossed = self.drained and "attach" in arms
        if self.state == "leaving" and "attach" in arms and not crossed:
            return None
        if any(count > MAX_ITEMS for arm, count in arms.items() if arm in ITEMS):
            return None
        return [arm for arm in ORDER if arm in arms]

    def judge(self, now: float) -> str:
        """Says what the silence means at a tick; every one is judged."""
        if self.half_closed or self.state not in ("live", "leaving"):
            return "fine"
        if self.taken != self.seen_taken:
            self.seen_taken, self.wrote = self.taken, self.judged
        self.judged = now
        interval = 1.0 if self.pending or self.unanswered else 10.0
        if not self.pending:
            self.busy_since = None
        elif self.busy_since is None:
            self.busy_since = now
        begun = [self.busy_since] if self.busy_since is not None and not self.unanswered else []
        due = max(self.heard, self.probed, *begun) + interval
        overdue = now >= due
        if not overdue and now < max(self.wrote + 10.0, *(each + interval for each in begun), 0.0):
            return "fine"
        if overdue and self.unanswered >= 20:
            return "gone"
        hung = overdue and self.unanswered == 4
        newly = overdue and self.unanswered >= 2 and not self.suspect
        self.suspect |= newly
        self.probes += 1
        self.unanswered += 1
        self.wrote = now
        self.probed = due if 0 <= now - due < interval / 2 else now  # late ticks do not add up
        self.put("heartbeat", str(self.probes), 0, 16)
        return "hung" if hung else "suspect" if newly else "probe"


SIZES = st.sampled_from([0, 10, 10, 3_000, 9_000, 300_000, 900_000])
WHICH = st.integers(0, 1)
COUNTS = st.integers(0, 19).map(lambda draw: {0: MAX_ITEMS, 1: MAX_ITEMS + 1}.get(draw, draw % 3 + 1))
PLACES = st.integers(0, 5)
PHASES = (Phase.generate,)  # a fault need not be shown at its smallest


class SessionMachine(RuleBasedStateMachine):
    """Two streams of one bus, or two peers: each is what its model says, whatever comes in which order."""

    @initialize(side=st.sampled_from([Side.BUS, Side.PEER]))
    def begin(self, side: Side) -> None:
        self.now = 100.0
        self.side = side
        self.pool = Pool(POOL_BYTES)
        self.sessions: list[Session[Any]] = [Session(side, WRITTEN[side], self.now) for _ in range(2)]
        self.models = [SessionModel(side, self.now, self._grew) for _ in range(2)]
        self.woken = [0, 0]
        self.floods, self.wanted_floods = [0, 0], [0, 0]
        self.count = 0
        for index, session in enumerate(self.sessions):
            session.outbox.pool, session.outbox.max_bytes = self.pool, MAX_WAITING
            session.outbox.wake = lambda index=index: self._note(self.woken, index)  # type: ignore[misc]
            session.outbox.flooded = lambda index=index: self._note(self.floods, index)  # type: ignore[misc]
        self.opens(0, 0, 0)

    def _grew(self, grown: SessionModel, size: int) -> None:
        """Notes which outboxes must report a flood: the fullest where all hold too much, and each that does alone."""
        outboxes = [session.outbox for session in self.sessions]
        held = [sum(model.sizes()[:-1]) for model in self.models]
        if size and sum(held) > POOL_BYTES:
            order = [outboxes.index(outbox) for outbox in self.pool.outboxes]  # for two that hold the same
            assert order, "the pool knows of nothing that waits"
            self.wanted_floods[max(order, key=held.__getitem__)] += 1
        index = self.models.index(grown)
        if held[index] > MAX_WAITING:
            self.wanted_floods[index] += 1

    @staticmethod
    def _note(counts: list[int], index: int) -> None:
        counts[index] += 1

    @rule(index=WHICH, most=st.sampled_from([0, 2, 256]), largest=st.sampled_from([0, 8 * KIB, 100 * KIB, 16 * MIB]))
    def opens(self, index: int, most: int, largest: int) -> None:
        session, model = self.sessions[index], self.models[index]
        if model.state != "opening":
            return
        session.open(most or 4, largest)
        model.state, model.max_in_flight = "live", most or 4
        receives = largest or 4 * MIB
        model.frame_bytes = min(MIB, max(receives - 4 * KIB, receives // 2) // 4)

    @rule(
        index=WHICH,
        arms=st.dictionaries(st.sampled_from(ORDER), COUNTS, max_size=5),
    )
    def hears(self, index: int, arms: dict[str, int]) -> None:
        session, model = self.sessions[index], self.models[index]
        arms = {arm: count for arm, count in arms.items() if arm in FROM[self.side]}
        message = MESSAGE[self.side]()
        for arm, count in arms.items():
            if arm in ITEMS or arm == "events":
                [getattr(message, arm).add() for _ in range(count)]
            else:
                getattr(message, arm).SetInParent()
        expected = model.hear(arms, self.now)
        if expected is None:
            with pytest.raises(ProtocolError):
                session.receive(message, self.now)
            self.ends(index)
        else:
            assert [arm for arm, _ in session.receive(message, self.now)] == expected

    @rule(index=WHICH, size=SIZES)
    def a_call_goes_out_where_there_is_room(self, index: int, size: int) -> None:
        session, model = self.sessions[index], self.models[index]
        assert session.takes_calls == model.takes_calls
        if session.takes_calls and len(session.pending) < session.max_in_flight:
            self.count += 1
            call_id = str(self.count)
            fill(session.outbox.room(size), "calls", call_id, size)
            session.pending[call_id] = session.outbox.opened
            model.put("calls", call_id, size, size)
            model.pending[call_id] = model.number

    @rule(index=WHICH, size=SIZES, times=st.sampled_from([1, 1, 3, 200]))
    def results_go_out(self, index: int, size: int, times: int) -> None:
        session, model = self.sessions[index], self.models[index]
        if model.state == "closed":
            return
        for _ in range(times if size < 10_000 else 1):
            self.count += 1
            fill(session.outbox.room(size), "results", str(self.count), size)
            model.put("results", str(self.count), size, size)

    @rule(index=WHICH)
    def the_writer_takes_one(self, index: int) -> None:
        session, model = self.sessions[index], self.models[index]
        message = session.outbox.take()
        if not model.frames:
            assert message is None
            return
        frame = model.frames.pop(0)
        model.taken += 1
        assert message == frame.fill(WRITTEN[self.side]())
        assert len(message.calls) + len(message.results) <= 128

    @rule(index=WHICH)
    def the_writer_takes_all(self, index: int) -> None:
        while self.models[index].frames:
            self.the_writer_takes_one(index)

    @rule(index=WHICH, which=PLACES)
    def a_call_is_recalled(self, index: int, which: int) -> None:
        session, model = self.sessions[index], self.models[index]
        if not model.pending:
            return
        call_id = list(model.pending)[which % len(model.pending)]
        number = model.pending.pop(call_id)
        waits = number > model.taken
        assert session.outbox.recall(session.pending.pop(call_id), call_id) == waits
        if waits:
            frame = model.frames[number - model.taken - 1]
            frame.items = [item for item in frame.items if item[:2] != ("calls", call_id)]

    @rule(index=WHICH, which=PLACES)
    def a_call_is_answered(self, index: int, which: int) -> None:
        model = self.models[index]
        if model.pending:
            call_id = list(model.pending)[which % len(model.pending)]
            del model.pending[call_id], self.sessions[index].pending[call_id]

    @rule(index=WHICH, which=PLACES)
    def the_peer_asks_and_is_answered(self, index: int, which: int) -> None:
        model, call_id = self.models[index], f"asked {which}"
        if model.state == "closed":
            return
        if call_id in model.in_flight:
            model.in_flight.remove(call_id)
            del self.sessions[index].in_flight[call_id]
        else:
            model.in_flight.add(call_id)
            self.sessions[index].in_flight[call_id] = call_id

    @rule(index=WHICH)
    def what_comes_next_is_read_later(self, index: int) -> None:
        self.sessions[index].outbox.seal()
        if self.models[index].frames:
            self.models[index].frames[-1].left = -1

    @rule(ticks=st.sampled_from([1, 4, 20, 90]), only_one_writes=st.booleans())
    def time_passes(self, ticks: int, only_one_writes: bool) -> None:
        for _ in range(ticks):
            self.now += TICK
            for index, (session, model) in enumerate(zip(self.sessions, self.models, strict=True)):
                if self.side is Side.PEER:
                    continue  # only the bus asks
                pulse, expected = session.pulse(self.now), model.judge(self.now)
                assert pulse is Pulse(expected), f"at {self.now}: {session!r}"
                if pulse is Pulse.GONE:
                    self.ends(index)
            if only_one_writes:
                self.the_writer_takes_all(0)

    @rule()
    def the_clock_stood_still(self) -> None:
        self.now += 3_600.0
        for session, model in zip(self.sessions, self.models, strict=True):
            session.restart_pulse(self.now)
            model.heard = model.probed = self.now
            model.unanswered = 0

    @rule(index=WHICH, how=st.sampled_from(["drain", "leave", "half", "discard", "end"]))
    def it_comes_to_an_end(self, index: int, how: str) -> None:
        session, model = self.sessions[index], self.models[index]
        if how == "drain":
            session.send_drain("why")
            if not model.drained and model.state != "closed":
                model.drained = True
                model.put("drain", "why", 0, 3 + 16)
                model.frames[-1].left = -1
        elif how == "leave":
            session.leave()
            model.state = "leaving" if model.state == "live" else model.state
        elif how == "half":
            session.close_half()
            model.half_closed = True
            model.state = "leaving" if model.state == "live" else model.state
        elif how == "end":
            self.ends(index)
        elif model.state == "closed":
            session.outbox.discard()
            model.taken, model.frames = model.number, []

    def ends(self, index: int) -> None:
        session, model = self.sessions[index], self.models[index]
        pending, running = session.end()
        assert pending == list(model.pending.values())
        assert set(running) == model.in_flight
        model.state, model.pending, model.in_flight = "closed", {}, set()

    @rule(index=WHICH)
    def another_takes_its_place(self, index: int) -> None:
        """A closed stream is forgotten with what waited in it."""
        if self.models[index].state == "closed":
            self.it_comes_to_an_end(index, "discard")
            outbox = self.sessions[index].outbox
            self.sessions[index] = Session(self.side, WRITTEN[self.side], self.now)
            self.models[index] = SessionModel(self.side, self.now, self._grew)
            self.sessions[index].outbox.pool, self.sessions[index].outbox.max_bytes = self.pool, MAX_WAITING
            self.sessions[index].outbox.wake, self.sessions[index].outbox.flooded = outbox.wake, outbox.flooded
            self.woken[index] = 0

    @invariant()
    def it_is_what_the_model_says(self) -> None:
        for session, model, woken in zip(self.sessions, self.models, self.woken, strict=True):
            assert session.state is State(model.state)
            assert (session.takes_calls, session.suspect) == (model.takes_calls, model.suspect)
            assert (session.half_closed, session.drain_sent) == (model.half_closed, model.drained)
            assert session.idle == (not model.pending and not model.in_flight and not model.frames)
            assert session.max_in_flight == model.max_in_flight
            assert (session.outbox.opened, session.outbox.taken) == (model.number, model.taken)
            assert woken == model.woken

    @invariant()
    def the_pool_holds_what_waits_but_for_the_open_messages(self) -> None:
        waiting = {}
        for session, model in zip(self.sessions, self.models, strict=True):
            sizes = model.sizes()
            assert session.outbox.waiting_bytes == sum(sizes)
            if sum(sizes[:-1]):
                waiting[session.outbox] = sum(sizes[:-1])
        assert self.pool.outboxes == waiting
        assert self.pool.bytes == sum(waiting.values())

    @invariant()
    def a_flood_is_told_of_the_one_that_holds_too_much(self) -> None:
        assert self.floods == self.wanted_floods


SessionMachine.TestCase.settings = settings(max_examples=examples(12), stateful_step_count=40)
test_a_session_is_what_a_plain_model_says = SessionMachine.TestCase


@pytest.mark.parametrize(
    "fault",
    ["a window too wide", "a lost frame", "a hasty pulse", "an uncounted byte", "an open door", "no flood", "any arm"],
)
def test_the_model_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine can fail: each planted fault breaks it."""
    _plant(fault, monkeypatch)
    # `Failed` comes of the `pytest.raises` in the machine, where the session took what the model refuses.
    with pytest.raises((AssertionError, ProtocolError, pytest.fail.Exception)):
        run_state_machine_as_test(
            SessionMachine,
            settings=settings(
                max_examples=500,  # the first one that fails ends the search; of 100, some orders find none
                stateful_step_count=40,
                derandomize=True,
                database=None,
                phases=PHASES,
                report_multiple_bugs=False,
            ),
        )


def _plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the session in one way."""
    if fault == "a window too wide":
        monkeypatch.setattr(Session, "_update", lambda self: setattr(self, "takes_calls", self.state is State.LIVE))
    elif fault == "a lost frame":
        monkeypatch.setattr(Outbox, "seal", lambda self: None)
    elif fault == "a hasty pulse":
        monkeypatch.setattr(Session.__init__, "__defaults__", (Timings(missed_heartbeats=2),))
    elif fault == "an uncounted byte":
        monkeypatch.setattr(Pool, "count", lambda self, outbox, waiting, more: None)
    elif fault == "any arm":
        everything = frozenset({"attach", "calls", "progress", "results", "cancels", "heartbeat", "drain"})
        monkeypatch.setattr("toolbus.protocol.session._MAY_ARRIVE", defaultdict(lambda: everything))
    elif fault == "no flood":
        deaf = property(lambda self: lambda: None, lambda self, value: None)
        monkeypatch.setattr(Outbox, "flooded", deaf, raising=False)
    else:
        monkeypatch.setattr("toolbus.protocol.session._OPENING_FIELD", {Side.BUS: "heartbeat", Side.PEER: "heartbeat"})
