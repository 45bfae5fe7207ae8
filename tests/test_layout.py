"""The floors of the house: who may import whom, what importing costs, how long files, classes and functions may get.

Imports are read, not run, so the list also holds for files whose dependencies are not installed.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import HANG_SECONDS

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Block = ast.stmt | ast.ExceptHandler | ast.match_case  # what statements are in
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "toolbus"

# From the ground up: a module imports from its own floor and from those above it in this list, never from one below.
FLOORS = (
    "v1",
    "errors cancellation limits tool result_text text questions schema_grammar normal_schema newest reader mailbox "
    "lazy stall session log_limit local_users traceparent span_names version "
    "bridge_socket",
    "functions",  # a Python function as a tool; no connection, no bus
    "neko",  # plugins as N.E.K.O. writes them; no connection
    "sdk",  # what plugin and host authors import
    "openapi",  # operations of an OpenAPI document as tools; a plugin of the SDK
    "embeddings",
    "search",
    "search_tool",
    "mcp",  # the Model Context Protocol as texts: no input or output
    "dialects.schemas",
    "dialects",
    "loop",
    "council extension",
    "processes",
    "dropin.sandbox",
    "dropin.javascript",  # scripts as an engine runs them: no connection, no bus
    "dropin",
    "check",  # reads code of other systems, and runs nothing of it
    "conformance",  # proves clients and buses; needs grpcio and protobuf only
    "bus.loopback bus.callback_url bus.outbound bus.path_ownership",
    "bus.access",  # who is asking
    "bus.audit",  # what was done, and by whom
    "bus.keys",  # what proves who is asking
    "bus.storage",
    "bus.pins",  # what sources declared when they were trusted
    "bus.metrics",  # counts and their texts: knows neither entries nor calls
    "bus.catalog",
    "bus.calls",
    "bus.traces",  # spans to a collector
    "bus.streams",
    "bus.tasks",
    "bus.config bus.local bus.mcp_settings bus.serve_settings",
    "bus.signals bus.roles",
    "bus.features bus.web_paths",  # what rooms hold for one another
    "bus.embedded",
    "bus.core",
    "bus.operators",
    "bus.gateway",
    "bus.upstream",
    "bus.mcp_server",
    "bus.mcp_client",
    "bus.console",  # what operators look at
    "bus.rooms",
    "bus",
    "tools",
    "testing",
    "mcp_bridge",  # of clients that start their MCP servers; the standard library alone
    "cli",
)
FLOOR_OF: dict[str, int] = {place: floor for floor, places in enumerate(FLOORS) for place in places.split()}

# Floors → what they may use beside the standard library. What is not named here may use what the server extra brings.
LIGHT = {"google.protobuf", "grpc"}
LIBRARIES = {
    "errors": {"google.protobuf", "grpc"},
    "tool": {"google.protobuf"},
    "text": set[str](),
    "result_text": set[str](),
    "schema_grammar": set[str](),
    "normal_schema": set[str](),
    "questions": set[str](),
    "newest": set[str](),
    "cancellation": set[str](),
    "mailbox": set[str](),
    "limits": set[str](),
    "local_users": set[str](),
    "bridge_socket": set[str](),
    "stall": set[str](),
    "log_limit": set[str](),
    "reader": set[str](),
    "traceparent": set[str](),
    "span_names": set[str](),
    "version": set[str](),
    "session": {"google.protobuf"},
    "functions": set[str](),
    "neko": set[str](),
    "sdk": LIGHT,
    "openapi": {"httpx", "yaml"},  # extra `openapi`, imported when they are used
    "embeddings": {"numpy", "safetensors", "tokenizers"},  # extra `semantic`, imported when it is used
    "search": set[str](),
    "search_tool": set[str](),
    "mcp": {"google.protobuf", "msgspec"},  # msgspec where messages are decoded
    "mcp_bridge": set[str](),
    "dialects": set[str](),
    "dialects.schemas": set[str](),
    "loop": set[str](),
    "council": {"httpx"},  # where it asks a model itself
    "processes": set[str](),
    "dropin.javascript": {"quickjs"},  # extra `javascript`
    "check": set[str](),
    "bus.access": set[str](),
    "bus.keys": {"cryptography", "tomlkit", "jwt", "aiohttp"},  # extras `keys` and `jwt`
    "bus.metrics": set[str](),
    "bus.catalog": {"google.protobuf", "orjson", "jsonschema_rs"},
    "bus.calls": {"google.protobuf", "orjson", "jsonschema_rs"},
}
# The core decides and never waits: no sockets, files, environment or loop of its own.
CORE = ("bus.metrics", "bus.catalog", "bus.calls")
NOT_IN_CORE = {
    *("asyncio", "multiprocessing", "os", "pathlib", "selectors", "shutil", "socket", "ssl", "subprocess", "tempfile"),
}

# Reasons for files of more than 500 lines, classes of more than 350, functions of more than 60. Empty is best.
LONG_FILES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {
    "toolbus/bus/tasks/task_manager.py:TaskManager": "how tasks begin, change and end, under one lock",
    "toolbus/bus/catalog/registry.py:Registry": "each way in which an offer comes and goes, under one lock",
}
LONG_FUNCTIONS: dict[str, str] = {
    "toolbus/bus/calls/dispatcher.py:calls": "the hot path, one flat function a frame: a call costs as much as a check",
    "toolbus/bus/calls/dispatcher.py:results": "the hot path, for the same reason",
    "toolbus/cli/mount_command.py:mount": "one parameter for each option of the command, and their mapping to an entry",
    "toolbus/cli/serve_command.py:serve": "one parameter for each option of the command, and nothing else",
}
# Reasons for a name that two public classes, or two files, have. Users import, write or read these names.
SHARED_CLASSES = {
    "Ok Err": "what plugins of N.E.K.O. return; tools of the bus return values or failures of the same names",
    "ContextMessage ListedTool": "models of the REST contract, named in its OpenAPI document; the SDK's are public",
    "LeftOut": "tools that a dialect leaves out, operations that `toolbus.openapi` leaves out; both are public",
    "Question": "of a tool to its caller (`toolbus.sdk`), of a council to a model (`toolbus.extension`)",
    "Reply": "of a tool (`toolbus.sdk`), of a turn (`toolbus.loop`)",
}
SHARED_FILES = {
    "extension": "`toolbus.extension` is an import path of users; `sdk/extension.py` holds the SDK's `Extension`",
}


def _place(module: str) -> str:
    """Returns the place of FLOORS that a module (dotted, without ``toolbus.``) belongs to."""
    parts = module.split(".")
    while parts and ".".join(parts) not in FLOOR_OF:
        parts.pop()
    return ".".join(parts)


def _written_files() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "v1" not in file.parents]


def _module(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(file): file for file in _written_files()}


@dataclass(frozen=True, slots=True)
class _Defined:
    """A class or function of a file."""

    kind: type[_Definition]
    name: str
    lines: int  # without its docstring
    is_outermost: bool


@functools.cache  # to read all files takes a second, and their trees 130 MB
def _nodes(file: Path) -> tuple[ast.Import | ast.ImportFrom | _Defined, ...]:
    """Returns the imports and definitions of a file."""
    return tuple(_each_node(ast.parse(file.read_text(encoding="utf-8"), str(file))))


def _each_node(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom | _Defined]:
    pending: list[ast.AST] = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif isinstance(node, _Definition):
                yield _Defined(type(node), node.name, _length(node), node.col_offset == 0)
            if isinstance(node, _Block):
                pending.append(node)


@functools.cache
def _imports(file: Path) -> tuple[tuple[int, str], ...]:
    """Returns line and full dotted name of everything imported anywhere in a file, types and functions included."""
    return tuple(_each_import(file))


def _each_import(file: Path) -> Iterator[tuple[int, str]]:
    package = file.relative_to(ROOT).parent.parts
    for node in _nodes(file):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*above, node.module or "")).strip(".")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def _own_imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields line and place for what a file imports from toolbus."""
    for line, name in _imports(file):
        package, _, rest = name.partition(".")
        if package == "toolbus" and rest:
            yield line, _place(rest)


