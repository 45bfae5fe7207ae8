"""The tail of what plugins write: the stored lines, what a follower reads, and that it is bounded."""

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import WAIT_SECONDS, within
from toolbus import Plugin
from toolbus.errors import InvalidRequest
from toolbus.processes.output_tail import MAX_ENDED, MAX_LINES, TAIL_BYTES, OutputTails
from toolbus.processes.supervisor import PluginReport, ReportKind
from toolbus.testing import running_bus


def _tails(*texts: str, tail_bytes: int = TAIL_BYTES) -> OutputTails:
    tails = OutputTails(tail_bytes)
    tails(PluginReport("p", ReportKind.STARTED, "started (pid 7)", pid=7))
    for text in texts:
        tails(PluginReport("p", ReportKind.OUTPUT, text, "stdout"))
    return tails


def _texts(answer: dict[str, object]) -> list[str]:
    lines = answer["lines"]
    assert isinstance(lines, list)
    return [line["text"] for line in lines]


async def test_the_newest_lines_are_shown_with_their_numbers_and_streams() -> None:
    answer = await _tails("a", "b", "c").read("p", 3)
    assert [(line["number"], line["stream"], line["text"]) for line in answer["lines"]] == [
        (2, "stdout", "a"),
        (3, "stdout", "b"),
        (4, "stdout", "c"),
    ]
    assert (answer["lost"], answer["next"]) == (0, 4)
    assert (await _tails("a").read("p", 2))["lines"][0]["stream"] == "started"


async def test_a_follower_reads_each_line_once_and_gets_the_number_of_lost_ones() -> None:
    tails = _tails(*(f"{number:0>1000}" for number in range(200)), tail_bytes=60_000)
    answer = await tails.read("p", 10, since=100)
    first = answer["lines"][0]["number"]
    assert answer["lost"] == first - 101 > 0
    seen, position = [first - 1], first - 1
    while (answer := await tails.read("p", 10, since=position))["lines"]:
        seen += [line["number"] for line in answer["lines"]]
        position = answer["next"]
    assert seen == list(range(first - 1, 202))


async def test_a_number_of_an_earlier_supervisor_counts_as_none() -> None:
    assert _texts(await _tails("a").read("p", 10, since=5_000)) == ["started (pid 7)", "a"]


async def test_a_follower_that_waits_gets_the_next_line() -> None:
    tails = _tails("a")
    reading = asyncio.create_task(tails.read("p", 10, since=2, wait_seconds=30.0))
    await asyncio.sleep(0)
    tails(PluginReport("other", ReportKind.OUTPUT, "not this one", "stdout"))
    tails(PluginReport("p", ReportKind.OUTPUT, "b", "stderr"))
    async with asyncio.timeout(WAIT_SECONDS):
        assert _texts(await reading) == ["b"]
    assert _texts(await tails.read("p", 10, since=3, wait_seconds=0.01)) == []


@given(st.lists(st.text("ab漢", max_size=300) | st.integers(1, 60_000).map(lambda size: "é" * size), max_size=60))
def test_what_is_kept_of_a_plugin_stays_below_the_bound_and_is_the_newest(texts: list[str]) -> None:
    lines = _texts(_tails(*texts, tail_bytes=100_000).find("p").read(MAX_LINES))
    assert sum(map(sys.getsizeof, lines)) <= 100_000
    assert lines == ["started (pid 7)", *texts][-len(lines) or len(texts) + 1 :]


async def test_an_answer_is_bounded_in_lines_and_characters() -> None:
    assert len((await _tails(*["x"] * 5_000).read("p", 10**9))["lines"]) == MAX_LINES
    answer = await _tails(*["x" * 60_000] * 10).read("p", 10)
    assert 1 < len(answer["lines"]) < 10
    assert answer["next"] == 11
    answer = await _tails(*["x" * 60_000] * 10).read("p", 10, since=0)
    assert answer["next"] == answer["lines"][-1]["number"] < 11


async def test_what_is_handed_out_can_be_shown_in_a_terminal() -> None:
    answer = await _tails("\x1b]0;title\x07a\x9b2J\x1b[31mred\x1b[2Jb\u202ec").read("p", 1)
    assert _texts(answer) == ["a\x1b[31mredbc\x1b[0m"]


def test_the_state_of_a_plugin_follows_its_reports() -> None:
    tails = _tails("a")
    (row,) = tails.described()
    assert (row["plugin"], row["state"], row["pid"], row["restarts"]) == ("p", "running", 7, 0)
    tails(PluginReport("p", ReportKind.DIED, "died (SIGKILL): restarting in 0.2 s", pid=7))
    (row,) = tails.described()
    assert (row["state"], row["pid"], row["last_exit"]) == ("restarting", 0, "died (SIGKILL): restarting in 0.2 s")
    tails(PluginReport("p", ReportKind.STARTED, "started (pid 8)", pid=8))
    (row,) = tails.described()
    assert (row["state"], row["pid"], row["restarts"]) == ("running", 8, 1)
    tails(PluginReport("p", ReportKind.ENDED, "ended (SIGTERM)", pid=6))  # one that was replaced
    assert tails.described()[0]["state"] == "running"
    tails(PluginReport("p", ReportKind.GIVEN_UP, "cannot start", pid=8))
    assert tails.described()[0]["state"] == "given_up"


def test_plugins_that_have_ended_are_forgotten_beyond_a_bound_the_first_ones_first() -> None:
    tails = _tails("a")
    for number in range(MAX_ENDED + 20):
        tails(PluginReport(f"old#{number}", ReportKind.ENDED, "ended (exit code 0)"))
    names = [row["plugin"] for row in tails.described()]
    assert names[0] == "p"
    assert len(names) <= MAX_ENDED + 2
    assert names[-1] == f"old#{MAX_ENDED + 19}"
    with pytest.raises(InvalidRequest, match="no plugin 'old#0' here; there are: p, "):
        tails.find("old#0")


async def test_a_plugin_is_known_by_the_source_as_which_it_logged_that_it_attached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "toolbus")
    async with running_bus() as bus, Plugin("weather.north-2", address=bus.grpc_addresses[0]) as plugin:
        plugin.tool(name="sun")(lambda: "up")
        await within(plugin.ready())
    logged = [f"{each.levelname} {each.name}: {each.getMessage()}" for each in caplog.records]
    (row,) = _tails("not attached to anything as x, y", *logged).described()
    assert row["attached_as"] == "weather.north-2"
    (row,) = _tails("not attached to anything as x, y").described()
    assert row["attached_as"] == ""
