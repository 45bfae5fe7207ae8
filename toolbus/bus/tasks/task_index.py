"""Indexes tasks by id and owner, limits how many may run, and expires or evicts finished ones.

Pure bookkeeping: nothing here waits, locks or reads a clock. A finished task expires when it is too old, or is evicted
by newer ones; a running task never is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from toolbus.bus.tasks.task import Task
from toolbus.tool import KIB, MIB, TASK_SECONDS

MAX_OWNER = 512  # characters: users in grants have half as many, and no limit below counts this text


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """How many tasks there may be, and for how long.

    Attributes:
        task_seconds: how long a task may run.
        running, running_per_owner: tasks that may run, in all and of one owner.
        finished_kept: finished tasks that can still be fetched.
        finished_seconds: after which a finished task expires.
        finished_bytes: of all their results together; 500 of the largest would take 2 GB.
        result_bytes: the largest result that is written to disk.

    Raises:
        ValueError: from the constructor; a limit is not a number, or below 0.
    """

    task_seconds: float = TASK_SECONDS
    running: int = 1_000
    running_per_owner: int = 100
    finished_kept: int = 500
    finished_seconds: float = 86_400.0
    finished_bytes: int = 64 * MIB
    result_bytes: int = 512 * KIB

    def __post_init__(self) -> None:
        for each in fields(self):
            check_limit(each.name, getattr(self, each.name))


class TaskIndex:
    """The tasks of one program."""

    def __init__(self, limits: TaskLimits) -> None:
        self._limits = limits
        self._running: dict[str, Task] = {}  # by task_id, oldest first
        self._per_owner: dict[str, int] = {}  # running tasks by owner, without owners that have none
        self._finished: dict[str, Task] = {}  # by task_id, in the order in which they ended
        self._finished_bytes = 0

    def __repr__(self) -> str:
        return f"<TaskIndex running={len(self._running)} finished={len(self._finished)} bytes={self._finished_bytes}>"

    def begin(self, task: Task) -> bool:
        """Adds a running task; returns False, and adds nothing, above the limits or where its owner is too long."""
        if len(task.owner) > MAX_OWNER:
            return False
        owned = self._per_owner.get(task.owner, 0)
        if len(self._running) >= self._limits.running or owned >= self._limits.running_per_owner:
            return False
        self._running[task.task_id] = task
        self._per_owner[task.owner] = owned + 1
        return True

    def update(self, task: Task) -> None:
        """Puts a running task in the place of its earlier state."""
        self._running[task.task_id] = task

    def end(self, task: Task) -> tuple[Task, list[str]]:
        """Adds a finished task, whether it ran here or was restored.

        Returns:
            The task, without its result where that alone is too large; and the ids of evicted tasks, which may be its
            own.
        """
        limits = self._limits
        if self._running.pop(task.task_id, None) is not None:
            self._per_owner[task.owner] -= 1
            if not self._per_owner[task.owner]:
                del self._per_owner[task.owner]
        if task.size > limits.finished_bytes:
            task = task.without_result(f"it is larger than the limit finished_bytes = {limits.finished_bytes}")
        self._finished[task.task_id] = task
        self._finished_bytes += task.size
        evicted = []
        while len(self._finished) > limits.finished_kept or self._finished_bytes > limits.finished_bytes:
            evicted.append(self._drop_oldest())
        return task, evicted

    def expire(self, now: float) -> list[str]:
        """Drops finished tasks that are too old. Returns their ids."""
        expired = []
        while self._finished:
            oldest = next(iter(self._finished.values()))
            if oldest.ended is not None and oldest.ended + self._limits.finished_seconds > now:
                break
            expired.append(self._drop_oldest())
        return expired

    def find(self, task_id: str, owner: str | None = None) -> Task | None:
        """Returns a task; None where the id is unknown, or the task is another owner's (owner None: not checked)."""
        task = self._running.get(task_id) or self._finished.get(task_id)
        return task if task is not None and owner in (None, task.owner) else None

    def of(self, owner: str | None) -> list[Task]:
        """Returns an owner's tasks, or (None) all: those that run, then the finished ones, each newest first."""
        both = (reversed(self._running.values()), reversed(self._finished.values()))
        return [task for tasks in both for task in tasks if owner in (None, task.owner)]

    def all(self) -> list[Task]:
        """Returns the tasks that run, then the finished ones, each oldest first."""
        return [*self._running.values(), *self._finished.values()]

    def _drop_oldest(self) -> str:
        task_id = next(iter(self._finished))
        self._finished_bytes -= self._finished.pop(task_id).size
        return task_id


def check_limit(name: str, value: object) -> None:
    """Checks the value of a limit.

    Raises:
        ValueError: it is not a number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:  # NaN fails this too
        raise ValueError(f"{name} is {value!r}, it must be a number of at least 0: omit it for the default")
