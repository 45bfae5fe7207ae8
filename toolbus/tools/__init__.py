"""Tools of a Python program, in the program's own process: what the Stargazer package ``tools`` offers, on this bus.

``from toolbus.tools import ToolRegistry, ToolDefinition, TaskManager``
"""

from toolbus.bus.tasks import TaskManager
from toolbus.tools.definition import ToolDefinition
from toolbus.tools.tool_registry import ToolRegistry

__all__ = [
    "ToolRegistry",
    "ToolDefinition",
    "TaskManager",
]
