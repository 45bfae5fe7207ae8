"""Frames of text and JSON, and the digests that they are made of."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from tests.parts.console.top.digests import (
    ATTACK,
    DigestHost,
    change,
    digest,
    error,
    failed,
    running,
    session,
    source,
    tool,
)
from tests.support.waiting import within
from toolbus.errors import Code, RequestError
from toolbus.parts.console.top.command import FrameSettings, print_frames
from toolbus.parts.console.top.digest_reader import BusLost, DigestReader, ReaderTimings
from toolbus.parts.console.top.views import Selection
from toolbus.sdk import Host

TIMINGS = ReaderTimings(wait=0.05, late=10.0, look=0.01, pause=0.02)
FIRST = digest(1, tools=[tool("a", 10), tool("b", 2)], sources=[source()], sessions=[session("s1")])
SECOND = change(2, tools=[tool("a", 15)], running=[running("r1", "a")], calls=[failed(1)], ended=5, total=17)


async def _print(host: DigestHost, count: int = 1, **settings: Any) -> None:
    values = {
        "rows": 20,
        "as_json": False,
        "selection": Selection("rate"),
        "interval": 0.05,
        "timings": TIMINGS,
        **settings,
    }
    await within(print_frames(cast(Host, host), FrameSettings("127.0.0.1:1", count, **values)))


async def test_a_frame_of_text_has_heading_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    await _print(DigestHost(FIRST, *[SECOND | {"number": number} for number in range(2, 6)]))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("toolbus 0.1.0  127.0.0.1:1  up 1 min 4")
    assert shown[1].startswith("0 calls/s  17 calls, 0 errors  0 in flight  held 0 B  lag 1.0 ms")
    assert shown[3].split() == ["NAME", "SOURCE", "CALLS/S", "CALLS", "ERRORS", "P50", "P95", "IN", "FLIGHT"]
    assert shown[4].split()[:2] == ["a", "weather"]
    heads = [line.split()[0] for line in shown if line.isupper()]
    assert heads == ["NAME", "SOURCE", "OUTCOME", "LAST"]


async def test_a_frame_of_json_has_the_whole_state_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    await _print(DigestHost(FIRST, *[SECOND | {"number": number} for number in range(2, 9)]), 2, as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first.keys() == second.keys()
    for frame in (first, second):
        assert [each["name"] for each in frame["tools"]] == ["a", "b"]
        assert frame["tools"][0]["rate"] == 10.0 or frame is second
        assert [each["session"] for each in frame["sources"][0]["sessions"]] == ["s1"]
        assert [each["count"] for each in frame["errors"]] == [1]
        assert frame["running"][0]["stage"] == "SENT"


async def test_a_frame_of_text_leaves_out_lines_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    many = digest(1, tools=[tool(f"t{number}") for number in range(9)])
    await _print(DigestHost(many, *map(change, range(2, 6))), rows=3)
    assert "6 more tools: --rows shows more" in capsys.readouterr().out


async def test_texts_of_plugins_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    call = failed(1, ATTACK, source=ATTACK, caller=ATTACK, failure={"message": ATTACK, "stage": ATTACK})
    nasty = digest(
        1,
        tools=[tool(ATTACK, of=ATTACK)],
        sources=[source(ATTACK, state=ATTACK)],
        calls=[call],
        running=[running(ATTACK, ATTACK, caller=ATTACK)],
        version=ATTACK,
        bus_id=ATTACK,
    )
    for as_json in (False, True):
        await _print(DigestHost(nasty, *map(change, range(2, 6))), as_json=as_json)
        shown = capsys.readouterr().out
        assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e"}
        assert not any(line.startswith("second line") for line in shown.splitlines())


async def test_frames_go_on_when_the_bus_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    lost = error(Code.UNAVAILABLE, "the bus went away")
    host = DigestHost(FIRST, lost, lost, digest(1, instance="two", tools=[tool("c")]), *map(change, range(2, 6)))
    await _print(host, as_json=True)
    shown = capsys.readouterr()
    assert [each["name"] for each in json.loads(shown.out)["tools"]] == ["c"]
    assert shown.err == "toolbus: no bus at 127.0.0.1:1: the bus went away; waiting for it\n"
    assert [arguments["since"] for _, arguments in host.calls[:4]] == [-1, 1, -1, -1]


async def test_a_bus_without_digests_is_named_so() -> None:
    host = DigestHost(error(Code.NOT_FOUND, "no tool"))
    with pytest.raises(RequestError, match="older version"):
        await _print(host)
    with pytest.raises(RequestError, match="may not"):
        await _print(DigestHost(error(Code.PERMISSION_DENIED, "may not")))


async def test_changes_of_another_bus_are_not_taken_for_those_of_the_one_before() -> None:
    whole = digest(2, instance="two")
    host = DigestHost(FIRST, change(2, instance="two"), whole)
    reader = DigestReader(cast(Host, host), TIMINGS)
    await reader.read()
    assert await within(reader.read()) == whole
    assert [arguments["since"] for _, arguments in host.calls] == [-1, 1, -1]


async def test_a_bus_that_does_not_answer_is_lost() -> None:
    with pytest.raises(BusLost, match="not answered"):
        await within(DigestReader(cast(Host, DigestHost()), ReaderTimings(late=0.05, look=0.01)).read(0.0))


async def test_a_broken_connection_is_a_loss_at_once() -> None:
    host = DigestHost()
    host.connected = False
    with pytest.raises(BusLost, match="broke"):
        await within(DigestReader(cast(Host, host), TIMINGS).read())
