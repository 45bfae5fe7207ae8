"""The floors of the house: who may import whom, what importing costs, how long classes and functions may get.

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
    "errors common.lazy common.cancellation common.text common.newest common.reader common.mailbox common.log_limit "
    "common.stall common.local_users common.path_ownership common.version common.terminal_input common.whole_file",
    "protocol common parts",  # of `parts` the list alone
    "functions",  # a Python function as a tool; no connection, no bus
    "parts.moving.neko",  # plugins as N.E.K.O. writes them; no connection
    "sdk",  # what plugin and host authors import
    "parts.tls_probe",  # says why a peer cannot talk to a bus
    "parts.buses",  # stands for one connection where there are several buses
    "parts.extension",  # the API of extensions; a plugin of the SDK
    "parts.openapi",  # operations of an OpenAPI document as tools; a plugin of the SDK
    "parts.models.embeddings",
    "parts.models.search",
    "parts.mcp.messages",  # the Model Context Protocol as texts: no input or output
    "parts.models.dialects.schemas",
    "parts.models.dialects",
    "parts.models.loop",
    "processes",
    "parts.moving.neko.neko_loader",
    "parts.dropin.sandbox",
    "parts.dropin.javascript",  # scripts as an engine runs them: no connection, no bus
    "parts.dropin",
    "parts.moving.check",  # reads code of other systems, and runs nothing of it
    "parts.conformance",  # proves clients and buses; needs grpcio and protobuf only
    "parts.mcp.bridge",  # of clients that start their MCP servers; the standard library alone
    "bus.loopback bus.callback_url bus.outbound",
    "bus.access",  # who is asking
    "bus.audit",  # what was done, and by whom
    "bus.keys",  # what proves who is asking
    "bus.storage",
    "bus.metrics",  # counts and their texts: knows neither entries nor calls
    "bus.catalog",
    "bus.calls",
    "bus.streams parts.tripwire.tripwire",
    "bus.config bus.serve_settings",
    "parts.mcp.settings parts.tasks.settings parts.audit.settings parts.identity.settings parts.pins.settings "
    "parts.observability.settings parts.console.settings parts.guards.settings "
    "parts.handles.settings parts.origins.settings parts.overlays.settings parts.postgres.settings "
    "parts.tripwire.settings",
    "bus.signals bus.roles",
    "bus.web_paths",  # what rooms hold for one another
    "bus.local",
    "bus.core",
    "bus.operators",
    "parts.mcp.features",
    "bus.gateway parts.budgets parts.guards parts.origins parts.overlays parts.pins parts.recordings "
    "parts.observability parts.tasks "
    "parts.tripwire parts.audit parts.postgres parts.identity parts.council parts.models.export_routes",
    "parts.moving.upstream",
    "parts.mcp.server parts.handles",
    "parts.mcp.client",
    "bus.rooms parts.dropin.room parts.models.room parts.moving.upstream.room parts.mcp.client.room",
    "parts.console",  # what operators look at
    "bus",
    "parts.moving.registry",
    "testing dialects loop search dropin openapi tools extension",  # import paths of users
    "cli parts.mcp.commands parts.models.commands parts.conformance.command parts.moving.check.command "
    "parts.console.command parts.console.top parts.openapi.command parts.dropin.tools_commands "
    "parts.tasks.tasks_command parts.audit.audit_command parts.observability.logs_command "
    "parts.observability.calls_command parts.observability.health_command parts.development "
    "parts.observability.explain_command parts.pins.approve_command parts.identity.keys_command "
    "parts.buses.buses_command parts.recordings.record_command parts.recordings.replay_command "
    "parts.guards.approvals_command",
)
FLOOR_OF: dict[str, int] = {place: floor for floor, places in enumerate(FLOORS) for place in places.split()}

# Floors → what they may use beside the standard library. What is not named here may use what the server extra brings.
LIGHT = {"google.protobuf", "grpc"}
LIBRARIES = {
    "errors": {"google.protobuf", "grpc"},
    "common": set[str](),
    "protocol": {"google.protobuf"},
    "functions": set[str](),
    "sdk": LIGHT,
    "processes": set[str](),
    "parts.moving.neko": set[str](),
    "parts.moving.check": set[str](),
    "parts.tls_probe": set[str](),
    "parts.buses": set[str](),
    "parts.extension": set[str](),
    "parts.openapi": {"httpx", "yaml"},  # extra `openapi`, imported when they are used
    "parts.models.embeddings": {"numpy", "safetensors", "tokenizers"},  # extra `semantic`, imported when it is used
    "parts.models.search": set[str](),
    "parts.models.dialects": set[str](),
    "parts.models.dialects.schemas": set[str](),
    "parts.models.loop": set[str](),
    "parts.mcp.messages": {"google.protobuf", "msgspec"},  # msgspec where messages are decoded
    "parts.mcp.bridge": set[str](),
    "parts.dropin.javascript": {"quickjs"},  # extra `javascript`
    "bus.access": set[str](),
    "bus.keys": set[str](),
    "parts.postgres": {"psycopg"},  # extra `postgres`
    "parts.identity": {"cryptography", "tomlkit", "jwt", "aiohttp"},  # extras `keys` and `jwt`
    "bus.metrics": set[str](),
    "bus.catalog": {"google.protobuf", "orjson", "jsonschema_rs"},
    "bus.calls": {"google.protobuf", "orjson", "jsonschema_rs"},
}
# The core decides and never waits: no sockets, files, environment or loop of its own.
CORE = ("bus.metrics", "bus.catalog", "bus.calls")
NOT_IN_CORE = {
    *("asyncio", "multiprocessing", "os", "pathlib", "selectors", "shutil", "socket", "ssl", "subprocess", "tempfile"),
}

# Reasons for classes of more than 350 lines and functions of more than 60. Empty is best.
LONG_CLASSES: dict[str, str] = {
    "toolbus/sdk/connection.py:Connection": "one session after the other, and what a peer sees of them",
    "toolbus/parts/tasks/task_manager.py:TaskManager": "how tasks begin, change and end, under one lock",
    "toolbus/bus/catalog/registry.py:Registry": "each way in which an offer comes and goes, under one lock",
    "toolbus/bus/streams/tool_review.py:ToolReview": "each way in which declared tools of sessions come and go",
    "toolbus/parts/mcp/client/mount.py:Mount": "how one server starts, runs, changes and ends",
    "toolbus/parts/mcp/client/calls.py:MountHandler": "each way that a call to one server takes",
}
LONG_FUNCTIONS: dict[str, str] = {
    "toolbus/bus/calls/dispatcher.py:calls": "the hot path, one flat function a frame: a call costs as much as a check",
    "toolbus/bus/calls/dispatcher.py:results": "the hot path, for the same reason",
    "toolbus/cli/call_command.py:call": "one parameter for each option",
    "toolbus/cli/run_command.py:run": "one parameter for each option",
    "toolbus/parts/mcp/commands/mount_command.py:mount": "one parameter for each option",
}
# Reasons for a name that two public classes have. Users import, write or read these names.
SHARED_CLASSES = {
    "Ok Err": "what plugins of N.E.K.O. return; tools of the bus return values or failures of the same names",
    "ContextMessage ListedTool": "models of the REST contract, named in its OpenAPI document; the SDK's are public",
    "LeftOut": "tools that a dialect leaves out, operations that `toolbus.openapi` leaves out; both are public",
    "Question": "of a tool to its caller (`toolbus.sdk`), of a council to a model (`toolbus.extension`)",
    "Part": "of toolbus (`toolbus.parts`), of a schema that is written for a provider",
    "Reply": "of a tool (`toolbus.sdk`), of a turn (`toolbus.loop`)",
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
        if module and _place(module) == place and file not in (PACKAGE / "bus" / "__init__.py", TYPES_OF_PARTS)
        for line, other in _own_imports(file)
        if other and FLOOR_OF[other] > FLOOR_OF[place]
    ]
    assert not wrong, f"{place} may not: {wrong}"


WITHOUT_PARTS = ("sdk", "processes", "functions", "protocol", "common")
# Types of public names of the SDK, for the type checks of authors: a program that runs uses the modules' names alone.
TYPES_OF_PARTS = PACKAGE / "sdk" / "__init__.py"


@pytest.mark.parametrize("place", WITHOUT_PARTS)
def test_the_core_imports_no_part(place: str) -> None:
    """Also not inside a function: a part goes with its folder."""
    files = [file for file in _written_files() if file.is_relative_to(PACKAGE / place)]
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        if file != TYPES_OF_PARTS
        for line, name in _imports(file)
        if name.startswith("toolbus.parts.")
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
    *(
        "toolbus",
        "toolbus.protocol.tool",
        "toolbus.parts.models.search",
        "toolbus.parts.models.dialects.openai_chat",
        "toolbus.loop",
    ),
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


def _check_shared(places: dict[str, list[str]], reasons: dict[str, str]) -> None:
    shared = {name: files for name, files in places.items() if len(files) > 1}
    known = {name for names in reasons for name in names.split()}
    new = {name: files for name, files in shared.items() if name not in known}
    assert not new, f"name each by what it is, or give the reason in the tables above: {new}"
    assert not known - shared.keys(), f"a reason that is no longer needed: delete it: {known - shared.keys()}"
