"""The processes of a folder of tools: restarts, grants, secrets and tokens."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.processes import alive, environment
from tests.support.tool_folders import DIES, QUICK, offered_folder, slow, tool
from tests.support.waiting import until_sync
from toolbus.errors import Code, NotPermitted
from toolbus.parts.dropin.group_supervisor import FolderTimings
from toolbus.processes.supervisor import ReportKind, RestartPolicy
from toolbus.sdk import Plugin

BURNS = """
def run():
    while True:
        pass
TOOL_NAME = "burns"
"""
ASKS = """
import os
def run(variable):
    return os.environ.get(variable, "")
TOOL_NAME = {name!r}
TOOL_DESCRIPTION = {says!r}
TOOL_PARAMETERS = {{"type": "object", "properties": {{"variable": {{"type": "string"}}}}}}
"""


STEALS = """
import os, sys
from toolbus import Plugin
frame = sys._getframe()
while "plan" not in frame.f_locals:
    frame = frame.f_back
token = frame.f_locals["plan"].token
async def run(source):
    async with Plugin(source, address=os.environ["TOOLBUS_ADDRESS"], token=token) as plugin:
        await plugin.ready()
    return "attached"
TOOL_NAME = "steals"
TOOL_PARAMETERS = {"type": "object", "properties": {"source": {"type": "string"}}}
"""

# That the kernel then ends the process is a test of its own: each such end takes seconds of the processor.
FINDS_GUARD = """
import sys
frame = sys._getframe()
while "plan" not in frame.f_locals:
    frame = frame.f_back
