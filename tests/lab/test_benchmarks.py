"""The suites of `make bench`: what they name is there, and what all hosts pay for is measured to the last cell."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from lab.benchmarks import (
    catalog,
    contest,
    crowds,
    footprint,
    growth,
    local_calls,
    many_tools,
    searches,
    secure_frames,
    turns,
)
from lab.benchmarks.contest import Contestant, Outcome, Plan
from lab.benchmarks.contestants import MCP, RIVALS, SDK
from lab.benchmarks.facts import Fact, compared
from lab.benchmarks.relay import END, Bare
from lab.benchmarks.report import Report
from lab.benchmarks.suite import SUITES
from lab.chart import Chart, Panel, svg
from lab.load import host, workload
from lab.load.windows import Cell, Window, cells, options_of, read_cells
from lab.stage import Stage
from toolbus import Bus
from toolbus.bus.catalog.entry import compile_tool
from toolbus.bus.catalog.schema import compile_schema
from toolbus.dialects import find_dialect
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.lab

BRIEFLY = Plan(rounds=1)
Measure = Callable[[Stage, Plan, int], tuple[Fact, ...]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Has everything measured with few tools and few calls."""
    sizes: dict[ModuleType, dict[str, object]] = {
        searches: {"SIZES": (80,), "QUERIES": 1},
        turns: {"OFFERED": 3, "TURNS": 1},
        growth: {"TOOLS": (3, 6), "OPERATIONS": 4, "PART": 4, "SETTLE_SECONDS": 0.0},
        crowds: {"SESSIONS": (2, 3), "MIN_FOR_MEMORY": 3, "WATCHERS": 3, "HELD_BY_ONE": 8, "HOLDERS": 1},
        secure_frames: {"FRAMES": {1: 2, secure_frames.FRAME: 1}},
    }
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(crowds, "SETTLE_SECONDS", 0.0)
    with Stage() as stage:
        yield stage


def reported(facts: tuple[Fact, ...]) -> Report:
    suite = next(suite for suite in SUITES.values() if facts[0].name in suite.facts)
    return Report(suite, BRIEFLY, Outcome({}, {}, []), facts, {}, f"python -m lab.benchmarks {suite.name}", 1)


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_names_only_facts_that_can_be_measured(suite: str) -> None:
    for name, module in SUITES[suite].facts.items():
        assert callable(getattr(importlib.import_module(f"lab.benchmarks.{module}"), name))


def test_the_catalog_is_the_same_each_time_and_a_bus_takes_all_of_it() -> None:
    tools = catalog.tools(200)
    assert tools == catalog.tools(200)
    assert len({tool.name for tool in tools}) == 200
    assert len([compile_tool(tool, Limits()) for tool in tools]) == 200
    assert find_dialect("anthropic").export(tools).left_out
    assert find_dialect("gemini").export(tools).losses


@pytest.mark.parametrize(
    ("measure", "lines"),
    [
        (turns.loop, 4),
        (searches.search, 1),
        (searches.search_quality, 5),
        (local_calls.dispatch, 5),
    ],
)
def test_every_cell_of_a_table_is_measured(small: Stage, measure: Measure, lines: int) -> None:
    report = reported(measure(small, BRIEFLY, 2))
    (table,) = report.sections()
    assert len(table.rows) == lines
    assert all(len(row) == len(table.columns) and all(row) for row in table.rows)
    command = f"python -m lab.benchmarks {report.suite.name} --only {measure.__name__} --repeats 1 --rounds 1"
    assert f"repeat with `{command}" in report.to_markdown()


def test_a_cell_shows_three_digits_and_how_far_its_samples_lie_apart() -> None:
    samples = {"far": (1234.5, 1300.25, 1250.4), "near": (0.01234, 0.0125, 0.0124), "one": (7.0,), "zero": (0.0,)}
    facts = tuple(Fact("loop", "takes", "ms", None, seen, "Times", line) for line, seen in samples.items())
    (table,) = reported(facts).sections()
    assert table.columns == ("what", "takes, ms")
    assert [row[1] for row in table.rows] == ["1,250 (1,234 to 1,300)", "0.0124 (0.0123 to 0.0125)", "7", "0"]


