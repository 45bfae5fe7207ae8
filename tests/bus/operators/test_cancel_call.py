"""Tests `toolbus:cancel_call`: whose call ends, what its caller and its plugin are told, and who may do it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parts.audit.chains import entries
from tests.support.waiting import within
from toolbus import Host, Plugin
from toolbus.bus.access.identity import Identity, Scopes
from toolbus.bus.catalog.policy import VERBS_OF_TOOLS
from toolbus.errors import Code, NotPermitted
from toolbus.parts.audit.audit_log import FOLDER
from toolbus.testing import running_bus


async def test_the_caller_gets_an_error_that_names_the_operator_and_the_plugin_stops(tmp_path: Path) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()
    async with running_bus(data_dir=tmp_path) as bus:
        plugin = Plugin("reports", address=bus.grpc_addresses[0])

        @plugin.tool
        async def write_report() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with plugin, Host(bus.grpc_addresses[0], source="chat") as host:
            await within(plugin.ready())
            calling = asyncio.create_task(host.call("write_report"))
            await within(begun.wait())  # a call that is only sent may be cancelled before its function runs
            (call,) = bus.core.calls.dispatcher.in_flight.oldest(1)
            answer = await bus.call("toolbus:cancel_call", {"id": call.id})
            error = (await within(calling)).error
            await within(cancelled.wait())
            again = await bus.call("toolbus:cancel_call", {"id": call.id})
    row = {"id": call.id, "name": "write_report", "source": "reports", "caller": "chat"}
    assert answer.output == {**row, "cancelled": True}
    assert error is not None
    assert (error.code, error.message) == (Code.CANCELLED, "an operator cancelled the call")
    assert again.error is not None
    assert f"no call '{call.id}' runs" in again.error.message
    (line,) = [each for each in entries(tmp_path / FOLDER) if each["act"] == "call.cancel"]
    assert (line["who"], line["target"]) == ("local", "write_report")
    assert (line["outcome"], line["why"]) == ("ok", f"call {call.id} of chat")


def test_it_needs_the_verb_drain_as_all_that_ends_what_runs() -> None:
    verb = VERBS_OF_TOOLS["cancel_call"]
    Identity("ann", Scopes(administer=frozenset({"drain"}))).check_verb(verb, "cancel_call")
    with pytest.raises(NotPermitted):
        Identity("bob", Scopes(administer=frozenset({"calls"}))).check_verb(verb, "cancel_call")
