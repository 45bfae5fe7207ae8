"""The overload harness itself: schedules are open loops, each rule can fail, and short runs leave nothing behind.

The file is long because each bound has a record that breaks it; what overloads brought to light stands at its end.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from lab.chart import svg
from lab.judge import Verdict
from lab.ledger import NEVER_SENT, OK, UNANSWERED, Answer, Answers
from lab.load.schedule import Pace, Phase, Schedule, options_of, read_schedule
from lab.load.workload import quantile
from lab.overload import judge, slow_reader
from lab.overload.parts import PARTS, RUDE
from lab.overload.report import chart, markdown
from lab.overload.run import BYSTANDER, Plan, Recording, play
from lab.overload.watch import Look, Watch
from lab.report import verdict_table
from lab.stage import Stage
from tests.bus.gateway.calling import client, legacy_plugin
from tests.support.processes import ROOT, alive, environment
from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.errors import Code
from toolbus.functions.call_context import CallOptions
from toolbus.protocol.tool import Limits
from toolbus.sdk.outgoing_calls import SWEEP_PAUSE, OutgoingCall, OutgoingCalls
from toolbus.testing import running_bus

pytestmark = pytest.mark.lab

PART = PARTS["plugin"]
CAPACITY = 10.0
OVERLOADED = Code.OVERLOADED.value
Spoil = Callable[[Recording], object]

# -- what is offered -------------------------------------------------------------------------------------------------


def test_a_schedule_says_when_each_call_is_due_whatever_becomes_of_the_others() -> None:
    schedule = Schedule([Phase(2, 1), Phase(10, 1), Phase(0, 1), Phase(2, 1)])
    assert [schedule.due_at(number) for number in (0, 1, 2, 3, 11, 12)] == [0.0, 0.5, 1.0, 1.1, 1.9, 3.0]
    assert [schedule.due_by(at) for at in (-1.0, 0.0, 0.6, 1.0, 2.5, 3.0, 9.0)] == [0, 1, 2, 3, 12, 13, 14]
    assert str(read_schedule(str(schedule))) == str(schedule)


def test_answers_are_the_same_after_they_were_written(tmp_path: Path) -> None:
    answers = Answers()
    answers.add(Answer(7, 0.5, 0.6, 0.7, OVERLOADED, 0.05))
    answers.write(tmp_path / "host.answers")
    assert list(Answers.read(tmp_path / "host.answers")) == list(answers)


def test_calls_that_are_never_sent_cost_their_host_one_answer_for_all() -> None:
    options = options_of("").parse_args(["bus", "folder", "host", "--window", "1", "--max-wait", "0.5"])
    pace = Pace(Schedule([Phase(1e6, 60.0)]), time.monotonic() - 10.0, options)
    assert pace.to_send(8) == [next(iter(pace.answers)).calls], "one may be sent; it comes after those that may not"
    (gone,) = pace.answers
    assert (gone.code, gone.number, gone.due) == (NEVER_SENT, 0, 0.0)
    assert gone.calls == pytest.approx(9.5e6, rel=0.01)


# -- each rule can fail ----------------------------------------------------------------------------------------------


CHILD: Any = None  # nothing of these tests looks at the bus's process


def good() -> Recording:
    """Returns what a good run looks like: 2 s of calm, 4 s of load, 2 s of calm, a capacity of 10 calls a second."""
    watch = Watch(CHILD, "", "", ())
    watch.looks = [Look("Check ''", at / 10, 0.001, "SERVING") for at in range(80)]
    watch.looks += [Look(BYSTANDER, at / 10, 0.001, "SERVING" if at < 40 else "NOT_SERVING") for at in range(80)]
    watch.memory = [(at / 10, 90.0) for at in range(80)]
    watch.late = [(at / 10, 0.0) for at in range(80)]
    answers = {"host": Answers(), "modest": Answers()}
    seen = Recording([CAPACITY], (2.0, 6.0), answers, array("d"), watch, 3.95)
    for at in (0.0, 0.5, 1.0, 1.5, 6.0, 6.5, 7.0, 7.5):
        done(seen, at)
    for number in range(400):
        at = 2.0 + number / 100
        done(seen, at) if number % 10 == 0 else refuse(seen, at)
    done(seen, 3.0, host="modest")
    return seen


def add(seen: Recording, at: float, seconds: float, code: int, hint: float = 0.0, host: str = "host") -> int:
    number = sum(map(len, seen.answers.values()))
    seen.answers[host].add(Answer(number, at, at, at + seconds, code, hint))
    return number


def done(seen: Recording, at: float, seconds: float = 0.02, host: str = "host") -> None:
    seen.ran.append(add(seen, at, seconds, OK, host=host))


def refuse(seen: Recording, at: float, seconds: float = 0.001, hint: float = 0.05, host: str = "host") -> int:
    return add(seen, at, seconds, OVERLOADED, hint, host)


def look(seen: Recording, what: str, at: float, answer: str, seconds: float = 0.001) -> None:
    seen.watch.looks.append(Look(what, at, seconds, answer))


def slowly(seen: Recording) -> None:
    """Many are done, and late."""
    for _ in range(40):
        done(seen, 4.0, 5.0)


def unserved(seen: Recording) -> None:
    """Nearly nothing is done under load."""
    seen.answers["host"] = Answers()
    for number in range(400):
        refuse(seen, 2.0 + number / 100)


def slow_health(seen: Recording) -> None:
    """Many answers about health are late."""
    for _ in range(10):
        look(seen, "/healthz", 4.0, "200", 0.5)


def slow_after(seen: Recording) -> None:
    """OutgoingCalls after the load are slow."""
    for _ in range(9):
        done(seen, 7.6, 0.5)


def never_sent(seen: Recording) -> None:
    """Nearly all that was due waited in the host until it was too late."""
    seen.answers["host"] = Answers()
    for number in range(400):
        add(seen, 2.0 + number / 100, 1.0, NEVER_SENT if number % 10 else OK)


def held_up(seen: Recording) -> None:
    """What the host writes waits for the bus to read it."""
    for number in range(40):
        seen.answers["host"].add(Answer(900 + number, 3.0, 3.6, 3.61, OVERLOADED, 0.05))


def forgotten(seen: Recording) -> None:
    """The bystander's death is never in its health."""
    seen.watch.looks = [each for each in seen.watch.looks if each.answer != "NOT_SERVING"]


