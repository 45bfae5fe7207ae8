"""The floors of the house: who may import whom, what importing costs, how long a file may get.

Imports are read, not run, so the table also holds for files whose dependencies are not installed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "toolbus"

# Core: no sockets, files, environment or loop of its own.
CORE = {
    *("tool", "errors", "schema", "schema_graph", "registry", "catalogue", "session", "peer", "presence"),
    *("call", "dispatcher", "entry", "listings", "loopback", "offer", "staleness", "policy", "records", "refusals"),
    *("redaction", "tripwire", "view", "watchers", "withdrawal"),
}
CORE_LIBRARIES = {"google.protobuf", "orjson", "jsonschema_rs"}
NOT_IN_CORE = {
    *("asyncio", "multiprocessing", "os", "pathlib", "selectors", "shutil", "socket", "ssl", "subprocess", "tempfile"),
}
# The SDK brings these along, and a plugin should not need the bus's libraries.
LIGHT_CORE = {"tool", "errors", "session"}
LIGHT_LIBRARIES = {"google.protobuf", "grpc"}

# Rooms, each with the files that it consists of.
ROOMS = {
    "server": {"server", "health", "guarded", "listeners"},
    "gateway": {"gateway"},
    "local": {"local"},
    "tasks": {"tasks"},
    "dropin": {"dropin"},
    "upstream": {"upstream"},
    "admin": {"admin", "rights", "sight", "permits"},
    "store": {"store"},
}
ROOM_FILES = set().union(*ROOMS.values())
# A function becomes a tool by one set of rules, wherever it runs. These rooms take them from the SDK.
ROOMS_WITH_SDK_RULES = {"local", "admin", "tasks", "dropin"}

TOP = {"bus", "config", "tools", "tool_folder", "cli", "supervisor", "lifeline", "__main__"}
PUBLIC = {"sdk", "loop", "extension", "testing"}
# Pure, and as light as the SDK: what a host needs between a catalogue and a model. The bus uses it too.
FOR_HOSTS = {"dialects", "search", "deferred"}

# Part → the parts of toolbus that it may import, beside itself and the stubs.
MAY_IMPORT = (
    dict.fromkeys(CORE, CORE)
    | {part: LIGHT_CORE - {"session"} for part in ("tool", "errors", "database")}
    | {"session": LIGHT_CORE}
    | {file: CORE | files for files in ROOMS.values() for file in files}
    | {room: CORE | {"sdk"} for room in (*ROOMS_WITH_SDK_RULES, "sight")}
    | {"outbound": set(), "lazy": set()}
    | {room: CORE | {room, "outbound"} for room in ("gateway", "upstream")}
    | {part: (LIGHT_CORE | FOR_HOSTS) - {"session"} for part in FOR_HOSTS}
    | {
        "sdk": LIGHT_CORE | {"lazy"},
        "loop": LIGHT_CORE | FOR_HOSTS | {"sdk", "lazy"},
        "extension": (LIGHT_CORE - {"session"}) | FOR_HOSTS | {"sdk", "loop", "lazy"},
        "store": CORE | {"database"},
        "rights": CORE | {"permits"},
        "tasks": CORE | {"sdk", "outbound", "database"},
        "admin": CORE | {"sdk", "search", "rights", "sight"},
        "gateway": CORE | FOR_HOSTS | {"outbound"},
        "config": CORE,
        "bus": CORE | ROOM_FILES | {"config", "sdk", "extension"},
        "tools": CORE | ROOM_FILES | FOR_HOSTS | {"loop", "sdk"},
        "supervisor": CORE | {"config", "lifeline", "sdk"},
        "tool_folder": CORE | {"dropin", "supervisor"},
        "lifeline": set(),
        "testing": CORE | {"bus", "config", "sdk"},
        "cli": CORE | ROOM_FILES | FOR_HOSTS | TOP | PUBLIC,
        "__main__": {"cli"},
    }
)

# Reasons for files of more than 500 lines and functions of more than 60. Empty is best.
LONG_FILES: dict[str, str] = {
    "toolbus/dispatcher.py": "the life of a call stands in one place: start, send, progress, result, deadline, end",
    "toolbus/registry.py": "every way in which an offer comes and goes, under one lock and with one order of steps",
}
LONG_FUNCTIONS: dict[str, str] = {
    "toolbus/dispatcher.py:calls": "the hot path, one flat function a frame: a call costs as much as a check",
    "toolbus/cli/serve.py:serve": "one parameter for each option of the command, and nothing else",
}


def _parts() -> list[str]:
    found = {file.stem for file in PACKAGE.glob("*.py")} | {
        directory.name for directory in PACKAGE.iterdir() if any(directory.rglob("*.py"))
    }
    return sorted(found - {"__init__", "v1"})


def _files(part: str) -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


def _written_files() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "v1" not in file.parents]


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields line and full dotted name of everything imported anywhere in a file, types and functions included."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*above, node.module or "")).strip(".")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def _own_imports(part: str) -> Iterator[tuple[str, str]]:
    """Yields place and part for what a part imports from toolbus; the package itself has no part but its version."""
    for file in _files(part):
        for line, name in _imports(file):
            package, _, rest = name.partition(".")
            if package == "toolbus" and rest not in ("", "__version__"):
                yield f"{file.relative_to(ROOT)}:{line}", rest.partition(".")[0]


def _libraries(part: str) -> Iterator[tuple[str, str]]:
    for file in _files(part):
        for line, name in _imports(file):
            top = name.partition(".")[0]
            if top != "toolbus" and top not in sys.stdlib_module_names:
                yield f"{file.relative_to(ROOT)}:{line}", name


def _belongs(name: str, libraries: set[str]) -> bool:
    return any(name == library or name.startswith(library + ".") for library in libraries)


def test_every_part_of_the_package_has_a_floor() -> None:
    unknown = set(_parts()) - MAY_IMPORT.keys()
    assert not unknown, f"decide on which floor {sorted(unknown)} stand, and add them to the tables of this file"


@pytest.mark.parametrize("part", _parts())
def test_imports_go_down_only(part: str) -> None:
    allowed = MAY_IMPORT.get(part, set()) | {part, "v1"}
    wrong = [f"{place} imports toolbus.{other}" for place, other in _own_imports(part) if other not in allowed]
    assert not wrong, f"toolbus.{part} may not: {wrong}"


@pytest.mark.parametrize("part", sorted(CORE & set(_parts())))
def test_the_core_needs_three_libraries_and_no_operating_system(part: str) -> None:
    allowed = {"google.protobuf"} if part in LIGHT_CORE else CORE_LIBRARIES
    wrong = [f"{place} imports {name}" for place, name in _libraries(part) if not _belongs(name, allowed)]
    wrong += [
        f"{file.name}:{line} imports {name}"
        for file in _files(part)
        for line, name in _imports(file)
        if name.partition(".")[0] in NOT_IN_CORE
    ]
    assert not wrong, f"toolbus.{part} is core: {wrong}"


@pytest.mark.parametrize("part", ["sdk", "loop", "extension", *sorted(FOR_HOSTS)])
def test_what_plugins_and_hosts_install_needs_grpc_and_protobuf_only(part: str) -> None:
    allowed = LIGHT_LIBRARIES | ({"httpx"} if part == "extension" else set())  # where it asks a model itself
    wrong = [f"{place} imports {name}" for place, name in _libraries(part) if not _belongs(name, allowed)]
    assert not wrong, f"toolbus.{part} is what plugins and hosts install: {wrong}"


@pytest.mark.parametrize(
    "module", ["toolbus", "toolbus.sdk", "toolbus.loop", "toolbus.search", "toolbus.dialects", "toolbus.tool"]
)
def test_a_light_import_loads_nothing_of_the_server(module: str) -> None:
    heavy = ["orjson", "jsonschema_rs", "typer", "rich", "uvloop", "starlette", "toolbus.server", "toolbus.bus"]
    script = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "[]", "")


def test_importing_the_package_loads_no_part_of_it() -> None:
    script = "import sys, toolbus; print(sorted(name for name in sys.modules if name.startswith(('toolbus.', 'grpc'))))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_files_of_more_than_500_lines_have_a_reason() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text("utf-8").splitlines()) for file in _written_files()}
    long = {name: length for name, length in lengths.items() if length > 500}
    assert not long.keys() - LONG_FILES.keys(), f"split them, or give their reason in LONG_FILES: {long}"
    assert not LONG_FILES.keys() - long.keys(), "a reason that is no longer needed: delete it"


def test_functions_of_more_than_60_lines_have_a_reason() -> None:
    long = {
        f"{file.relative_to(ROOT)}:{function.name}": length
        for file in _written_files()
        for function in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := _length(function)) > 60
    }
    assert not long.keys() - LONG_FUNCTIONS.keys(), f"split them, or give their reason in LONG_FUNCTIONS: {long}"
    assert not LONG_FUNCTIONS.keys() - long.keys(), "a reason that is no longer needed: delete it"


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns a function's lines without its docstring: explaining more should cost nothing."""
    whole = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None or first.end_lineno is None:
        return whole
    return whole - (first.end_lineno - first.lineno + 1)
