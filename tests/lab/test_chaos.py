"""The chaos harness itself: schedules repeat, each check can fail, and a short run leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.chaos import checks
from lab.chaos.callback_plugin import is_valid
from lab.chaos.cast import BUS, cast, tools
from lab.chaos.checks import CHECKS, judge
from lab.chaos.evidence import Evidence
from lab.chaos.scene import Trouble
from lab.chaos.schedule import Act, plan
from lab.chaos.starvation import Starvation, waits_of
from lab.chaos.watcher import AWAY, Move
from lab.load.line import Line
from tests.support.processes import ROOT, alive, environment
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS, until_sync

pytestmark = pytest.mark.lab

PARTS = cast()
TOOLS = tools(PARTS)
BUS_PID, HOST_PID, SOLO_PID = 1, 2, 3

Spoil = Callable[[Evidence], object]


def evidence(*troubles: Trouble, moves: tuple[Move, ...] = ()) -> Evidence:
    return Evidence({part.name: part for part in PARTS}, troubles, moves)


def order(it: Evidence, tool: str = "solo_once", host: str = "raw-host", at: float = 100.0, **more: Any) -> str:
    """A host makes a call; returns its token."""
    token = f"t{len(it.calls)}"
    line = {"called": token, "host": host, "tool": tool, "at": at, "pid": HOST_PID}
    line |= {"timeout": 8.0, "seconds": 0.0, "refuse": False, "leave": 0.0, **more}
    it.take_call_line(line, TOOLS)
    return token


def run(it: Evidence, token: str, at: float = 100.1, *, ends: bool = True, part: str = "solo") -> None:
    """A plugin runs a call."""
    it.take_run_line({"began": token, "part": part, "at": at, "pid": SOLO_PID})
    if ends:
        it.take_run_line({"ended": token, "part": part, "at": at + 0.1, "pid": SOLO_PID})


def reply(it: Evidence, token: str, code: str = "OK", stage: str = "", at: float = 100.3, **more: Any) -> None:
    """A host gets a result."""
    ran = token if code == "OK" else None
    line = {"answered": token, "host": "raw-host", "at": at, "pid": HOST_PID, "code": code, "stage": stage, "ran": ran}
    it.take_call_line({**line, "retry_safe": False, "limit": "", "message": "", **more}, TOOLS)


def whole(it: Evidence, **more: Any) -> str:
    """A call that goes well; returns its token."""
    token = order(it, **more)
    run(it, token)
    reply(it, token)
    return token


def strangers_result(it: Evidence) -> None:
    token = order(it)
    run(it, token)
    reply(it, token, ran="another")


def stray(it: Evidence, *, again: bool) -> None:
    it.take_call_line({"stray": "7", "again": again, "host": "raw-host", "at": 1.0, "pid": HOST_PID}, TOOLS)


def failed(it: Evidence, code: str, stage: str, *, ran: bool, tool: str = "solo_once", **more: Any) -> None:
    token = order(it, tool)
    if ran:
        run(it, token, ends=False)
    reply(it, token, code, stage, **more)


def unanswered() -> Evidence:
    """Returns a death after which a host got no result, though it had time before it was killed itself."""
    it = evidence(killed(), Trouble("raw-host", Act.KILL, 110.0, 111.0, {HOST_PID}))
    run(it, order(it), ends=False)
    return it


def lost_long_before_a_kill() -> Evidence:
    it = evidence(Trouble("raw-host", Act.KILL, 400.0, 401.0, {HOST_PID}))
    run(it, order(it))
    return it


def killed() -> Trouble:
    return Trouble("solo", Act.KILL, 100.2, 101.0, {SOLO_PID})


def frozen() -> Trouble:
    return Trouble("solo", Act.FREEZE, 100.2, 125.0, standstill=(100.2, 125.0))


def cut_off(failed_at: float) -> Evidence:
    it = evidence(killed())
    token = order(it)
    run(it, token, ends=False)
    reply(it, token, "UNAVAILABLE", "DISPATCHED", failed_at)
    return it


def seen(*moves: tuple[float, str], trouble: Trouble) -> Evidence:
    it = evidence(trouble, moves=tuple(Move(at, "solo_once", state) for at, state in ((90.0, "live"), *moves)))
    whole(it)
    return it


def spoilt(spoil: Spoil) -> Evidence:
    it = evidence(Trouble(BUS, Act.FREEZE, 85.0, 101.0))  # so that failures have a cause
    spoil(it)
    return it


def given_up(part: str, asked_at: float, ran_at: float | None) -> Evidence:
    """Returns a call that ended for its caller while a part was stopped."""
    it = evidence(Trouble(part, Act.FREEZE, 100.0, 105.5, standstill=(100.2, 105.0)))
    token = order(it, at=asked_at, timeout=2.0)
    reply(it, token, "DEADLINE_EXCEEDED", "UNKNOWN", at=104.0, limit="timeout_seconds")
    if ran_at is not None:
        run(it, token, at=ran_at)
    return it


ANSWERED, ONCE, OWN, STRAYS, DELIVERED, HONEST, CAUSE, DEATH, HANG, UNRUN = CHECKS


@pytest.mark.parametrize(
    ("rule", "it"),
    [
        (ANSWERED, spoilt(lambda it: run(it, order(it)))),
        (ANSWERED, spoilt(lambda it: reply(it, whole(it)))),
        (ANSWERED, lost_long_before_a_kill()),
        (ONCE, spoilt(lambda it: run(it, whole(it)))),
        (ONCE, spoilt(lambda it: run(it, "unknown"))),
        (OWN, spoilt(lambda it: reply(it, order(it)))),
        (OWN, spoilt(strangers_result)),
        (STRAYS, spoilt(lambda it: stray(it, again=True))),
        (STRAYS, spoilt(lambda it: stray(it, again=False))),
        (HONEST, spoilt(lambda it: failed(it, "UNAVAILABLE", "NOT_DISPATCHED", ran=True))),
        (HONEST, spoilt(lambda it: failed(it, "UNAVAILABLE", "DISPATCHED", ran=True, retry_safe=True))),
        (HONEST, spoilt(lambda it: failed(it, "UNAVAILABLE", "DISPATCHED", ran=True, tool="solo_again"))),
        (HONEST, spoilt(lambda it: failed(it, "UNAVAILABLE", "ACCEPTED", ran=False))),
        (HONEST, spoilt(lambda it: failed(it, "NOT_FOUND", "DISPATCHED", ran=False))),
        (HONEST, spoilt(lambda it: failed(it, "INTERNAL", "UNKNOWN", ran=False))),
        (HONEST, spoilt(lambda it: failed(it, "DEADLINE_EXCEEDED", "DISPATCHED", ran=True, limit="timeout_seconds"))),
        (DEATH, unanswered()),
        (DEATH, seen(trouble=killed())),
        (HANG, seen(trouble=frozen())),
        (HANG, seen((108.0, "suspect"), trouble=frozen())),
        (UNRUN, given_up(BUS, asked_at=101.0, ran_at=105.1)),
        (UNRUN, given_up("solo", asked_at=100.0, ran_at=105.1)),
    ],
)  # fmt: skip
def test_each_rule_is_seen_to_be_broken(rule: str, it: Evidence) -> None:
    broken = {verdict.rule for verdict in judge(it) if verdict.broken}
    assert rule in broken


@pytest.mark.parametrize(
    ("times", "it", "seconds"),
    [
        (checks.lateness, spoilt(lambda it: reply(it, order(it), "DEADLINE_EXCEEDED", "UNKNOWN", at=112.0)), [3.0]),
        (checks.deaths, cut_off(failed_at=103.0), [2.8]),
        (checks.deaths, seen((102.0, AWAY), trouble=killed()), [1.8]),
        (checks.hangs, seen((112.0, "suspect"), (122.0, AWAY), trouble=frozen()), [11.8, 21.8]),
        (checks.hangs, seen((108.0, "suspect"), (124.5, AWAY), trouble=frozen()), [7.8, 24.3]),
    ],
)
def test_how_soon_something_was_noticed_is_a_figure_and_breaks_no_rule(
    times: Callable[[Evidence], Iterable[Any]], it: Evidence, seconds: list[float]
) -> None:
    found = [each[1] if isinstance(each, tuple) else each for each in times(it)]
    assert [round(each, 3) for each in found] == seconds
    timed = {ANSWERED, DEATH, HANG}
    assert not [verdict for verdict in judge(it) if verdict.broken and verdict.rule in timed]


def test_a_finished_run_without_its_result_is_seen_as_lost_and_as_a_failure_without_a_cause() -> None:
    it = evidence()
    token = order(it)
    run(it, token)
    reply(it, token, "UNAVAILABLE", "DISPATCHED")
    assert {verdict.rule for verdict in judge(it) if verdict.broken} == {DELIVERED, CAUSE}


@pytest.mark.parametrize(("back_at", "excused"), [(150.0, True), (110.0, False)])
def test_a_tool_that_a_disturbance_took_away_may_be_missing_until_it_is_back(back_at: float, excused: bool) -> None:
    moves = (Move(90.0, "solo_once", "live"), Move(101.0, "solo_once", AWAY), Move(back_at, "solo_once", "live"))
    it = evidence(Trouble(BUS, Act.KILL, 100.0, 102.0), moves=moves)
    reply(it, order(it, at=120.0), "NOT_FOUND", "NOT_DISPATCHED", at=120.1)
    broken = {verdict.rule for verdict in judge(it) if verdict.broken}
    assert broken == (set() if excused else {CAUSE})


@pytest.mark.parametrize(
    "it",
    [
        spoilt(whole),
        cut_off(failed_at=100.3),
        seen((100.3, AWAY), trouble=killed()),
        seen((108.0, "suspect"), (122.0, AWAY), trouble=frozen()),
        spoilt(lambda it: failed(it, "UNAVAILABLE", "NOT_DISPATCHED", ran=False, retry_safe=True)),
        spoilt(lambda it: failed(it, "UNAVAILABLE", "DISPATCHED", ran=True, tool="solo_again", retry_safe=True)),
        spoilt(lambda it: failed(it, "DEADLINE_EXCEEDED", "DISPATCHED", ran=True, at=108.1, limit="timeout_seconds")),
        spoilt(lambda it: run(it, whole(it, tool="solo_again"))),
        given_up(BUS, asked_at=101.0, ran_at=None),
        given_up(BUS, asked_at=100.1, ran_at=105.1),  # it was on its way to the plugin
        given_up("solo", asked_at=100.0, ran_at=100.1),
    ],
)
def test_what_a_disturbance_explains_breaks_no_rule(it: Evidence) -> None:
    assert [finding for verdict in judge(it) for finding in verdict.broken] == []


def test_a_host_that_was_killed_needs_no_results() -> None:
    it = evidence(Trouble("raw-host", Act.KILL, 100.2, 101.0, {HOST_PID}))
    run(it, order(it))
    assert not any(verdict.broken for verdict in judge(it))


def test_a_host_that_was_killed_and_is_back_needs_no_result_of_a_plugin_that_died_with_its_old_call() -> None:
    host = Trouble("raw-host", Act.KILL, 100.2, 101.0, {HOST_PID})
    it = evidence(host, Trouble("solo", Act.KILL, 104.0, 105.0, {SOLO_PID}))
    run(it, order(it), ends=False)
    assert not any(verdict.broken for verdict in judge(it))


@pytest.mark.parametrize(("timeout", "is_lost"), [(8.0, True), (2.0, False)])
def test_a_result_that_a_deadline_cut_off_is_lost_where_a_busy_machine_had_the_time_to_deliver_it(
    timeout: float, is_lost: bool
) -> None:
    it = evidence()
    token = order(it, timeout=timeout)
    run(it, token)
    reply(it, token, "DEADLINE_EXCEEDED", "DISPATCHED", at=100.0 + timeout, limit="timeout_seconds")
    assert {verdict.rule for verdict in judge(it) if verdict.broken} == ({DELIVERED} if is_lost else set())


def test_a_failure_that_a_later_disturbance_caused_is_not_a_lost_result() -> None:
    it = evidence(Trouble(BUS, Act.KILL, 101.5, 102.0))
    token = order(it)
    run(it, token)
    reply(it, token, "UNAVAILABLE", "DISPATCHED", at=101.6)
    assert not any(verdict.broken for verdict in judge(it))


def test_a_drain_does_not_excuse_a_lost_result() -> None:
    it = evidence(Trouble("solo", Act.DRAIN, 100.0, 103.0))
    token = order(it)
    run(it, token)
    reply(it, token, "UNAVAILABLE", "DISPATCHED")
    assert list(filter(None, checks.delivered(it)))


def test_a_seed_makes_the_same_schedule_and_another_one_another() -> None:
    assert plan(7, 600, PARTS) == plan(7, 600, PARTS) != plan(8, 600, PARTS)


def test_a_schedule_does_nothing_to_a_part_twice_at_once_and_undoes_everything_before_the_calm() -> None:
    for seed in range(20):
        for each in plan(seed, 180, PARTS):
            ends = dict.fromkeys((part.name for part in PARTS), 0.0)
            for event in each.events:
                assert event.at >= ends[event.part]
                ends[event.part] = event.at + event.seconds
                assert ends[event.part] <= each.seconds


def test_ten_minutes_do_everything_to_every_kind_of_part() -> None:
    kinds = {part.name: part.kind for part in PARTS}
    done = {(kinds[event.part], event.act) for each in plan(1, 600, PARTS) for event in each.events}
    assert {kind for kind, _ in done} == set(kinds.values())
    assert {act for _, act in done} == set(Act) - {Act.STARVE}


@pytest.mark.parametrize(
    ("made_with", "there", "still_valid"),
    [
        ([], ["bus-1", "plugin-1"], False),  # it was never made
        (["bus-1", "plugin-1"], ["bus-1", "plugin-2"], True),  # the plugin was killed
        (["bus-1", "plugin-1"], ["bus-2", "plugin-1"], True),  # the plugin outlived the bus
        (["bus-1", "plugin-1"], ["bus-2", "plugin-2"], False),
    ],
)
def test_a_callback_plugin_registers_only_where_neither_bus_nor_plugin_is_the_same(
    made_with: list[str], there: list[str], still_valid: bool
) -> None:
    assert is_valid(made_with, there) is still_valid


async def test_a_line_passes_on_stalls_and_resets() -> None:
    ended = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(100):
                writer.write(piece)
        writer.close()
        ended.set()

    async with asyncio.timeout(WAIT_SECONDS), await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        spare = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = spare.sockets[0].getsockname()[1]
        spare.close()
        await spare.wait_closed()
        line = Line(port, server.sockets[0].getsockname()[1])
        await line.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        line.stall()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.05)
        line.flow()
        assert await reader.readexactly(3) == b"two"
        line.reset()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        await line.close()
        await ended.wait()  # else a later test meets its socket as garbage


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lab.chaos", "--few", "--seed", "11", "--folder", str(folder), *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """Returns the output of a program once it has ended; kills one that hangs, which later tests would meet."""
    with process:
        try:
            text, _ = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    return text


def test_a_part_that_waited_half_a_second_for_a_processor_was_disturbed_and_its_calls_are_not_judged() -> None:
    waited = iter([{"1": 5.0}, {"1": 5.4}, {"1": 6.0, "2": 9.0}, {"2": 9.1}])
    scene: Any = SimpleNamespace(actors={"bus": SimpleNamespace(starts=1, pid=1)}, troubles=[])
    starvation = Starvation(scene, lambda pid: next(waited) if pid == 1 else {})
    for _ in range(4):
        starvation.look()
    assert [(trouble.part, trouble.act) for trouble in scene.troubles] == [("bus", Act.STARVE)]
    assert waits_of(os.getpid()) or sys.platform != "linux"
    for began, broken in ((100.2, False), (120.0, True)):
        it = evidence(Trouble("bus", Act.STARVE, began, began + 1.0))
        failed(it, "UNAVAILABLE", "NOT_DISPATCHED", ran=False, retry_safe=True)
        assert any(checks.no_failure_without_cause(it)) is broken


def test_a_short_run_keeps_every_promise(tmp_path: Path) -> None:
    process = start(tmp_path, "--seconds", "3", "--json", str(tmp_path / "outcome.json"))
    text = output_of(process)
    assert process.returncode == 0, text
    assert "python -m lab.chaos --seed 11 --seconds 3 --few" in text
    assert (tmp_path / "outcome.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        until_sync(lambda: (tmp_path / "bus.log").exists() and "ready" in (tmp_path / "bus.log").read_text(), "a bus")
        pids = started_in(tmp_path)
        assert len(pids) >= 3
    finally:
        process.send_signal(number)
    output_of(process)
    until_sync(lambda: not any(map(alive, pids)), f"the end of {pids}")


def started_in(folder: Path) -> list[int]:
    """Returns the processes that have a folder among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has just ended
    return found