def test_a_line_is_compared_with_another_sample_by_sample() -> None:
    facts = tuple(
        Fact("calls", "a call", "µs", None, seen, "Calls", line)
        for line, seen in {"alone": (1.0, 2.0), "far": (10.0, 30.0)}.items()
    )
    times = [fact.samples for fact in compared(facts, "alone", "times") if fact.unit == "×"]
    assert times == [(1.0, 1.0), (10.0, 15.0)]


# -- rivals ------------------------------------------------------------------------------------------------------------


def test_cells_that_would_fill_the_memory_are_left_out_and_the_others_can_be_written_and_read() -> None:
    found = cells((1, 512), (100, 1_000_000))
    assert found == (Cell(1, 100), Cell(512, 100), Cell(1, 1_000_000))
    assert read_cells(",".join(map(str, found))) == list(found)


@pytest.mark.parametrize("size", [100, 10_000])
def test_arguments_have_the_given_size_and_fit_the_schema(size: int) -> None:
    checker = compile_schema(workload.PARAMETERS_JSON, Limits())
    text = workload.arguments_json(4095, size)
    assert len(text) == size
    assert checker is not None
    assert checker.is_valid(json.loads(text))


def window(cell: Cell, speed: float = 1000.0) -> Window:
    return Window(cell.in_flight, speed, 100.0, 200.0, 10.0, cell.size)


def contestant(name: str, *, partial: bool = False) -> Contestant:
    return Contestant(name, lambda stage, plan: (None, "-"), (), partial=partial)


def test_a_contestant_that_fails_in_a_cell_goes_on_with_the_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[list[Cell]] = []

    def fails_at_64(_: Contestant, plan: Plan, wanted: Sequence[Cell]) -> tuple[list[Window], str]:
        starts.append(list(wanted))
        done = [window(cell) for cell in wanted if cell.in_flight < 64]
        return done[: [*wanted, Cell(64)].index(Cell(64))], "no"

    monkeypatch.setattr(contest, "_run_until_it_fails", fails_at_64)
    wanted = (Cell(1), Cell(64), Cell(512), Cell(1, 100), Cell(64, 100))
    windows, cannot = contest.run_once(contestant("some"), Plan(), wanted)
    assert [each.cell for each in windows] == [Cell(1), Cell(1, 100)]
    assert cannot == {Cell(64): "no", Cell(512): "as 64 in flight", Cell(64, 100): "as 64 in flight"}
    assert starts == [list(wanted), [Cell(1, 100)]]


