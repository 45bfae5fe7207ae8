"""``toolbus tasks``: listing, waiting for and cancelling tasks."""

import asyncio
import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Running, toolbus
from tests.support.served_bus import in_flight, run_json
from tests.support.waiting import until_sync
from toolbus.parts.tasks import tasks_command
from toolbus.sdk import Host


@pytest.fixture
def bus(recording_bus: str) -> str:
    """The bus that records contents."""
    return recording_bus


def _start_task(bus: str, year: int, *words: str) -> str:
    """Starts a report that becomes a task; returns its id."""
    toolbus("call", "release", "again=true", "--bus", bus)
    ended = toolbus("call", "report", f"year={year}", "--background-after", "0.1", *words, "--bus", bus)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"task_[0-9a-f]+\n", ended.stdout)
    assert f"`toolbus tasks await {shlex.join([ended.stdout.strip(), *words])}`" in ended.stderr
    return ended.stdout.strip()


def test_a_call_continues_as_a_task_and_is_awaited(bus: str) -> None:
    task = _start_task(bus, 2026)
    assert toolbus("tasks", "--bus", bus).stdout.splitlines()[1].split()[:2] == [task, "running"]
    running = toolbus("tasks", "check", task, "--bus", bus)
    assert running.returncode == 0
    assert re.search(rf"^{task} +running +[\d.]+ +report$", running.stdout, re.MULTILINE)
    late = toolbus("tasks", "await", task, "--timeout", "0.1", "--bus", bus)
    assert (late.returncode, late.stdout) == (1, "")
    assert f"{task} did not end in time and continues" in late.stderr
    toolbus("call", "release", "--bus", bus)
    done = toolbus("tasks", "await", task, "--bus", bus)
    assert (done.returncode, done.stdout, done.stderr) == (0, '"report of 2026"\n', "")
    assert run_json(bus, "tasks", "check", task)["status"] == "completed"


def test_a_task_is_printed_with_its_latest_progress_or_its_error() -> None:
    task = {"task_id": "task_1", "status": "running", "seconds": 2.04, "tool": "report"}
    assert tasks_command._row(task) == ("task_1", "running", "2.0", "report", "")
    progress = {"done": 1.0, "total": 3.0, "message": "counting"}
    assert tasks_command._row({**task, "progress": progress})[-1] == "1/3 counting"
    assert tasks_command._row({**task, "progress": {**progress, "total": 0.0}})[-1] == "1 counting"
    assert tasks_command._row({**task, "error": "lost"})[-1] == "lost"


def test_a_task_is_shown_to_its_user_only(bus: str) -> None:
    task = _start_task(bus, 2027, "--user", "gus")
    assert [each["task_id"] for each in run_json(bus, "tasks", "--user", "gus")["tasks"]] == [task]
    foreign = toolbus("tasks", "check", task, "--bus", bus)
    assert (foreign.returncode, foreign.stdout) == (1, "")
    assert foreign.stderr.startswith(f"toolbus: unknown task '{task}': `toolbus tasks` lists tasks")
    assert toolbus("tasks", "cancel", task, "--user", "gus", "--bus", bus).stdout == f"cancelled {task}\n"
    again = toolbus("tasks", "cancel", task, "--user", "gus", "--bus", bus)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is failed already" in again.stderr


def test_tasks_of_all_are_listed_with_their_owners_and_fetched_for_them(bus: str) -> None:
    task = _start_task(bus, 2029, "--user", "hal")
    (shown,) = [each for each in run_json(bus, "tasks", "--all")["tasks"] if each["task_id"] == task]
    assert (shown["user"], shown["status"]) == ("hal", "running")
    assert re.search(rf"^{task} .* user hal$", toolbus("tasks", "--all", "--bus", bus).stdout, re.MULTILINE)
    assert toolbus("tasks", "cancel", task, "--all", "--bus", bus).stdout == f"cancelled {task}\n"
    unknown = toolbus("tasks", "check", "task_x", "--all", "--bus", bus)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "`toolbus tasks --all` lists tasks" in unknown.stderr
    both = toolbus("tasks", "--all", "--user", "hal", "--bus", bus)
    assert (both.returncode, "give one of them" in both.stderr) == (2, True)


def test_a_task_of_a_program_that_had_no_name_is_fetched_as_that_program(bus: str) -> None:
    toolbus("call", "release", "again=true", "--bus", bus)

    async def begin() -> dict[str, Any]:
        async with Host(bus, source="host:4711") as host:  # as a host without a name attaches
            await host.ready()
            begun = await host.call("report", {"year": 2030}, background_after=0.1)
            return dict(begun.unwrap())

    begun = asyncio.run(begin())
    assert "toolbus tasks --all" in begun["note"]
    task = begun["task_id"]
    assert task not in toolbus("tasks", "--bus", bus).stdout
    assert task in toolbus("tasks", "--source", "host:4711", "--bus", bus).stdout
    toolbus("call", "release", "--bus", bus)
    done = toolbus("tasks", "await", task, "--all", "--bus", bus)
    assert (done.returncode, done.stdout, done.stderr) == (0, '"report of 2030"\n', "")


def test_a_failed_task_is_exit_code_1_with_its_error_text(bus: str) -> None:
    task = _start_task(bus, 13)
    toolbus("call", "release", "--bus", bus)
    ended = toolbus("tasks", "await", task, "--bus", bus)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no report of 13" in ended.stderr


@pytest.mark.parametrize("verb", ["check", "await", "cancel"])
def test_an_unknown_task_is_one_error_in_words_of_the_command_line(verb: str, bus: str) -> None:
    ended = toolbus("tasks", verb, "task_x", "--user", "lea", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("toolbus: unknown task 'task_x' of user 'lea': `toolbus tasks --user lea` lists")
    assert ended.stderr.count("\n") == 1
    as_json = toolbus("tasks", verb, "task_x", "--json", "--bus", bus)
    assert (as_json.returncode, json.loads(as_json.stdout)["error"]["code"]) == (1, "TOOL")


def test_an_error_text_is_printed_once(bus: str) -> None:
    ended = toolbus("call", "toolbus:check_task", "task_id=task_x", "--bus", bus)
    assert ended.stderr.count("you have no task") == 1
    assert "reason=" not in ended.stderr


def test_ctrl_c_ends_the_wait_and_not_the_task(bus: str, tmp_path: Path) -> None:
    task = _start_task(bus, 2028)
    with Running(tmp_path, "tasks", "await", task, "--bus", bus) as waiting:
        until_sync(lambda: in_flight(bus, "toolbus:await_task") == 1, "the question")
        waiting.send(signal.SIGINT)
        assert waiting.code() == 130
        assert waiting.err == ""
    assert run_json(bus, "tasks", "check", task)["status"] == "running"
    toolbus("tasks", "cancel", task, "--bus", bus)


def test_a_call_that_ends_in_time_does_not_become_a_task(bus: str) -> None:
    ended = toolbus("call", "get.weather", "city=Oslo", "--background-after", "20", "--bus", bus)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout) == {"city": "Oslo"}
    assert run_json(bus, "call", "get.weather", "city=Oslo", "--background-after", "20")["is_error"] is False
