"""Offers the tools of a Python program in its own process: the public names of Stargazer's package ``tools``.

``from toolbus.tools import ToolRegistry, ToolDefinition, TaskManager, load_tools, reload_tools``
"""

from toolbus.functions.tool_spec import ToolDefinition
from toolbus.parts.moving.registry.tool_registry import ToolRegistry, load_tools, reload_tools
from toolbus.parts.tasks import TaskManager

__all__ = ["ToolRegistry", "ToolDefinition", "TaskManager", "load_tools", "reload_tools"]
