"""The council of a bus without a bus: its file, finished runs, and watchers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parts.council.fake_tool_source import FakeToolSource, failed, tool
from tests.parts.council.test_sidecar import KEY, says, server_of
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS
from toolbus.errors import Code, PeerLost, SetupError
from toolbus.parts.council.service import LOST, MAX_RUNS, MAX_WAITING, CouncilFile, CouncilService
from toolbus.parts.council.settings import API_KEY_VARIABLE

ADA = {"id": "m1", "name": "Ada", "tools": ["ext:look"]}
NO_CONNECTION = (
    "no sidecar model: the settings name no connection; set it to the base URL of an OpenAI-compatible server, for "
    "example http://127.0.0.1:8080/v1"
)
HELLO = {"messages": [{"role": "user", "content": "Hello?"}], "chat_id": "c1"}
PROMPT = {"name": "feel", "prompt": "Say how it feels.", "variable": "mood", "store_in_deliberation": 0}


def written(folder: Path, text: str, name: str = "council.toml") -> Path:
    file = folder / name
    file.write_text(text, "utf-8")
    return file


def loaded(file: Path, **environ: str) -> CouncilFile:
    return CouncilFile.load(file, environ)


async def ran(service: CouncilService, **more: Any) -> dict[str, Any]:
    return await service.begin({**HELLO, "members": [ADA], **more})(None)


# -- the file --------------------------------------------------------------------------------------------------------

TOML = """
prompt_tools = ["prompts"]
bundled = false
parallel = true

[sidecar]
connection = "http://127.0.0.1:8080/v1"
model = "small"

