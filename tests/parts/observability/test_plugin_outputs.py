"""The output of plugins over the bus: found wherever they run, for operators only, and never shown to models."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus import Host, Plugin
from toolbus.bus import Bus
from toolbus.bus.access.identity import Globs, Identity, Principal, Scopes
from toolbus.errors import Code, InvalidRequest
from toolbus.processes.output_tail import OutputTails
from toolbus.processes.run_tools import RunTools, offer, run_source
from toolbus.processes.supervisor import PluginReport, ReportKind
from toolbus.protocol.tool import CallError
from toolbus.sdk import ToolScope
from toolbus.testing import running_bus


class _Supervisor:
    """The tools of a supervisor, without processes."""

    def __init__(self) -> None:
        self.tails = OutputTails()
        self.acts: list[tuple[str, str]] = []

    def says(self, plugin: str, *texts: str) -> None:
        if not self.tails.has(plugin):
            self.tails(PluginReport(plugin, ReportKind.STARTED, "started (pid 7)", pid=7))
        for text in texts:
            self.tails(PluginReport(plugin, ReportKind.OUTPUT, text, "stdout"))

    @asynccontextmanager
    async def on(self, bus: Bus, source: str = "") -> AsyncIterator[str]:
        def note(act: str, plugin: str) -> None:
            self.tails.find(plugin)
            self.acts.append((act, plugin))

        tools = RunTools(self.tails, lambda name: note("restart", name), lambda name: note("stop", name), source)
        async with tools.as_plugin(bus.grpc_addresses[0], None) as plugin:
            await plugin.ready()
            yield plugin.source


async def _refusal(bus: Bus, name: str, **arguments: object) -> CallError:
    """Returns why a call was refused."""
    error = (await bus.call(name, arguments)).error
    assert error is not None
    return error


async def test_lines_of_a_plugin_are_read_and_followed_wherever_its_supervisor_runs() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather", "one", "two")
    async with running_bus() as bus, supervisor.on(bus) as source:
        table = (await bus.call("toolbus:plugin_logs")).output
        (row,) = table["plugins"]
        assert (row["source"], row["plugin"], row["state"], row["pid"]) == (source, "weather", "running", 7)
        answer = (await bus.call("toolbus:plugin_logs", {"plugin": "weather", "lines": 1})).output
        assert [(line["number"], line["text"]) for line in answer["lines"]] == [(3, "two")]
        more = {"plugin": "weather", "source": source, "since": answer["next"], "wait_seconds": 30}
        waiting = asyncio.create_task(bus.call("toolbus:plugin_logs", more))
        await until(lambda: bus.dispatcher.in_flight.active >= 2, "the question to the supervisor")
        supervisor.says("weather", "three")
        answer = (await waiting).output
        assert ([line["text"] for line in answer["lines"]], answer["next"], answer["lost"]) == (["three"], 4, 0)


async def test_who_follows_output_that_does_not_come_does_not_hold_up_the_shutdown_of_the_bus() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather", "one")
    async with running_bus() as bus, supervisor.on(bus) as source, Host(bus.grpc_addresses[0]) as host:
        more = {"plugin": "weather", "source": source, "since": 2, "wait_seconds": 60}
        waiting = asyncio.create_task(host.call("toolbus:plugin_logs", more))
        await until(lambda: bus.dispatcher.in_flight.active >= 2, "the question to the supervisor")
        draining = asyncio.create_task(bus.drain(60))
        output = (await within(waiting, 30)).output
        assert (output["source"], output["lines"], output["next"]) == (source, [], 2)
        await within(draining, 30)


async def test_plugins_of_one_name_in_two_places_are_listed_and_one_that_ended_gives_way() -> None:
    first, second = _Supervisor(), _Supervisor()
    first.says("weather", "here")
    second.says("weather", "there")
    async with running_bus() as bus, first.on(bus, "run.a.1"), second.on(bus, "run.b.2"):
        ambiguous = await _refusal(bus, "toolbus:plugin_logs", plugin="weather")
        assert "'weather' runs in several places: name one as source: run.a.1, run.b.2" in ambiguous.message
        answer = (await bus.call("toolbus:plugin_logs", {"plugin": "weather", "source": "run.b.2"})).output
        assert answer["lines"][-1]["text"] == "there"
        first.tails(PluginReport("weather", ReportKind.ENDED, "ended (exit code 0)", pid=7))
        answer = (await bus.call("toolbus:plugin_logs", {"plugin": "weather"})).output
        assert answer["source"] == "run.b.2"
        unknown = await _refusal(bus, "toolbus:plugin_logs", plugin="clock")
        assert "no plugin 'clock' has output here; these have: weather" in unknown.message
        other = await _refusal(bus, "toolbus:plugin_logs", plugin="weather", source="weather")
        assert "'weather' runs no plugins" in other.message


async def test_plugins_of_a_guarded_supervisor_hide_none_of_those_that_are_trusted_more() -> None:
    own, guarded = _Supervisor(), _Supervisor()
    own.says("weather", "here")
    for plugin in ("weather", "clock", "aaa"):
        guarded.says(plugin, "forged")
    async with running_bus(guarded=("run.a.*",)) as bus, guarded.on(bus, "run.a.1"), own.on(bus, "run.b.2"):
        table = (await bus.call("toolbus:plugin_logs")).output["plugins"]
        assert [row["source"] for row in table] == ["run.b.2", *3 * ["run.a.1"]]
        answer = (await bus.call("toolbus:plugin_logs", {"plugin": "weather"})).output
        assert (answer["source"], answer["lines"][-1]["text"]) == ("run.b.2", "here")
        assert (await bus.call("toolbus:plugin_logs", {"plugin": "clock"})).output["source"] == "run.a.1"


async def test_a_plugin_is_restarted_and_stopped_where_it_runs() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather")
    async with running_bus() as bus, supervisor.on(bus) as source:
        restarted = (await bus.call("toolbus:plugin_restart", {"plugin": "weather"})).output
        assert restarted == {"plugin": "weather", "source": source, "restarted": True}
        assert (await bus.call("toolbus:plugin_stop", {"plugin": "weather", "source": source})).output["stopped"]
        refused = await _refusal(bus, "toolbus:plugin_stop", plugin="clock", source=source)
        assert "there is no plugin 'clock' here" in refused.message
    assert supervisor.acts == [("restart", "weather"), ("stop", "weather")]


async def test_a_supervisor_that_does_not_answer_is_named_beside_those_that_do() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather")
    async with running_bus() as bus, supervisor.on(bus):
        async with Plugin("run.broken.1", address=bus.grpc_addresses[0], qualified=True) as broken:

            @broken.tool
            def plugins() -> list[str]:
                raise RuntimeError("is broken")

            await broken.ready()
            table = (await bus.call("toolbus:plugin_logs")).output
        assert [row["plugin"] for row in table["plugins"]] == ["weather"]
        assert table["errors"] == {"run.broken.1": "supervisor run.broken.1: RuntimeError: is broken"}


async def test_tools_of_a_supervisor_are_in_no_listing_have_no_bare_name_and_run_for_no_guarded_source() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather", "one")
    async with (
        running_bus(offered=("search",), grace_seconds=0.0, guarded=("nosy",)) as bus,
        supervisor.on(bus) as source,
        Plugin("nosy", address=bus.grpc_addresses[0]) as nosy,
        Host(bus.grpc_addresses[0], source="chat") as host,
    ):

        @nosy.tool
        async def look(name: str, scope: ToolScope) -> str:
            result = await scope.call(name, {"plugin": "weather"})
            return result.error.message if result.error is not None else "it ran"

        await nosy.ready()
        assert {tool.name for tool in await host.list()} == {"look", "search_tools"}
        assert [each.tool.name for each in bus.list()] == ["search_tools", "look"]
        assert (await _refusal(bus, "tail", plugin="weather")).code is Code.NOT_FOUND
        names = [each.tool.name for each in bus.core.catalog.view.own(source=source)]
        assert names == [f"{source}:{name}" for name in ("plugins", "tail", "restart", "stop")]
        denied = (await host.call("look", {"name": f"{source}:stop"})).output
        assert "administers the bus, and 'nosy' is not an administrator" in denied
        assert supervisor.acts == []
        found = (await host.call("search_tools", {"query": "restart a plugin, show the tail of its output"})).output
        assert source not in str(found)


@pytest.mark.parametrize(
    ("tool", "verb"), [("plugins", "logs"), ("tail", "logs"), ("restart", "catalog"), ("stop", "drain")]
)
async def test_an_identity_of_another_machine_needs_a_verb_for_each_tool_of_a_supervisor(tool: str, verb: str) -> None:
    everything = Globs(["*"])
    async with running_bus() as bus, _Supervisor().on(bus) as source:
        entry = bus.registry.find(f"{source}:{tool}")
        assert entry is not None
        may_not = Principal(identity=Identity("ops", Scopes(call=everything, administer=frozenset({"calls"}))))
        denial = bus.policy.denial(may_not, entry)
        assert denial is not None
        assert f"{verb!r} in its scope administer" in denial
        may = Principal(identity=Identity("ops", Scopes(administer=frozenset({verb}))))
        assert bus.policy.denial(may, entry) is None


async def test_a_source_that_looks_like_a_supervisor_cannot_hide_the_tools_of_others() -> None:
    async with running_bus() as bus:
        plugin = Plugin("run.desk.1", address=bus.grpc_addresses[0])
        plugin.tool(name="get_weather")(lambda: "fake")
        async with plugin:
            with pytest.raises(InvalidRequest, match="attach as qualified, or choose another source"):
                await plugin.ready()


async def test_asking_for_output_leaves_no_record_of_a_call() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather", "one")
    async with running_bus() as bus, supervisor.on(bus):
        await bus.call("toolbus:plugin_logs")
        await bus.call("toolbus:plugin_logs", {"plugin": "weather"})
        assert list(bus.records) == []


async def test_a_request_for_the_output_of_a_detached_supervisor_leaves_no_record_either() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather", "one")
    async with running_bus(grace_seconds=0.0) as bus:
        async with supervisor.on(bus) as source:
            pass
        await until(lambda: source not in bus.core.catalog.registry.sources(), "the end of the supervisor")
        refusal = await _refusal(bus, "toolbus:plugin_logs", plugin="weather", source=source)
        assert f"supervisor {source} is not attached" in refusal.message
        assert list(bus.records) == []


async def test_a_supervisor_that_the_bus_refuses_says_so_once_and_its_plugins_run_on() -> None:
    logged: list[str] = []
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        tools = RunTools(OutputTails(), lambda name: None, lambda name: None)
        async with Plugin(tools.source, address=address, qualified=True, token="of another") as other:
            await other.ready()
            async with asyncio.timeout(WAIT_SECONDS):
                await offer(tools, address, None, logged.append)
    (text,) = logged
    assert text.startswith("the bus refuses the tools of this run, so `toolbus logs` cannot show its output: source")
    assert "is bound to a token" in text


async def test_a_supervisor_speaks_for_no_other_source() -> None:
    supervisor = _Supervisor()
    supervisor.says("weather", "true")
    forged = {"source": "run.b.2", "plugin": "clock", "state": "running"}
    async with (
        running_bus() as bus,
        supervisor.on(bus, "run.b.2"),
        Plugin("run.forger.1", address=bus.grpc_addresses[0], qualified=True) as forger,
    ):
        forger.tool(name="plugins")(lambda: [forged])

        @forger.tool
        def tail(plugin: str, lines: int, since: int, wait_seconds: float) -> dict[str, object]:
            return {"lines": [], "source": "run.b.2", "plugin": "weather", "next": 0, "lost": 0}

        await forger.ready()
        table = (await bus.call("toolbus:plugin_logs")).output["plugins"]
        assert {row["plugin"]: row["source"] for row in table} == {"weather": "run.b.2", "clock": "run.forger.1"}
        answer = (await bus.call("toolbus:plugin_logs", {"plugin": "clock"})).output
        assert (answer["source"], answer["plugin"]) == ("run.forger.1", "clock")


async def test_what_a_supervisor_makes_up_has_the_types_that_readers_expect() -> None:
    rows = [{"plugin": ["clock"], "since": "1e999", "pid": True, "more": 1}, 7, {"plugin": "p", "since": 1e300}]
    async with (
        running_bus() as bus,
        Plugin("run.forger.1", address=bus.grpc_addresses[0], qualified=True) as forger,
    ):
        forger.tool(name="plugins")(lambda: rows)

        @forger.tool
        def tail(plugin: str, lines: int, since: int, wait_seconds: float) -> dict[str, object]:
            return {"lines": [{"text": 5}, "no line"], "lost": "many"}

        await forger.ready()
        table = (await bus.call("toolbus:plugin_logs")).output["plugins"]
        assert [(row["plugin"], row["since"], row["pid"]) for row in table] == [("", 0.0, 0), ("p", 0.0, 0)]
        assert {tuple(row) for row in table} == {
            ("plugin", "state", "pid", "restarts", "since", "last_exit", "lines", "next", "attached_as", "source")
        }
        answer = (await bus.call("toolbus:plugin_logs", {"plugin": "p"})).output
        assert answer["lines"] == [{"number": 0, "at": 0.0, "stream": "", "text": ""}]
        assert (answer["lost"], answer["next"]) == (0, 0)


def test_supervisors_with_one_host_name_and_process_id_are_two_sources() -> None:
    sources = [run_source() for _ in range(20)]
    assert len(set(sources)) == 20
    assert all(re.fullmatch(rf"run\.[A-Za-z0-9_-]+\.{os.getpid()}-[0-9a-f]{{6}}", source) for source in sources)
