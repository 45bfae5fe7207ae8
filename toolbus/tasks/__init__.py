"""Tasks: calls, and other work, that outlive their caller's patience. Their results are asked for later."""

from toolbus.tasks.background import LoopTasks
from toolbus.tasks.caller import TaskCaller
from toolbus.tasks.record import Status, Task, owner_of
from toolbus.tasks.task_manager import TaskManager
from toolbus.tasks.tools import TaskTools
from toolbus.tasks.watching import Events

__all__ = [
    # keeping tasks
    "TaskManager",
    "Task",
    "Status",
    "Events",
    # for the bus: what a dispatcher's calls become, who takes their results, whose they are, and the tools for models
    "LoopTasks",
    "TaskCaller",
    "owner_of",
    "TaskTools",
]