def without(seen: Recording, code: int, begin: float, end: float = 9.0, host: str = "host") -> None:
    """Drops the answers with a code in a time, as if those calls had never been."""
    rest = [each for each in seen.answers[host] if each.code != code or not begin <= each.due < end]
    seen.answers[host] = Answers()
    for each in rest:
        seen.answers[host].add(each)


def unaccepted(seen: Recording) -> None:
    """No call is accepted during the load."""
    for host in ("host", "modest"):
        without(seen, OK, 2.0, 6.0, host)


BROKEN: list[tuple[str, Spoil]] = [
    ("accepted during the load", unaccepted),
    ("turned away during the load", lambda seen: without(seen, OVERLOADED, 0.0)),
    ("refused without limit or hint", lambda seen: refuse(seen, 3.0, hint=0.0)),
    ("refused, and run all the same", lambda seen: seen.ran.append(refuse(seen, 3.0))),
    ("run, and sent by no host", lambda seen: seen.ran.append(add(seen, 3.0, 1.0, NEVER_SENT))),
    ("run, and sent by no host", lambda seen: seen.ran.append(10**9)),
    ("done, but not run once", lambda seen: seen.ran.append(seen.ran[0])),
    ("done, but not run once", lambda seen: add(seen, 3.0, 0.02, OK)),
    ("never answered, or with another error", lambda seen: add(seen, 3.0, 5.0, UNANSWERED)),
    ("never answered, or with another error", lambda seen: add(seen, 3.0, 0.1, Code.DEADLINE_EXCEEDED.value)),
    ("health that was false", lambda seen: look(seen, "/healthz", 4.0, "503")),
    ("health that was false", lambda seen: look(seen, "toolbus health", 4.0, "exit 3")),
    ("health that shows a live plugin as dead", lambda seen: look(seen, BYSTANDER, 1.0, "NOT_SERVING")),
    ("health that shows a dead plugin", forgotten),
    ("that succeed after the load", lambda seen: without(seen, OK, 6.0)),
    ("the bus grew during the load", lambda seen: seen.watch.memory.insert(30, (3.0, 400.0))),
    ("the bus grew for good", lambda seen: seen.watch.memory.append((8.0, 200.0))),
    ("the modest host's calls that succeed", lambda seen: without(seen, OK, 0.0, host="modest")),
]
# What depends on the pace of the machine → what makes it bad.
SLOW: list[tuple[str, Spoil]] = [
    ("offered, times the capacity", lambda seen: setattr(seen, "capacities", [100.0])),
    ("offered, times the capacity", never_sent),
    ("the bus's work took, times as long as alone", lambda seen: seen.watch.turns.extend([(2, 1, 1), (5, 2, 5.5)])),
    ("the machine woke a metronome late, p99", lambda seen: seen.watch.late.extend([(3.0, 1.0)] * 9)),
    ("p99 of the refused", held_up),
    ("p99 of the refused", lambda seen: [refuse(seen, 3.0, 0.5) for _ in range(40)]),
    ("p99 of the accepted", slowly),
    ("done during the load, of the capacity", unserved),
    ("p99 of health", slow_health),
    ("slowest health", lambda seen: look(seen, "/healthz", 4.0, "200", 5.0)),
    ("a plugin's death is in its health after", lambda seen: setattr(seen, "killed_at", 2.0)),
    ("the first success after the load", lambda seen: setattr(seen, "phases", (2.0, 7.45))),
    ("share that succeeds in the second half of the calm", lambda seen: refuse(seen, 7.9)),
    ("p50 then, over that before", slow_after),
    ("share of the modest host's calls that succeed", lambda seen: refuse(seen, 3.1, host="modest")),
    ("the modest host's p99", lambda seen: done(seen, 3.1, 9.0, host="modest")),
]


