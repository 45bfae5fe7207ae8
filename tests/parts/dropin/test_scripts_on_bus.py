"""JavaScript files of a folder on a real bus, in their sandboxed processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parts.dropin.script_cases import seed
from tests.parts.dropin.test_script_group import registration
from tests.parts.dropin.test_spindle_scripts import KNOWLEDGE, answering
from tests.support.tool_folders import OfferedFolder, offered_folder, tool
from tests.support.waiting import until
from toolbus.errors import Code, Stage
from toolbus.parts.dropin.group_process import ProcessPlan
from toolbus.protocol.tool import MIB
from toolbus.sdk import Host


def write(folder: Path, **files: str) -> None:
    for stem, text in files.items():
        (folder / f"{stem}.js").write_text(text)


def test_a_process_of_scripts_gets_no_grant_but_its_limits() -> None:
    granted: dict[str, Any] = {"write": ("/w",), "read": ("/r",), "connect": (("127.0.0.1", 80),)}
    limits = {"memory_bytes": 256 * MIB}
    for file, grants in (("a.py", granted), ("a.js", dict.fromkeys(granted, ()))):
        plan = ProcessPlan("/tools", "dropin:a", (file,), (file,), "bus:1", "token", 3, limits=limits, **granted)
        given = plan.grants()
        assert (given.write, given.read, given.connect) == tuple(
            tuple(map(Path, grants[key])) if key != "connect" else grants[key] for key in granted
        )
        assert given.memory_bytes == 256 * MIB


async def called(folder: OfferedFolder, name: str, **arguments: Any) -> Any:
    result = await folder.bus.call(name, arguments)
    return result.error.code if result.error is not None else result.output


async def test_a_copied_folder_runs_as_it_is_beside_files_in_python(tmp_path: Path) -> None:
    write(tmp_path, _common="var GREETING = 'hello'", my_tool=seed("my_tool.js"))
    (tmp_path / "kb" / "dist").mkdir(parents=True)
    (tmp_path / "kb" / "spindle.json").write_text('{"identifier": "knowledge"}')
    write(tmp_path / "kb" / "dist", backend=seed("search_knowledge_base.js", "tool_invocation.js") + KNOWLEDGE)
    write(tmp_path, leaky=registration("leaky", "return {greeting: GREETING, password: 'x'}"))
    (tmp_path / "own.py").write_text(tool("own", "1"))
    async with offered_folder(tmp_path) as folder:
        described = {
            "search_knowledge_base": "Searches the extension knowledge base for relevant information",
            "my_tool": "What this tool does and exactly when to call it.",
            "leaky": "D.",
            "own": "1",
        }
        await folder.wait_for_report(" offered ", 3)
        assert {name: description for _, name, description in folder.catalog()} == described
        assert {name: source for source, name, _ in folder.catalog()} == {
            "search_knowledge_base": "dropin:kb",
            "my_tool": "dropin:js",
            "leaky": "dropin:js",
            "own": "dropin",
        }
        assert await called(folder, "my_tool", topic="boards") == {"ok": True, "answer": "..."}
        assert await called(folder, "my_tool") is Code.INVALID_ARGUMENTS
        assert await called(folder, "leaky") is Code.SECRET_BLOCKED
        query = await folder.bus.call("dropin:kb:search_knowledge_base", {"query": "bells", "limit": 5})
        assert query.output == "bells is known\nlimit 5"
        async with Host(folder.bus.grpc_addresses[0]) as host:
            notices = (await host.list()).notices
        assert {source for source, text in notices if "protected by" in text} == {"dropin", "dropin:js", "dropin:kb"}
        write(tmp_path, leaky=registration("tight", "return GREETING"))
        await folder.wait_for_report("dropin:js#2 offered .*tight")
        assert await called(folder, "tight") == "hello"


SCHEMA = {
    "type": "object",
    "properties": {
        "side": {"type": "string"},
        "azimuth": {"type": "number", "default": 0.0},
        "plane": {"type": ["string", "null"], "default": None},
    },
}


async def test_files_of_other_systems_get_the_arguments_that_were_sent_and_no_defaults(tmp_path: Path) -> None:
    schema = json.dumps(SCHEMA)
    record = f"{{name: '%s', description: 'D.', parameters: {schema}}}"
    write(
        tmp_path,
        script="llm_tool_register({name: 'script', execute: args => ({got: args}),"
        f" def: {{type: 'function', function: {record % 'script'}}}}})",
    )
    (tmp_path / "kb" / "dist").mkdir(parents=True)
    (tmp_path / "kb" / "spindle.json").write_text('{"identifier": "kb"}')
    write(
        tmp_path / "kb" / "dist",
        backend=f"spindle.registerTool({record % 'extension'})\n"
        "spindle.on('TOOL_INVOCATION', payload => JSON.stringify({got: payload.args}))",
    )
    (tmp_path / "by_dict.py").write_text(
        f"from toolbus.dropin import register_tool\nregister_tool(name='by_dict',"
        f" execute=lambda args, env: {{'got': args}}, definition={{'description': 'D.', 'parameters': {SCHEMA}}})"
    )
    run = "def run(**args):\n    return {'got': args}\n"
    (tmp_path / "by_name.py").write_text(f"{run}TOOL_NAME = 'by_name'\nTOOL_PARAMETERS = {SCHEMA}")
    (tmp_path / "listed.py").write_text(
        f"{run}TOOLS = [{{'name': 'listed', 'handler': run, 'parameters': {SCHEMA}}},"
        f" {{'name': 'filled', 'handler': run, 'parameters': {SCHEMA}, 'no_defaults': False}}]"
    )
    names = {"script", "extension", "by_dict", "by_name", "listed", "filled"}
    async with offered_folder(tmp_path) as folder:
        await until(lambda: {name for _, name, _ in folder.catalog()} == names, "all to be offered")
        for name in names:
            output = await called(folder, name, side="left")
            got = json.loads(output) if isinstance(output, str) else output
            got["got"].pop("__deadlineMs", None)  # of an extension
            more = {"azimuth": 0.0, "plane": None} if name == "filled" else {}
            assert got == {"got": {"side": "left", **more}}, name


async def test_a_script_without_end_or_measure_harms_only_itself_and_runs_again(tmp_path: Path) -> None:
    manifest = {"files": {"greedy.js": {"memory_mb": 128, "cpu_seconds": 1}}}
    (tmp_path / "_manifest.json").write_text(json.dumps(manifest))
    fills = "globalThis.kept = []; while (true) kept.push('x'.repeat(1e6) + kept.length)"
    body = f"if (payload.args.fill) {{ {fills} }} if (payload.args.loop) while (true) {{}} return 'well'"
    write(tmp_path, greedy=answering(body, "greedy"), calm=registration("calm", "return 'calm'"))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report(" offered ", 2)
        looping = await folder.bus.call("greedy", {"loop": 1})
        assert looping.error is not None
        assert looping.error.message.startswith("the script computed for more than 0.333 s without a pause")
        assert await called(folder, "greedy") == "well"
        filling = await folder.bus.call("greedy", {"fill": 1})
        assert filling.error is not None
        assert "limit of 64 MiB of memory" in filling.error.message
        assert await called(folder, "calm") == "calm"
        await folder.wait_for_report(r"dropin:greedy.js#1 ended ")
        assert await called(folder, "greedy") == "well"
        assert len(await folder.pids(3)) == 3


@pytest.mark.parametrize("is_extension", [False, True])
async def test_jobs_without_end_end_their_call_and_others_are_lost_without_blame(
    tmp_path: Path, is_extension: bool
) -> None:
    body = (
        "if (ARGS.wait) return new Promise(() => {}); if (!ARGS.loop) return 'well';"
        " (async () => { while (true) await null })(); return new Promise(() => {})"
    )
    manifest = {"files": {"greedy.js": {"cpu_seconds": 1}}}
    (tmp_path / "_manifest.json").write_text(json.dumps(manifest))
    if is_extension:
        write(tmp_path, greedy=answering(body.replace("ARGS", "payload.args"), "greedy"))
    else:
        write(tmp_path, greedy=registration("greedy", body.replace("ARGS", "args")))
    async with offered_folder(tmp_path) as folder:
        await folder.wait_for_report(" offered ", 1)
        waiting = asyncio.create_task(folder.bus.call("greedy", {"wait": 1}))
        await until(lambda: "active=1" in repr(folder.bus.dispatcher), "the call to be in flight")
        looping = (await folder.bus.call("greedy", {"loop": 1})).error
        assert looping is not None
        assert (looping.code, "without end" in looping.message) == (Code.TOOL, True)
        lost = (await waiting).error
        assert lost is not None
        assert (lost.code, lost.stage, lost.retry_safe) == (Code.UNAVAILABLE, Stage.ACCEPTED, False)
        async with Host(folder.bus.grpc_addresses[0]) as host:  # it waits for the next process
            assert (await host.call("greedy", {})).unwrap() == "well"
