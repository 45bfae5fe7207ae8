"""Each part goes with its folder: the rest imports, a bus runs, and a command of the part says what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolbus
from tests.support.waiting import HANG_SECONDS
from toolbus.common.part import Part
from toolbus.parts import PARTS

PACKAGE = Path(str(toolbus.__file__)).parent
_IMPORTS = """
import importlib, pkgutil, sys
import toolbus, toolbus.parts
from toolbus.common.part import installed, parts

gone = {part.name for part in parts()} - {part.name for part in installed()}
facades = {"toolbus." + name for name in ("dialects", "dropin", "extension", "loop", "openapi", "search", "tools")}
if "mcp" in gone:
    facades.add("toolbus.parts.models.dialects.mcp")  # of both parts: `find_dialect` says what is missing
failed = []
for found in pkgutil.walk_packages(toolbus.__path__, "toolbus."):
    name = found.name
    if name in facades or name.endswith("__main__") or name.split(".")[2:3] and name.split(".")[2] in gone:
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print(sorted(gone), failed)
"""
_SERVES = """
import asyncio
from toolbus import Bus, Config

async def main():
    async with Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0")) as bus:
        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b
        reader, writer = await asyncio.open_connection(*bus.http_address.split(":"))
        writer.write(b"GET /healthz HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
        status = (await reader.readline()).split()[1].decode()
        writer.close()
        print((await bus.call("add", {"a": 1, "b": 2})).output, status)

asyncio.run(main())
"""
# Imports everything once, for the libraries, and runs the two texts above in a fork for each folder that it reads.
_FORKS = """
import gc, importlib, os, pkgutil, sys

finders, text = list(sys.meta_path), sys.argv[1]
import toolbus

for found in pkgutil.walk_packages(toolbus.__path__, "toolbus."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
for name in [name for name in sys.modules if name.partition(".")[0] == "toolbus"]:
    del sys.modules[name]
sys.meta_path[:] = finders
gc.freeze()
for line in sys.stdin:
    folder = line.strip()
    if not os.fork():
        code = 1
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
            os.chdir(folder)
            os.environ |= {name: folder for name in ("PYTHONPATH", "HOME", "TOOLBUS_DATA_DIR")}
            sys.path.insert(0, folder)
            exec(compile(text, "<the test>", "exec"), {"__name__": "__main__"})
            assert sys.modules["toolbus"].__file__.startswith(folder)
            code = 0
        finally:
            if code:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def _without(part: Part, folder: Path) -> Path:
    """Makes a package of links to this one's files, without a part."""
    package = folder / "toolbus"
    (package / "parts").mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.name not in ("parts", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    for entry in (PACKAGE / "parts").iterdir():
        if entry.name not in (part.name, "__pycache__"):
            (package / "parts" / entry.name).symlink_to(entry)
    return folder


# A protection, and the part that gives it: keys of the configuration, or variables.
PROTECTIONS = {
    "pins": '[pins]\nweather = "block"\n',
    "identity": '[[issuers]]\nissuer = "https://login.example"\naudience = "bus"\njwks = "keys.json"\n',
    "audit": "audit_required = true\n",
    "dropin": "require_manifest = true\n",
    "guards": '[[guards]]\nguard = "check"\ntools = ["*"]\non_failure = "refuse"\n',
    "overlays": 'overlays = "overlays.toml"\n',
    "postgres": 'storage = "postgresql://db.internal/toolbus"\n',
}
VARIABLES = {
    "overlays": "TOOLBUS_OVERLAYS",
    "audit": "TOOLBUS_AUDIT_REQUIRED",
    "dropin": "TOOLBUS_REQUIRE_MANIFEST",
    "postgres": "TOOLBUS_STORAGE",
}


def _environment(folder: str) -> dict[str, str]:
    return {"PYTHONPATH": folder, "PATH": "/usr/bin:/bin", "HOME": folder, "TOOLBUS_DATA_DIR": folder}


def _run(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = _environment(str(folder)) | more
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=folder, env=path, timeout=HANG_SECONDS
    )


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Runs the texts for each folder that it is told, and tells the exit codes."""
    folder = str(tmp_path_factory.mktemp("forks"))
    command = [sys.executable, "-c", _FORKS, _IMPORTS + _SERVES]
    path = _environment(folder) | {"PYTHONPATH": str(PACKAGE.parent)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=folder, env=path) as process:
        yield process


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_without_a_part_the_rest_imports_and_a_bus_runs(
    part: Part, tmp_path: Path, forks: subprocess.Popen[str]
) -> None:
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(f"{_without(part, tmp_path)}\n")
    code = forks.stdout.readline()
    gone = sorted({part.name} | {each.name for each in PARTS if part.name in each.needs})
    printed = (tmp_path / "stdout").read_text().splitlines()
    assert (printed, code) == ([f"{gone} []", "3 200"], "0\n"), (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("part", [part for part in PARTS if part.commands], ids=lambda part: part.name)
def test_a_command_of_a_part_that_is_missing_says_so(part: Part, tmp_path: Path) -> None:
    ran = _run(_without(part, tmp_path), "-m", "toolbus.cli", *part.commands[0].name.split())
    assert ran.returncode == 2
    assert f"lacks its part {part.name!r}" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", PROTECTIONS)
def test_a_configuration_that_asks_a_missing_part_for_protection_is_refused(name: str, tmp_path: Path) -> None:
    part = next(each for each in PARTS if each.name == name)
    folder = _without(part, tmp_path)
    (folder / "bus.toml").write_text(PROTECTIONS[name], "utf-8")
    ran = _run(folder, "-m", "toolbus.cli", "serve", "--config", "bus.toml", "--grpc", "127.0.0.1:0", "--http", "off")
    assert ran.returncode != 0
    assert re.search(rf"lacks its parts? .*'?{name}", ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_asks_a_missing_part_for_protection_is_refused(name: str, tmp_path: Path) -> None:
    part = next(each for each in PARTS if each.name == name)
    variables = {VARIABLES[name]: "true"}
    words = ("-m", "toolbus.cli", "serve", "--grpc", "127.0.0.1:0", "--http", "off")
    ran = _run(_without(part, tmp_path), *words, **variables)
    assert ran.returncode != 0
    assert f"{VARIABLES[name]} is set" in ran.stderr, ran.stderr
    assert re.search(rf"lacks its parts? .*'?{name}", ran.stderr), ran.stderr


def test_every_protection_of_a_part_that_a_variable_asks_for_is_tested() -> None:
    assert {f"TOOLBUS_{name.upper()}" for part in PARTS for name in part.guards} == set(VARIABLES.values())
