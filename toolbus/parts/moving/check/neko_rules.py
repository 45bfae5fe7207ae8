"""Lists what differs for plugins of N.E.K.O.; `parts.moving.neko` holds what toolbus has of that system."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolbus.errors import SetupError
from toolbus.functions.tool_spec import ToolOptions
from toolbus.parts.moving.check.source_file import (
    Effect,
    Finding,
    Import,
    SourceFile,
    System,
    constant,
    dotted,
    is_installed,
    keyword,
    schemas,
    tried,
)
from toolbus.parts.moving.neko import entries
from toolbus.parts.moving.neko.absences import IGNORED, OBJECTS, RAISING
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase
from toolbus.parts.moving.neko.plugin_context import PluginContext
from toolbus.parts.moving.neko.plugin_folder import (
    MAIN_PROGRAM,
    MANIFEST,
    MARKET,
    PLUGINS,
    SERVER,
    SUBMODULES,
    has_module,
    is_of_sdk,
    is_plugin_folder,
    main_program,
    plugin_folders,
    read_manifest,
)
from toolbus.parts.moving.neko.plugin_lifecycle import NEVER_CALLED
from toolbus.parts.moving.neko.sdk_names import NAMES, OLDER_MODULES, SETTINGS, is_absent
from toolbus.processes.child_environment import PLUGIN, variables_read_by
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, NAME

_BASES = ("NekoPluginBase", "PluginBase", "PluginRouter")
_CATCH_ABSENCES = ("Exception", "BaseException", "AttributeError", "NotProvided")  # what an absent attribute raises
_ONLY_IN_NEKO = {*entries.KINDS, "entry", "event"}  # the last two as plugin.entry and plugin.event
_LINES = {"type": r"^\s*type\s*=", "id": r"^\s*id\s*=", "entry": r"^\s*entry\s*="}
_AWAITED = re.compile(r"self\.(store|config)\.[a-z]\w*")
_OFFER = "Put @llm_tool above it to offer it to models."
_OFFER_ENTRY = "Run it with --entries, or put @llm_tool above it, to offer it to models."
_ONLY_ENTRIES = f"{_OFFER_ENTRY} The plugin has entries only, and offers nothing until then."
_READ_THEIR_ARGUMENT = ("len", "list", "tuple", "set", "dict", "sorted", "iter", "aiter", "next", "sum")
_PYDANTIC = "Install pydantic where `toolbus run` is."
_START_BY_NAME = "Name its folder to run it; of a folder of plugins it is left out."


def _manifest(folder: Path) -> Iterator[Finding]:
    file = folder / MANIFEST
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        manifest = read_manifest(folder)
    except SetupError as problem:
        what = str(problem).removeprefix(f"{file.resolve()}: ").removeprefix(f"{file.resolve()} ")
        line = re.search(r"\(at line (\d+)", what)
        key = next((key for key in _LINES if re.search(rf"\b{key}\b", what)), "")
        yield Finding(file, int(line[1]) if line else _line(text, _LINES.get(key, r"\A")), Effect.STOPS, what)
        return
    runtime = manifest.values.get("plugin_runtime")
    if isinstance(runtime, dict) and runtime.get("enabled") is False:
        yield Finding(file, _line(text, r"^\s*enabled\s*="), Effect.NOTE, "says enabled = false", _START_BY_NAME)
    inner = manifest.module.split(".")[3:]
    module = folder.joinpath(*inner)
    code = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    if not module.is_dir() and not code.is_file():
        what = f"entry names the module {manifest.module}, which is not in the folder"
        yield Finding(file, _line(text, _LINES["entry"]), Effect.STOPS, what, "Correct entry.")
    elif not (bound := _binds(code, manifest.class_name)):
        what = f"entry names the class {manifest.class_name}, which {manifest.module} does not have"
        yield Finding(file, _line(text, _LINES["entry"]), Effect.STOPS, what, "Correct entry.")
    elif all(
        isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(each, ast.ClassDef) and all(dotted(base) == "object" for base in each.bases))
        for each in bound
    ):
        what = f"entry names {manifest.class_name}, which is not a class that derives from NekoPluginBase"
        yield Finding(code, bound[0].lineno, Effect.STOPS, what, "Derive it from NekoPluginBase, or correct entry.")
    if (folder / "store.db").is_file():
        remedy = "Write what the plugin needs of it with self.store.set() once."
        yield Finding(
            folder / "store.db", 0, Effect.DIFFERS, "is not read: values are stored in data/store.json", remedy
        )


def _binds(file: Path, name: str) -> list[Any]:
    """Returns where a module defines, imports or assigns a name; of one that cannot be read, that is assumed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8-sig")) if file.is_file() else ast.Module([], [])
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return [ast.Name(name)]
    return [
        node
        for node in ast.walk(tree)
        if getattr(node, "asname", None) == name
        or getattr(node, "name", None) in (name, "*")
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
    ]


