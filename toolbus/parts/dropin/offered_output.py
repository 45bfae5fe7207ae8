"""Has ``toolbus run`` offer the output of its plugins to operators, beside running them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from toolbus.cli.bus_client import BusTarget
    from toolbus.parts.dropin.tool_folder import ToolFolder
    from toolbus.processes.output_tail import OutputTails
    from toolbus.processes.supervisor import PluginReport, Supervisor

OFFER_AFTER_SECONDS = 1.0  # plugins come first, and a command that ends at once needs no connection
OWN_NAME = "toolbus"  # of this command, in its own output


class RecordedOutput:
    """Prints reports of plugins, and stores the newest of each.

    Args:
        prints: prints a report.
        tail_bytes: stored of each plugin; 0 stores nothing.
        in_groups: whether they are of drop-in tools, whose processes change.

    Attributes:
        tails: the stored reports; None without.
    """

    def __init__(self, prints: Callable[[PluginReport], object], tail_bytes: int, *, in_groups: bool) -> None:
        from toolbus.processes.output_tail import OutputTails

        self.tails = OutputTails(tail_bytes) if tail_bytes else None
        self._prints = prints
        self._as_stored: Callable[[PluginReport], PluginReport] = lambda report: report
        if in_groups:
            from toolbus.parts.dropin.group_supervisor import group_report

            self._as_stored = group_report

    def __call__(self, report: PluginReport) -> None:
        """Takes a report."""
        if self.tails is not None:
            self.tails(self._as_stored(report))
        self._prints(report)


@contextlib.asynccontextmanager
async def offering_output(
    bus: BusTarget, plugins: Supervisor | ToolFolder, output: RecordedOutput
) -> AsyncIterator[None]:
    """Offers the output of the plugins to operators, from a moment after the start on."""
    if output.tails is None:
        yield
        return
    offering = asyncio.create_task(_offer_output(bus, plugins, output.tails, output), name="output for operators")
    try:
        yield
    finally:
        offering.cancel()
        await asyncio.gather(offering, return_exceptions=True)


async def _offer_output(
    bus: BusTarget, plugins: Supervisor | ToolFolder, tails: OutputTails, emit: Callable[[PluginReport], None]
) -> None:
    from toolbus.errors import SetupError
    from toolbus.parts.dropin.group_supervisor import refuse_stop
    from toolbus.processes.supervisor import PluginReport, ReportKind, Supervisor
    from toolbus.sdk.bus_address import BusAddress
    from toolbus.sdk.connection_settings import find_credential

    await asyncio.sleep(OFFER_AFTER_SECONDS)

    def report(text: str) -> None:
        emit(PluginReport(OWN_NAME, ReportKind.OUTPUT, text, "stderr"))

    run_tools = await asyncio.to_thread(importlib.import_module, "toolbus.processes.run_tools")  # it takes a while
    if isinstance(plugins, Supervisor):
        # Each plugin says for itself that no bus is there; the connection for operators need not.
        logging.getLogger("toolbus.sdk").setLevel(logging.CRITICAL)
        tools = run_tools.RunTools(tails, plugins.restart, plugins.stop_plugin)
    else:
        tools = run_tools.RunTools(tails, plugins.processes.restart, refuse_stop)
    try:
        address = BusAddress.parse(bus.address).text if bus.address else ""
        await run_tools.offer(tools, address, find_credential(bus.credential), report)
    except SetupError as error:
        report(f"`toolbus logs` cannot show the output of these plugins: {error}")
