"""The slots of a tool are shared: a modest caller keeps its service beside greedy ones, and one alone has them all."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.core_model import Core, KeeperDouble, PeerDouble, tool
from toolbus.bus.catalog.entry import SHARED_SECONDS
from toolbus.errors import Code
from toolbus.v1 import tool_pb2 as pb

LEFT_FREE = 7  # of 256 slots, while a tool is shared


def fill(core: Core, caller: PeerDouble, count: int, name: str = "t") -> int:
    """Makes calls in one frame; returns how many were accepted."""
    before = len(caller.in_flight)
    numbers = range(len(caller.results) + before, len(caller.results) + before + count)
    core.dispatcher.calls(
        caller, [pb.ToolCall(call_id=f"c{number}", name=name, arguments_json="{}") for number in numbers], core.now
    )
    return len(caller.in_flight) - before


def answer_all(core: Core, plugin: PeerDouble) -> None:
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=each) for each in list(plugin.pending)], core.now)


def shared(slots: int) -> tuple[Core, PeerDouble, PeerDouble, PeerDouble]:
    """Returns a tool where two callers have met, and has all their calls answered."""
    core = Core()
    plugin, greedy, modest = core.plugin("p", tool("t"), max_in_flight=slots), core.peer("greedy"), core.peer("modest")
    greedy.max_in_flight = 4096
    fill(core, greedy, slots)
    fill(core, modest, 1)
    answer_all(core, plugin)
    return core, plugin, greedy, modest


@pytest.mark.parametrize("slots", [1, 2, 32, 33, 256])
def test_a_caller_that_is_alone_has_every_slot(slots: int) -> None:
    core = Core()
    core.plugin("p", tool("t"), max_in_flight=slots)
    host = core.peer("host", max_in_flight=4096)
    assert fill(core, host, slots + 1) == slots


def test_a_tool_that_is_shared_keeps_a_few_slots_free_for_whoever_comes() -> None:
    core, _, greedy, modest = shared(256)
    assert fill(core, greedy, 256) == 256 - LEFT_FREE
    assert fill(core, modest, LEFT_FREE) == LEFT_FREE


def test_a_tool_is_no_longer_shared_a_minute_after_two_callers_met() -> None:
    core, plugin, greedy, _ = shared(256)
    core.advance(SHARED_SECONDS - 1)
    assert fill(core, greedy, 256) == 256 - LEFT_FREE
    answer_all(core, plugin)
    core.advance(1)
    assert fill(core, greedy, 256) == 256


@pytest.mark.parametrize("slots", [1, 2, 8, 32])
def test_a_small_tool_keeps_none_free_and_gives_its_last_slot_to_anybody(slots: int) -> None:
    core, plugin, greedy, modest = shared(slots)
    assert fill(core, greedy, slots) == slots
    assert fill(core, modest, 1) == 0
    core.answer(plugin)
    assert fill(core, modest, 1) == 1


def test_greedy_callers_have_equal_shares_over_time() -> None:
    core = Core()
    plugin = core.plugin("p", tool("t"), max_in_flight=256)
    hosts = [core.peer(f"host-{number}", max_in_flight=4096) for number in range(4)]
    choose = random.Random(1)
    held = Counter[PeerDouble]()
    for turn in range(500):
        fill(core, choose.choice(hosts), 256 if turn == 0 else 32)  # of which 8 are free
        if turn >= 100:  # the first one began with every slot
            held.update({host: len(host.in_flight) for host in hosts})
        plugin.hand_over()
        ended = choose.sample(sorted(plugin.pending), 8)
        core.dispatcher.results(plugin, [pb.ToolResult(call_id=each) for each in ended], core.now)
    assert max(held.values()) < 1.25 * min(held.values())


def test_callers_of_one_source_count_as_one() -> None:
    core, _, greedy, _ = shared(256)
    twin = core.peer("greedy")
    assert fill(core, greedy, 200) == 200
    assert fill(core, twin, 100) == 256 - LEFT_FREE - 200


def test_a_refusal_says_that_the_rest_is_for_others() -> None:
    core, _, greedy, _ = shared(256)
    fill(core, greedy, 256 - LEFT_FREE)
    error = core.refusal(greedy, "t", call_id="one more")
    assert (error.code, error.retry_safe, error.limit) == (Code.OVERLOADED, True, ("calls_in_flight", 249))
    assert error.retry_after_seconds > 0
    assert error.message == (
        "'greedy' has 249 of the 256 calls in flight that tool 't' takes, its share: the rest is for other callers: "
        "try again later"
    )


def test_a_caller_that_has_its_share_of_one_session_goes_to_another_with_room() -> None:
    core = Core()
    small = core.plugin("p", tool("t"), instance="small", max_in_flight=100)
    large = core.plugin("p", tool("t"), instance="large", max_in_flight=1_000)
    greedy, modest = core.peer("greedy", max_in_flight=4096), core.peer("modest")
    fill(core, modest, 2)
    assert fill(core, greedy, 1_100) > 1_000
    assert len(small.pending) < 100
    assert len(large.pending) < 1_000


def test_a_host_with_no_call_in_flight_that_is_refused_at_a_full_tool_gets_in_soon() -> None:
    core = Core()
    plugin = core.plugin("p", tool("t"), max_in_flight=256)
    greedy, modest = core.peer("greedy", max_in_flight=4096), core.peer("modest")
    fill(core, greedy, 256)
    assert fill(core, modest, 1) == 0
    core.answer(plugin)
    fill(core, greedy, 256)
    assert fill(core, modest, 1) == 1


def _lost(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    core.lose(plugin)


def _caller_gone(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    core.lose(host)
    answer_all(core, plugin)  # the plugin confirms the cancels


def _cancelled(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    for call_id in list(host.in_flight):
        core.cancel(host, call_id)


def _confirmed(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    plugin.hand_over()
    _cancelled(core, plugin, host)
    assert plugin.slots.held == {host.budget: 3}
    answer_all(core, plugin)


def _never_confirmed(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    plugin.hand_over()
    core.advance(100.0)


def _failed(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    results = [pb.ToolResult(call_id=each, is_error=each == min(plugin.pending)) for each in list(plugin.pending)]
    core.dispatcher.results(plugin, results, core.now)


def _task(core: Core, plugin: PeerDouble, host: PeerDouble) -> None:
    keeper = KeeperDouble(core)
    core.call(host, "t", call_id="task", background_after_seconds=1.0)
    core.advance(2.0)
    assert plugin.slots.held == {host.budget: 3, keeper.peer.budget: 1}
    answer_all(core, plugin)


@pytest.mark.parametrize("end", [_lost, _caller_gone, _cancelled, _confirmed, _never_confirmed, _failed, _task])
def test_every_end_of_a_call_gives_its_slot_back(end: Callable[[Core, PeerDouble, PeerDouble], None]) -> None:
    core = Core()
    plugin, host = core.plugin("p", tool("t")), core.peer("host")
    assert fill(core, host, 3) == 3
    assert plugin.slots.held == {host.budget: 3}
    end(core, plugin, host)
    assert not plugin.pending
    assert plugin.slots.held == {}


def test_a_call_that_moves_to_another_session_takes_a_slot_there() -> None:
    core = Core()
    first, host = core.plugin("p", tool("t"), instance="1"), core.peer("host")
    fill(core, host, 3)
    second = core.plugin("p", tool("t"), instance="2")
    core.lose(first)
    assert (first.slots.held, second.slots.held) == ({}, {host.budget: 3})


# -- a modest host beside greedy ones ---------------------------------------------------------------------------------


class Load:
    """Hosts and a tool of 256 slots on a clock of milliseconds; a call takes the tool 10 to 30 ms.

    A greedy host has 512 calls: each is made again at once when it has succeeded, and 50 to 60 ms after a refusal. The
    modest host makes a twentieth of the calls that the tool can take, at random, and never again what was refused.

    Args:
        one_caller: whether all hosts are of one source, and so share nothing.
    """

    SLOTS, WAITING, RATE = 256, 512, 256 / 20 / 20

    def __init__(self, greedy: int, *, one_caller: bool = False) -> None:
        self.core = Core()
        self.plugin = self.core.plugin("p", tool("t"), max_in_flight=self.SLOTS)
        self.greedy = [self._host("one" if one_caller else f"greedy-{number}") for number in range(greedy)]
        self.modest = self._host("one" if one_caller else "modest")
        self.ready = {host: [0] * self.WAITING for host in self.greedy}  # when each of its calls is made next
        self.choose = random.Random(7)
        self.ends: list[tuple[int, str]] = []  # (when, the bus's id)
        self.calls = 0
        self.made = self.accepted = self.answered = 0  # the first two of the modest host

    def _host(self, source: str) -> PeerDouble:
        return self.core.peer(source, max_in_flight=4096)

    def run(self, milliseconds: int) -> None:
        for now in range(milliseconds):
            self.core.now += 0.001
            self._answer(now)
            hosts = [*self.greedy, self.modest]
            self.choose.shuffle(hosts)
            for host in hosts:
                if host is self.modest:
                    count = sum(self.choose.random() < self.RATE / 4 for _ in range(4))
                    self.made += count
                    self.accepted += self._call(host, count)
                else:
                    due = 0
                    while self.ready[host] and self.ready[host][0] <= now:
                        heapq.heappop(self.ready[host])
                        due += 1
                    for _ in range(due - self._call(host, due)):
                        heapq.heappush(self.ready[host], now + self.choose.randint(50, 60))
            for call in self.plugin.hand_over():
                heapq.heappush(self.ends, (now + self.choose.randint(10, 30), call.id))

    def _call(self, host: PeerDouble, count: int) -> int:
        before = len(host.in_flight)
        numbers = range(self.calls, self.calls + count)
        self.calls += count
        messages = [pb.ToolCall(call_id=str(number), name="t", arguments_json="{}") for number in numbers]
        self.core.dispatcher.calls(host, messages, self.core.now)
        return len(host.in_flight) - before

    def _answer(self, now: int) -> None:
        results = []
        while self.ends and self.ends[0][0] <= now:
            _, call_id = heapq.heappop(self.ends)
            results.append(pb.ToolResult(call_id=call_id))
            caller = self.plugin.pending[call_id].caller
            if caller in self.ready:
                heapq.heappush(self.ready[caller], now)
        self.core.dispatcher.results(self.plugin, results, self.core.now)
        self.answered += len(results)


@pytest.mark.parametrize(("greedy", "least"), [(1, 0.95), (3, 0.90)])
def test_a_modest_host_is_accepted_at_the_first_attempt_beside_greedy_ones(greedy: int, least: float) -> None:
    without, with_shares = Load(greedy, one_caller=True), Load(greedy)
    for load in (without, with_shares):
        load.run(400)
    assert without.accepted < 0.6 * without.made
    assert with_shares.accepted >= least * with_shares.made
    assert with_shares.answered >= 0.94 * without.answered
