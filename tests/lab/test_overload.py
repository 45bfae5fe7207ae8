"""The overload harness itself: schedules are open loops, each rule can fail, and short runs leave nothing behind.

The file is long because each bound has a record that breaks it; what overloads brought to light stands at its end.
"""

from __future__ import annotations

import asyncio
import json
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

from lab.benchmarks.plot import svg
from lab.overload import judge, slow_reader
from lab.overload.load import NEVER_SENT, OK, UNANSWERED, Answer, Answers, Phase, Schedule, quantile, read_schedule
from lab.overload.pace import Pace, options_of
from lab.overload.parts import BYSTANDER, PARTS, Plan, play
from lab.overload.report import chart, markdown, table, to_json
from lab.overload.stage import Measured, Scene, Seen
from lab.overload.watch import Look, Watch
from tests.bus.gateway.calling import client, legacy_plugin
from tests.faults.raw_peer import PATIENCE
from tests.support.processes import ROOT, alive, environment, until
from toolbus.errors import Code
from toolbus.functions.call_options import CallOptions
from toolbus.processes.lifeline import Lifeline
from toolbus.sdk.outgoing_calls import SWEEP_PAUSE, OutgoingCall, OutgoingCalls
from toolbus.testing import running_bus
from toolbus.tool import Limits

PART = PARTS["plugin"]
CAPACITY = 10.0
OVERLOADED = Code.OVERLOADED.value
Spoil = Callable[[Seen], object]

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
    options = options_of("").parse_args(["bus", "folder", "host", "--window", "1", "--patience", "0.5"])
    pace = Pace(Schedule([Phase(1e6, 60.0)]), time.monotonic() - 10.0, options)
    assert pace.to_send(8) == [next(iter(pace.answers)).calls], "one may be sent; it comes after those that may not"
    (gone,) = pace.answers
    assert (gone.code, gone.number, gone.due) == (NEVER_SENT, 0, 0.0)
    assert gone.calls == pytest.approx(9.5e6, rel=0.01)


# -- each rule can fail ----------------------------------------------------------------------------------------------


def good() -> Seen:
    """Returns what a good run looks like: 2 s of calm, 4 s of load, 2 s of calm, a capacity of 10 calls a second."""
    watch = Watch("", "", (), os.getpid())
    watch.looks = [Look("Check ''", at / 10, 0.001, "SERVING") for at in range(80)]
    watch.looks += [Look(BYSTANDER, at / 10, 0.001, "SERVING" if at < 40 else "NOT_SERVING") for at in range(80)]
    watch.memory = [(at / 10, 90.0) for at in range(80)]
    watch.late = [(at / 10, 0.0) for at in range(80)]
    seen = Seen(CAPACITY, (2.0, 6.0), {"host": Answers(), "modest": Answers()}, array("d"), watch, {"killed_at": 3.95})
    for at in (0.0, 0.5, 1.0, 1.5, 6.0, 6.5, 7.0, 7.5):
        done(seen, at)
    for number in range(400):
        at = 2.0 + number / 100
        done(seen, at) if number % 10 == 0 else refuse(seen, at)
    done(seen, 3.0, host="modest")
    return seen


def add(seen: Seen, at: float, seconds: float, code: int, hint: float = 0.0, host: str = "host") -> int:
    number = sum(map(len, seen.answers.values()))
    seen.answers[host].add(Answer(number, at, at, at + seconds, code, hint))
    return number


def done(seen: Seen, at: float, seconds: float = 0.02, host: str = "host") -> None:
    seen.ran.append(add(seen, at, seconds, OK, host=host))


def refuse(seen: Seen, at: float, seconds: float = 0.001, hint: float = 0.05, host: str = "host") -> int:
    return add(seen, at, seconds, OVERLOADED, hint, host)


def look(seen: Seen, what: str, at: float, said: str, seconds: float = 0.001) -> None:
    seen.watch.looks.append(Look(what, at, seconds, said))


