"""Plugin files as processes: which are restarted, which are given up, and that nothing outlives the supervisor."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fork_server import forked_plugins
from tests.support.processes import Running, alive, environment, toolbus
from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.processes.supervisor import (
    Command,
    PluginReport,
    ReportKind,
    RestartPolicy,
    Supervisor,
    describe_exit,
    plugin_names,
    stats_of_group,
)

TOOL = """
import os, subprocess, sys
from toolbus.sdk import llm_tool
@llm_tool(description="Says hello.")
def hello() -> str:
    return "hello"
"""
GOOD = TOOL + 'print("up", os.getpid(), flush=True)\n'
WITH_GRANDCHILD = TOOL + 'print("child", subprocess.Popen(["sleep", "60"]).pid, "of", os.getpid())\n'
STUBBORN = (
    "import os, signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    'print("child", subprocess.Popen(["sleep", "60"]).pid, "of", os.getpid())\ntime.sleep(60)\n'
)
DIES = 'import os\nprint("going", flush=True)\nos._exit(3)\n'
QUICK = RestartPolicy(backoff_seconds=0.01, max_deaths=3)


def _file(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.py"
    file.write_text(text)
    return file


def _pids(running: Running) -> list[int]:
    """The processes of a plugin that printed `child X of Y`."""
    running.says("child ")
    until_sync(lambda: re.search(r"child (\d+) of (\d+)\n", running.out) is not None, "the pids")
    match = re.search(r"child (\d+) of (\d+)\n", running.out)
    assert match is not None
    return [int(match[1]), int(match[2])]


def _supervisor(files: list[Path], emit: Callable[[PluginReport], None], restarts: RestartPolicy = QUICK) -> Supervisor:
    supervisor = Supervisor(emit, restarts=restarts)
    for name, file in zip(plugin_names(files), files, strict=True):
        supervisor.add(name, Command.of_file(file, environment({})))
    return supervisor


async def _run(files: list[Path], restarts: RestartPolicy = QUICK) -> tuple[bool, list[PluginReport]]:
    reports: list[PluginReport] = []
    supervisor = _supervisor(files, reports.append, restarts)
    with forked_plugins():
        async with asyncio.timeout(WAIT_SECONDS):
            return await supervisor.run(), reports


def _texts(reports: list[PluginReport], kind: ReportKind) -> list[str]:
    return [report.text for report in reports if report.kind is kind]


async def test_a_plugin_in_a_crash_loop_is_given_up(tmp_path: Path) -> None:
    well, reports = await _run([_file(tmp_path, "dies", DIES)])
    assert not well
    assert len(_texts(reports, ReportKind.STARTED)) == 3
    assert [text.split(":")[0] for text in _texts(reports, ReportKind.DIED)] == ["died (exit code 3)"] * 2
    assert _texts(reports, ReportKind.GIVEN_UP) == [
        "died 3 times within 30 s, the last time with exit code 3 (a crash loop, so it is given up): correct it and "
        "run it again"
    ]
    assert _texts(reports, ReportKind.OUTPUT) == ["going"] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("x = 1\n", "holds no plugin"),
        ("from toolbus.sdk import Plugin\nplugin = Plugin('a b')\n", "'a b'"),
    ],
)
async def test_a_file_that_cannot_start_is_given_up_at_once(tmp_path: Path, text: str, words: str) -> None:
    well, reports = await _run([_file(tmp_path, "broken", text)])
    assert not well
    assert len(_texts(reports, ReportKind.STARTED)) == 1
    assert any(words in line for line in _texts(reports, ReportKind.OUTPUT))
    assert "cannot start" in _texts(reports, ReportKind.GIVEN_UP)[0]


def test_the_backoff_has_a_longest_one_after_any_number_of_attempts() -> None:
    # A plugin that dies every 10 s is in no crash loop, and a remote server may be down for a weekend.
    for attempt in (7, 1_023, 1_024, 100_000):
        assert 15.0 <= RestartPolicy().backoff(attempt) <= 30.0


async def test_a_plugin_that_ends_with_exit_code_0_is_not_restarted(tmp_path: Path) -> None:
    well, reports = await _run([_file(tmp_path, "done", "import os\nos._exit(0)\n")])
    assert well
    assert _texts(reports, ReportKind.ENDED) == ["ended (exit code 0)"]
    assert len(_texts(reports, ReportKind.STARTED)) == 1


async def test_a_plugin_that_finds_no_descriptors_is_started_later_and_ends_no_other() -> None:
    before, reports = resource.getrlimit(resource.RLIMIT_NOFILE), list[PluginReport]()

    def starve() -> None:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))

    def emit(report: PluginReport) -> None:
        reports.append(report)
        if len([each for each in reports if "cannot start" in each.text]) == 2:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    supervisor = Supervisor(emit, restarts=QUICK)
    for name in ("one", "two"):
        supervisor.add(name, Command((sys.executable, "-S", "-c", ""), dict(os.environ)))
    asyncio.get_running_loop().call_soon(starve)  # once the supervisor runs, and before it starts a process
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            assert await supervisor.run()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sorted(each.plugin for each in reports if each.kind is ReportKind.ENDED) == ["one", "two"]


async def test_output_of_any_length_is_passed_on_also_without_a_line_end(tmp_path: Path) -> None:
    text = (
        'import os, sys\nsys.stdout.write("x" * 200_000 + "\\nend")\nsys.stdout.flush()\n'
        'os.write(2, b"\\xff\\n")\nos._exit(0)\n'
    )
    _, reports = await _run([_file(tmp_path, "long", text)])
    lines = [report.text for report in reports if report.stream == "stdout"]
    assert "".join(lines) == "x" * 200_000 + "end"
    assert [report.text for report in reports if report.stream == "stderr"] == ["\N{REPLACEMENT CHARACTER}"]


async def test_a_child_that_left_the_group_and_holds_the_output_does_not_block_the_supervisor(tmp_path: Path) -> None:
    text = (
        "import os, subprocess\n"
        'print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)\nos._exit(0)\n'
    )
    well, reports = await _run([_file(tmp_path, "escape", text)])
    assert well
    os.kill(int(_texts(reports, ReportKind.OUTPUT)[0]), signal.SIGKILL)


async def test_an_error_in_emit_ends_everything_and_leaves_no_process(tmp_path: Path) -> None:
    pids: list[int] = []

    def emit(report: PluginReport) -> None:
        if report.kind is ReportKind.STARTED:
            pids.append(int(re.findall(r"\d+", report.text)[0]))
            raise BrokenPipeError

    supervisor = _supervisor([_file(tmp_path, "good", GOOD)], emit)
    with pytest.raises(ExceptionGroup):
        await supervisor.run()
    assert not alive(pids[0])


def test_plugins_are_named_after_their_files() -> None:
    files = [Path("/a/x.py"), Path("/a/y.py"), Path("/b/y.py"), Path("/b/y.py")]
    assert plugin_names(files) == ["x", "a/y", "b/y", "b/y#2"]


def test_an_exit_code_is_described_in_words() -> None:
    texts = ["exit code 0", "exit code 3", "SIGKILL", "signal 264"]
    assert [describe_exit(code) for code in (0, 3, -9, -64 - 200)] == texts


def test_a_killed_plugin_is_restarted_and_the_others_go_on(tmp_path: Path) -> None:
    files = [_file(tmp_path, "one", GOOD), _file(tmp_path, "two", GOOD)]
    with Running(tmp_path, "run", *files) as running:
        running.says("one | up")
        running.says("two | up")
        os.kill(int(re.findall(r"one \* started \(pid (\d+)", running.err)[0]), signal.SIGKILL)
        until_sync(lambda: running.out.count("one | up") == 2, "the second start")
        assert running.out.count("two | up") == 1
        assert "one * died (SIGKILL): restarting in 0." in running.err
        running.send(signal.SIGTERM)
        assert running.code() == 0


def test_a_crash_loop_stops_that_plugin_only_and_the_exit_code_says_so(tmp_path: Path) -> None:
    files = [_file(tmp_path, "dies", DIES), _file(tmp_path, "good", GOOD)]
    with Running(tmp_path, "run", *files) as running:
        running.says("dies * died 5 times within 30 s")
        assert running.process.poll() is None
        running.send(signal.SIGINT)
        assert running.code() == 1
        assert "good * ended" in running.err


def test_a_signal_ends_plugins_and_their_children(tmp_path: Path) -> None:
    with Running(tmp_path, "run", _file(tmp_path, "parent", WITH_GRANDCHILD)) as running:
        pids = _pids(running)
        assert all(map(alive, pids))
        running.send(signal.SIGINT)
        assert running.code() == 0
        until_sync(lambda: not any(map(alive, pids)), "the end of all")


def test_a_plugin_that_ignores_sigterm_is_killed_after_the_stop_seconds(tmp_path: Path) -> None:
    with Running(tmp_path, "run", _file(tmp_path, "stubborn", STUBBORN), "--stop-seconds", "0.2") as running:
        pids = _pids(running)
        running.send(signal.SIGTERM)
        assert running.code() == 0
        assert "stubborn * ended (SIGKILL)" in running.err
        until_sync(lambda: not any(map(alive, pids)), "the end of all")


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    with Running(tmp_path, "run", _file(tmp_path, "stubborn", STUBBORN), "--stop-seconds", "60") as running:
        pids = _pids(running)
        running.send(signal.SIGINT)
        running.send(signal.SIGTERM)
        assert running.code() == 0
        until_sync(lambda: not any(map(alive, pids)), "the end of all")


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    files = [_file(tmp_path, "parent", WITH_GRANDCHILD), _file(tmp_path, "stubborn", STUBBORN)]
    with Running(tmp_path, "run", *files) as running:
        until_sync(lambda: len(re.findall(r"child \d+ of \d+\n", running.out)) == 2, "both plugins")
        pids = [int(pid) for pair in re.findall(r"child (\d+) of (\d+)\n", running.out) for pid in pair]
        assert all(map(alive, pids))
        running.send(signal.SIGKILL)
        assert running.code() == -signal.SIGKILL
        until_sync(lambda: not any(map(alive, pids)), "the end of all")


def test_the_kernel_ends_the_leader_if_the_lifeline_was_killed_too(tmp_path: Path) -> None:
    with Running(tmp_path, "run", _file(tmp_path, "good", GOOD)) as running:
        running.says("good | up")
        pid = int(re.findall(r"up (\d+)", running.out)[0])
        lifelines = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        for other in map(int, lifelines):
            if other != pid:
                os.kill(other, signal.SIGKILL)
        running.send(signal.SIGKILL)
        running.code()
        until_sync(lambda: not alive(pid), "the end of the plugin")


def test_output_is_prefixed_with_the_plugins_name_on_its_own_stream(tmp_path: Path) -> None:
    text = 'import os, sys\nprint("to out")\nprint("to err", file=sys.stderr)\nsys.stdout.flush()\nos._exit(0)\n'
    ended = toolbus("run", _file(tmp_path, "talks", text))
    assert ended.returncode == 0
    assert ended.stdout == "talks | to out\n"
    assert "talks | to err\n" in ended.stderr
    assert "\x1b" not in ended.stderr


def test_json_lines_carry_output_and_events(tmp_path: Path) -> None:
    ended = toolbus("run", "--json", "--once", _file(tmp_path, "dies", DIES))
    assert ended.returncode == 1
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {event["event"] for event in events} == {"started", "output", "given_up"}
    assert {"plugin": "dies", "event": "output", "stream": "stdout", "text": "going"} in events
    assert ended.stderr == ""


def test_with_once_no_plugin_is_restarted(tmp_path: Path) -> None:
    ended = toolbus("run", "--once", _file(tmp_path, "dies", DIES))
    assert ended.returncode == 1
    assert ended.stdout == "dies | going\n"


def test_the_plugin_gets_the_address_of_the_bus(tmp_path: Path) -> None:
    file = _file(tmp_path, "asks", "import os\nprint(os.environ['TOOLBUS_ADDRESS'], flush=True)\nos._exit(0)\n")
    assert toolbus("run", file, "--bus", "127.0.0.1:7").stdout == "asks | 127.0.0.1:7\n"


def test_a_file_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    ended = toolbus("run", tmp_path / "nothing.py")
    assert ended.returncode == 2
    assert "does not exist" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_ends_while_the_list_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    listed = [str(ended.pid), *os.listdir("/proc"), str(ended.pid), "self"]
    monkeypatch.setattr(os, "listdir", lambda path: listed)
    assert str(os.getppid()) in [stat[1] for stat in stats_of_group(os.getpgrp())]
