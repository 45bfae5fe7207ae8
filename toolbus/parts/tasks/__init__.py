"""Runs background tasks: calls, and other work, that go on after their soft deadline; results are fetched later."""

from toolbus.parts.tasks.delivery import TaskCaller, TaskEvents
from toolbus.parts.tasks.task import HomeAway, Status, Task, owner_of
from toolbus.parts.tasks.task_manager import TaskManager
from toolbus.parts.tasks.task_tools import TaskTools

__all__ = [
    # holding tasks
    "TaskManager",
    "Task",
    "Status",
    "TaskEvents",
    "HomeAway",
    # for the bus: the caller that takes the results of a dispatcher's calls, owners of tasks, and the tools for models
    "TaskCaller",
    "owner_of",
    "TaskTools",
]
