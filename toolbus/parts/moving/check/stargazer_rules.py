"""Lists what differs for tool files and programs of Stargazer."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from toolbus.functions.scope import ToolScope
from toolbus.parts.dropin.manifest import FILE
from toolbus.parts.moving.check.source_file import (
    Effect,
    Finding,
    SourceFile,
    System,
    dotted,
    is_installed,
    read_source,
    schemas,
)
from toolbus.processes.child_environment import PLUGIN, variables_read_by

# The names of `toolbus.tools`, whose modules are not loaded for it.
NAMES = ("ToolRegistry", "ToolDefinition", "TaskManager", "load_tools", "reload_tools")
_TASK_METHODS = {"execute", "get_result", "await_result", "list_tasks", "set_output_redirect"}
_IN_SCOPE = {name for name in dir(ToolScope) if not name.startswith("_")}
_NETWORK = {"aiohttp", "httpx", "requests", "urllib3", "socket", "websockets", "redis"}
_SHAPES = ("TOOL_NAME", "TOOLS")
_OWN_CTX = (
    "Take it as an argument or return it; a ToolRegistry in your own program may hand in a ctx of your own: "
    "registry.call(name, arguments, ctx=ctx)."
)
_NESTED = f"Write (await ctx.call(name, arguments)).text to call another tool of the bus. {_OWN_CTX}"


def _imports(source: SourceFile) -> Iterator[Finding]:
    for each in source.imports:
        top = each.module.partition(".")[0]
        if top == "tools" and not source.brings(each):
            if each.module != "tools" or each.name not in ("", "*", *NAMES):
                what = f"imports {each.module}{'.' if each.name else ''}{each.name}, which does not exist here"
                yield source.finding(each.line, Effect.STOPS, what, f"From toolbus.tools there are {', '.join(NAMES)}.")
            else:
                remedy = 'Write toolbus.tools, or put sys.modules["tools"] = toolbus.tools before the first import.'
                yield source.finding(each.line, Effect.STOPS, "imports the package tools", remedy)
        elif not top or top in sys.stdlib_module_names or source.brings(each):
            continue
        elif not is_installed(top):
            what, remedy = f"imports {top}, which is not installed here", f"Install {top}, or bring it along."
            yield source.missing(each.line, what, remedy, optional=each.optional)


def _reach(source: SourceFile) -> Iterator[Finding]:
    """Yields what a file in a folder of drop-in tools does not reach without a grant."""
    if not _is_tool_file(source.tree):
        return
    for each in source.imports:
        top = each.module.partition(".")[0]
        if top in _NETWORK:
            remedy = f'Grant what it connects to in {FILE}: "connect": ["HOST:PORT"].'
            yield source.finding(each.line, Effect.NOTE, f"imports {top}: a drop-in tool has no network", remedy)
        elif top == "subprocess":
            remedy = "Make it a plugin, which runs outside the sandbox, or load the folder with load_tools()."
            yield source.finding(each.line, Effect.STOPS, "a drop-in tool starts no processes", remedy)
    for node in ast.walk(source.tree):
        for name in variables_read_by(node):
            if name not in PLUGIN.choose({name: ""}):
                remedy = f'Grant it in {FILE}: "secrets": ["{name}"].'
                yield source.finding(node, Effect.NOTE, f"reads the variable {name}, which drop-in tools lack", remedy)


def _shapes(source: SourceFile) -> Iterator[Finding]:
    assigned = _assigned(source.tree)
    if "TOOL_NAME" in assigned and not _defines(source.tree, "run"):
        yield source.finding(assigned["TOOL_NAME"], Effect.STOPS, "names a tool and has no function run", "Add run.")
    for name in ("TOOL_DESCRIPTION", "TOOL_PARAMETERS"):
        if name in assigned and "TOOL_NAME" not in assigned:
            yield source.finding(assigned[name], Effect.STOPS, f"sets {name} without TOOL_NAME", "Add TOOL_NAME.")


def _attributes(source: SourceFile) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "TaskManager":
            for each in node.keywords:
                if each.arg == "redis":
                    remedy = "Leave it out; path=… keeps results over a restart."
                    yield source.finding(node, Effect.STOPS, "TaskManager takes no redis", remedy)
        if not isinstance(node, ast.Attribute):
            continue
        owner = dotted(node.value)
        if owner == "ctx" and node.attr not in _IN_SCOPE:
            remedy = _NESTED if node.attr == "tool_registry" else _OWN_CTX
            yield source.finding(node, Effect.DIFFERS, f"the ctx of the bus has no {node.attr}", remedy)
        elif node.attr == "_tools" and owner != "self":
            remedy = "Use list_tools(), unregister_tool(name) and reload_tools(directory, registry)."
            yield source.finding(node, Effect.STOPS, f"{owner}._tools does not exist here", remedy)
        elif owner.endswith("task_manager") and not node.attr.startswith("_") and node.attr not in _TASK_METHODS:
            remedy = f"There are {', '.join(sorted(_TASK_METHODS))}."
            yield source.finding(node, Effect.STOPS, f"a TaskManager has no {node.attr}", remedy)


def _allow_list(folder: Path) -> Iterator[Finding]:
    if not (folder / FILE).is_file() and any(_assigns_a_tool(file) for file in folder.glob("*.py")):
        remedy = "Run the folder with --require-manifest to load nothing without one, as Stargazer does."
        yield Finding(folder, 0, Effect.DIFFERS, f"has no {FILE}, so every file is loaded", remedy)


def _assigns_a_tool(file: Path) -> bool:
    source = read_source(file, file.parent)
    try:
        return isinstance(source, SourceFile) and _is_tool_file(source.tree)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _is_tool_file(tree: ast.Module) -> bool:
    return any(name in _assigned(tree) for name in _SHAPES)


def _assigned(tree: ast.Module) -> dict[str, ast.stmt]:
    """Returns what a module assigns at its top level, each name with its statement."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _defines(tree: ast.Module, name: str) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return name in _assigned(tree) or any(isinstance(node, functions) and node.name == name for node in tree.body)


STARGAZER = System(
    "stargazer",
    "Stargazer",
    rules={".py": (_imports, _shapes, _attributes, _reach, schemas)},
    folder_rules=(_allow_list,),
)