def _imports(source: SourceFile) -> Iterator[Finding]:
    for each in source.imports:
        if is_of_sdk(each.module) and is_absent(each.name):
            absence = NAMES[each.name].absence
            what = f"imports {each.name}, which raises when it is used: it {absence.purpose} in N.E.K.O."
            yield source.finding(each.line, Effect.DIFFERS, what, absence.remedy)
        elif missing := _missing(source, each):
            yield source.missing(each.line, f"imports {missing[0]}", missing[1], optional=each.optional)


def _missing(source: SourceFile, imported: Import) -> tuple[str, str] | None:
    """Returns what of an import is not here, and the remedy; None where it is."""
    module, name, top = imported.module, imported.name, imported.module.partition(".")[0]
    if is_of_sdk(module):
        if name in SETTINGS:
            return None if is_installed("pydantic") else (f"{name}, which needs pydantic", _PYDANTIC)
        if name in ("", "*", *NAMES, *SUBMODULES) or (module.endswith(".ui") and name in ("action", "context")):
            return None
        return f"{module}.{name}, which toolbus does not have", SERVER.remedy
    own, relative = _own_module(source, imported), module.startswith(".")
    if (own and not _has_file(source.root.joinpath(*own))) or (relative and not _has_relative(source, module)):
        return f"{module}, which is not in the folder", "Correct the import, or copy the file."
    if relative or own is not None:
        return None
    if is_plugin_folder(source.root) and (other := _below_plugins(source, imported)):
        if _has_file(source.root.parent.joinpath(*other)):
            return None
        remedy = f"Copy the folder {other[0]} beside this plugin's."
        return f"{module} of another plugin, which is not beside this one", remedy
    if top == "plugin" and module != "plugin" and not f"{module}.".startswith(f"{PLUGINS}."):
        return f"{module}, which {SERVER.purpose} in N.E.K.O.", SERVER.remedy
    if source.brings(imported):
        return None
    if top in MAIN_PROGRAM:
        absence = main_program(module, name)
        return f"{module}, which {absence.purpose} in N.E.K.O.", absence.remedy
    if top in ("plugin", *sys.stdlib_module_names) or is_installed(top) or _is_vendored(source, module):
        return None
    return f"{top}, which is not installed here", f"Install {top} where `toolbus run` is."


def _below_plugins(source: SourceFile, imported: Import) -> list[str]:
    """Returns the path of a module in the package of all plugins; empty for a module elsewhere."""
    parts = imported.module.split(".")
    if parts[0] == MARKET and not has_module(source.root, MARKET):
        parts = ["plugin", *parts]
    if parts == PLUGINS.split(".") and imported.name not in ("", "*"):
        parts.append(imported.name)
    return parts[2:] if parts[:2] == PLUGINS.split(".") else []


def _own_module(source: SourceFile, imported: Import) -> list[str] | None:
    """Returns the path in the plugin's folder of a module of the plugin itself; None for any other module."""
    parts = _below_plugins(source, imported)
    try:
        manifest = read_manifest(source.root) if parts else None
    except SetupError:  # the finding of the manifest says why
        return None
    return parts[1:] if manifest is not None and parts[0] in (manifest.package, manifest.id) else None


def _has_relative(source: SourceFile, module: str) -> bool:
    """Tells whether a relative import finds its module, in the plugin's folder or beside it."""
    path = module.lstrip(".")
    folder = source.path.parent
    for _ in range(len(module) - len(path) - 1):
        folder = folder.parent
    if not path or not folder.is_relative_to(source.root.parent):
        return True
    return _has_file(folder.joinpath(*path.split(".")))


def _is_vendored(source: SourceFile, module: str) -> bool:
    """Tells whether a module is in a folder of the plugin that its own code puts on the path of imports."""
    return "sys.path" in source.text and any(
        _has_file(each.joinpath(*module.split("."))) for each in source.root.glob("*/") if each.is_dir()
    )


def _has_file(module: Path) -> bool:
    """Tells whether Python finds a module at a path; it may be compiled code."""
    return module.is_dir() or any(module.parent.glob(f"{module.name}.*"))


