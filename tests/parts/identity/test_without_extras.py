"""Tests installations without the extras `keys` and `jwt`: a bus runs, and what needs them names them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment
from tests.support.waiting import HANG_SECONDS

BLOCKED = """
import sys
for name in ("cryptography", "tomlkit", "jwt"):
    sys.modules[name] = None
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + script],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=ROOT,
        env=environment({"FOLDER": str(folder)}),
        check=False,
    )


def test_a_bus_on_its_own_machine_needs_none_of_them(tmp_path: Path) -> None:
    ran = run(
        """
import asyncio, os
from pathlib import Path
from toolbus.bus import Bus, Config

async def main():
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=Path(os.environ["FOLDER"]))) as bus:
        print((await bus.call("toolbus:keys", {})).text)
        print((await bus.call("toolbus:key_revoke", {"name": "chat"})).text)

asyncio.run(main())
""",
        tmp_path / "data",
    )
    assert ran.returncode == 0, ran.stderr
    listed, revoked = ran.stdout.splitlines()
    assert "make keys with `toolbus keys init" in listed
    assert "run `pip install 'toolbus[keys]'`" in revoked


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("import toolbus.parts.identity.key_store", "keys"),
        ("import toolbus.parts.identity.authority", "keys"),
        ("import toolbus.parts.identity.issuers", "jwt"),
    ],
)
def test_what_needs_an_extra_names_it(statement: str, extra: str, tmp_path: Path) -> None:
    ran = run(
        f"from toolbus.errors import SetupError\ntry:\n    {statement}\nexcept SetupError as e:\n    print(e)", tmp_path
    )
    assert f"run `pip install 'toolbus[{extra}]'`" in ran.stdout, ran.stderr


def test_the_command_names_the_extra_instead_of_a_traceback(tmp_path: Path) -> None:
    ran = run(
        "import sys\nsys.argv = ['toolbus', 'keys', 'init', '--name', 'a', '--keys', 'none']\n"
        "from toolbus.cli import main\nmain()",
        tmp_path,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("toolbus: keys need more libraries")
