"""Tries the packages of a release in environments of their own: `make dist`, `make sbom`."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from toolbus.common.version import VERSION

ROOT = Path(__file__).parents[2]
OF_THE_PROJECT = {"bench", "dev", "docs", "examples", "release"}  # extras that no user of a release needs
SECONDS = 600.0

PLUGIN = '''
import asyncio
from toolbus import Plugin, Host
from toolbus.testing import running_bus

plugin = Plugin("packed")

@plugin.tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

async def main() -> None:
    async with running_bus(plugin) as host:
        assert (await host.call("add", {"a": 20, "b": 22})).unwrap() == 42

asyncio.run(main())
print("called")
'''
LIGHT = "import toolbus, sys; toolbus.Plugin('light'); assert not {'fastapi', 'uvicorn', 'aiohttp'} & set(sys.modules)"


class Environment:
    """An empty environment; nothing of the checkout can be imported in it."""

    def __init__(self, folder: Path, constraint: Path | None) -> None:
        self._folder = folder
        self._constraint = constraint
        venv.create(folder / "env", with_pip=True)

    def pip(self, *words: str | Path) -> str:
        """Runs pip."""
        more = ("--constraint", self._constraint) if self._constraint is not None and words[0] == "install" else ()
        return self.run("python", "-m", "pip", "--quiet", "--disable-pip-version-check", *words, *more)

    def run(self, program: str, *words: str | Path) -> str:
        """Runs a program of the environment, in an empty folder; ends this one if it fails."""
        empty = self._folder / "empty"
        empty.mkdir(exist_ok=True)
        command = [str(self._folder / "env" / "bin" / program), *map(str, words)]
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=empty, env=variables, timeout=SECONDS, check=False
        )
        if ran.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return ran.stdout


def users_extras() -> list[str]:
    """Returns the extras that users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return sorted(set(project["optional-dependencies"]) - OF_THE_PROJECT)


def try_package(package: Path, constraint: Path | None) -> None:
    """Installs a wheel or an sdist, first alone, as for a plugin, and then with what a bus needs."""
    version = re.sub(r"-py3-none-any.whl$|.tar.gz$", "", package.name).rpartition("-")[2]
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder), constraint)
        environment.pip("install", package)
        environment.run("python", "-c", LIGHT)
        environment.pip("install", f"{package}[server]")
        assert environment.run("toolbus", "--version").split()[-1] == version
        program = Path(folder) / "program.py"
        program.write_text(PLUGIN, "utf-8")
        assert environment.run("python", program) == "called\n"
        environment.run("toolbus", "plugins", "tools", "bundled")
        # As documentation and errors say it: by name, which no registry needs to have.
        environment.pip("install", "--dry-run", f"toolbus[{','.join(users_extras())}]")
    print(f"{package.name}: installed alone and with [server], and a tool was called")


def write_bill(file: Path, constraint: Path | None) -> None:
    """Writes what a wheel with all extras for users brings along."""
    file.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder), constraint)
        environment.pip("install", f"{ROOT}[{','.join(users_extras())}]")
        environment.pip("uninstall", "--yes", "pip")
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        command += [
            "--pyproject",
            str(ROOT / "pyproject.toml"),
            "--short-PURLs",
            "--mc-type",
            "library",
            "--output-file",
            str(file),
        ]
        subprocess.run([*command, str(Path(folder) / "env" / "bin" / "python")], check=True, timeout=SECONDS)
    bill = json.loads(file.read_text("utf-8"))
    bill["metadata"]["component"]["version"] = VERSION  # pyproject.toml says where it is, which the tool does not read
    file.write_text(json.dumps(bill, indent=2) + "\n", "utf-8")
    print(f"wrote {file}")


def main() -> None:
    """Reads the words of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", type=Path, help="wheels and sdists to try")
    parser.add_argument("--constraint", type=Path, help="a file of versions for pip")
    parser.add_argument("--sbom", type=Path, help="where to write a bill of materials")
    given = parser.parse_args()
    constraint = given.constraint.resolve() if given.constraint is not None else None
    for package in given.packages:
        try_package(package.resolve(), constraint)
    if given.sbom is not None:
        write_bill(given.sbom.resolve(), constraint)


if __name__ == "__main__":
    main()
