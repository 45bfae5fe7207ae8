"""Runs background tasks: calls, and other work, that go on after their soft deadline; results are fetched later."""

from toolbus.bus.tasks.delivery import TaskCaller, TaskEvents
from toolbus.bus.tasks.task import Status, Task, owner_of
from toolbus.bus.tasks.task_manager import TaskManager
from toolbus.bus.tasks.task_tools import TaskTools

__all__ = [
    # holding tasks
    "TaskManager",
    "Task",
    "Status",
    "TaskEvents",
    # for the bus: the caller that takes the results of a dispatcher's calls, owners of tasks, and the tools for models
    "TaskCaller",
    "owner_of",
    "TaskTools",
]