guard = frame.f_locals["self"]._protection.cpu
"""


def manifest(folder: Path, content: object) -> None:
    (folder / "_manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("code", [0, 3])
async def test_a_tool_that_ends_its_process_is_offered_again_whatever_the_exit_code(tmp_path: Path, code: int) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=DIES, b=tool("two", "2"))
        await folder.wait_for_tools(("dies", "-"), ("two", "2"))
        error = await folder.call("dies", code=code)
        assert error.code is Code.UNAVAILABLE
        await folder.wait_for_tools(("dies", "-"), ("two", "2"))
        assert await folder.call("two") == "2"


async def test_a_killed_process_is_restarted_and_the_others_go_on(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    manifest(tmp_path, {"files": {"b.py": {"write": ["scratch"]}, "c.py": {"write": ["scratch"]}}})
    async with offered_folder(tmp_path) as folder:
        folder.write(b=slow("two", "2", scratch), c=tool("three", "3"))
        await folder.wait_for_tools(("two", "2"), ("three", "3"))
        call = asyncio.create_task(folder.call("two"))
        await asyncio.to_thread(until_sync, (scratch / "called").exists, "the call")
        victim, other = await folder.pids(2)
        os.kill(victim, signal.SIGKILL)
        error = await call
        assert error.code is Code.UNAVAILABLE
        await folder.wait_for_report(r"died \(SIGKILL\)")
        await folder.wait_for_tools(("two", "2"), ("three", "3"))
        assert await folder.call("three") == "3"
        assert alive(other)
        (scratch / "go").touch()
        assert await folder.call("two") == "2"


async def test_a_tool_beyond_its_processor_time_is_ended_by_the_kernel(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"a.py": {"cpu_seconds": 1}}})
    async with offered_folder(tmp_path) as folder:
        folder.write(a=BURNS)
        await folder.wait_for_tools(("burns", ""))
        assert (await folder.call("burns")).code is Code.UNAVAILABLE
        await folder.wait_for_report(r"died \(SIGXCPU\)")
        await folder.wait_for_tools(("burns", ""))


async def test_a_thread_that_a_file_left_running_has_the_processor_time_of_a_call(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"a.py": {"cpu_seconds": 1}}})
    spins = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1", spins))
        await folder.wait_for_report(r"died \(SIGXCPU\)")


async def test_a_process_in_a_crash_loop_is_given_up_until_its_file_changes(tmp_path: Path) -> None:
    async with offered_folder(tmp_path, restarts=QUICK) as folder:
        folder.write(a="import os\nos._exit(3)\n")
        await folder.wait_for_report("dropin#1 given_up died 3 times within 30 s, the last time with exit code 3")
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))


async def test_a_file_that_ends_its_process_while_it_is_loaded_is_left_out_and_the_others_are_offered(
    tmp_path: Path,
) -> None:
    async with offered_folder(tmp_path, restarts=QUICK) as folder:
        folder.write(a=tool("one", "1"), b="import os\nos._exit(3)\n", c=tool("three", "3"))
        await folder.wait_for_report(r"tools output b\.py: is not loaded, since dropin#1 died 3 times within 30 s")
        await folder.wait_for_tools(("one", "1"), ("three", "3"))
        folder.write(b="import os\nos._exit(4)\n")  # what runs stays
        await folder.wait_for_report("does not replace dropin#2, which keeps running")
        assert await folder.call("three") == "3"
        folder.write(b=tool("two", "2"))
        await folder.wait_for_tools(("one", "1"), ("three", "3"), ("two", "2"))


async def test_a_change_in_a_crash_loop_does_not_replace_the_running_process(tmp_path: Path) -> None:
    async with offered_folder(tmp_path, restarts=QUICK) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        folder.write(a="import os\nos._exit(0)\n")
        await folder.wait_for_report("dropin#2 given_up")
        await folder.wait_for_report("dropin#2 does not replace dropin#1, which keeps running")
        assert await folder.call("one") == "1"
        folder.write(a=tool("one", "2"))
        await folder.wait_for_tools(("one", "2"))


async def test_a_drained_process_stays_away_until_its_file_changes(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        await folder.bus.call("toolbus:drain", {"source": "dropin"})
        await folder.wait_for_report("dropin#1 given_up")
        await folder.wait_for_tools()
        folder.write(a=tool("one", "2"))
        await folder.wait_for_tools(("one", "2"))


async def test_a_file_has_a_process_of_its_own_while_it_has_grants(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
        await folder.wait_for_report("dropin#1 ended")
        assert folder.catalog() == [("dropin", "one", "1"), ("dropin:b", "two", "2")]
        manifest(tmp_path, {})
        (pid,) = await folder.wait_for_report(r"dropin:b#\d+ started .*pid (\d+)")
        await folder.wait_for_report(r"dropin:b#\d+ ended")
        assert folder.catalog() == [("dropin", "one", "1"), ("dropin", "two", "2")]
        assert not alive(int(pid))


async def test_no_call_fails_while_grants_are_added_and_removed(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        answers = []
        changing = True

        async def call_on() -> None:
            while changing:
                answers.append(await folder.call("two"))
                await asyncio.sleep(0.002)  # else the calls take all processor time

        calling = asyncio.create_task(call_on())
        for count in (1, 2):
            manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
            await folder.wait_for_report(r"dropin#\d+ ended", 2 * count - 1)
            manifest(tmp_path, {})
            await folder.wait_for_report(r"dropin:b#\d+ ended", count)
            await folder.wait_for_report(r"dropin#\d+ ended", 2 * count)
        changing = False
        await calling
        assert set(answers) == {"2"}


async def test_removed_grants_are_gone_even_if_the_new_process_cannot_start(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        manifest(tmp_path, {"files": {"a.py": {"connect": ["127.0.0.1:9", "127.0.0.1:10"]}}})
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        folder.write(a="import os\nos._exit(1)\n")
        manifest(tmp_path, {"files": {"a.py": {"connect": ["127.0.0.1:9"]}}})
        await folder.wait_for_report("dropin:a#1 ended")
        await folder.wait_for_tools()


async def test_a_broken_manifest_keeps_running_tools_and_is_reported(tmp_path: Path) -> None:
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        manifest(tmp_path, "{")
        await folder.wait_for_report("_manifest.json is not JSON.*: running tools stay as they are")
        folder.write(b=tool("two", "2"))
        manifest(tmp_path, {"allow": ["b.py"]})
        await folder.wait_for_tools(("two", "2"))
        assert await folder.wait_for_report(r"tools output (a\.py is not on the allow list)")


async def test_a_broken_manifest_at_the_start_loads_nothing(tmp_path: Path) -> None:
    manifest(tmp_path, {"alow": []})
    (tmp_path / "a.py").write_text(tool("one", "1"))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report("unknown key alow.*: no tool is loaded")
        assert "dropin#" not in folder.text  # nothing but the process that tells operators
        manifest(tmp_path, {})
        await folder.wait_for_tools(("one", "1"))


async def test_a_required_manifest_that_is_missing_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(tool("one", "1"))
    async with offered_folder(tmp_path, require_manifest=True) as folder:
        await folder.wait_for_report("has no _manifest.json.*: no tool is loaded")
        manifest(tmp_path, {"allow": ["a.py"]})
        await folder.wait_for_tools(("one", "1"))


async def test_a_process_can_read_granted_secrets_and_no_others(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"b.py": {"secrets": ["WEATHER_KEY"]}}})
    (tmp_path / "a.py").write_text(ASKS.format(name="one", says="1"))
    (tmp_path / "b.py").write_text(ASKS.format(name="two", says="2"))
    known = {**environment({}), "WEATHER_KEY": "w-1", "BANK_KEY": "b-2", "HOME": "/home/nobody"}
    async with offered_folder(tmp_path, forked=False, environment=known) as folder:
        await folder.wait_for_tools(("one", "1"), ("two", "2"))
        assert [await folder.call("one", variable=name) for name in ("WEATHER_KEY", "BANK_KEY", "HOME")] == ["", "", ""]
        assert [await folder.call("two", variable=name) for name in ("WEATHER_KEY", "BANK_KEY", "HOME")] == [
            "w-1",
            "",
            "",
        ]
        pids = await folder.pids(2)
        assert len(pids) == 2
        for pid in pids:
            assert "w-1" not in f"{psutil.Process(pid).environ()} {psutil.Process(pid).cmdline()}"


async def test_the_token_is_not_in_the_process_and_no_other_program_can_use_the_source(tmp_path: Path) -> None:
    token = "t0ken-of-this-test"
    async with offered_folder(tmp_path, forked=False, environment=environment({"TOOLBUS_TOKEN": token})) as folder:
        folder.write(a=tool("one", "1"))
        await folder.wait_for_tools(("one", "1"))
        (pid,) = await folder.pids()
        known = psutil.Process(pid)
        assert token not in f"{known.environ()} {known.cmdline()}"
        for stolen in (None, "another"):
            async with Plugin("dropin", address=folder.bus.grpc_addresses[0], token=stolen) as thief:
                with pytest.raises(NotPermitted, match="bound to a token"):
                    await thief.ready()
        assert token not in folder.text


async def test_a_group_cannot_attach_as_another_source_with_its_own_token(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
    async with offered_folder(tmp_path) as folder:
        folder.write(a=STEALS, b=tool("two", "2"))
        await folder.wait_for_tools(("steals", ""), ("two", "2"))
        assert await folder.call("steals", source="dropin") == "attached"
        assert "bound to a token" in (await folder.call("steals", source="dropin:b")).message


async def test_a_file_that_hangs_when_its_process_restarts_is_skipped(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    hangs = f"import os\nwhile os.path.exists({str(scratch / 'hang')!r}):\n    pass"
    manifest(tmp_path, {"files": {"a.py": {"read": ["scratch"]}}})
    async with offered_folder(tmp_path, timings=FolderTimings(file_seconds=0.5)) as folder:
        folder.write(a=tool("one", "1", hangs))
        await folder.wait_for_report("offers one")
        (scratch / "hang").touch()
        os.kill((await folder.pids())[0], signal.SIGKILL)
        await folder.wait_for_report(r"tools output a\.py: takes longer than 0\.5 s to load", 2)
        await folder.wait_for_tools()
        await folder.wait_for_report("offers no tools")
        (scratch / "hang").unlink()
        folder.write(a=tool("one", "2", hangs))
        await folder.wait_for_tools(("one", "2"))


async def test_tools_are_withdrawn_although_a_tool_blocks_its_loop(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    manifest(tmp_path, {"files": {"a.py": {"write": ["scratch"]}}})
    async with offered_folder(tmp_path) as folder:
        blocks = slow("one", "1", scratch).replace("await asyncio.sleep", "__import__('time').sleep")
        folder.write(a=blocks)
        await folder.wait_for_tools(("one", "1"))
        call = asyncio.create_task(folder.call("one"))
        await asyncio.to_thread(until_sync, (scratch / "called").exists, "the call")
        (tmp_path / "a.py").unlink()
        await folder.wait_for_tools()
        assert not call.done()
        (scratch / "go").touch()
        assert await call == "1"


async def test_no_code_of_a_file_runs_on_the_main_thread(tmp_path: Path) -> None:
    where = "import signal\ndef run():\n    signal.signal(signal.SIGALRM, print)\nTOOL_NAME = 'one'\n"
    async with offered_folder(tmp_path) as folder:
        folder.write(a=where, b=where + "run()\n")
        await folder.wait_for_tools(("one", ""))
        await folder.wait_for_report(r"tools output b\.py: ValueError: signal only works in main thread")
        assert "signal only works in main thread" in (await folder.call("one")).message


async def test_a_source_that_another_program_has_is_waited_for(tmp_path: Path) -> None:
    async with offered_folder(tmp_path, restarts=RestartPolicy()) as folder:
        other = Plugin("dropin", address=folder.bus.grpc_addresses[0], token="another")
        async with other:
            await other.ready()
            folder.write(a=tool("one", "1"))
            await folder.wait_for_report(r"bound to a token.*\(it tries again in 10 s\)")
            assert folder.count(ReportKind.GIVEN_UP) == 0


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"event": "loaded"}', "[" * 60_000, "\\xff\\xfe"])
async def test_a_file_that_writes_into_the_reports_does_no_harm(tmp_path: Path, line: str) -> None:
    more = f"""
import os
for number in range(3, 20):
    try:
        os.write(number, b'''{line}\\n''')
    except OSError:
        pass
"""
    async with offered_folder(tmp_path) as folder:
        folder.write(a=tool("one", "1", more))
        await folder.wait_for_tools(("one", "1"))


async def test_every_kind_of_function_has_the_limit_on_processor_time_of_a_call(tmp_path: Path) -> None:
    kinds = {
        "a": "def run():\n    yield 'x'\n    yield repr(guard)",
        "b": "async def run():\n    return repr(guard)",
        "c": "async def run():\n    yield 'x'\n    yield repr(guard)",
        "d": "async def later():\n    return repr(guard)\nrun = lambda: later()",
        "e": "def run():\n    return repr(guard)",
    }
    async with offered_folder(tmp_path) as folder:
        folder.write(**{name: f"{FINDS_GUARD}{how}\nTOOL_NAME = {name!r}\n" for name, how in kinds.items()})
        await folder.wait_for_tools(*((name, "") for name in kinds))
        for name in kinds:
            assert "running=1" in str(await folder.call(name)), kinds[name]
