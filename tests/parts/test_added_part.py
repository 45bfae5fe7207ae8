"""A part as CONTRIBUTING says to add it (a setting, a room, a command, a loader) runs on an unchanged core."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import toolbus
from tests.support.waiting import HANG_SECONDS

PACKAGE = Path(str(toolbus.__file__)).parent
ROOT = PACKAGE.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")

SETTINGS = '''
"""Declares how many greetings a bus gives."""

from dataclasses import dataclass

from toolbus.common.setting import WHOLE, at_least_one, check_settings, setting


@dataclass(frozen=True, slots=True)
class GreetingSettings:
    """The limit of greetings."""

    greeting_limit: int = setting(3, WHOLE, "how many greetings a bus gives", check=at_least_one)

    def __post_init__(self) -> None:
        check_settings(self)
'''
ROOM = '''
"""Greets people, up to the limit of the configuration."""

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.core import Core, Room
from toolbus.errors import InvalidRequest
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.greeting.settings import GreetingSettings


class GreetingRoom(Room):
    """The greetings of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._limit = core.config.part(GreetingSettings).greeting_limit
        self._count = 0

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tool that greets."""
        return [self.greet_person]

    @llm_tool(description="Greets a person.")
    async def greet_person(self, name: str) -> dict[str, Any]:
        """Greets, and counts greetings."""
        if self._count >= self._limit:
            raise InvalidRequest(f"greeting_limit is {self._limit}, and the bus has given that many: restart it")
        self._count += 1
        return {"text": f"Hello, {name}!", "left": self._limit - self._count}
'''
COMMAND = '''
"""Implements ``toolbus greet``."""

from typing import Annotated

import typer

from toolbus.cli import terminal
from toolbus.cli.call_command import Steps, operator
from toolbus.cli.help_text import epilog

EPILOG = epilog(("toolbus greet Ada",), "The bus counts greetings.", "0 done, 1 the bus refused, 3 no bus found.")


@operator
def greet(name: Annotated[str, typer.Argument(metavar="NAME", help="Who is greeted.")]) -> Steps:
    """Greet a person."""
    answer = yield "greet_person", {"name": name}
    yield lambda: terminal.print_lines(f"{answer['text']} ({answer['left']} left)")
'''
(COMMAND_ROW,) = re.findall(r'`(PartCommand\("greet"[^`]*)`', CONTRIBUTING)
(LOADER,) = re.findall(r"^```python\n(.*?class CommandsLoader.*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)
PART = f"""
PARTS += (
    Part(
        "greeting",
        commands=({COMMAND_ROW},),
        rooms=(PartRoom("toolbus.parts.greeting.room:GreetingRoom"),),
        loaders=("toolbus.parts.greeting.commands_loader:CommandsLoader",),
        settings=("toolbus.parts.greeting.settings:GreetingSettings",),
    ),
)
"""
# One process serves and runs the commands: a new interpreter takes half a second.
_RUNS = """
import asyncio
from pathlib import Path

from tests.support.processes import toolbus
from toolbus.bus.serve_settings import settle
from toolbus.bus.wiring import Bus
from toolbus.processes.loader import load_plugin


async def main():
    config = settle({"grpc": ["127.0.0.1:0"], "http": "off", "data_dir": None}, {}, Path("bus.toml")).config
    async with Bus(config) as bus:
        for word in ("--help", "Ada", "Bob"):
            ran = await asyncio.to_thread(toolbus, "greet", word, TOOLBUS_ADDRESS=bus.grpc_addresses[0])
            print(ran.returncode, " ".join((ran.stdout + ran.stderr).split()))


asyncio.run(main())
print([spec.tool.name for spec in load_plugin("shop.py").tools])
"""


def test_a_part_as_contributing_shows_it_runs(tmp_path: Path) -> None:
    parts = tmp_path / "toolbus" / "parts"
    (parts / "greeting").mkdir(parents=True)
    for folder, made in ((PACKAGE, {"parts"}), (PACKAGE / "parts", {"__init__.py"})):
        for entry in folder.iterdir():
            if entry.name not in made | {"__pycache__"}:
                (tmp_path / "toolbus" / entry.relative_to(PACKAGE)).symlink_to(entry)
    (parts / "__init__.py").write_text((PACKAGE / "parts" / "__init__.py").read_text("utf-8") + PART, "utf-8")
    files = {"__init__": "", "settings": SETTINGS, "room": ROOM, "command": COMMAND, "commands_loader": LOADER}
    for name, text in files.items():
        (parts / "greeting" / f"{name}.py").write_text(text, "utf-8")
    (tmp_path / "bus.toml").write_text("greeting_limit = 1\n", "utf-8")
    (tmp_path / "shop.py").write_text("def order(item: str) -> str:\n    return item\n\nCOMMANDS = [order]\n", "utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", _RUNS],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "HOME": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr
    help_text, greeted, refused, tools = ran.stdout.splitlines()
    assert re.match(r"0 Usage: toolbus greet .*Greet a person\..*The bus counts greetings\.", help_text)
    assert greeted == "0 Hello, Ada! (0 left)"
    assert refused.startswith("1 ")
    assert "greeting_limit is 1" in refused
    assert tools == "['order']"
