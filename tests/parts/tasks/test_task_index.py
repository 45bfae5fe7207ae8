"""The ledger: who sees which task, how many there may be, and which go first."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.parts.tasks.samples import finished, running
from tests.support.examples import examples
from toolbus.parts.tasks.task import Task
from toolbus.parts.tasks.task_manager import MAX_OWNER, TaskIndex, TaskLimits

LIMITS = TaskLimits(running=4, running_per_owner=2, finished_kept=3, finished_seconds=10.0, finished_bytes=60)


def test_a_task_is_found_by_its_owner_and_where_owners_are_not_checked() -> None:
    ledger = TaskIndex(LIMITS)
    assert ledger.begin(running())
    assert ledger.find("task_1") == ledger.find("task_1", "ann") == running()
    assert ledger.find("task_1", "bob") is None
    assert ledger.find("task_1", "") is None
    assert ledger.find("task_2", "ann") is None


def test_an_owner_has_room_again_when_a_task_ends() -> None:
    ledger = TaskIndex(LIMITS)
    assert [ledger.begin(running(f"task_{number}")) for number in range(3)] == [True, True, False]
    assert ledger.begin(running("task_3", "bob"))
    ledger.end(finished("task_0"), 1.0)
    assert ledger.begin(running("task_4"))


def test_there_is_room_for_so_many_tasks_in_all() -> None:
    ledger = TaskIndex(LIMITS)
    assert [ledger.begin(running(f"task_{each}", each)) for each in "abcde"] == [True, True, True, True, False]


def test_an_owner_of_endless_name_has_no_tasks_and_takes_no_room() -> None:
    ledger = TaskIndex(LIMITS)
    assert not ledger.begin(running(owner="x" * (MAX_OWNER + 1)))
    assert (ledger.begin(running(owner="x" * MAX_OWNER)), len(ledger.all())) == (True, 1)


def test_the_oldest_finished_task_goes_for_a_new_one() -> None:
    ledger = TaskIndex(LIMITS)
    evicted = [ledger.end(finished(f"task_{number}"), 1.0)[1] for number in range(5)]
    assert evicted == [[], [], [], ["task_0"], ["task_1"]]
    assert [task.task_id for task in ledger.of("ann")] == ["task_4", "task_3", "task_2"]


def test_large_results_take_as_many_old_ones_away_as_they_need() -> None:
    ledger = TaskIndex(LIMITS)
    for number in range(3):
        ledger.end(finished(f"task_{number}", output_json="x" * 20), 1.0)
    assert ledger.end(finished("task_3", output_json="x" * 40), 1.0)[1] == ["task_0", "task_1"]


def test_a_result_above_the_limit_is_dropped_and_evicts_no_other_task() -> None:
    ledger = TaskIndex(LIMITS)
    ledger.end(finished("task_0", output_json="x" * 60), 1.0)
    final, evicted = ledger.end(finished("task_1", output_json="x" * 61), 1.0)
    assert (final.result, evicted) == (None, [])
    assert "its result of 61 bytes was dropped" in final.text
    assert ledger.find("task_1") is final


def test_with_a_limit_of_0_every_finished_task_is_evicted_at_once() -> None:
    ledger = TaskIndex(TaskLimits(finished_kept=0))
    assert ledger.end(finished(), 1.0)[1] == ["task_1"]
    assert ledger.find("task_1") is None


def test_finished_tasks_go_when_their_time_is_over_and_running_ones_never() -> None:
    ledger = TaskIndex(LIMITS)
    ledger.begin(running("task_0"))
    ledger.end(finished("task_1"), 1.0)
    ledger.end(finished("task_2"), 5.0)
    assert ledger.expire(10.9) == []
    assert ledger.expire(11.0) == ["task_1"]
    assert ledger.expire(math.inf) == ["task_2"]
    assert ledger.of("ann") == [running("task_0")]


@pytest.mark.parametrize("value", [-1, math.nan, True, "3", None])
def test_an_invalid_limit_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=f"finished_kept is {value!r}, it must be a number of at least 0"):
        TaskLimits(finished_kept=value)  # type: ignore[arg-type]


OWNERS = ("ann", "bob", "")


class LedgerModel(RuleBasedStateMachine):
    """Any history of a ledger, beside two plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TaskIndex(LIMITS)
        self.running: list[Task] = []
        self.finished: list[Task] = []
        self.now = 0.0
        self.count = 0

    @rule(owner=st.sampled_from(OWNERS))
    def begin(self, owner: str) -> None:
        self.count += 1
        task = running(f"task_{self.count}", owner, self.now)
        room = len(self.running) < 4 and sum(each.owner == owner for each in self.running) < 2
        assert self.ledger.begin(task) is room
        if room:
            self.running.append(task)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(1, 80))
    def end(self, data: st.DataObject, size: int) -> None:
        task = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.keep(finished(task.task_id, task.owner, self.now, "x" * size))

    @rule(owner=st.sampled_from(OWNERS), size=st.integers(1, 80))
    def end_of_a_task_from_before(self, owner: str, size: int) -> None:
        self.count += 1
        self.keep(finished(f"task_{self.count}", owner, self.now, "x" * size))

    def keep(self, task: Task) -> None:
        final, evicted = self.ledger.end(task, self.now)
        assert (final.result is None) is (task.size > 60)
        self.finished.append(final)
        went = []
        while len(self.finished) > 3 or sum(each.size for each in self.finished) > 60:
            went.append(self.finished.pop(0).task_id)
        assert evicted == went

    @rule(seconds=st.floats(0, 8))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        old = [task.task_id for task in self.finished if (task.ended or 0.0) + 10.0 <= self.now]
        self.finished = [task for task in self.finished if task.task_id not in old]
        assert self.ledger.expire(self.now) == old

    @invariant()
    def everybody_sees_his_own(self) -> None:
        for owner in OWNERS:
            both = [*reversed(self.running), *reversed(self.finished)]
            assert self.ledger.of(owner) == [task for task in both if task.owner == owner]
        for task in (*self.running, *self.finished):
            seen = {owner for owner in OWNERS if self.ledger.find(task.task_id, owner) is task}
            assert seen == {task.owner}
        assert self.ledger.all() == [*self.running, *self.finished]


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=examples(15), stateful_step_count=30)