def verdicts_of(seen: Recording) -> dict[str, Verdict]:
    return {verdict.what: verdict for verdict in judge.judge(PART, seen)}


def test_a_good_run_breaks_no_rule() -> None:
    assert [verdict for verdict in judge.judge(PART, good()) if not verdict.good] == []


@pytest.mark.parametrize(("what", "spoil"), BROKEN, ids=[what for what, _ in BROKEN])
def test_a_rule_finds_what_breaks_it(what: str, spoil: Spoil) -> None:
    seen = good()
    spoil(seen)
    assert what in [verdict.what for verdict in judge.judge(PART, seen) if not verdict.good]


def test_every_rule_is_shown_to_fail() -> None:
    assert {what for what, _ in BROKEN} == {v.what for v in judge.judge(PART, good()) if v.bound}


@pytest.mark.parametrize(("what", "spoil"), SLOW, ids=[what for what, _ in SLOW])
def test_what_depends_on_the_pace_of_the_machine_is_a_figure_without_a_verdict(what: str, spoil: Spoil) -> None:
    seen = good()
    spoil(seen)
    before, after = verdicts_of(good())[what], verdicts_of(seen)[what]
    assert before.measured != after.measured
    assert (after.good, after.bound, after.word) == (True, "", "")


def test_every_figure_is_shown_to_change() -> None:
    assert {what for what, _ in SLOW} | {"the capacity"} == {v.what for v in judge.judge(PART, good()) if not v.bound}


def test_a_modest_host_that_is_refused_too_often_breaks_the_rule_of_parts_that_share() -> None:
    what = "the modest host's calls that are refused at the first attempt"
    seen = good()
    for number in range(18):
        done(seen, 2.1 + number / 10, host="modest")
    refuse(seen, 3.1, host="modest")
    assert [verdict for verdict in judge.judge(PARTS["shared-by-2"], seen) if not verdict.good] == []
    refuse(seen, 3.2, host="modest")
    assert what in [verdict.what for verdict in judge.judge(PARTS["shared-by-2"], seen) if not verdict.good]
    assert what not in [verdict.what for verdict in judge.judge(PARTS["shared-by-4"], seen) if not verdict.good]


