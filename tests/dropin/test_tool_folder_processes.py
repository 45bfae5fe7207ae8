"""The processes of a folder of tools: what becomes of those that die, what each may reach, and what they know."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.processes import alive, environment, until
from tests.support.tool_folders import DIES, QUICK, offered, slow, tool
from toolbus.dropin.group_supervisor import FolderTimings
from toolbus.errors import Code, NotPermitted
from toolbus.processes.supervised_plugin import ReportKind
from toolbus.processes.supervisor import RestartPolicy
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


def manifest(folder: Path, said: object) -> None:
    (folder / "_manifest.json").write_text(said if isinstance(said, str) else json.dumps(said))


@pytest.mark.parametrize("code", [0, 3])
async def test_a_tool_that_ends_its_process_is_offered_again_whatever_the_exit_code(tmp_path: Path, code: int) -> None:
    async with offered(tmp_path) as folder:
        folder.write(a=DIES, b=tool("two", "2"))
        await folder.lists(("dies", "-"), ("two", "2"))
        error = await folder.call("dies", code=code)
        assert error.code is Code.UNAVAILABLE
        await folder.lists(("dies", "-"), ("two", "2"))
        assert await folder.call("two") == "2"


async def test_a_killed_process_is_started_again_and_the_others_do_not_notice(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    manifest(tmp_path, {"files": {"b.py": {"write": ["scratch"]}, "c.py": {"write": ["scratch"]}}})
    async with offered(tmp_path) as folder:
        folder.write(b=slow("two", "2", scratch), c=tool("three", "3"))
        await folder.lists(("two", "2"), ("three", "3"))
        call = asyncio.create_task(folder.call("two"))
        await asyncio.to_thread(until, (scratch / "called").exists, "the call")
        victim, other = await folder.pids(2)
        os.kill(victim, signal.SIGKILL)
        error = await call
        assert error.code is Code.UNAVAILABLE
        await folder.says(r"died \(SIGKILL\)")
        await folder.lists(("two", "2"), ("three", "3"))
        assert await folder.call("three") == "3"
        assert alive(other)
        (scratch / "go").touch()
        assert await folder.call("two") == "2"


async def test_a_tool_that_burns_its_processor_time_is_ended_by_the_kernel(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"a.py": {"cpu_seconds": 1}}})
    async with offered(tmp_path) as folder:
        folder.write(a=BURNS)
        await folder.lists(("burns", ""))
        assert (await folder.call("burns")).code is Code.UNAVAILABLE
        await folder.says(r"died \(SIGXCPU\)")
        await folder.lists(("burns", ""))


async def test_a_thread_that_a_file_leaves_behind_burns_no_more_processor_time_than_a_call_may(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"a.py": {"cpu_seconds": 1}}})
    spins = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
    async with offered(tmp_path) as folder:
        folder.write(a=tool("one", "1", spins))
        await folder.says(r"died \(SIGXCPU\)")


async def test_what_dies_again_and_again_is_given_up_until_its_file_changes(tmp_path: Path) -> None:
    async with offered(tmp_path, restarts=QUICK) as folder:
        folder.write(a="import os\nos._exit(3)\n")
        await folder.says("dropin#1 given_up died 3 times within 30 s, the last time with exit code 3")
        folder.write(a=tool("one", "1"))
        await folder.lists(("one", "1"))


async def test_a_change_that_dies_again_and_again_does_not_take_the_place_of_what_runs(tmp_path: Path) -> None:
    async with offered(tmp_path, restarts=QUICK) as folder:
        folder.write(a=tool("one", "1"))
        await folder.lists(("one", "1"))
        folder.write(a="import os\nos._exit(0)\n")
        await folder.says("dropin#2 given_up")
        await folder.says("dropin#2 does not replace dropin#1, which keeps running")
        assert await folder.call("one") == "1"
        folder.write(a=tool("one", "2"))
        await folder.lists(("one", "2"))


async def test_a_process_that_an_operator_sent_away_stays_away_until_its_file_changes(tmp_path: Path) -> None:
    async with offered(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.lists(("one", "1"))
        await folder.bus.call("toolbus:drain", {"source": "dropin"})
        await folder.says("dropin#1 given_up")
        await folder.lists()
        folder.write(a=tool("one", "2"))
        await folder.lists(("one", "2"))


async def test_a_file_has_a_process_of_its_own_while_it_has_grants(tmp_path: Path) -> None:
    async with offered(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.lists(("one", "1"), ("two", "2"))
        manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
        await folder.says("dropin#1 ended")
        assert folder.catalog() == [("dropin", "one", "1"), ("dropin:b", "two", "2")]
        manifest(tmp_path, {})
        (pid,) = await folder.says(r"dropin:b#\d+ started .*pid (\d+)")
        await folder.says(r"dropin:b#\d+ ended")
        assert folder.catalog() == [("dropin", "one", "1"), ("dropin", "two", "2")]
        assert not alive(int(pid))


async def test_no_call_fails_while_files_are_given_grants_and_lose_them(tmp_path: Path) -> None:
    async with offered(tmp_path) as folder:
        folder.write(a=tool("one", "1"), b=tool("two", "2"))
        await folder.lists(("one", "1"), ("two", "2"))
        answers = []
        changing = True

        async def call_on() -> None:
            while changing:
                answers.append(await folder.call("two"))

        calling = asyncio.create_task(call_on())
        for count in (1, 2, 3):
            manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
            await folder.says(r"dropin#\d+ ended", 2 * count - 1)
            manifest(tmp_path, {})
            await folder.says(r"dropin:b#\d+ ended", count)
            await folder.says(r"dropin#\d+ ended", 2 * count)
        changing = False
        await calling
        assert set(answers) == {"2"}


async def test_grants_that_are_taken_away_are_gone_even_if_the_new_process_cannot_start(tmp_path: Path) -> None:
    async with offered(tmp_path) as folder:
        manifest(tmp_path, {"files": {"a.py": {"connect": ["127.0.0.1:9", "127.0.0.1:10"]}}})
        folder.write(a=tool("one", "1"))
        await folder.lists(("one", "1"))
        folder.write(a="import os\nos._exit(1)\n")
        manifest(tmp_path, {"files": {"a.py": {"connect": ["127.0.0.1:9"]}}})
        await folder.says("dropin:a#1 ended")
        await folder.lists()


async def test_a_broken_manifest_keeps_what_runs_and_says_so(tmp_path: Path) -> None:
    async with offered(tmp_path) as folder:
        folder.write(a=tool("one", "1"))
        await folder.lists(("one", "1"))
        manifest(tmp_path, "{")
        await folder.says("_manifest.json is not JSON.*: running tools stay as they are")
        folder.write(b=tool("two", "2"))
        manifest(tmp_path, {"allow": ["b.py"]})
        await folder.lists(("two", "2"))
        assert await folder.says(r"tools output (a\.py is not on the allow list)")


async def test_a_broken_manifest_at_the_start_loads_nothing(tmp_path: Path) -> None:
    manifest(tmp_path, {"alow": []})
    (tmp_path / "a.py").write_text(tool("one", "1"))
    async with offered(tmp_path) as folder:
        await folder.says("unknown key alow.*: no tool is loaded")
        assert "dropin#" not in folder.text  # nothing but the process that tells operators
        manifest(tmp_path, {})
        await folder.lists(("one", "1"))


async def test_where_a_manifest_is_required_nothing_loads_until_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(tool("one", "1"))
    async with offered(tmp_path, require_manifest=True) as folder:
        await folder.says("has no _manifest.json.*: no tool is loaded")
        manifest(tmp_path, {"allow": ["a.py"]})
        await folder.lists(("one", "1"))


async def test_a_process_knows_the_secrets_that_it_was_granted_and_no_others(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"b.py": {"secrets": ["WEATHER_KEY"]}}})
    (tmp_path / "a.py").write_text(ASKS.format(name="one", says="1"))
    (tmp_path / "b.py").write_text(ASKS.format(name="two", says="2"))
    known = {**environment({}), "WEATHER_KEY": "w-1", "BANK_KEY": "b-2", "HOME": "/home/nobody"}
    async with offered(tmp_path, environment=known) as folder:
        await folder.lists(("one", "1"), ("two", "2"))
        assert [await folder.call("one", variable=name) for name in ("WEATHER_KEY", "BANK_KEY", "HOME")] == ["", "", ""]
        assert [await folder.call("two", variable=name) for name in ("WEATHER_KEY", "BANK_KEY", "HOME")] == [
            "w-1",
            "",
            "",
        ]


async def test_the_token_is_in_no_process_and_nobody_else_has_the_source(tmp_path: Path) -> None:
    token = "t0ken-of-this-test"
    async with offered(tmp_path, environment=environment({"TOOLBUS_TOKEN": token})) as folder:
        folder.write(a=tool("one", "1"))
        await folder.lists(("one", "1"))
        (pid,) = await folder.pids()
        known = psutil.Process(pid)
        assert token not in f"{known.environ()} {known.cmdline()}"
        for stolen in (None, "another"):
            async with Plugin("dropin", address=folder.bus.grpc_addresses[0], token=stolen) as thief:
                with pytest.raises(NotPermitted, match="bound to a token"):
                    await thief.ready()
        assert token not in folder.text


async def test_a_group_cannot_attach_as_another_one_with_the_token_that_it_has(tmp_path: Path) -> None:
    manifest(tmp_path, {"files": {"b.py": {"connect": ["127.0.0.1:9"]}}})
    async with offered(tmp_path) as folder:
        folder.write(a=STEALS, b=tool("two", "2"))
        await folder.lists(("steals", ""), ("two", "2"))
        assert await folder.call("steals", source="dropin") == "attached"
        assert "bound to a token" in (await folder.call("steals", source="dropin:b")).message


async def test_a_file_that_hangs_when_its_process_restarts_is_skipped(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    hangs = f"import os\nwhile os.path.exists({str(scratch / 'hang')!r}):\n    pass"
    manifest(tmp_path, {"files": {"a.py": {"read": ["scratch"]}}})
    async with offered(tmp_path, timings=FolderTimings(file_seconds=0.5)) as folder:
        folder.write(a=tool("one", "1", hangs))
        await folder.says("offers one")
        (scratch / "hang").touch()
        os.kill((await folder.pids())[0], signal.SIGKILL)
        await folder.says(r"tools output a\.py: takes longer than 0\.5 s to load", 2)
        await folder.lists()
        await folder.says("offers no tools")
        (scratch / "hang").unlink()
        folder.write(a=tool("one", "2", hangs))
        await folder.lists(("one", "2"))


async def test_a_tool_that_blocks_its_loop_does_not_keep_the_tools_from_being_withdrawn(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    manifest(tmp_path, {"files": {"a.py": {"write": ["scratch"]}}})
    async with offered(tmp_path) as folder:
        blocks = slow("one", "1", scratch).replace("await asyncio.sleep", "__import__('time').sleep")
        folder.write(a=blocks)
        await folder.lists(("one", "1"))
        call = asyncio.create_task(folder.call("one"))
        await asyncio.to_thread(until, (scratch / "called").exists, "the call")
        (tmp_path / "a.py").unlink()
        await folder.lists()
        assert not call.done()
        (scratch / "go").touch()
        assert await call == "1"


async def test_no_code_of_a_file_runs_on_the_main_thread(tmp_path: Path) -> None:
    where = "import signal\ndef run():\n    signal.signal(signal.SIGALRM, print)\nTOOL_NAME = 'one'\n"
    async with offered(tmp_path) as folder:
        folder.write(a=where, b=where + "run()\n")
        await folder.lists(("one", ""))
        await folder.says(r"tools output b\.py: ValueError: signal only works in main thread")
        assert "signal only works in main thread" in (await folder.call("one")).message


async def test_who_has_the_source_already_is_waited_for(tmp_path: Path) -> None:
    async with offered(tmp_path, restarts=RestartPolicy()) as folder:
        other = Plugin("dropin", address=folder.bus.grpc_addresses[0], token="another")
        async with other:
            await other.ready()
            folder.write(a=tool("one", "1"))
            await folder.says(r"bound to a token.*\(it tries again in 10 s\)")
            assert folder.count(ReportKind.GIVEN_UP) == 0


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"event": "loaded"}', "[" * 60_000, "\\xff\\xfe"])
async def test_what_a_file_writes_into_the_reports_harms_nobody(tmp_path: Path, line: str) -> None:
    more = f"""
import os
for number in range(3, 20):
    try:
        os.write(number, b'''{line}\\n''')
    except OSError:
        pass
"""
    async with offered(tmp_path) as folder:
        folder.write(a=tool("one", "1", more))
        await folder.lists(("one", "1"))


@pytest.mark.parametrize(
    "how",
    [
        "def run():\n    yield 'x'\n    while True: pass",
        "async def run():\n    while True: pass",
        "async def run():\n    yield 'x'\n    while True: pass",
        "async def later():\n    while True: pass\nrun = lambda: later()",
    ],
)
async def test_no_kind_of_function_burns_more_processor_time_than_it_may(tmp_path: Path, how: str) -> None:
    manifest(tmp_path, {"files": {"a.py": {"cpu_seconds": 1}}})
    async with offered(tmp_path) as folder:
        folder.write(a=f"{how}\nTOOL_NAME = 'burns'\n")
        await folder.lists(("burns", ""))
        assert (await folder.call("burns")).code is Code.UNAVAILABLE
        await folder.says(r"died \(SIGXCPU\)")