def _libraries(file: Path) -> Iterator[tuple[int, str]]:
    for line, name in _imports(file):
        top = name.partition(".")[0]
        if top != "toolbus" and top not in sys.stdlib_module_names:
            yield line, name


def _belongs(name: str, libraries: set[str]) -> bool:
    return any(name == library or name.startswith(library + ".") for library in libraries)


def test_every_module_has_a_floor() -> None:
    without = sorted(module for module in MODULES if module and not _place(module))
    assert not without, f"decide on which floor they stand, and add them to FLOORS: {without}"


@pytest.mark.parametrize("place", list(FLOOR_OF))
def test_imports_go_down_only(place: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports from {other}"
        for module, file in MODULES.items()
        if module and _place(module) == place and file != PACKAGE / "bus" / "__init__.py"
        for line, other in _own_imports(file)
        if other and FLOOR_OF[other] > FLOOR_OF[place]
    ]
    assert not wrong, f"{place} may not: {wrong}"


@pytest.mark.parametrize("root", [PACKAGE, ROOT / "lab", ROOT / "clients" / "python"], ids=lambda root: root.name)
def test_no_files_import_each_other_in_a_circle(root: Path) -> None:
    """Imports for types count: what two files share belongs into a third, below both."""
    home = root if root.name == "python" else ROOT  # whose folder names begin with
    modules = {".".join(file.relative_to(home).with_suffix("").parts): file for file in sorted(root.rglob("*.py"))}
    modules = {module.removesuffix(".__init__"): file for module, file in modules.items()}
    below = {
        module: {each for _, name in _imports(file) if (each := _module_of(name, modules))} - {module}
        for module, file in modules.items()
    }
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def _module_of(name: str, modules: Mapping[str, Path]) -> str | None:
    """Returns the module that an imported name is, or comes from; None where it is of no file here."""
    return next((module for module in (name, name.rpartition(".")[0]) if module in modules), None)


