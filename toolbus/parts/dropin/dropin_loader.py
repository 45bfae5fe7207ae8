"""Runs folders of drop-in tools, and files *.js of one, for ``toolbus run``: `DropinLoader`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolbus.errors import PeerLost, RequestError, SetupError
from toolbus.processes.loader import Loader, OwnRun, Running, RunOptions, missing_loaders
from toolbus.sdk import Credential, Host

if TYPE_CHECKING:
    from toolbus.parts.dropin.tool_folder import ToolFolder
    from toolbus.processes.supervisor import PluginReport

REPLY_SECONDS = 10.0  # timeout of a request to the bus
RETRY_SECONDS = 1.0  # between two requests, if the bus gave no address
RECONNECT_SECONDS = 10.0  # before connecting again to a bus that refused us, or whose operator drained us


async def follow_dropin_address(
    bus: str,
    use: Callable[[str], object],
    log: Callable[[str], object],
    *,
    credential: Credential | None = None,
    retry_seconds: float = RETRY_SECONDS,
    reconnect_seconds: float = RECONNECT_SECONDS,
) -> None:
    """Passes on the bus's address for drop-in tools after each start of the bus; runs until cancelled.

    The request names the port of the previous bus, so that processes which were attached there find it again. If
    another program uses that port, the bus opens another one.

    Args:
        bus: its own address.
        use: takes the address, which may be the same as before.
        log: takes what an operator should know.
        credential: proves who this process is; None means that of TOOLBUS_CREDENTIAL.
        retry_seconds, reconnect_seconds: pauses, see the constants.
    """
    port = 0
    while True:
        try:
            # A source of its own: with a token of the environment, one process would lock the others out.
            async with Host(bus, source=f"toolbus-run:{os.getpid()}", credential=credential) as host:
                async for change in host.watch():
                    if change.full:  # a new connection
                        address = await _request_address(host, port, log, retry_seconds)
                        port = int(address.rpartition(":")[2])
                        use(address)
        except (PeerLost, RequestError) as error:
            log(f"{error} (trying again in {reconnect_seconds:g} s)")
            await asyncio.sleep(reconnect_seconds)


async def _request_address(host: Host, port: int, log: Callable[[str], object], retry_seconds: float) -> str:
    logged = ""
    while True:
        result = await host.call("toolbus:dropin_address", {"port": port}, timeout=REPLY_SECONDS)
        if result.error is None:
            return str(result.output)
        if result.error.message != logged:
            logged = result.error.message
            log(f"the bus gives no address for drop-in tools, trying again each second: {logged}")
        await asyncio.sleep(retry_seconds)


_OF_A_PLUGIN = "plugin.toml"  # in a folder of the part `moving`, which finds it first where it is installed
REPEAT_SECONDS = 2.0  # in which the connections for tools and for operators report the same problem


class DropinLoader(Loader):
    """Takes a folder in which no other loader finds plugins, and scripts."""

    def take(self, paths: Sequence[Path], rest: Sequence[Path], options: Collection[str]) -> OwnRun | None:
        folder, only = _scripts(paths) or (rest[0] if rest else None, None)
        if folder is None:
            return None
        if only is None and len(paths) > 1:
            raise SetupError(
                f"{folder} is a folder of drop-in tools, since neither it nor a folder in it has a "
                f"{_OF_A_PLUGIN}: name it alone"
            )
        if (folder / _OF_A_PLUGIN).is_file():
            raise SetupError(f"{folder} has a {_OF_A_PLUGIN}, which nothing reads here{missing_loaders()}")
        if programs := [each for each in ("--exec", "-m") if each in options]:
            raise SetupError(f"{folder} holds drop-in tools, and {programs[0]} runs a plugin: run them by two commands")
        if unfit := [each for each in options if each != "--secrets"]:
            raise SetupError(
                f"{unfit[0]} is for plugin files: name the variables of a tool in the folder's "
                '_manifest.json ({"files": {"FILE.py": {"secrets": ["NAME"]}}})'
            )
        return ToolFolderRun(folder, only)


def _scripts(paths: Sequence[Path]) -> tuple[Path, list[str]] | None:
    """Returns the folder of drop-in tools and which of its files run; None if none in JavaScript is named."""
    # Here, because the processes of plugins make a loader too, and never come here.
    from toolbus.parts.dropin.file_loader import extension_entry
    from toolbus.parts.dropin.manifest import EXTENSION

    scripts: list[tuple[Path, str]] = []
    for path in paths:
        if (path / EXTENSION).is_file():
            folder = path.resolve()
            scripts.append((folder.parent, f"{folder.name}/{extension_entry(folder)}"))
        elif path.suffix == ".js" and path.is_file():
            scripts.append((path.parent, path.name))
    if not scripts:
        return None
    if len(scripts) < len(paths) or len({folder.resolve() for folder, _ in scripts}) > 1:
        raise SetupError(
            f"{scripts[0][1]} is JavaScript, which runs as a drop-in tool: name files *.js and extensions of one "
            "folder alone"
        )
    return scripts[0][0], [file for _, file in scripts]


class ToolFolderRun:
    """A folder of drop-in tools in `toolbus run`.

    Args:
        only: the files that run; None means all.
    """

    def __init__(self, folder: Path, only: Collection[str] | None) -> None:
        self._folder = folder
        self._only = only

    def start(self, options: RunOptions) -> Running:
        """Returns what runs it.

        Raises:
            SetupError: the bus is on another machine, the library that watches folders is not installed, or the file of
                secrets is refused.
        """
        if options.address.tls and not options.address.is_local:
            raise SetupError(
                f"{self._folder} holds drop-in tools, which attach at a port that the bus opens on its own machine, "
                f"and {options.address} is another one: run them there"
            )
        from toolbus.parts.dropin.tool_folder import ToolFolder
        from toolbus.processes.child_environment import read_variables

        folder = ToolFolder(
            self._folder,
            "",
            options.emit,
            environment={**os.environ, **(read_variables(options.secrets) if options.secrets is not None else {})},
            require_manifest=options.require_manifest,
            only=self._only,
            restarts=options.restarts,
            stop_seconds=options.stop_seconds,
        )
        return FollowingFolder(folder, options)

    def as_stored(self, report: PluginReport) -> PluginReport:
        """Returns a report of a process as one of its group, which stays when a file changes."""
        from toolbus.parts.dropin.group_supervisor import group_report

        return group_report(report)


class FollowingFolder:
    """Runs a folder of tools, and follows the bus's address for them."""

    def __init__(self, folder: ToolFolder, options: RunOptions) -> None:
        self._folder = folder
        self._options = options

    async def run(self) -> bool:
        """Offers the tools until `stop`, and reports connection problems. Returns whether every process started."""
        from toolbus.parts.dropin.group_supervisor import FOLDER_NAME
        from toolbus.processes.supervisor import PluginReport, ReportKind

        loop, options = asyncio.get_running_loop(), self._options

        def report(text: str) -> None:
            options.emit(PluginReport(FOLDER_NAME, ReportKind.OUTPUT, text, "stderr"))

        handler = _ReportHandler(lambda text: loop.call_soon_threadsafe(report, text))
        logging.getLogger("toolbus").addHandler(handler)  # the connection logs that no bus is there
        following = asyncio.create_task(
            follow_dropin_address(options.address.text, self._folder.move, report, credential=options.credential)
        )
        following.add_done_callback(lambda task: self._folder.stop())
        try:
            return await self._folder.run()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            logging.getLogger("toolbus").removeHandler(handler)
            if not following.cancelled():
                following.result()

    def stop(self) -> None:
        """Stops every process gracefully; the second call kills them."""
        self._folder.stop()

    def restart(self, name: str) -> None:
        """Restarts the processes of a group."""
        self._folder.processes.restart(name)

    def stop_plugin(self, name: str) -> None:
        """Refuses: all files of a folder are offered."""
        from toolbus.parts.dropin.group_supervisor import refuse_stop

        refuse_stop(name)


class _ReportHandler(logging.Handler):
    """Reports warnings of this process, the same text once in a while."""

    def __init__(self, report: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self._latest = ("", 0.0)  # a text, and when it was reported

    def emit(self, record: logging.LogRecord) -> None:
        text, when = f"{record.levelname} {record.name}: {record.getMessage()}", record.created
        if text != self._latest[0] or when - self._latest[1] >= REPEAT_SECONDS:
            self._latest = text, when
            self._report(text)