@pytest.mark.parametrize("partial", [True, False])
def test_what_a_contestant_cannot_do_is_reported_and_fails_the_run_unless_it_may_leave_cells_out(
    monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    monkeypatch.setattr(contest, "_run_until_it_fails", lambda one, plan, wanted: ([window(wanted[0])], "too much"))
    outcome = contest.run([contestant("some", partial=partial)], Plan(in_flight=(1, 64), rounds=2), lambda line: None)
    assert [len(each) for each in outcome.rounds["some"]] == [1, 1]
    assert bool(outcome.cannot) is partial
    assert bool(outcome.failures) is not partial
    report = Report(SUITES["rivals"], Plan(), outcome, (), outcome.failures, "python -m lab.benchmarks rivals", 1)
    assert ("some", "64 in flight", "too much") in report.sections()[-1].rows or not partial


def test_contestants_are_measured_in_every_cell_in_turns() -> None:
    plan = Plan(in_flight=(1, 4), sizes=(100, 10_000), seconds=0.1, warm_up=0.05, rounds=1)
    lines: list[str] = []
    outcome = contest.run([RIVALS["relay"], RIVALS["in_process"]], plan, lines.append)
    assert not outcome.failures
    assert {name: [w.cell for w in rounds[0]] for name, rounds in outcome.rounds.items()} == {
        "relay": list(plan.cells),
        "in_process": list(plan.cells),
    }
    assert len(lines) == 2


def test_the_same_bare_client_calls_over_mcp_and_over_rest() -> None:
    for seconds in (0.1, 1.0, 10.0):  # longer where a busy machine ended no call in so short a time
        plan = Plan(in_flight=(2,), seconds=seconds, warm_up=0.05, rounds=1)
        outcome = contest.run([MCP["mcp"], MCP["rest"]], plan, lambda line: None)
        assert not outcome.failures
        rates = [seen[0].calls_per_second for (seen,) in outcome.rounds.values()]
        if all(rates):
            break
    assert min(rates) > 0


def test_the_sdk_is_measured_with_the_processor_time_of_each_process() -> None:
    plan = Plan(in_flight=(4,), seconds=0.3, warm_up=0.05, rounds=1)
    outcome = contest.run([SDK["both_async"]], plan, lambda line: None)
    assert not outcome.failures
    (seen,) = outcome.rounds["both_async"][0]
    assert min(seen.host_cpu_us, seen.middle_cpu_us, seen.plugin_cpu_us) > 0
    figures = Report(SUITES["sdk"], plan, outcome, (), {}, "python -m lab.benchmarks sdk", 1).sections()[-1]
    assert figures.columns[5:8] == tuple(f"CPU of the {end} µs/call" for end in ("host", "bus", "plugin"))


@pytest.mark.parametrize("way", host.SDK)
async def test_a_host_on_the_sdk_is_measured_in_each_of_its_ways(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of("").parse_args(["-", "--cells", "1x0,4x0", "--seconds", "0.02", "--warm-up", "0.01"])
    async with local_calls.offered([local_calls.TOOL], over_grpc=False) as bus:
        assert isinstance(bus, Bus)
        options.address = bus.grpc_addresses[0]
        await asyncio.to_thread(host.run, way, options)
    printed = [Window(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert [window.cell for window in printed] == [Cell(1), Cell(4)]
    assert all(window.calls_per_second > 0 for window in printed)


def rivals(speeds: dict[str, float]) -> Report:
    plan = Plan(in_flight=(1, 64, 512), sizes=(100, 10_000), rounds=1)
    rounds = {name: [[window(cell, speed) for cell in plan.cells]] for name, speed in speeds.items()}
    return Report(SUITES["rivals"], plan, Outcome(rounds, {}, []), (), {}, "python -m lab.benchmarks rivals", 1)


def test_a_report_begins_with_the_ratios_of_each_size() -> None:
    report = rivals({"toolbus": 3000.0, "relay": 4000.0, "nats": 1000.0})
    small, large, *_ = report.sections()
    assert (small.title, large.title) == ("Ratios with 100 B of arguments", "Ratios with 10 kB of arguments")
    assert ("toolbus / nats, calls/s", "3.00", "3.00", "3.00") in large.rows
    assert json.dumps(report.to_json())
    assert "--only nats --in-flight 64 --sizes 10000 --rounds 1" in report.to_markdown()


def test_ratios_are_those_of_a_round_however_fast_the_machine_was_in_it() -> None:
    report = rivals({"toolbus": 3000.0, "relay": 4000.0})
    for name, speed in (("toolbus", 300.0), ("relay", 400.0)):  # rounds on a machine that is ten times as slow
        report.outcome.rounds[name] += [[window(cell, speed) for cell in report.plan.cells]] * 2
    del report.outcome.rounds["relay"][2]  # a round in which it was not measured
    small, *_ = report.sections()
    assert small.rows[0] == ("toolbus / relay, calls/s", "0.75", "0.75", "0.75")


# -- growth and charts -------------------------------------------------------------------------------------------------


def test_frames_are_measured_in_three_ways_and_what_tls_adds_has_an_aim_with_small_arguments(small: Stage) -> None:
    report = Report(SUITES["tls"], BRIEFLY, Outcome({}, {}, []), secure_frames.frames(small, BRIEFLY, 3), {}, "tls", 1)
    *tables, added = report.sections()
    for table in tables:
        assert [row[0] for row in table.rows] == ["plain", "TLS", "mTLS"]
        assert all(len(row) == len(table.columns) == 1 + len(secure_frames.WORKS) and all(row) for row in table.rows)
    assert [row[0].split(" adds to ")[0] for row in added.rows] == ["TLS"] * 4 + ["mTLS"] * 4
    assert [row[3] for row in added.rows] == ["40 µs", "0.5 µs", "", ""] * 2


@pytest.mark.parametrize("measure", [growth.catalog, growth.served, crowds.sessions])
def test_growth_is_measured_for_every_amount_and_compared_with_the_smallest(small: Stage, measure: Measure) -> None:
    facts = measure(small, BRIEFLY, 6)  # enough for each to be measured twice
    report = Report(SUITES["growth"], BRIEFLY, Outcome({}, {}, []), facts, {}, "python -m lab.benchmarks growth", 1)
    ratios, table = report.sections()
    assert all((row[3] == "1.5 ×") != (many_tools.DICT in row[0]) for row in ratios.rows)
    assert [row[0].split()[0] for row in table.rows][:2] in (["3", "6"], ["2", "3"])
    assert len(ratios.rows) >= 5


def test_calls_in_flight_and_watchers_are_measured(small: Stage) -> None:
    assert crowds.held_calls(small, BRIEFLY, 1).unit == "kB"
    facts = crowds.watchers(small, BRIEFLY, 2)
    for last, middle, spent in (facts[:3], facts[3:]):  # of a bus, and of bare streams
        assert all(late >= half > 0 for late, half in zip(last.samples, middle.samples, strict=True))
        assert spent.unit == "µs"


class _Stream:
    """The server's side of a stream whose first write ends late: it stores what is written."""

    def __init__(self, *frames: wire.InvokeRequest) -> None:
        self.written: list[wire.InvokeResponse] = []
        self.may_end = asyncio.Event()
        self._frames = [*frames]

    async def read(self) -> object:
        return self._frames.pop(0) if self._frames else END

    async def write(self, frame: wire.InvokeResponse) -> None:
        self.written.append(frame)
        if len(self.written) == 1:
            await self.may_end.wait()


async def test_a_bare_stream_gets_the_event_that_was_sent_while_its_first_write_had_not_ended() -> None:
    bare = Bare()  # type: ignore[abstract]  # a run needs no other RPC
    early, late = _Stream(wire.InvokeRequest(), wire.InvokeRequest(calls=[pb.ToolCall(name="new")])), _Stream()
    early.may_end.set()
    async with asyncio.TaskGroup() as streams:
        streams.create_task(bare.Invoke(iter(()), late))  # type: ignore[arg-type]  # the streams read themselves
        streams.create_task(bare.Invoke(iter(()), early))  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            while len(early.written) < 2:
                await asyncio.sleep(0)
        late.may_end.set()
    for stream in (early, late):
        assert [listed.tool.name for listed in stream.written[1].events[0].catalog.added] == ["new"]


def test_imports_of_the_sdk_are_timed_with_byte_code_beside_the_least_that_they_could_take(
    small: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "folder", lambda: str(tmp_path))
    least, names, both = footprint.import_sdk(small, BRIEFLY, 1)
    assert (least.aim, both.aim, len(both.samples)) == (None, 250.0, 1)
    assert names.median < least.median < both.median
    assert [*tmp_path.rglob("plugin_client.*.pyc")]


def test_a_chart_is_svg_that_names_every_line_apart_and_has_colours_for_dark_pages() -> None:
    lines = {f"<{name}>": [(1.0, 10.0), (64.0, 500.0)] for name in "abc"}
    text = svg(
        Chart(
            "Speed & more", "in flight", [Panel("calls/s", lines)], {1.0: "1", 64.0: "64"}, "repeat", frozenset({"<b>"})
        )
    )
    words = [each for each in ElementTree.fromstring(text).iter() if each.tag.endswith("text")]
    places = [float(each.attrib["y"]) for each in words if (each.text or "").startswith("<")]
    assert len(places) == 3
    assert all(below - above >= 14 for above, below in itertools.pairwise(places))
    assert "prefers-color-scheme: dark" in text
    assert text.count("stroke-dasharray") == 1