@pytest.mark.parametrize("place", sorted(LIBRARIES))
def test_a_light_floor_needs_few_libraries(place: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for module, file in MODULES.items()
        if module and _place(module) == place
        for line, name in _libraries(file)
        if not _belongs(name, LIBRARIES[place])
    ]
    assert not wrong, f"{place} may not: {wrong}"


@pytest.mark.parametrize("place", CORE)
def test_the_core_needs_no_operating_system(place: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for module, file in MODULES.items()
        if _place(module) == place
        for line, name in _imports(file)
        if name.partition(".")[0] in NOT_IN_CORE
    ]
    assert not wrong, f"{place} is core: {wrong}"


LIGHT_MODULES = (
    *("toolbus", "toolbus.tool", "toolbus.search", "toolbus.dialects.openai_chat", "toolbus.loop"),
    *("toolbus.sdk.host", "toolbus.sdk.plugin_client"),
)


@functools.cache
def _heavy_after_each() -> dict[str, list[str]]:
    """Imports the light modules one after another in a process of their own: what one loads stays for the next."""
    heavy = [
        *("orjson", "jsonschema_rs", "typer", "rich", "uvloop", "starlette", "toolbus.bus", "toolbus.cli"),
        *("aiohttp", "fastapi", "httpx", "numpy", "pydantic", "opentelemetry"),
    ]
    lines = (
        "import sys",
        f"for module in {LIGHT_MODULES!r}:",
        "    __import__(module)",
        f"    print(module, *[name for name in {heavy!r} if name in sys.modules])",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (ran.returncode, ran.stderr) == (0, "")
    return {module: names for module, *names in map(str.split, ran.stdout.splitlines())}


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_import_loads_nothing_of_the_server(module: str) -> None:
    assert _heavy_after_each()[module] == []


def test_the_command_line_loads_what_its_commands_need_when_they_run() -> None:
    heavy = ["grpc", "google.protobuf", "orjson", "rich", "uvloop", "pydantic", "toolbus.bus", "toolbus.sdk.connection"]
    script = f"import sys, toolbus.cli.command_line; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "[]", "")


def test_importing_the_package_loads_no_part_of_it() -> None:
    script = "import sys, toolbus; print(sorted(name for name in sys.modules if name.startswith(('toolbus.', 'grpc'))))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_files_of_more_than_500_lines_have_a_reason() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text("utf-8").splitlines()) for file in _written_files()}
    _check_reasons({name: length for name, length in lengths.items() if length > 500}, LONG_FILES)


def test_classes_of_more_than_350_lines_have_a_reason() -> None:
    _check_reasons(_long(ast.ClassDef, limit=350), LONG_CLASSES)


def test_functions_of_more_than_60_lines_have_a_reason() -> None:
    _check_reasons(_long(ast.FunctionDef, ast.AsyncFunctionDef, limit=60), LONG_FUNCTIONS)


def _check_reasons(long: dict[str, int], reasons: dict[str, str]) -> None:
    assert not long.keys() - reasons.keys(), f"split them, or give their reason in the tables above: {long}"
    assert not reasons.keys() - long.keys(), "a reason that is no longer needed: delete it"


def _long(*kinds: type[_Definition], limit: int) -> dict[str, int]:
    return {
        f"{file.relative_to(ROOT)}:{node.name}": node.lines
        for file in _written_files()
        for node in _nodes(file)
        if isinstance(node, _Defined) and node.kind in kinds and node.lines > limit
    }


def _length(node: _Definition) -> int:
    """Returns a definition's lines without its docstring: explaining more should cost nothing."""
    whole = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return whole
    return whole - (first.end_lineno - first.lineno + 1)


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for file in _written_files():
        for node in _nodes(file):
            if (
                isinstance(node, _Defined)
                and node.kind is ast.ClassDef
                and node.is_outermost
                and not node.name.startswith("_")
            ):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    _check_shared(places, SHARED_CLASSES)


def test_no_two_files_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for file in _written_files():
        if not file.stem.startswith("__"):
            places.setdefault(file.stem, []).append(str(file.relative_to(ROOT)))
    _check_shared(places, SHARED_FILES)


def _check_shared(places: dict[str, list[str]], reasons: dict[str, str]) -> None:
    shared = {name: files for name, files in places.items() if len(files) > 1}
    known = {name for names in reasons for name in names.split()}
    new = {name: files for name, files in shared.items() if name not in known}
    assert not new, f"name each by what it is, or give the reason in the tables above: {new}"
    assert not known - shared.keys(), f"a reason that is no longer needed: delete it: {known - shared.keys()}"