[[members]]
name = "Ada"
tools = ["memory:recall", "feel"]
chance = 50
"""


def test_a_file_holds_members_settings_model_and_prompt_tools(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    written(tmp_path / "prompts", json.dumps(PROMPT), "feel.json")
    council_file = loaded(written(tmp_path, TOML))
    (ada,) = council_file.settings.members
    assert (ada.id, ada.tools, ada.chance, council_file.settings.parallel) == (
        "Ada",
        ("memory:recall", "feel"),
        50,
        True,
    )
    assert (council_file.sidecar.model, council_file.model is not None) == ("small", True)
    assert [each.name for each in council_file.prompt_tools] == ["feel"]


def test_the_file_that_the_documents_show_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "start" / "council-settings.md").read_text("utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (shown,) = (block for block in blocks if "[[members]]" in block)
    (tmp_path / "prompts").mkdir()
    written(tmp_path / "prompts", json.dumps(PROMPT), "feel.json")
    council_file = loaded(written(tmp_path, shown))
    (ada,) = council_file.settings.members
    assert (ada.history_retention, ada.tools[1]) == ({"memory:recall": 2}, "propose_twist")
    assert council_file.model is not None
    assert {"feel", "propose_twist"} <= {each.name for each in council_file.prompt_tools}


def test_bundled_prompt_tools_come_last_so_that_they_count(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(PROMPT), "feel.json")
    council_file = loaded(written(tmp_path, '{"prompt_tools": ["feel.json"]}', "c.json"))
    names = [each.name for each in council_file.prompt_tools]
    assert (names[0], len(names) > 5, council_file.model) == ("feel", True, None)


@pytest.mark.parametrize(
    "content",
    [
        {"sidecar": {"connection": "home", "model": "m"}},
        {"sidecarSettings": {"connectionProfileId": "home", "model": "m"}},
        {"toolsSettings": {"sidecar": {"connectionProfileId": "home", "model": "m"}}},
    ],
)
def test_the_model_may_be_described_where_hosts_keep_it_and_its_connection_named(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    content = {**content, "connections": {"home": "http://127.0.0.1:8080/v1"}}
    assert loaded(written(tmp_path, json.dumps(content), "c.json")).model is not None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[", "cannot be parsed"),
        ("timeout_ms = 'soon'", "council settings: timeout_ms is 'soon', it must be a number"),
        ("[[members]]\nrole = 'x'", "members[0]: it has no name: give it one"),
        ("sidecar = 5", "sidecar is 5, it must be an object"),
        ("[sidecar]\nconnection = 'home'\nmodel = 'm'", "the name of a connection (known: none)"),
        ("[sidecar]\n[sidecarSettings]", "under sidecar and sidecarSettings, which mean the same"),
        (f"[sidecar]\napi_key = '{KEY}'", f"settings hold no key: take it out, and set {API_KEY_VARIABLE} in the env"),
        (f"[sidecar]\nconnection = 'http://u:{KEY}@h/v1'", f"leave them out, and set {API_KEY_VARIABLE} in the env"),
        ("connections = ['x']", "connections is ['x'], it must be an object"),
        ("bundled = 1", "bundled is 1, it must be true or false"),
        ("prompt_tools = 'prompts'", "prompt_tools is 'prompts', it must be a list"),
        ("prompt_tools = ['nowhere']", "nowhere does not exist: write it, or name a file or folder that does"),
        ("prompt_tools = ['empty']", "empty has no prompt tools: name the file or folder that has them"),
    ],
)
def test_an_error_in_the_file_names_the_file_and_the_fix(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    file = written(tmp_path, text)
    with pytest.raises(SetupError) as refusal:
        loaded(file)
    assert str(refusal.value).startswith(f"{file}: ")
    assert sentence in str(refusal.value)
    assert KEY not in str(refusal.value)


def test_a_file_that_plans_without_a_model_is_refused_with_its_name(tmp_path: Path) -> None:
    file = written(tmp_path, "plan_arguments = true")
    with pytest.raises(SetupError, match=f"^{file}: plan_arguments is on"):
        CouncilService.of_file(FakeToolSource(), file)


def test_json_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"the council file is .*, it must be an object"):
        loaded(written(tmp_path, "[1]", "c.json"))


async def test_the_key_of_the_model_comes_from_the_environment_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    async with server_of((200, says("calm"))) as server:
        content = {"sidecar": {"connection": server.url, "model": "small"}, "prompt_tools": ["feel.json"]}
        written(tmp_path, json.dumps(PROMPT), "feel.json")
        service = CouncilService.of_file(FakeToolSource(), written(tmp_path, json.dumps(content), "c.json"))
        answer = await ran(service, members=[{**ADA, "tools": ["feel"]}])
    assert answer["results"][0]["content"] == "calm"
    assert answer["namedResults"] == {"mood": "calm"}
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {KEY}"]
    assert KEY not in f"{service!r} {service.described()} {answer} {caplog.text} {loaded(tmp_path / 'c.json')}"


def test_the_current_settings_can_be_sent_with_a_run(tmp_path: Path) -> None:
    service = CouncilService.of_file(
        FakeToolSource(), written(tmp_path, "timeout_seconds = 60\n[[members]]\nname = 'Ada'")
    )
    shown = json.loads(json.dumps(service.described()))
    assert (shown["settings"]["timeout_seconds"], shown["members"][0]["name"]) == (60.0, "Ada")
    assert shown["sidecar"]["available"] is False
    assert "name no connection" in shown["sidecar"]["reason"]
    service.begin({**HELLO, "members": shown["members"], "settings": shown["settings"]})


def test_the_bus_loads_nothing_of_councils_before_it_needs_them() -> None:
    script = "import sys, toolbus.bus; print([name for name in sys.modules if name.startswith('toolbus.extension')])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


# -- runs ------------------------------------------------------------------------------------------------------------


async def test_a_run_s_settings_and_members_are_its_own() -> None:
    fake = FakeToolSource(tool("ext:look"))
    service = CouncilService(fake)
    answer = await ran(service, settings={"timeoutMs": 45_000})
    assert fake.calls[0].timeout == 45.0
    assert [each["content"] for each in answer["results"]] == ["what ext:look says"]
    assert service.described()["members"] == []
    assert service.described()["settings"]["timeout_seconds"] == 30.0


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"members": None}, "the council has no members"),
        ({"members": [{"name": "Ada"}]}, "no member has tools"),
        ({"members": [{**ADA, "chance": 0}]}, "the dice chose no member"),
        ({"settings": {"mode": "inline"}}, "the mode is inline: the main model calls the tools itself"),
    ],
)
async def test_a_run_without_participants_has_a_reason(more: dict[str, Any], text: str) -> None:
    answer = await ran(CouncilService(FakeToolSource(tool("ext:look"))), **more)
    assert text in answer.pop("reason")
    assert answer == {"ok": True, "active": False, "results": []}


async def test_a_run_without_existing_tools_is_not_active_and_names_them() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")))
    answer = await ran(service, members=[{**ADA, "tools": ["ext:loook"]}])
    assert (answer["active"], answer["results"]) == (False, [])
    assert "see skipped for the reasons" in answer["reason"]
    assert [(each["memberId"], each["toolName"]) for each in answer["skipped"]] == [("m1", "ext:loook")]
    assert service.find(answer["runId"]) == answer


async def test_unknown_keys_are_named_in_the_response() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")))
    answer = await ran(
        service,
        settings={"paralel": True, "toolsSettings": {"timeOut": 5, "enabled": True}},
        members=[{**ADA, "mood": 1, "bad\nkey": 2}],
        unknown=["mesages"],
    )
    assert answer["ignored"] == [
        "mesages",
        "settings.paralel",
        "settings.toolsSettings.timeOut",
        "members[0].mood",
        r"members[0].bad\nkey",
    ]
    assert "ignored" not in await ran(service)
    assert len((await ran(service, unknown=[str(number) for number in range(1000)]))["ignored"]) == 20


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"members": [{"name": "x", "chance": 10**400}]}, "must be a number"),
        ({"members": [ADA, ADA]}, "is the id of two members"),
        ({"settings": {"members": []}}, "members are a field of the body"),
        ({"settings": {"Members": []}}, "members are a field of the body"),
        ({"members": [{**ADA, "definition": "\ud800"}]}, "holds half of a surrogate pair"),
        ({"settings": {"plan_arguments": True}}, "the council has no model"),
        ({"settings": {"mode": "sideways"}}, "must be one of sidecar, inline"),
    ],
)
def test_an_invalid_run_is_refused_before_it_starts(more: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        CouncilService(FakeToolSource()).begin({**HELLO, "members": [ADA], **more})


def test_unknown_keys_cannot_fill_the_log_or_write_lines_of_it(caplog: pytest.LogCaptureFixture) -> None:
    keys = {f"x\nERROR forged {number}": 1 for number in range(1000)}
    CouncilService(FakeToolSource()).begin({**HELLO, "members": [{**ADA, **keys}]})
    (line,) = caplog.messages
    assert "\n" not in line
    assert len(line) < 1000


async def test_earlier_results_are_stored_by_chat_and_not_without_one() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")))
    ada = {**ADA, "history_retention": {"ext:look": 2}}
    assert (await ran(service, members=[ada]))["history"] == ""
    assert "1 deliberation ago - Ada / look\nwhat ext:look says" in (await ran(service, members=[ada]))["history"]
    for _ in range(2):
        assert (await ran(service, members=[ada], chat_id=""))["history"] == ""


async def test_a_regenerated_reply_reuses_the_run_of_another_request() -> None:
    fake = FakeToolSource(tool("ext:look"))
    service = CouncilService(fake)
    keeping = {"settings": {"retain_results_for_regens": True}, "regenerates": True}
    first, again = await ran(service, **keeping), await ran(service, **keeping)
    assert (first["reused"], again["reused"], len(fake.calls)) == (False, True, 1)
    assert again["results"] == first["results"]
    assert service.find(again["runId"]) == again


async def test_a_retry_uses_the_members_messages_and_user_of_the_run() -> None:
    fake = FakeToolSource(tool("ext:look"), tool("ext:listen"), look=failed(Code.TOOL, "fog"))
    service = CouncilService(fake)
    ada = {**ADA, "tools": ["ext:look", "ext:listen"]}
    run = await ran(service, members=[ada], user_id="ann", attributes={"level": "5"}, persona="A sailor")
    assert (run["successCount"], run["failedCount"]) == (1, 1)
    fake.answers["look"] = "a wolf"
    for useless in ([("m1", "ext:listen")], []):
        with pytest.raises(SetupError, match="failed in this run: m1 ext:look"):
            service.begin_retry(run["runId"], useless)
    for only, times in (([("m1", "ext:look")], 3), (None, 3)):
        start = service.begin_retry(run["runId"], only)
        assert start is not None
        answer = await start(None)
        assert len(fake.calls) == times
    assert [each["content"] for each in answer["results"]] == ["a wolf", "what ext:listen says"]
    assert service.find(run["runId"]) == answer
    assert (fake.calls[2].name, fake.calls[2].context.messages) == ("ext:look", fake.calls[0].context.messages)
    assert (fake.calls[2].context.user_id, dict(fake.calls[2].context.attributes)) == ("ann", {"level": "5"})
    assert service.begin_retry("unknown") is None


async def test_two_retries_at_once_keep_the_outcomes_of_both() -> None:
    fake = FakeToolSource(tool("ext:look"), tool("ext:listen"), look=failed(Code.TOOL), listen=failed(Code.TOOL))
    service = CouncilService(fake)
    run = await ran(service, members=[{**ADA, "tools": ["ext:look", "ext:listen"]}])
    fake.answers = {}
    starts = [service.begin_retry(run["runId"], [("m1", f"ext:{name}")]) for name in ("look", "listen")]
    await asyncio.gather(*(start(None) for start in starts if start is not None))
    found = service.find(run["runId"])
    assert found is not None
    assert (found["successCount"], found["failedCount"]) == (2, 0)


async def test_a_retry_that_waited_for_one_of_the_same_tool_does_not_run_it_again() -> None:
    fake = FakeToolSource(tool("ext:look"), look=failed(Code.TOOL))
    service = CouncilService(fake)
    run = await ran(service)
    fake.answers = {}
    starts = [service.begin_retry(run["runId"], [("m1", "ext:look")]) for _ in range(2)]
    first, second = await asyncio.gather(*(start(None) for start in starts if start is not None))
    assert first == second
    assert len(fake.calls) == 2


async def test_a_retry_that_is_cancelled_leaves_the_run_to_the_next_one() -> None:
    fake = FakeToolSource(tool("ext:look"), look=failed(Code.TOOL))
    service = CouncilService(fake)
    run = await ran(service)
    begun = asyncio.Event()

    async def hang(asked: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    fake.answers["look"] = hang
    start = service.begin_retry(run["runId"])
    assert start is not None
    retrying = asyncio.ensure_future(start(None))
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    retrying.cancel()
    await asyncio.wait((retrying,))
    assert service.find(run["runId"]) == run
    fake.answers = {}
    assert (await asyncio.wait_for(start(None), WAIT_SECONDS))["failedCount"] == 0


async def test_the_newest_runs_can_be_retried() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")))
    ids = [(await ran(service))["runId"] for _ in range(MAX_RUNS + 1)]
    assert [service.find(run_id) is not None for run_id in ids] == [False, *([True] * MAX_RUNS)]


async def test_of_large_runs_fewer_can_be_retried_and_the_newest_always() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")), max_characters=10)
    older, newest = (await ran(service))["runId"], (await ran(service))["runId"]
    assert service.find(newest) is not None
    assert service.find(older) is None


@pytest.mark.parametrize(
    "more",
    [{"world_info": "x" * 5000}, {"members": [{**ADA, "definition": "x" * 5000}]}, {"attributes": {"a": "x" * 5000}}],
)
async def test_the_request_counts_towards_the_size_of_a_run(more: dict[str, Any]) -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")), max_characters=9000)
    older, newer = (await ran(service, **more))["runId"], (await ran(service, **more))["runId"]
    assert (service.find(older), service.find(newer) is not None) == (None, True)


async def test_many_unknown_tool_names_do_not_block_the_bus() -> None:
    service = CouncilService(FakeToolSource(*(tool(f"ext:t{number}") for number in range(200))))
    member = {**ADA, "tools": [f"q{number}" for number in range(100_000)] + ["t7"]}
    began = time.process_time()
    run = await ran(service, members=[member])
    assert time.process_time() - began < 5  # comparing every name with every tool takes longer
    assert [each["toolName"] for each in run["results"]] == ["t7"]


# -- those who watch -------------------------------------------------------------------------------------------------


async def test_a_watcher_gets_the_events_of_its_chat_and_a_client_those_of_its_run() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look"), look=failed(Code.TOOL)))
    everything, of_c2, council_file = service.watch(), service.watch("c2"), list[Mapping[str, Any]]()
    await service.begin({**HELLO, "members": [ADA]})(council_file.append)
    kinds = ["COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED", "COUNCIL_TOOLS_FAILED"]
    assert [each["event"] for each in council_file] == kinds
    await ran(service, chat_id="c2")
    service.close()
    assert [each["event"] async for each in everything] == kinds * 2
    assert [each["chatId"] async for each in of_c2] == ["c2"] * 4
    assert [each async for each in service.watch()] == []


async def test_a_slow_watcher_loses_the_oldest_events_and_gets_their_count() -> None:
    service = CouncilService(FakeToolSource(tool("ext:look")))
    watcher = service.watch("c1")
    for number in range(MAX_WAITING + 3):
        watcher.put({"event": "X", "chatId": "c1", "number": number})
    watcher.close()
    lost, *delivered = [each async for each in watcher]
    assert lost == {"event": LOST, "chatId": "c1", "count": 3}
    assert [each["number"] for each in delivered] == [*range(3, MAX_WAITING + 3)]


async def test_a_service_that_is_closed_ends_its_runs_at_once() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(asked: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    service = CouncilService(FakeToolSource(tool("ext:look"), look=hang))
    running = asyncio.ensure_future(ran(service))
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    service.close()
    with pytest.raises(PeerLost, match="the bus stopped"):
        await asyncio.wait_for(running, WAIT_SECONDS)
    assert ended.is_set()
    with pytest.raises(PeerLost):
        await ran(service)


async def test_prompt_tools_are_listed_as_unavailable_where_there_is_no_model() -> None:
    listed = {each["name"]: each for each in await CouncilService(FakeToolSource(tool("ext:look"))).tools()}
    assert (listed["ext:look"]["available"], listed["ext:look"]["source"]) == (True, "ext")
    assert (listed["propose_twist"]["available"], listed["propose_twist"]["reason"]) == (False, NO_CONNECTION)