def test_one_account_leaves_room_for_others_whatever_users_it_names() -> None:
    ledger = TaskIndex(TaskLimits(running=100, running_per_owner=2))
    begun = [ledger.begin(running(f"task_{number}", f"user {number}"), "identity greedy") for number in range(100)]
    assert begun == [True] * 91 + [False] * 9
    assert ledger.begin(running("another", "ann"), "identity modest")
    ledger.end(finished("task_0"), 1.0)
    assert not ledger.begin(running("task_100", "user 100"), "identity greedy")


def test_the_finished_tasks_of_an_account_that_has_most_go_first() -> None:
    ledger = TaskIndex(TaskLimits(finished_kept=4, finished_bytes=1000))
    for number, account in enumerate(("modest", "greedy", "greedy", "greedy", "greedy", "greedy")):
        ledger.begin(running(f"task_{number}", f"user {number}"), account)
    evicted = [ledger.end(finished(f"task_{number}", owner=f"user {number}"), 1.0)[1] for number in range(6)]
    assert evicted == [[], [], [], [], ["task_1"], ["task_2"]]
    assert ledger.find("task_0") is not None


def test_large_results_take_away_those_of_the_account_whose_results_are_largest() -> None:
    ledger = TaskIndex(TaskLimits(finished_kept=10, finished_bytes=60))
    for number, account in enumerate(("modest", "greedy", "greedy")):
        ledger.begin(running(f"task_{number}", f"user {number}"), account)
    ledger.end(finished("task_0", owner="user 0", output_json="x" * 20), 1.0)
    ledger.end(finished("task_1", owner="user 1", output_json="x" * 25), 1.0)
    assert ledger.end(finished("task_2", owner="user 2", output_json="x" * 25), 1.0)[1] == ["task_1"]
