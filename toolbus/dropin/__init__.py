"""Loads drop-in tools: a folder of Python files, each with one or more tools, run in sandboxed processes."""

from toolbus.dropin.file_declarations import register_tool
from toolbus.dropin.file_grants import FileGrants, Target
from toolbus.dropin.file_loader import FileProblem, Loaded, load_files, load_folder, tool_files
from toolbus.dropin.file_result import unknown_tool
from toolbus.dropin.group import Group, groups
from toolbus.dropin.manifest import Manifest, append, load_manifest, read_manifest
from toolbus.dropin.tool_env import env_of
from toolbus.dropin.visibility import may_see, visible

llm_tool_register = register_tool  # as the files of a Synchronet BBS call it

__all__ = [
    # for the files themselves
    "register_tool",
    "llm_tool_register",
    "may_see",
    "visible",
    # loading a folder
    "load_folder",
    "load_files",
    "tool_files",
    "Loaded",
    "FileProblem",
    # grants, and which files share a process
    "load_manifest",
    "read_manifest",
    "append",
    "Manifest",
    "FileGrants",
    "Target",
    "groups",
    "Group",
    # calls and results
    "env_of",
    "unknown_tool",
]