def slowly(seen: Seen) -> None:
    """Many are done, and late."""
    for _ in range(40):
        done(seen, 4.0, 5.0)


def unserved(seen: Seen) -> None:
    """Nearly nothing is done under load."""
    seen.answers["host"] = Answers()
    for number in range(400):
        refuse(seen, 2.0 + number / 100)


def slow_health(seen: Seen) -> None:
    """Many answers about health are late."""
    for _ in range(10):
        look(seen, "/healthz", 4.0, "200", 0.5)


def slow_after(seen: Seen) -> None:
    """OutgoingCalls after the load are slow."""
    for _ in range(9):
        done(seen, 7.6, 0.5)


def never_sent(seen: Seen) -> None:
    """Nearly all that was due waited in the host until it was too late."""
    seen.answers["host"] = Answers()
    for number in range(400):
        add(seen, 2.0 + number / 100, 1.0, NEVER_SENT if number % 10 else OK)


def held_up(seen: Seen) -> None:
    """What the host writes waits for the bus to read it."""
    for number in range(40):
        seen.answers["host"].add(Answer(900 + number, 3.0, 3.6, 3.61, OVERLOADED, 0.05))


BROKEN: list[tuple[str, Spoil]] = [
    ("offered, times the capacity", lambda seen: setattr(seen, "capacity", 100.0)),
    ("offered, times the capacity", never_sent),
    ("the bus's work took, for the machine", lambda seen: seen.watch.turns.extend([(2.0, 1.0, 1.0), (5.0, 2.0, 5.5)])),
    ("p99 of the refused", held_up),
    ("p99 of the accepted", slowly),
    ("done under load, of the capacity", unserved),
    ("p99 of the refused", lambda seen: [refuse(seen, 3.0, 0.5) for _ in range(40)]),
    ("refused without limit or hint", lambda seen: refuse(seen, 3.0, hint=0.0)),
    ("refused, and run all the same", lambda seen: seen.ran.append(refuse(seen, 3.0))),
    ("run, and sent by nobody", lambda seen: seen.ran.append(add(seen, 3.0, 1.0, NEVER_SENT))),
    ("run, and sent by nobody", lambda seen: seen.ran.append(10**9)),
    ("done, but not run once", lambda seen: seen.ran.append(seen.ran[0])),
    ("done, but not run once", lambda seen: add(seen, 3.0, 0.02, OK)),
    ("ended in anything else", lambda seen: add(seen, 3.0, 5.0, UNANSWERED)),
    ("ended in anything else", lambda seen: add(seen, 3.0, 0.1, Code.DEADLINE_EXCEEDED.value)),
    ("health that was false", lambda seen: look(seen, "/healthz", 4.0, "503")),
    ("health that was false", lambda seen: look(seen, "toolbus health", 4.0, "exit 3")),
    ("p99 of health", slow_health),
    ("slowest health", lambda seen: look(seen, "/healthz", 4.0, "200", 5.0)),
    ("a plugin said to be dead that is not", lambda seen: look(seen, BYSTANDER, 1.0, "NOT_SERVING")),
    ("a plugin's death is in its health", lambda seen: seen.notes.update(killed_at=2.0)),
    ("the first success after the load", lambda seen: setattr(seen, "phases", (2.0, 7.9))),
    ("that succeed in the second half of the calm", lambda seen: refuse(seen, 7.9)),
    ("p50 then, twice that before", slow_after),
    ("the bus grew, at the most", lambda seen: seen.watch.memory.insert(30, (3.0, 400.0))),
    ("the bus grew, for good", lambda seen: seen.watch.memory.append((8.0, 200.0))),
    ("the modest host's calls that succeed", lambda seen: refuse(seen, 3.1, host="modest")),
    ("the modest host's p99", lambda seen: done(seen, 3.1, 9.0, host="modest")),
]


