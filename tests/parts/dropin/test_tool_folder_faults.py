"""A folder of tools with faults: refused tools, unavailable grants, stopped processes, and notices for operators."""

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.tool_folders import OfferedFolder, offered_folder, tool
from tests.support.waiting import WAIT_SECONDS, until_sync, within
from toolbus.parts.dropin.group import Group
from toolbus.parts.dropin.group_supervisor import FolderTimings, limit_hit
from toolbus.parts.dropin.manifest import FileGrants
from toolbus.parts.dropin.room import log_report
from toolbus.parts.dropin.tool_folder import changes
from toolbus.processes.supervisor import PluginReport, ReportKind
from toolbus.sdk import Host

REFUSED = """
register_tool(
    name={name!r},
    execute=lambda args, env: 1,
    definition={{"description": "-", "parameters": {{"properties": {{"x": {{"type": "nonsense"}}}}}}}},
    **{options},
)
"""


def refused(name: str, **options: object) -> str:
    """Returns a file with a tool that only the bus refuses."""
    return REFUSED.format(name=name, options=options)


def manifest(folder: Path, content: object) -> None:
    (folder / "_manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))


async def test_a_tool_that_the_bus_refuses_is_a_warning_and_the_others_are_offered(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(tool("one", "1"))
    (tmp_path / "b.py").write_text(tool("fine", "-") + refused("bad"))
    (tmp_path / "c.py").write_text(refused("worse"))
    (tmp_path / "d.py").write_text(tool("four", "4"))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_tools(("one", "1"), ("fine", "-"), ("four", "4"))
        refusals = await folder.wait_for_report(
            r"tools output ([bc]\.py: the bus refuses its tool: tool '(?:bad|worse)': schema at .*)", 2
        )
        assert "nonsense" in refusals[0]
        async with Host(folder.bus.grpc_addresses[0]) as host:
            listing = await host.list(include_refused=True)
        assert [(each.name, each.source) for each in listing.refused] == [("bad", "dropin"), ("worse", "dropin")]
        assert folder.count(ReportKind.GIVEN_UP) == 0
        assert folder.count(ReportKind.DIED) == 0
        folder.write(b=tool("fine", "now"))
        await folder.wait_for_tools(("one", "1"), ("fine", "now"), ("four", "4"))


async def test_other_edits_take_effect_despite_a_tool_that_the_bus_refuses(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        folder.write(b=refused("two"))
        await folder.wait_for_tools(("one", "1"))
        folder.write(a=tool("one", "new"))
        await folder.wait_for_tools(("one", "new"))
        folder.write(c=tool("three", "3"))
        await folder.wait_for_tools(("one", "new"), ("three", "3"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are UTF-8")
async def test_a_name_of_a_file_that_is_not_utf8_does_not_end_the_watch_of_its_folder(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff.py")
    async with aclosing(changes(tmp_path)) as changed:
        await within(anext(changed))
        for number in range(3):  # the first comes before the system is asked for events
            odd.write_text("#" * number)
            await within(anext(changed))
        (tmp_path / "a.py").touch()
        await within(anext(changed))


async def test_a_tool_for_a_role_that_does_not_exist_waits_for_it_and_the_others_are_offered(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(tool("one", "1"))
    (tmp_path / "b.py").write_text('TOOLS = [{"name": "two", "handler": lambda: 2, "role": "nobody"}]\n')
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_tools(("one", "1"))
        await folder.wait_for_report("two of source dropin waits for role 'nobody'")


async def test_a_folder_whose_only_tool_is_refused_says_so_and_takes_the_corrected_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(refused("bad"))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report("dropin#1 waits, since the bus does not accept its tools: tool 'bad'")
        folder.write(a=tool("bad", "good now"))
        await folder.wait_for_tools(("bad", "good now"))


async def test_a_stopped_process_is_killed_and_restarted(tmp_path: Path) -> None:
    timings = FolderTimings(heartbeat_seconds=0.1, frozen_seconds=1.0)
    async with offered_folder(tmp_path, timings=timings) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        await folder.wait_for_report("dropin#1 offered")
        (pid,) = await folder.pids()
        os.kill(pid, signal.SIGSTOP)
        await folder.wait_for_report("tools output dropin#1 has sent no heartbeat for 1 s: it is killed and restarted")
        await folder.wait_for_report(r"dropin#1 died .*\(SIGKILL\)")
        await folder.wait_for_report("dropin#1 offered", 2)
        await folder.wait_for_tools(("one", "1"))
        await asyncio.to_thread(until_sync, lambda: not alive(pid), "the end of the stopped process")
        assert await folder.call("one") == "1"


async def test_a_process_with_a_long_call_is_not_killed(tmp_path: Path) -> None:
    timings = FolderTimings(heartbeat_seconds=0.05, frozen_seconds=1.0)
    naps = "import time\ndef run():\n    time.sleep(2)\n    return 'done'\nTOOL_NAME = 'naps'\n"
    async with offered_folder(tmp_path, timings=timings) as folder:
        folder.write(a=naps)
        await folder.wait_for_tools(("naps", ""))
        assert await folder.call("naps") == "done"
        assert "no heartbeat" not in folder.text


async def test_an_edit_while_the_source_may_not_offer_tools_is_offered_after_the_grant(tmp_path: Path) -> None:
    (tmp_path / "_manifest.json").write_text(json.dumps({"files": {"note.py": {"connect": ["127.0.0.1:9"]}}}))
    async with offered_folder(tmp_path) as folder:
        folder.write(note=tool("note", "old"), other=tool("other", "1"))
        await folder.wait_for_tools(("note", "old"), ("other", "1"))
        await folder.bus.call("toolbus:revoke", {"source": "dropin:note"})
        await folder.wait_for_tools(("other", "1"))
        folder.write(note=tool("note", "new"))
        await folder.wait_for_report(r"tools output dropin:note#\d+ waits, since the bus does not accept its tools: .+")
        await folder.wait_for_report("dropin:note#1 ended")
        folder.write(other=tool("other", "2"))
        await folder.wait_for_tools(("other", "2"))
        await folder.bus.call("toolbus:grant", {"source": "dropin:note"})
        await folder.wait_for_tools(("other", "2"), ("note", "new"))
        assert await folder.call("note") == "new"


async def notices(folder: OfferedFolder, *texts: str) -> None:
    """Waits until the notices for operators contain each of these texts; without texts, until there are no notices."""
    async with asyncio.timeout(WAIT_SECONDS), Host(folder.bus.grpc_addresses[0]) as host:
        while True:
            notices = [text for _, text in (await host.list()).notices if not text.startswith("protected by")]
            if all(any(text in each for each in notices) for text in texts) and bool(notices) == bool(texts):
                return
            await asyncio.sleep(0.05)


async def test_an_unavailable_grant_takes_effect_once_it_is_available_and_running_tools_stay(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        unavailable = {"write": ["nofolder/x"]}
        manifest(
            tmp_path,
            {"files": {"a.py": unavailable, "b.py": {"connect": ["127.0.0.1:9"]} | unavailable, "c.py": unavailable}},
        )
        folder.write(c=tool("three", "3"))
        text = r"tools output {}\.py has a \"write\" grant that is not available: .*/nofolder'.* Until then it {}"
        await folder.wait_for_report(text.format("a", "runs with its previous grants"))
        await folder.wait_for_report(text.format("b", "runs with its previous grants"))
        await folder.wait_for_report(text.format("c", "is not loaded"))
        assert [await folder.call("one"), await folder.call("two")] == ["1", "2"]
        await notices(
            folder, *(f'{file} has a "write" grant that is not available' for file in ("a.py", "b.py", "c.py"))
        )
        folder.write(a=tool("one", "new"))
        await folder.wait_for_tools(("one", "new"), ("two", "2"))
        (tmp_path / "nofolder").mkdir()
        await folder.wait_for_report("dropin:c#\\d+ offered")
        await folder.wait_for_report("dropin:a#\\d+ offered")
        await notices(folder)
        assert await folder.call("three") == "3"
        assert {source for source, _, _ in folder.catalog()} == {"dropin:a", "dropin:b", "dropin:c"}


async def test_an_unavailable_grant_does_not_keep_grants_that_were_taken_away(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        manifest(tmp_path, {"files": {"a.py": {"connect": ["127.0.0.1:9"]}}})
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        manifest(tmp_path, {"files": {"a.py": {"write": ["nofolder/x"]}}})
        await folder.wait_for_tools()
        await folder.wait_for_report("Until then it is not loaded")


async def test_notices_for_operators_include_faults_of_the_manifest(tmp_path: Path) -> None:
    async with offered_folder(tmp_path, require_manifest=True) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await notices(folder, "has no _manifest.json, so no file of it may be loaded")
        manifest(tmp_path, "{")
        await notices(folder, "_manifest.json is not JSON")
        entry = {"secrets": ["NOT_SET_HERE"], "read": ["data.txt"]}
        manifest(tmp_path, {"allow": ["a.py", "gone.py"], "files": {"a.py": entry, "rely.py": {}}})
        await folder.wait_for_tools(("one", "1"))
        await notices(
            folder,
            "b.py is not on the allow list",
            "gone.py is on the allow list of _manifest.json, but not in the folder",
            'rely.py has an entry in _manifest.json under "files", but is not in the folder',
            "a.py is granted the secret NOT_SET_HERE, which is not set",
            f"a.py is granted to read '{tmp_path / 'data.txt'}', which does not exist",
        )
        await folder.wait_for_report("tools output a.py is granted the secret NOT_SET_HERE, which is not set")
        manifest(tmp_path, {})
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        await notices(folder)


async def test_a_process_that_was_given_up_is_a_notice_until_its_file_is_fixed(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a="import os\nos._exit(3)\n")
        await notices(folder, "a.py: dropin#1 died 3 times within 30 s, the last time with exit code 3 (a crash loop")
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        await notices(folder)


async def test_a_process_that_a_limit_ended_names_it_in_the_log_and_in_a_notice(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"a.py": {"cpu_seconds": 1}}})
    async with offered_folder(tmp_path) as folder:
        folder.write(a="def run():\n    while True: pass\nTOOL_NAME = 'burns'\n")
        await folder.wait_for_tools(("burns", ""))
        await folder.call("burns")
        text = "was ended by its limit cpu_seconds = 1: a call, or a minute without one, took more processor time"
        await folder.wait_for_report(f"tools output dropin:a#1 {text}")
        await notices(folder, f"a.py: dropin:a#1 {text}")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", "was ended by its limit cpu_seconds = 2: a call, or a minute without one, took"),
        ("a.js", "was ended by 10 times its limit cpu_seconds = 2: its calls together, or a minute without one, took"),
    ],
)
def test_the_limit_on_processor_time_that_the_kernel_holds_is_named_with_its_factor(file: str, text: str) -> None:
    group = Group("dropin:a", (file,), grants=FileGrants(cpu_seconds=2))
    assert limit_hit(group, "died (SIGXCPU)").startswith(text)


async def test_relative_paths_start_in_the_folder_and_temporary_files_go_to_a_granted_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    manifest(tmp_path, {"files": {"a.py": {"write": ["data", "log.txt"]}}})
    text = """
import tempfile
def run():
    with open("log.txt", "a") as log, open("data/x", "w") as made:
        log.write("1")
        made.write("2")
    with tempfile.NamedTemporaryFile() as made:
        return made.name
TOOL_NAME = "one"
"""
    async with offered_folder(tmp_path) as folder:
        folder.write(a=text)
        folder.write(b="import tempfile\ndef run():\n    return tempfile.mkdtemp()\nTOOL_NAME = 'two'\n")
        await folder.wait_for_tools(("one", ""), ("two", ""))
        assert (await folder.call("one")).startswith(f"{tmp_path}/data/")
        assert ((tmp_path / "log.txt").read_text(), (tmp_path / "data/x").read_text()) == ("1", "2")
        assert "the file has no temporary folder: grant it a folder" in (await folder.call("two")).message


@pytest.mark.parametrize(
    ("happened", "level"),
    [
        *((ReportKind.DIED, logging.WARNING), (ReportKind.GIVEN_UP, logging.WARNING)),
        *((ReportKind.STARTED, logging.INFO), (ReportKind.OFFERED, logging.INFO), (ReportKind.ENDED, logging.INFO)),
    ],
)
def test_reports_that_need_an_operator_are_warnings_in_the_log_of_the_bus(
    happened: ReportKind, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        log_report(PluginReport("dropin#1", happened, "so it is"))
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [(level, "dropin#1: so it is")]
