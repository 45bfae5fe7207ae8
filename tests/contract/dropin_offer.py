"""A drop-in tool: a file in a folder that a `ToolFolder` runs in a sandboxed process and attaches to the suite's bus.

The file is `dropin_file`, whose text is written into the folder; a grant lets it connect to this process, where each
call's `Work` runs. A change of what is offered is what its author would do: the file is written anew.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.contract.offer import Offer, as_function, on
from tests.contract.works import Work
from tests.support.fork_server import fork_plugin
from tests.support.processes import environment
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.parts.dropin.tool_folder import ToolFolder
from toolbus.processes.supervisor import PluginReport, ReportKind
from toolbus.sdk import CallContext
from toolbus.sdk.shared_loop import SharedLoop
from toolbus.v1 import tool_pb2 as pb

FILE = Path(__file__).with_name("dropin_file.py")


class DropinOffer(Offer):
    """`ToolFolder` on the test's loop, the process that it starts, and the works on a loop of their own."""

    source = "dropin:contract"
    arrival_seconds = 20.0  # a process is forked and enters its sandbox

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._thread = SharedLoop("contract-dropin")
        self._thread.loop.set_default_executor(ThreadPoolExecutor(32))  # for works that are plain functions
        self._home = tempfile.TemporaryDirectory(prefix="contract-dropin-")
        self._folder = Path(self._home.name)
        self._server: asyncio.Server | None = None  # None before the first tool
        self._port = 0
        self._tools = ToolFolder(self._folder, "", self._emit, environment=environment({}))
        self._running: asyncio.Task[bool] | None = None  # None before the first tool
        self._forking = mock.patch("asyncio.create_subprocess_exec", fork_plugin)  # while the folder runs
        self._known: dict[str, Work] = {}  # all that were ever offered: a call may come after its tool was taken away
        self.reports: list[PluginReport] = []

    def _emit(self, report: PluginReport) -> None:
        self.reports.append(report)

    async def _change(self, added: Sequence[Work], removed: Sequence[str]) -> None:
        self._known |= self.works
        if self._running is None:
            self._thread.start()
            await on(self._thread, self._listen())
            grants = {"files": {"contract.py": {"connect": [f"127.0.0.1:{self._port}"]}}}
            (self._folder / "_manifest.json").write_text(json.dumps(grants))
            self._write()
            self._tools.move(await self.bus.dropin_address())
            self._forking.start()
            self._running = asyncio.create_task(self._tools.run())
        else:
            self._write()

    async def _arrived(self) -> None:
        """Waits until the folder knows it too: a change before that ends a process that offers the tools already."""
        await super()._arrived()
        if self.works:
            await until(self._is_known, "the newest process to report that it offers its tools", self.arrival_seconds)

    def _is_known(self) -> bool:
        *_, newest = (report.plugin for report in self.reports if report.kind is ReportKind.STARTED)
        return any(report.kind is ReportKind.OFFERED and report.plugin == newest for report in self.reports)

    def _write(self) -> None:
        works = [
            {
                "name": work.name,
                "description": work.description,
                "parameters": work.parameters,
                "timeout": work.timeout,
                "idle_timeout": work.idle_timeout,
                "is_async": inspect.iscoroutinefunction(work.run),
            }
            for work in self.works.values()
        ]
        new = self._folder / ".contract.py"
        new.write_text(f"{FILE.read_text('utf-8')}\n\nTOOLS = tools({self._port}, {works!r})\n", "utf-8")
        os.replace(new, self._folder / "contract.py")

    async def close(self) -> None:
        if self._running is not None:
            self._tools.stop()
            assert await self._running, self.reports
            self._forking.stop()
            await on(self._thread, self._hang_up())
            await asyncio.to_thread(self._thread.stop)
        self._home.cleanup()

    # -- where the works run -----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Runs the calls of one process until it ends."""
        loop, calls = asyncio.get_running_loop(), dict[int, _Call]()

        def send(*message: Any) -> None:
            text = pickle.dumps(message)
            loop.call_soon_threadsafe(writer.write, len(text).to_bytes(4, "big") + text)

        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                what, number, *call = pickle.loads(await reader.readexactly(size))
                if what == "cancel":
                    calls[number].cancel()
                else:
                    name, arguments, context = call
                    calls[number] = _Call(self._known[name], arguments, context, partial(send, number))
        except (asyncio.IncompleteReadError, ConnectionError):
            for each in calls.values():
                each.cancel()
        finally:
            writer.close()


class _Call:
    """A call of a work."""

    def __init__(self, work: Work, arguments: dict[str, Any], context: bytes, answer: Callable[..., None]) -> None:
        self._is_plain = not inspect.iscoroutinefunction(work.run)
        self._on_thread = self._is_plain  # while it is, it can only be told
        self._answer = answer
        self._cancelled = threading.Event()
        scope = SimpleNamespace(
            context=CallContext.from_wire(pb.CallContext.FromString(context)),
            progress=lambda progress=0.0, /, **more: answer("progress", (progress, more)),
            cancelled=self._cancelled,
        )
        self._task = asyncio.create_task(self._run(partial(as_function(work), scope, **arguments)))

    def cancel(self) -> None:
        """Notifies the work that no caller waits any more; async ones end."""
        self._cancelled.set()
        if not self._on_thread:
            self._task.cancel()

    async def _run(self, function: Callable[[], Any]) -> None:
        try:
            if self._is_plain:
                returned = await asyncio.to_thread(function)
                self._on_thread = False
                if inspect.isawaitable(returned):
                    self._answer("later", None)
            else:
                returned = function()
            self._answer("returned", await returned if inspect.isawaitable(returned) else returned)
        except Exception as problem:
            self._answer("raised", problem)
