"""Loads drop-in tools: a folder of Python files, each with one or more tools, run in sandboxed processes.

The public names are loaded when they are first used: a sandboxed process starts with few modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.parts.dropin.file_declarations import env_of, llm_tool_register, register_tool
    from toolbus.parts.dropin.file_loader import FileProblem, Loaded, load_files, load_folder, tool_files
    from toolbus.parts.dropin.file_result import unknown_tool
    from toolbus.parts.dropin.group import Group, groups
    from toolbus.parts.dropin.manifest import FileGrants, Manifest, Target, append, load_manifest, read_manifest
    from toolbus.parts.dropin.script_runs import run_script
    from toolbus.parts.dropin.visibility import may_see, visible

__all__ = [
    # for the files themselves
    "register_tool", "llm_tool_register", "may_see", "visible", "run_script",
    # loading a folder
    "load_folder", "load_files", "tool_files", "Loaded", "FileProblem",
    # grants, and which files share a process
    "load_manifest", "read_manifest", "append", "Manifest", "FileGrants", "Target", "groups", "Group",
    # calls and results
    "env_of", "unknown_tool",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parts.dropin.file_declarations": "llm_tool_register register_tool env_of",
        "parts.dropin.manifest": "FileGrants Target Manifest append load_manifest read_manifest",
        "parts.dropin.file_loader": "FileProblem Loaded load_files load_folder tool_files",
        "parts.dropin.file_result": "unknown_tool",
        "parts.dropin.group": "Group groups",
        "parts.dropin.script_runs": "run_script",
        "parts.dropin.visibility": "may_see visible",
    },
)