def test_a_good_run_breaks_no_bound() -> None:
    assert [verdict for verdict in judge.judge(PART, good()) if not verdict.kept] == []


@pytest.mark.parametrize(("what", "spoil"), BROKEN, ids=[what for what, _ in BROKEN])
def test_a_rule_finds_what_breaks_it(what: str, spoil: Spoil) -> None:
    seen = good()
    spoil(seen)
    assert what in [verdict.what for verdict in judge.judge(PART, seen) if not verdict.kept]


def test_every_rule_with_a_bound_is_shown_to_fail() -> None:
    assert {what for what, _ in BROKEN} == {v.what for v in judge.judge(PART, good()) if v.bound}


def test_only_a_host_without_a_window_is_given_time_for_what_it_has_on_the_way() -> None:
    part = PARTS["bus"]
    (rude,) = part.on_the_way
    seen = good()
    late = judge.in_time(part, seen) + 1.0
    seen.answers[rude] = Answers()
    for number in range(100):
        done(seen, 3.0 + number / 100, late, host=rude)
        refuse(seen, 3.0 + number / 100, late, host=rude)
    assert [verdict for verdict in judge.judge(part, seen) if not verdict.kept and "p99" in verdict.what] == []
    seen.answers["host"], seen.answers[rude] = seen.answers[rude], seen.answers["host"]
    broken = [verdict.what for verdict in judge.judge(part, seen) if not verdict.kept and "p99" in verdict.what]
    assert broken == ["p99 of the accepted", "p99 of the refused"]


def test_a_full_bus_may_do_less_where_it_got_less_of_a_processor_than_for_the_measure() -> None:
    seen = good()
    seen.watch.turns = [(2.0, 1.0, 1.0), (5.0, 2.0, 2.0)]  # it took twice as long as alone,
    assert judge.goodput(PARTS["bus"], seen) == judge.GOODPUT / 2
    seen.measured = [Measured(CAPACITY, 1.0), Measured(CAPACITY, 2.0)]  # and so it did before, or nearly
    assert judge.goodput(PARTS["bus"], seen) == pytest.approx(judge.GOODPUT * 0.75)
    assert judge.goodput(PART, seen) == judge.GOODPUT, "a plugin is full, and it is no bus"
    seen.measured = [Measured(CAPACITY, 3.0)]
    assert judge.goodput(PARTS["bus"], seen) == judge.GOODPUT


def test_the_capacity_is_that_of_the_machine_before_and_after_the_load() -> None:
    seen = good()
    what = "done under load, of the capacity"
    assert [verdict.measured for verdict in judge.judge(PART, seen) if verdict.what == what] == ["1.025 ×"]
    seen.measured = [Measured(CAPACITY, 1.0), Measured(3 * CAPACITY, 1.0)]
    assert [verdict.measured for verdict in judge.judge(PART, seen) if verdict.what == what] == ["0.5125 ×"]


def test_a_bus_that_got_no_processor_is_given_more_time() -> None:
    seen = good()
    seen.watch.turns = [(2.0, 1.0, 1.0), (5.0, 2.0, 4.0)]  # it ran for 1 s and waited for 3
    assert seen.watch.stretch(*seen.phases) == 4.0
    assert judge.stretched(0.05, seen) == 0.2


def beside(spoil: str = "") -> slow_reader.Beside:
    """Returns what a run beside a slow reader looks like."""
    seen = replace(good(), phases=(4.0, 12.0), answers={"host": Answers()})
    for number in range(1200):
        late = 0.5 if spoil == "late" and number >= 800 else 0.002
        add(seen, number / 100, late, OVERLOADED if spoil == "failed" and number == 500 else OK)
    if spoil == "heavy":
        seen.watch.memory.append((8.0, 200.0))
    ending = "" if spoil == "untold" else "RESOURCE_EXHAUSTED the peer reads too slowly (limit waiting_bytes)"
    return slow_reader.Beside("host", seen, ending, 99.0 if spoil == "open" else 5.0, int(spoil == "absent"))