def _attributes(source: SourceFile) -> Iterator[Finding]:
    for cls in source.classes(*_BASES):
        own = _own_names(cls)
        used = {id(each) for node in ast.walk(cls) for each in _uses(node)}
        known = {*PluginContext.__dataclass_fields__, *_named(source, cls)}
        caught = tried(cls, _CATCH_ABSENCES)
        yield from _unknown_methods(source, cls, own)
        for node in ast.walk(cls):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            optional = id(node) in caught
            owner = dotted(node.value)
            if owner not in ("self", "ctx", "self.ctx") or (owner == "self" and node.attr in own):
                if owner == "self.config" and node.attr.startswith("profile_"):
                    remedy = "Use self.config.set(path, value), or one plugin.toml for each set."
                    yield source.missing(node, f"self.config.{node.attr} raises", remedy, optional=optional)
                continue
            shown = f"{owner}.{node.attr}"
            if node.attr in OBJECTS and id(node) not in used:
                what = f"{shown} raises when it is used: it {RAISING[node.attr].purpose} in N.E.K.O."
                yield source.finding(node, Effect.DIFFERS, what, RAISING[node.attr].remedy)
            elif node.attr in RAISING:
                what = f"{shown} raises: it {RAISING[node.attr].purpose} in N.E.K.O."
                yield source.missing(node, what, RAISING[node.attr].remedy, optional=optional)
            elif node.attr in IGNORED:
                yield source.finding(node, Effect.DIFFERS, f"{shown}() has no effect", IGNORED[node.attr].reason)
            elif node.attr == "push_message":
                remedy = "Hosts follow with host.notifications()."
                yield source.finding(node, Effect.NOTE, f"{shown}() reaches hosts as a notification", remedy)
            elif owner != "self" and not hasattr(PluginContext, node.attr) and node.attr not in known:
                yield source.missing(node, f"{shown} does not exist here", "Do without it.", optional=optional)
            elif node.attr in ("data_path", "cache_path"):
                what = f"{shown}() is in data/ of the plugin's folder"
                yield source.finding(node, Effect.NOTE, what, "Copy old files into it.")