def test_times_of_a_host_without_a_window_are_shown_apart() -> None:
    part = PARTS["bus"]
    seen = good()
    seen.answers[RUDE] = Answers()
    for number in range(100):
        done(seen, 3.0 + number / 100, 5.0, host=RUDE)
        refuse(seen, 3.0 + number / 100, 5.0, host=RUDE)
    figures = {verdict.what: verdict.measured for verdict in judge.judge(part, seen)}
    for what in ("accepted", "refused"):
        assert figures[f"p99 of the {what}, of 'rude'"] == "5,000.0 ms"
        assert figures[f"p99 of the {what}"] != "5,000.0 ms"


def test_the_capacity_is_that_of_the_machine_before_and_after_the_load() -> None:
    seen = good()
    what = "done during the load, of the capacity"
    assert verdicts_of(seen)[what].measured == "1.02 ×"
    seen.capacities = [CAPACITY, 3 * CAPACITY]
    assert verdicts_of(seen)[what].measured == "0.51 ×"
    assert verdicts_of(seen)["the capacity"].measured == "10, then 30 calls/s"


def beside(spoil: str = "") -> slow_reader.Beside:
    """Returns what a run beside a slow reader looks like."""
    seen = replace(good(), phases=(4.0, 12.0), answers={"host": Answers()})
    for number in range(1200):
        late = 0.5 if spoil == "late" and number >= 800 else 0.002
        add(seen, number / 100, late, OVERLOADED if spoil == "failed" and number == 500 else OK)
    if spoil == "heavy":
        seen.watch.memory.append((8.0, 200.0))
    ending = "" if spoil == "untold" else "RESOURCE_EXHAUSTED the peer reads too slowly (limit waiting_bytes)"
    return slow_reader.Beside("host", seen, ending, math.inf if spoil == "open" else 5.0, int(spoil == "absent"))


def test_a_slow_reader_that_costs_others_nothing_breaks_no_rule() -> None:
    assert [verdict for verdict in slow_reader.judge(beside()) if not verdict.good] == []


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        ("failed", "others' calls that failed"),
        ("open", "closed by the bus"),
        ("untold", "it learns why"),
        ("absent", "health that shows it as gone before it stops reading"),
        ("heavy", "the bus grew for good"),
    ],
)
def test_what_a_slow_reader_costs_others_is_found(spoil: str, what: str) -> None:
    assert what in [verdict.what for verdict in slow_reader.judge(beside(spoil)) if not verdict.good]


def test_how_much_slower_others_are_beside_a_slow_reader_is_a_figure() -> None:
    figures = {verdict.what: verdict for verdict in slow_reader.judge(beside("late"))}
    for name in ("p50", "p99"):
        verdict = figures[f"others' {name} with neither, beside one that reads, beside the slow one"]
        assert (verdict.measured, verdict.word) == ("2.0 ms, 2.0 ms, 500.0 ms: 250.00 ×", "")


def test_the_report_shows_what_was_broken_and_the_picture_both_kinds_of_answers() -> None:
    seen = good()
    refuse(seen, 3.0, hint=0.0)
    verdicts = {"plugin": judge.judge(PART, seen)}
    console = Console(record=True, width=160)
    verdict_table("rules", verdicts).show(console)
    assert "BROKEN" in console.export_text()
    page = markdown(verdicts, {"plugin": PART.title}, "python -m lab.overload", "overload.svg")
    assert "| refused without limit or hint | 0 | 1 | **BROKEN** |" in page
    assert "![Latency before, during and after an overload](overload.svg)" in page
    drawn = chart(seen, "Latency", "python -m lab.overload")
    assert drawn is not None
    picture = svg(drawn)
    assert all(name in picture for name in ("accepted, p99", "refused, p50", "prefers-color-scheme: dark"))


# -- short real runs -------------------------------------------------------------------------------------------------


