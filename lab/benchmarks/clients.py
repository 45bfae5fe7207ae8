"""Lists the plugins and hosts of the client packages in other languages, beside a plugin on bare stubs.

The plugins are the programs that the rules of the protocol are played against, and their tool ``echo`` is called.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from pathlib import Path

from lab.benchmarks.contest import Contestant, Plan
from lab.child import Child, ChildFailed
from lab.stage import ROOT, Stage, until

FOLDER = ROOT / "clients"
TOOL = "echo"
ATTACH_SECONDS = 30.0  # until a bus lists the tool
MAKE = "make clients"
# By language, what to start: the last word is a file that is there once the client is built; and how to build it.
PROGRAMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "node": (("node", str(FOLDER / "typescript/build/conformance.js")), MAKE),
    "go": ((str(FOLDER / "go/build/conformance"),), MAKE),
    "rust": (
        (str(FOLDER / "rust/build/release/examples/conformance"),),
        "cargo build --release --examples` in `clients/rust",  # what `make clients` builds is not optimized
    ),
    "java": (("java", "-jar", str(FOLDER / "java/build/toolbus-client-0.1.0-tests.jar")), MAKE),
}
GO_HOST = str(FOLDER / "go/build/load")


def _built(program: str, how: str) -> None:
    if not Path(program).exists():
        raise ChildFailed(f"it is not built: run `{how}`")


def _bus(stage: Stage, plan: Plan, *, programs: Mapping[str, str]) -> tuple[Child, str]:
    """Starts a bus, where what it is measured with is built."""
    for program, how in programs.items():
        _built(program, how)
    return stage.bus()[:2]


def _plugin(stage: Stage, address: str, *, language: str) -> Child:
    """Starts the plugin of a language; returns once a bus lists its tool."""
    command, _ = PROGRAMS[language]
    child = stage.start(language, command, TOOLBUS_ADDRESS=address)
    if not until(lambda: child.has_ended or asyncio.run(_is_listed(address)), ATTACH_SECONDS) or child.has_ended:
        raise ChildFailed(f"the plugin offers no tool. {child.error_text()}")
    return child


async def _is_listed(address: str) -> bool:
    from toolbus.sdk import Host  # grpc reads its switches when it is imported

    async with Host(address) as host:
        return any(tool.name == TOOL for tool in await host.list())


def _contestant(name: str, language: str, host: tuple[str, ...], programs: Mapping[str, str] = {}) -> Contestant:
    command, how = PROGRAMS[language]
    start = functools.partial(_bus, programs={command[-1]: how, **programs})
    plugin = functools.partial(_plugin, language=language)
    return Contestant(name, start, (*host, "--tool", TOOL), plugin, partial=True)


_RAW_PLUGIN = ("load.plugin", "--tool", TOOL)
CLIENTS = {
    each.name: each
    for each in (
        Contestant("python", functools.partial(_bus, programs={}), ("load.stream_host", "--tool", TOOL), _RAW_PLUGIN),
        *(_contestant(language, language, ("load.stream_host",)) for language in PROGRAMS),
        _contestant("go_go", "go", ("load.program_host", "--program", GO_HOST), {GO_HOST: MAKE}),
    )
}