def _uses(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the objects that a piece of code uses: a mere name or argument is only handed on."""
    match node:
        case (
            ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value)
        ):
            yield value
        case ast.For(iter=value) | ast.AsyncFor(iter=value) | ast.comprehension(iter=value):
            yield value
        case ast.withitem(context_expr=value):
            yield value
        case ast.Call(func=function, args=arguments):
            yield function
            if dotted(function) in _READ_THEIR_ARGUMENT:
                yield from arguments


def _unknown_methods(source: SourceFile, cls: ast.ClassDef, own: set[str]) -> Iterator[Finding]:
    """Finds methods that a plugin calls on itself and that nothing here defines.

    Only in a class whose base is the SDK's alone, in a file that sets no attributes by computed names.
    """
    bases = [dotted(each).rpartition(".")[2] for each in cls.bases]
    if bases not in (["NekoPluginBase"], ["PluginBase"]) or "setattr(" in source.text or "__getattr__" in source.text:
        return
    known = {*own, *_named(source, cls), *dir(NekoPluginBase), *IGNORED, *RAISING}
    caught = tried(cls, _CATCH_ABSENCES)
    for node in ast.walk(cls):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and dotted(node.func.value) == "self":
            name = node.func.attr
            if name not in known:
                what, remedy = f"self.{name}() does not exist here", "Write the method, or do without it."
                yield source.missing(node, what, remedy, optional=id(node.func) in caught)


def _named(source: SourceFile, cls: ast.ClassDef) -> Iterator[str]:
    """Yields the attributes that a file sets, and the texts of a class, which are names for hasattr and getattr."""
    for each in ast.walk(source.tree):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr
    for each in ast.walk(cls):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _attributes_of_sdk(source: SourceFile) -> Iterator[Finding]:
    """Finds names that a plugin takes from a module of the SDK by a dot, and that toolbus does not have."""
    modules: set[str] = set()  # their names in this file
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            modules.update(each.asname or each.name for each in node.names if is_of_sdk(each.name))
        elif isinstance(node, ast.ImportFrom) and is_of_sdk(node.module or ""):
            found = (each for each in node.names if each.name in SUBMODULES and each.name not in NAMES)
            modules.update(each.asname or each.name for each in found)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) in modules:
            name = node.attr
            if name not in {*NAMES, *SETTINGS, *SUBMODULES} and not name.startswith("__"):
                what = f"takes {dotted(node)}, which toolbus does not have"
                yield source.finding(node, Effect.STOPS, what, SERVER.remedy)


def _not_awaited(source: SourceFile) -> Iterator[Finding]:
    """Finds what only older plugins may write, whose store and configuration answer at once."""
    if any(each.name == "NekoPluginBase" and each.module in OLDER_MODULES for each in source.imports):
        return
    for cls in source.classes(*_BASES):
        for node in ast.walk(cls):
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) else None
            if isinstance(value, ast.Call) and _AWAITED.fullmatch(name := dotted(value.func)):
                what = f"{name}() is not awaited"
                yield source.finding(node, Effect.STOPS, what, f"Write await {name}(…) in an async method.")


def _decorators(source: SourceFile) -> Iterator[Finding]:
    for cls in source.classes(*_BASES):
        tools: set[str] = set()
        has_tools = "llm_tool" in ast.unparse(cls)
        for method in cls.body:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = {dotted(each): each for each in method.decorator_list}
            tool = next((each for name, each in names.items() if name.split(".")[-1] == "llm_tool"), None)
            for name, node in names.items():
                shown = name.removeprefix("plugin.")
                if shown in _ONLY_IN_NEKO and tool is None:
                    what = f"@{name} {method.name} is called by N.E.K.O. only"
                    entry = shown in (entries.ENTRY, "entry")
                    remedy = (_OFFER_ENTRY if has_tools else _ONLY_ENTRIES) if entry else _OFFER
                    yield source.finding(node, Effect.DIFFERS, what, remedy)
                elif shown.split(".")[-1] == "lifecycle" and isinstance(node, ast.Call):
                    moment = constant(keyword(node, "id"))
                    what = f'@lifecycle(id="{moment}") {method.name} is never called'
                    if moment in NEVER_CALLED:
                        yield source.finding(node, Effect.DIFFERS, what, "Use startup and shutdown.")
            if tool is not None:
                yield from _tool(source, tool, method.name, tools)
                yield from _signature(source, method)


def _signature(source: SourceFile, method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    """Finds parameters that no argument can fill, since arguments come by name."""
    names = method.args
    if len(names.posonlyargs) > 1:  # `self` is the first
        what = f"the parameter {names.posonlyargs[-1].arg} of the tool {method.name} is positional-only"
        yield source.finding(method, Effect.STOPS, what, "Remove the / from its signature: arguments come by name.")
    if names.vararg is not None and names.kwarg is None:
        what = f"no argument can fill *{names.vararg.arg} of the tool {method.name}"
        yield source.finding(method, Effect.STOPS, what, "Take a list, as in names: list[str].")


def _tool(source: SourceFile, node: ast.expr, method: str, seen: set[str]) -> Iterator[Finding]:
    options = {each.arg: each.value for each in node.keywords if each.arg} if isinstance(node, ast.Call) else {}
    name = constant(options.get("name")) or (method if "name" not in options else None)
    if isinstance(name, str):
        if not NAME.fullmatch(name):
            remedy = "Rename it: [A-Za-z0-9_.-]{1,64}."
            yield source.finding(node, Effect.STOPS, f"the tool name {name!r:.80} breaks the rule", remedy)
        if name in seen:
            what = f"the second method with the tool name {name!r} is skipped"
            yield source.finding(node, Effect.DIFFERS, what, "Rename one.")
        seen.add(name)
    timeout = constant(options.get("timeout"))
    if isinstance(timeout, int | float) and timeout > MAX_TIMEOUT_SECONDS:
        what = f"timeout={timeout} is cut to {MAX_TIMEOUT_SECONDS:g} s"
        yield source.finding(node, Effect.DIFFERS, what, "Let longer work continue in the background.")
    if unknown := sorted(options.keys() - ToolOptions.__annotations__.keys()):
        yield source.finding(node, Effect.DIFFERS, f"llm_tool has no option {', '.join(unknown)}; it has no effect")


def _variables(source: SourceFile) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        for name in variables_read_by(node):
            if name not in PLUGIN.choose({name: ""}):
                remedy = f"Run it with --env {name}, or set it in a file for --secrets."
                yield source.finding(node, Effect.NOTE, f"reads the variable {name}, which plugins do not get", remedy)


def _own_names(cls: ast.ClassDef) -> set[str]:
    """Returns what a class defines or sets on its objects."""
    defined = {each.name for each in cls.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            defined.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return defined


def _line(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return text.count("\n", 0, found.end()) + 1 if found else 1


NEKO = System(
    "neko",
    "N.E.K.O.",
    rules={".py": (_imports, _attributes, _attributes_of_sdk, _not_awaited, _decorators, _variables, schemas)},
    folder_rules=(_manifest,),
    roots=lambda path: plugin_folders(path) or [path],
)
