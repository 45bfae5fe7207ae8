"""A folder of tools that changes while it is offered: what the bus lists, what calls return, and what is reported."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.tool_folders import offered_folder, slow, tool
from tests.support.waiting import until, until_sync
from toolbus.parts.dropin.group_supervisor import FolderTimings
from toolbus.processes.supervisor import ReportKind, RestartPolicy
from toolbus.sdk import Host
from toolbus.testing import running_bus


async def test_added_changed_and_removed_files_take_effect_and_tools_keep_their_places(tmp_path: Path) -> None:
    async with offered_folder(tmp_path, forked=False) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        folder.write(a=tool("one", "first"))
        await folder.wait_for_tools(("one", "first"), ("two", "2"))
        assert await folder.call("one") == "first"
        folder.write(c=tool("three", "3"))
        await folder.wait_for_tools(("one", "first"), ("two", "2"), ("three", "3"))
        (tmp_path / "b.py").unlink()
        await folder.wait_for_tools(("one", "first"), ("three", "3"))
        (tmp_path / "a.py").unlink()
        (tmp_path / "c.py").unlink()
        await folder.wait_for_tools()


async def test_no_call_fails_while_the_file_of_its_tool_changes_six_times(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "0"))
        await folder.wait_for_tools(("one", "0"))
        answers = []
        changing = True

        async def call_on() -> None:
            while changing:
                answers.append(await folder.call("one"))
                await asyncio.sleep(0.002)

        async def answered(output: str) -> None:
            await until(lambda: answers[-1:] == [output], f"the answer {output}")

        calling = asyncio.create_task(call_on())
        for number in range(1, 7):
            folder.write(a=tool("one", str(number)))
            await folder.wait_for_tools(("one", str(number)))
            await answered(str(number))
        changing = False
        await calling
        assert answers == sorted(answers, key=int)


async def test_a_call_in_flight_finishes_on_the_old_code_while_new_calls_run_the_new_code(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "_manifest.json").write_text(json.dumps({"files": {"a.py": {"write": ["scratch"]}}}))
    async with offered_folder(tmp_path) as folder:
        folder.write(a=slow("one", "old", scratch))
        await folder.wait_for_tools(("one", "old"))
        old = asyncio.create_task(folder.call("one"))
        await asyncio.to_thread(until_sync, (scratch / "called").exists, "the call")
        folder.write(a=tool("one", "new"))
        await folder.wait_for_tools(("one", "new"))
        assert await folder.call("one") == "new"
        assert not old.done()
        (scratch / "go").touch()
        assert await old == "old"
        await folder.wait_for_report(r"dropin:a#1 ended .*exit code 0")


async def test_a_file_that_breaks_loses_only_its_own_tool_and_is_reported(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        folder.write(a="def broken(:\n")
        await folder.wait_for_tools(("two", "2"))
        assert await folder.wait_for_report(r"tools output (a\.py: SyntaxError.*\(line 1\))")
        folder.write(a=tool("one", "again"))
        await folder.wait_for_tools(("two", "2"), ("one", "again"))


async def test_a_file_that_hangs_is_skipped_and_the_others_are_offered(tmp_path: Path) -> None:
    async with offered_folder(tmp_path, timings=FolderTimings(file_seconds=0.5)) as folder:
        folder.write(a="while True:\n    pass\n", b=tool("two", "2"))
        await folder.wait_for_tools(("two", "2"))
        await folder.wait_for_report(r"tools output a\.py: takes longer than 0\.5 s to load.*\(line [12]\)")


async def test_a_file_that_hangs_in_native_code_is_skipped_too_and_operators_see_why(tmp_path: Path) -> None:
    timings = FolderTimings(file_seconds=0.5)
    async with offered_folder(tmp_path, restarts=RestartPolicy(enabled=False), timings=timings) as folder:
        folder.write(a="import re\nre.match('(a+)+$', 'a' * 64 + 'b')\n", b=tool("two", "2"))
        await folder.wait_for_tools(("two", "2"))
        async with Host(folder.bus.grpc_addresses[0]) as host:
            notices = (await host.list()).notices
        late = "a.py: takes longer than 0.5 s to load: move slow work into the first call of the tool (line 2)"
        assert ("dropin", late) in notices
        folder.tools.processes.timings = FolderTimings()
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("two", "2"), ("one", "1"))


@pytest.mark.parametrize("granted", ["a.py", "b.py"])
async def test_of_two_groups_with_one_name_the_later_file_has_it_and_that_is_reported(
    tmp_path: Path, granted: str
) -> None:
    (tmp_path / "_manifest.json").write_text(json.dumps({"files": {granted: {"connect": ["127.0.0.1:9"]}}}))
    warning = r'tools output a\.py: tool "one" registered twice \(later wins\): again in b\.py\. Rename one of them'
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "a") + tool("two", "2"), b=tool("one", "b"))
        await folder.wait_for_report(warning)
        await folder.wait_for_report(r"offers two \(")
        assert await folder.call("one") == "b"
        folder.write(a=tool("one", "A") + tool("two", "3"))
        await folder.wait_for_report(warning, 2)
        await folder.wait_for_tools(("one", "b"), ("two", "3"))
        folder.write(b=tool("three", "3"))
        await folder.wait_for_report(r"offers one, two \(", 2)
        assert await folder.call("one") == "A"


async def test_a_process_that_does_not_load_in_time_is_ended_and_the_old_one_stays(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        folder.tools.processes.timings = FolderTimings(start_seconds=0.5)
        folder.write(a=tool("one", "2", "import time; time.sleep(9)"))
        await folder.wait_for_report("dropin#2 did not load its files within 0.5 s, so it is ended")
        await folder.wait_for_report("dropin#2 does not replace dropin#1, which keeps running")
        assert await folder.call("one") == "1"
        folder.tools.processes.timings = FolderTimings()
        folder.write(a=tool("one", "3"))
        await folder.wait_for_tools(("one", "3"))


async def test_a_change_does_not_wait_for_a_process_that_hangs(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1", "import time; time.sleep(99)"))
        await folder.wait_for_report("dropin#1 started")
        folder.write(a=tool("one", "2"))
        await folder.wait_for_tools(("one", "2"))


async def test_many_files_at_once_are_one_start(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"f{number:03}.py").write_text(tool(f"t{number:03}", str(number)))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_tools(*((f"t{number:03}", str(number)) for number in range(200)))
        assert folder.count(ReportKind.STARTED) == 1
        for number in range(200):
            (tmp_path / f"f{number:03}.py").write_text(tool(f"t{number:03}", "x"))
        await folder.wait_for_tools(*((f"t{number:03}", "x") for number in range(200)))
        await folder.wait_for_report(r"dropin#\d+ ended")
        assert folder.count(ReportKind.STARTED) <= 3
        assert await folder.wait_for_report("offers t000, t001,.* 180 more")


async def test_changes_without_effect_start_no_process(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        os.utime(tmp_path / "a.py")
        folder.write(a=tool("one", "1"))
        for name in (".a.py.swp", "a.py~", "#a.py#", ".#a.py", "4913", "a.pyc", "notes.txt", ".a.py"):
            (tmp_path / name).write_text("x")
            (tmp_path / name).unlink()
        (tmp_path / "a.py.tmp").write_text(tool("one", "2"))
        os.replace(tmp_path / "a.py.tmp", tmp_path / "a.py")  # as many editors save
        await folder.wait_for_tools(("one", "2"))
        assert folder.count(ReportKind.STARTED) == 2


async def test_a_folder_that_is_deleted_and_created_again_is_followed(tmp_path: Path) -> None:
    home = tmp_path / "tools"
    home.mkdir()
    async with offered_folder(home) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        shutil.rmtree(home)
        await folder.wait_for_report("No such file or directory.*: running tools stay as they are")
        await folder.wait_for_report("No such file or directory.*: its tools are withdrawn")
        await folder.wait_for_tools()
        home.mkdir()
        folder.write(b=tool("two", "2"))
        await folder.wait_for_tools(("two", "2"))
        folder.write(b=tool("two", "3"))
        await folder.wait_for_tools(("two", "3"))


async def test_links_are_followed_and_changes_of_their_targets_take_effect(tmp_path: Path) -> None:
    home, other = tmp_path / "tools", tmp_path / "other.py"
    home.mkdir()
    other.write_text(tool("one", "1"))
    (home / "a.py").symlink_to(other)
    (home / "b.py").symlink_to(tmp_path / "nowhere.py")
    async with offered_folder(home) as folder:
        await folder.wait_for_tools(("one", "1"))
        await folder.wait_for_report(r"tools output b\.py: is not a readable file")
        other.write_text(tool("one", "2"))
        await folder.wait_for_tools(("one", "2"))


async def test_unreadable_files_are_reported_and_do_not_block_the_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "secret.py").write_text(tool("secret", "1"))
    (tmp_path / "secret.py").chmod(0)
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_report(r"pipe\.py: is not a readable file")
        await folder.wait_for_report(r"folder\.py: is not a readable file")
        if os.getuid():  # root reads everything
            await folder.wait_for_report(r"secret\.py: PermissionError")
            (tmp_path / "secret.py").chmod(0o600)
        await folder.wait_for_tools(("one", "1"), ("secret", "1"))


async def test_a_change_while_the_bus_is_away_takes_effect_when_it_is_back(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        (old,) = await folder.pids()
        await folder.bus.stop()
        folder.write(a=tool("one", "2"))
        await folder.wait_for_report("dropin#2 started")
        async with running_bus() as bus:
            folder.bus = bus
            folder.tools.move(await bus.dropin_address())
            await folder.wait_for_tools(("one", "2"))
            await asyncio.to_thread(until_sync, lambda: not alive(old), "the end of the old process")
            assert await folder.call("one") == "2"


async def test_stopping_while_a_process_starts_leaves_none(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1", "import time; time.sleep(99)"))
        (pid,) = await folder.pids()
    assert not alive(pid)