def test_a_slow_reader_that_costs_nobody_anything_breaks_no_bound() -> None:
    assert [verdict for verdict in slow_reader.judge(beside()) if not verdict.kept] == []


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        ("late", "others' p50 beside it"),
        ("late", "others' p99 beside it"),
        ("failed", "others' calls that failed"),
        ("open", "closed after"),
        ("untold", "it is told why"),
        ("absent", "it was gone before it stopped reading"),
        ("heavy", "the bus grew, for good"),
    ],
)
def test_what_a_slow_reader_costs_others_is_found(spoil: str, what: str) -> None:
    assert what in [verdict.what for verdict in slow_reader.judge(beside(spoil)) if not verdict.kept]


def test_the_report_shows_what_was_broken_and_the_picture_both_kinds_of_answers() -> None:
    seen = good()
    refuse(seen, 3.0, hint=0.0)
    verdicts = {"plugin": judge.judge(PART, seen)}
    titles = {"plugin": PART.title}
    assert "BROKEN" in str([[*column.cells] for column in table(verdicts, titles).columns])
    page = markdown(verdicts, titles, "python -m lab.overload", "overload.svg")
    assert "| refused without limit or hint | 0 | 1 | **BROKEN** |" in page
    assert "![Latency before, during and after an overload](overload.svg)" in page
    json.dumps(to_json(verdicts, {}, seconds=4.0))
    drawn = chart(seen, "Latency", "python -m lab.overload")
    assert drawn is not None
    picture = svg(drawn)
    assert all(name in picture for name in ("accepted, p99", "refused, p50", "prefers-color-scheme: dark"))


# -- short real runs -------------------------------------------------------------------------------------------------

# What a busy machine cannot spoil; the rest is a matter of `make overload`.
CERTAIN = {
    "refused without limit or hint",
    "refused, and run all the same",
    "done, but not run once",
    "health that was false",
    "a plugin said to be dead that is not",
    "the bus grew, at the most",
    "the bus grew, for good",
}


def test_a_plugin_that_is_offered_ten_times_what_it_takes_runs_only_what_is_accepted() -> None:
    async def run() -> Seen:
        with Lifeline() as lifeline, Scene(lifeline) as stage:
            return await play(PART, stage, Plan(1.5))

    seen = asyncio.run(run())
    verdicts = {verdict.what: verdict for verdict in judge.judge(PART, seen)}
    assert [verdicts[what] for what in sorted(CERTAIN) if not verdicts[what].kept] == []
    refused = [answer for answer in judge.answers(seen, "load") if answer.code == OVERLOADED]
    accepted = [answer for answer in judge.answers(seen, "load") if answer.code == OK]
    assert len(refused) > len(accepted) > 0
    assert quantile([answer.seconds for answer in accepted], 0.5) < 2.0


def test_a_host_that_does_not_read_is_closed_and_told_why() -> None:
    async def run() -> slow_reader.Beside:
        with Lifeline() as lifeline, Scene(lifeline) as stage:
            return await slow_reader.play("host", stage, 3.0)

    verdicts = {verdict.what: verdict for verdict in slow_reader.judge(asyncio.run(run()))}
    for what in ("others' calls that failed", "it is told why", "the bus grew, at the most"):
        assert verdicts[what].kept, verdicts[what]


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
        until(lambda: len(process.children(recursive=True)) >= 2, "it has started its processes", 30.0)
        started = [child.pid for child in process.children(recursive=True)]
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    until(lambda: not any(map(alive, started)), "they have ended")


def test_a_wrong_command_line_is_told_so() -> None:
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
            await asyncio.wait_for(entered.wait(), PATIENCE)
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
    async with asyncio.timeout(PATIENCE):
        results = [await ended.get() for _ in range(count)]
    assert {result.error.code for result in results} == {Code.UNAVAILABLE}
    assert sweeps <= 2 * spread / SWEEP_PAUSE