async def test_a_plugin_that_is_offered_ten_times_what_it_takes_runs_only_what_is_accepted() -> None:
    with Stage(environment({})) as stage:
        seen = await play(PART, stage, Plan(0.8))
    assert [verdict for verdict in judge.judge(PART, seen) if not verdict.good] == []
    refused = [answer for answer in seen.answers_in("load") if answer.code == OVERLOADED]
    accepted = [answer for answer in seen.answers_in("load") if answer.code == OK]
    assert len(refused) > len(accepted) > 0
    assert quantile([answer.seconds for answer in accepted], 0.5) < 20.0


async def test_a_host_that_does_not_read_is_closed_and_learns_why() -> None:
    with Stage(environment({})) as stage:
        beside = await slow_reader.play("host", stage, 0.6, settle=0.0)
    broken = {verdict.what for verdict in slow_reader.judge(beside) if not verdict.good}
    assert broken <= {"the bus grew for good"}  # it had no time to give memory back


def test_nothing_outlives_a_run_that_is_killed() -> None:
    command = [sys.executable, "-m", "lab.overload", "--part", "plugin", "--seconds", "30"]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process = psutil.Process(run.pid)
        until_sync(lambda: len(process.children(recursive=True)) >= 2, "it has started its processes", 50.0)
        started = [child.pid for child in process.children(recursive=True)]
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    until_sync(lambda: not any(map(alive, started)), "they have ended")


def test_a_wrong_command_line_is_refused_with_a_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.overload", "--seconds", "0.1"],
        cwd=ROOT,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "at least 2" in done.stderr


# -- what overloads brought to light ---------------------------------------------------------------------------------


async def test_a_gateway_with_all_the_connections_it_takes_still_says_that_the_process_runs() -> None:
    async with running_bus(http="127.0.0.1:0", limits=Limits(sessions=1)) as bus, client(bus) as http:
        assert (await http.get("/api/tools")).status_code == 200
        async with client(bus) as another:  # one more connection than it takes
            assert (await another.get("/api/tools")).status_code == 503
            assert (await another.get("/readyz")).status_code == 200
            assert (await another.get("/healthz")).json() == {"status": "ok"}


async def test_a_refusal_over_http_says_in_its_header_when_to_ask_again() -> None:
    async with running_bus(http="127.0.0.1:0", limits=Limits(calls_in_flight=1)) as bus, client(bus) as http:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def answer(body: dict[str, Any]) -> bytes:
            entered.set()
            await leave.wait()
            return b'"done"'

        async with legacy_plugin(answer) as url:
            await http.post("/api/tools/register", json={"name": "slow", "callback_url": url})
            first = asyncio.create_task(http.post("/api/tools/invoke", json={"name": "slow"}))
            await asyncio.wait_for(entered.wait(), WAIT_SECONDS)
            refused = await http.post("/api/tools/invoke", json={"name": "slow"})
            assert refused.json()["error"]["code"] == "OVERLOADED"
            assert refused.headers["retry-after"] == "1"  # 0.05 s, in the whole seconds of HTTP
            leave.set()
            assert "retry-after" not in (await first).headers


async def test_thousands_of_calls_that_wait_in_a_host_and_run_out_of_time_are_looked_at_together() -> None:
    calls = OutgoingCalls(asyncio.get_running_loop(), "nowhere", "test")
    sweeps = 0
    sweep = calls._sweep

    def counted() -> None:
        nonlocal sweeps
        sweeps += 1
        sweep()

    calls._sweep = counted  # type: ignore[method-assign]
    ended: asyncio.Queue[Any] = asyncio.Queue()
    count, spread = 500, 0.1
    for number in range(count):
        waiting = OutgoingCall(
            "t", "{}", lambda out, result: ended.put_nowait(result), options=CallOptions(0.01 + number / count * spread)
        )
        calls.begin(waiting)
    async with asyncio.timeout(WAIT_SECONDS):
        results = [await ended.get() for _ in range(count)]
    assert {result.error.code for result in results} == {Code.UNAVAILABLE}
    assert sweeps <= 2 * spread / SWEEP_PAUSE
