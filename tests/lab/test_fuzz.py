"""The fuzz targets in short: seeds through the oracles, a bounded search, and for each a fault that it has to find."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.fuzz.__main__ import main
from lab.fuzz.choices import Choices, block_of
from lab.fuzz.search import ROOT, search
from lab.fuzz.target import NAMES, Finding, Target, load
from tests.support.waiting import HANG_SECONDS
from toolbus.bus import callback_url
from toolbus.bus.calls.call_endings import CallEndings
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog import schema
from toolbus.bus.catalog.entry import Handler
from toolbus.bus.gateway import callback_messages
from toolbus.bus.streams.lane_server import _BusConnection
from toolbus.dialects import find_dialect
from toolbus.parts.council.settings import CouncilSettings
from toolbus.parts.dropin import manifest
from toolbus.parts.mcp.client.http_link import SseParser
from toolbus.parts.mcp.server.mcp_endpoint import McpEndpoint
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.protocol.lane import HEADER, LaneConnection
from toolbus.protocol.tool import Result
from toolbus.sdk.outgoing_calls import OutgoingCalls

pytestmark = pytest.mark.lab

RUNS = 60  # of each target in the bounded search: enough to see that libFuzzer, atheris and the target work together
SEEDS = 10  # of them in its corpus, so that most of the runs are of inputs that no person wrote
LEADS = "lab"  # whose branches lead the search: atheris takes ten seconds to instrument toolbus
needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this platform or Python"
)


# -- seeds, without atheris ------------------------------------------------------------------------------------------


def run_all(target: Target) -> None:
    for seed in target.seeds():
        target.run(seed)


@pytest.mark.parametrize("name", NAMES)
def test_every_seed_and_the_empty_input_pass_the_oracle(name: str) -> None:
    target = load(name)
    seeds = list(target.seeds())
    assert seeds
    assert max(map(len, seeds)) <= max(target.max_bytes, 4096)
    for seed in [b"", *seeds]:
        target.run(seed)


def test_what_a_block_says_about_its_length_is_read_back_and_nothing_is_read_behind_the_end() -> None:
    choose = Choices(b"\2" + block_of("né".encode()) + b"\1")
    assert (choose.pick("abc"), choose.text(), choose.flag(), bool(choose)) == ("c", "né", True, False)
    assert (choose.byte(), choose.block(), choose.pick("xy")) == (0, b"", "x")
    with pytest.raises(ValueError, match="two bytes"):
        block_of(b"x" * 70_000)


# -- each oracle can fail --------------------------------------------------------------------------------------------


def _answers_twice(patch: pytest.MonkeyPatch) -> None:
    """A bus that answers a call twice."""
    results = Dispatcher.results

    def twice(self: Dispatcher, handler: Handler, given: Any, now: float) -> None:
        for result in given:
            call = handler.pending.get(result.call_id)
            results(self, handler, [result], now)
            if call is not None and not call.active:
                call.caller.deliver([(call.call_id, "1")])

    patch.setattr(Dispatcher, "results", twice)


def _leaks(patch: pytest.MonkeyPatch) -> None:
    """A bus that forgets to give back what a lost plugin held."""
    patch.setattr(CallEndings, "handler_ended", lambda self, calls, why, now: None)


def _outlives_its_connection(patch: pytest.MonkeyPatch) -> None:
    """A bus whose sessions stay when their connection breaks."""
    patch.setattr(_BusConnection, "lost", lambda self: None)


def _reads_on(patch: pytest.MonkeyPatch) -> None:
    """A bus that reads a message whose header lies about its length."""
    patch.setattr(LaneConnection, "data_received", lambda self, data: self.frame(data[4], data[HEADER.size :]))


def _delivers_after_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """A peer whose callers hear nothing when their connection breaks."""
    patch.setattr(OutgoingCalls, "lost", lambda self, session, pending, *, all_read: None)


def _rounds(patch: pytest.MonkeyPatch) -> None:
    """A reader that loses the digits of wide integers."""
    patch.setattr(schema, "_load_exactly", lambda text: schema._loads(text))


def _takes_constants(patch: pytest.MonkeyPatch) -> None:
    """A gateway that takes NaN for JSON."""
    patch.setattr(callback_messages, "_DECODER", json.JSONDecoder())


def _takes_all_values(patch: pytest.MonkeyPatch) -> None:
    """A checker that finds everything valid."""
    patch.setattr(schema.ArgumentChecker, "explain", lambda self, arguments: "")


def _takes_all_hosts(patch: pytest.MonkeyPatch) -> None:
    """A parser that takes any host for this machine."""
    patch.setattr(callback_url, "loopback_host", lambda spelling: spelling or None)


def _follows_dots(patch: pytest.MonkeyPatch) -> None:
    """A manifest that grants its own folder to be written."""
    patch.setattr(manifest, "_read_writable", lambda reader, folder: (folder / reader.value).resolve())


def _keeps_unknown(patch: pytest.MonkeyPatch) -> None:
    """Settings that are read otherwise the second time."""
    read, times = CouncilSettings.read.__func__, iter(range(10**6))  # type: ignore[attr-defined]

    def otherwise(cls: type[CouncilSettings], content: Any) -> CouncilSettings:
        settings: CouncilSettings = read(cls, content)
        return settings.changed({"timeoutSeconds": 100 + next(times)})

    patch.setattr(CouncilSettings, "read", classmethod(otherwise))


def _knows_all_names(patch: pytest.MonkeyPatch) -> None:
    """A dialect that takes an invented name for one that was offered."""
    from toolbus.parts.models.dialects import conversation, ollama, openai_chat

    def known(*given: Any, **more: Any) -> Any:
        from dataclasses import replace

        return replace(model_call(*given, **more), known=True, wire_name="invented")

    model_call = conversation.model_call
    for module in (ollama, openai_chat):
        patch.setattr(module, "model_call", known)


def _leaves_a_task(patch: pytest.MonkeyPatch) -> None:
    """An endpoint that begins something and does not end it."""
    serve, kept = McpEndpoint.__call__, []

    async def begins(self: McpEndpoint, *given: Any) -> None:
        kept.append(asyncio.create_task(asyncio.sleep(0.2)))
        await serve(self, *given)

    patch.setattr(McpEndpoint, "__call__", begins)


def _reads_pieces(patch: pytest.MonkeyPatch) -> None:
    """A reader of events that takes each piece for a whole."""
    feed = SseParser.feed
    patch.setattr(SseParser, "feed", lambda self, chunk: feed(SseParser(1_000), chunk))


FAULTS: tuple[tuple[str, Callable[[pytest.MonkeyPatch], None]], ...] = (
    ("frames", _answers_twice),
    ("frames", _leaks),
    ("lane", _outlives_its_connection),
    ("lane", _reads_on),
    ("responses", _delivers_after_a_cancel),
    ("json_texts", _rounds),
    ("json_texts", _takes_constants),
    ("schemas", _takes_all_values),
    ("callback_urls", _takes_all_hosts),
    ("manifests", _follows_dots),
    ("settings", _keeps_unknown),
    ("deltas", _knows_all_names),
    ("mcp", _leaves_a_task),
    ("mcp", _reads_pieces),
)


@pytest.mark.parametrize(("name", "plant"), FAULTS, ids=[f"{name}-{plant.__name__[1:]}" for name, plant in FAULTS])
def test_a_planted_fault_is_found_by_the_seeds(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(name)
    plant(monkeypatch)
    with pytest.raises(Finding):
        run_all(target)


def test_every_target_has_a_planted_fault() -> None:
    assert {name for name, _ in FAULTS} == set(NAMES)


# -- searching -------------------------------------------------------------------------------------------------------


@needs_atheris
def test_a_bounded_search_of_every_target_finds_nothing(tmp_path: Path) -> None:
    runs, seeds = RUNS * len(NAMES), SEEDS * len(NAMES)
    outcome = search("tests.lab.every_target", tmp_path, runs=runs, max_seeds=seeds, package=LEADS)
    assert outcome.why == "", outcome.log[-3_000:]
    assert outcome.runs >= RUNS * len(NAMES)


@needs_atheris
def test_a_finding_is_saved_reported_and_repeated_by_the_command_that_is_printed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lab.fuzz",
        "tests.lab.broken_target",
        "--runs",
        "100000",
        "--folder",
        str(tmp_path),
        "--json",
    ]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert finished.returncode == 1, finished.stderr
    (outcome,) = json.loads(finished.stdout)
    assert outcome["why"] == "Finding: four bytes"
    assert len(Path(outcome["finding"]).read_bytes()) == 4
    again = [sys.executable, *outcome["repeat"].split()[1:]]
    repeated = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (repeated.returncode, "four bytes" in repeated.stderr) == (1, True)


@pytest.mark.parametrize("words", [["nothing"], ["--replay", "x"], ["--seconds", "0"]])
def test_a_wrong_command_ends_with_2_and_says_why(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


# -- what was found --------------------------------------------------------------------------------------------------


def test_an_output_that_is_nested_too_deep_is_refused_as_other_unreadable_ones_are() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        _ = Result(output_json="[" * 100_000).output


def test_an_entry_of_ollamas_calls_that_is_no_object_is_passed_over() -> None:
    dialect = find_dialect("ollama")
    stream = dialect.stream(NameTable.build(["echo"], dialect.name_rule))  # type: ignore[union-attr]
    stream.feed({"message": {"content": "x", "tool_calls": [None, {"function": {"name": "echo", "arguments": {}}}]}})
    stream.feed({"message": {"content": ""}, "done": True, "done_reason": "stop"})
    assert [call.name for call in stream.finish().calls] == ["echo"]
