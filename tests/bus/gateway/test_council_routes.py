"""The council over HTTP, with an extension on a stream: runs, retries, events, and askers that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import string
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bus.gateway.calling import Connection, client, events
from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.examples import examples
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.errors import Code, SetupError
from toolbus.parts.council.routes import MAX_MEMBERS, CouncilAnswer, CouncilShown, CouncilTools
from toolbus.sdk import Extension, ToolScope
from toolbus.testing import running_bus

STREAM = {"Accept": "text/event-stream"}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Who is"}, {"type": "text", "text": "there?"}]}]
ADA = {"id": "m1", "name": "Ada", "tools": ["ext:look", "ext:break"], "itemId": "i1"}
BOB = {"id": "m2", "name": "Bob", "tools": ["ext:look"]}
KINDS = ["COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED", "COUNCIL_TOOLS_FAILED"]
Words = dict[str, Any]


@dataclass
class House:
    """A bus with an extension: ``look`` succeeds, ``break`` fails until it is mended, ``nap`` waits."""

    bus: Bus
    http: httpx.AsyncClient
    calls: list[tuple[str, ToolScope]] = field(default_factory=list)
    broken: bool = True
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, path: str, **body: Any) -> Words:
        answer = await self.http.post(f"/api/council/{path}", json=body)
        assert answer.status_code == 200, answer.text
        said: Words = answer.json()
        CouncilAnswer.model_validate(said, by_name=False)
        return said

    async def run(self, *members: Words, **more: Any) -> Words:
        return await self.post("run", messages=MESSAGES, members=members or (ADA, BOB), **more)

    def extension(self) -> Extension:
        extension = Extension("ext", address=self.bus.grpc_addresses[0])
        eligible: Words = {"council_eligible": True}

        @extension.tool(name="look", display_name="Look Around", description="Looks.", **eligible)
        async def look(scope: ToolScope) -> str:
            self.calls.append(("look", scope))
            return f"a wolf, before {scope.context.messages[-1].content!r}"

        @extension.tool(name="break", **eligible)
        async def broken(scope: ToolScope) -> str:
            self.calls.append(("break", scope))
            if self.broken:
                raise ValueError("the glass is cracked")
            return "mended"

        @extension.tool(name="nap", **eligible)
        async def nap() -> str:
            self.woken.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return ""

        @extension.tool(name="vault", min_level=50, **eligible)
        async def vault() -> str:
            return "gold"

        @extension.tool(name="private")
        async def private() -> str:
            return "not for councils"

        return extension


@asynccontextmanager
async def house_of(**config: Any) -> AsyncIterator[House]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0, **config) as bus, client(bus) as http:
        house = House(bus, http)
        async with house.extension() as extension:
            await extension.ready()
            yield house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with house_of() as house:
        yield house


# -- what there is ---------------------------------------------------------------------------------------------------


async def test_the_tools_that_members_can_be_assigned_depend_on_the_user_s_level(house: House) -> None:
    for level, names in ((0, ["look", "break", "nap"]), (50, ["look", "break", "nap", "vault"])):
        answer = (await house.http.get("/api/council/tools", params={"user_id": "ann", "level": level})).json()
        CouncilTools.model_validate(answer, by_name=False)
        assert answer["count"] == len(answer["tools"])
        assert [each["name"] for each in answer["tools"] if each["kind"] == "extension"] == [f"ext:{n}" for n in names]
    assert answer["tools"][0] == {
        "name": "ext:look",
        "qualifiedName": "ext:look",
        "displayName": "Look Around",
        "description": "Looks.",
        "source": "ext",
        "category": "extension",
        "kind": "extension",
        "available": True,
        "reason": "",
    }
    prompts = [each for each in answer["tools"] if each["kind"] == "prompt"]
    assert prompts
    assert all(not each["available"] and "the settings name no connection" in each["reason"] for each in prompts)


async def test_settings_and_members_come_from_the_council_file(tmp_path: Path) -> None:
    file = tmp_path / "council.json"
    file.write_text(json.dumps({"members": [ADA], "toolsSettings": {"timeoutMs": 60_000}}))
    async with house_of(council=file) as house:
        shown = (await house.http.get("/api/council")).json()
        CouncilShown.model_validate(shown)
        assert (shown["settings"]["timeout_seconds"], shown["members"][0]["item_id"]) == (60.0, "i1")
        answer = await house.post("run", messages=MESSAGES)
        assert [(each["memberId"], each["toolName"]) for each in answer["results"]] == [
            ("m1", "ext:look"),
            ("m1", "ext:break"),
        ]
        assert [each["memberId"] for each in (await house.run(BOB))["results"]] == ["m2"]


async def test_a_council_that_no_host_can_reach_is_a_warning_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "council.toml"
    file.write_text("parallel = true\n", "utf-8")
    for http in ("127.0.0.1:0", "off"):
        caplog.clear()
        async with Bus(Config(grpc=("127.0.0.1:0",), http=http, council=file)):
            told = any("hosts reach the council over HTTP only" in message for message in caplog.messages)
        assert told == (http == "off")


async def test_a_council_file_with_a_fault_keeps_the_bus_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "council.toml"
    file.write_text("[[members]]\nchance = 'often'")
    for http in ("127.0.0.1:0", "off"):
        bus = Bus(Config(grpc=("127.0.0.1:0",), http=http, council=file))
        with pytest.raises(SetupError, match=r"council\.toml: council settings: .*'often', it must be a number"):
            await bus.start()
        assert bus.grpc_addresses == ()
        if bus.http_address is not None:
            with closing(socket.socket()) as free:
                free.bind(("127.0.0.1", int(bus.http_address.rpartition(":")[2])))


# -- runs ------------------------------------------------------------------------------------------------------------


async def test_a_run_answers_with_every_result_in_order_and_a_failed_tool_is_one_of_them(house: House) -> None:
    answer = await house.run(chat_id="c1", user_id="ann", attributes={"level": "5"}, persona="A sailor")
    assert (answer["ok"], answer["active"], answer["reused"]) == (True, True, False)
    looked, broke, second = answer["results"]
    assert looked["durationMs"] >= 0
    assert {**looked, "durationMs": 0} == {
        "memberId": "m1",
        "memberName": "Ada",
        "toolName": "ext:look",
        "toolDisplayName": "Look Around",
        "success": True,
        "content": "a wolf, before 'Who is\\nthere?'",
        "durationMs": 0,
    }
    assert (broke["success"], broke["content"], "the glass is cracked" in broke["error"]) == (False, "", True)
    assert (second["memberName"], second["success"]) == ("Bob", True)
    assert (answer["successCount"], answer["failedCount"], answer["namedResults"]) == (2, 1, {})
    assert "**Look Around:**\na wolf" in answer["deliberation"]
    assert answer["generationId"] == answer["runId"]
    scope = house.calls[0][1]
    assert (scope.context.user_id, dict(scope.context.attributes)) == ("ann", {"level": "5"})
    assert scope.context.messages[0].content == "## User persona\nA sailor"
    assert scope.context.member is not None
    assert (scope.context.member["memberId"], len(scope.context.member)) == ("m1", 12)


async def test_without_active_members_a_run_has_no_result_and_no_call(house: House) -> None:
    for answer, why in (
        (await house.run({**BOB, "chance": 0}), "the dice chose no member"),
        (await house.run(BOB, settings={"mode": "inline"}), "the mode is inline"),
        (await house.post("run"), "the council has no members"),
    ):
        assert why in answer.pop("reason")
        assert answer == {"ok": True, "active": False, "results": []}
    assert house.calls == []


async def test_the_level_of_a_run_decides_which_tools_exist(house: House) -> None:
    keeper = {**BOB, "tools": ["ext:vault"]}
    assert (await house.run(keeper, attributes={"level": "49"}))["results"] == []
    (result,) = (await house.run(keeper, attributes={"level": "50"}))["results"]
    assert result["content"] == "gold"


async def test_earlier_results_and_retained_runs_reach_over_two_requests(house: House) -> None:
    more: Words = {"chat_id": "c1", "regenerates": True, "settings": {"retainResultsForRegens": True}}
    bob = {**BOB, "toolHistoryRetention": {"ext:look": 1}}
    first, again = await house.run(bob, **more), await house.run(bob, **more)
    assert (first["history"], first["reused"], again["reused"], len(house.calls)) == ("", False, True, 1)
    assert again["results"] == first["results"]
    later = await house.run(bob, chat_id="c1")
    assert "1 deliberation ago - Bob / Look Around\na wolf" in later["history"]


# -- retries ---------------------------------------------------------------------------------------------------------


async def test_a_retry_runs_only_what_failed_and_answers_with_the_whole_run(house: House) -> None:
    run = await house.run()
    house.broken = False
    answer = await house.post("retry", run_id=run["runId"], only=[{"memberId": "m1", "toolName": "ext:break", "x": 1}])
    assert [each["content"] for each in answer["results"]] == [
        run["results"][0]["content"],
        "mended",
        run["results"][2]["content"],
    ]
    assert (answer["runId"], answer["failedCount"]) == (run["runId"], 0)
    assert [name for name, _ in house.calls] == ["look", "break", "look", "break"]
    shown = await house.http.get(f"/api/council/runs/{run['runId']}")
    assert (shown.status_code, shown.json()) == (200, answer)
    assert await house.post("retry", run_id=run["runId"]) == answer


async def test_the_list_of_runs_says_of_each_who_took_part_and_how_it_went_newest_first(house: House) -> None:
    first, second = await house.run(), await house.run(chat_id="c7")
    listed = (await house.http.get("/api/council/runs")).json()
    assert (listed["ok"], listed["count"]) == (True, 2)
    assert [(line["runId"], line["chatId"]) for line in listed["runs"]] == [
        (second["runId"], "c7"),
        (first["runId"], ""),
    ]
    line = listed["runs"][1]
    members = list(dict.fromkeys(each["memberName"] for each in first["results"]))
    assert (line["members"], line["successCount"], line["failedCount"]) == (members, 2, 1)
    assert (line["skippedCount"], line["totalDurationMs"]) == (len(first["skipped"]), first["totalDurationMs"])
    assert 0 < line["ended"] <= listed["runs"][0]["ended"]


async def test_a_run_that_is_not_stored_gets_404_and_how_to_fix_it(house: House) -> None:
    for answer in (
        await house.http.get("/api/council/runs/" + "x" * 5000),
        await house.http.post("/api/council/retry", json={"run_id": "x" * 256}),
    ):
        assert answer.status_code == 404
        assert "Run the council again" in answer.json()["detail"]
        assert len(answer.text) < 300


# -- events ----------------------------------------------------------------------------------------------------------


async def streamed(house: House, path: str, **body: Any) -> list[tuple[str, Words]]:
    async with house.http.stream("POST", f"/api/council/{path}", json=body, headers=STREAM) as answer:
        assert answer.status_code == 200
        return [(kind, data) async for kind, data, _ in events(answer)]


async def test_a_streamed_run_sends_its_events_and_then_its_result(house: House) -> None:
    told = await streamed(house, "run", messages=MESSAGES, members=[ADA, BOB], chat_id="c1")
    assert [kind for kind, _ in told] == [*KINDS, "result"]
    result = told[-1][1]
    assert all(data["generationId"] == result["runId"] and data["chatId"] == "c1" for _, data in told[:-1])
    assert told[0][1]["memberCount"] == 2
    assert told[1][1]["results"] == result["results"][:2]
    assert told[4][1]["failedTools"][0]["toolName"] == "ext:break"
    house.broken = False
    again = await streamed(house, "retry", run_id=result["runId"], only=told[4][1]["failedTools"])
    assert [kind for kind, _ in again] == ["COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED", "result"]
    assert again[-1][1]["failedCount"] == 0
    ((kind, nobody),) = await streamed(house, "run", members=[])
    assert (kind, nobody["active"], nobody["results"]) == ("result", False, [])


@asynccontextmanager
async def following(house: House, **query: str) -> AsyncIterator[AsyncIterator[tuple[str, Words, str]]]:
    async with house.http.stream("GET", "/api/council/events", params=query) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "retry: 1000"  # and from now on it hears of every run
        await anext(lines)
        yield events(answer, lines)


async def test_event_streams_follow_all_chats_or_one_until_the_bus_stops(house: House) -> None:
    async with following(house) as everything, following(house, chat_id="c2") as of_c2, asyncio.timeout(WAIT_SECONDS):
        for chat in ("c1", "c2"):
            await house.run(chat_id=chat)
        told = [await anext(everything) for _ in range(2 * len(KINDS))]
        assert [kind for kind, *_ in told] == KINDS * 2
        assert [(await anext(of_c2))[1]["chatId"] for _ in KINDS] == ["c2"] * len(KINDS)
        await house.bus.stop()
        for stream in (everything, of_c2):
            assert [each async for each in stream] == []


# -- askers that go away, a bus that stops ---------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_disconnect_ends_the_run_and_cancels_its_call(house: House, accept: str) -> None:
    body = {"messages": MESSAGES, "members": [{**BOB, "tools": ["ext:nap", "ext:look"]}]}
    async with Connection(house.bus) as connection:
        await connection.ask("POST", "/api/council/run", body, Accept=accept)
        await asyncio.wait_for(house.woken.wait(), WAIT_SECONDS)
        connection.cut()
        await asyncio.wait_for(house.cancelled.wait(), WAIT_SECONDS)
    await until(lambda: house.bus.records.outcomes[Code.CANCELLED] == 1, "the record of the call")
    assert house.calls == []


async def test_a_stop_of_the_bus_ends_runs_at_once() -> None:
    async with house_of() as house:
        body = {"messages": MESSAGES, "members": [{**BOB, "tools": ["ext:nap"]}]}
        asked = asyncio.ensure_future(house.http.post("/api/council/run", json=body))
        await asyncio.wait_for(house.woken.wait(), WAIT_SECONDS)
        async with asyncio.timeout(WAIT_SECONDS):
            await house.bus.stop()
            answer = await asked
        assert answer.status_code in (200, 503)
        if answer.status_code == 200:
            assert answer.json()["results"][0]["error"] == "Extension worker stopped"


# -- bodies that break rules -----------------------------------------------------------------------------------------

DEEP: Any = {}
for _ in range(40):
    DEEP = {"x": DEEP}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"members": [{"tools": ["x"]}]}, "members[0]: it has no name: give it one"),
        ({"members": [{"name": "x", "chance": 1e400}]}, "it must be a number"),
        ({"members": [BOB] * 2}, "is the id of two members"),
        ({"members": [BOB] * (MAX_MEMBERS + 1)}, "at most 100 items"),
        ({"members": [DEEP]}, "nested deeper than 16 levels"),
        ({"members": "Bob"}, "valid list"),
        ({"members": [5]}, "valid dictionary"),
        ({"messages": ["Hello"]}, "valid dictionary"),
        ({"settings": {"timeoutMs": -1}}, "it must be a number from 0 to 300000"),
        ({"settings": {"members": []}}, "members are a field of the body"),
        ({"settings": {"plan_arguments": True}}, "the council has no model"),
        ({"settings": DEEP}, "nested deeper than 16 levels"),
        ({"attributes": {"level": 5}}, "valid string"),
        ({"user_id": "x" * 300}, "at most 256 characters"),
        ({"persona": "\ud800"}, "half of a surrogate pair"),
    ],
)
async def test_a_body_that_breaks_a_rule_is_refused_with_a_sentence(house: House, body: Any, words: str) -> None:
    for accept in ("application/json", "text/event-stream"):
        headers = {"Content-Type": "application/json", "Accept": accept}
        answer = await house.http.post("/api/council/run", content=json.dumps(body), headers=headers)
        assert answer.status_code == 422, answer.text
        assert words in " ".join(each["msg"] for each in answer.json()["detail"])
    assert house.calls == []


@pytest.mark.parametrize(
    ("body", "loc", "said"),
    [
        ({"members": [BOB, {"name": "x", "chance": 101}]}, ["body", "members", 1, "chance"], 101),
        ({"members": [{"id": "x"}]}, ["body", "members", 0, "name"], {"id": "x"}),
        ({"settings": {"toolsSettings": {"timeoutMs": -1}}}, ["body", "settings", "toolsSettings", "timeoutMs"], -1),
        ({"settings": {"mode": "loud"}}, ["body", "settings", "mode"], "loud"),
        ({"settings": {"members": []}}, ["body", "settings", "members"], []),
        ({"settings": {"plan_arguments": True}}, ["body", "settings", "plan_arguments"], True),
    ],
)
async def test_a_refusal_says_where_the_value_stands_and_what_it_was(
    house: House, body: Words, loc: list[Any], said: Any
) -> None:
    answer = await house.http.post("/api/council/run", json=body)
    assert answer.status_code == 422
    (fault,) = answer.json()["detail"]
    assert (fault["loc"], fault["input"]) == (loc, said)


async def test_a_retry_of_what_did_not_fail_gets_422_and_the_names_of_what_did(house: House) -> None:
    run = await house.run()
    pair = {"memberId": "m2", "toolName": "ext:look"}
    for only in ([], [pair], [{"memberId": "m1", "toolName": "ext:break"}, pair]):
        answer = await house.http.post("/api/council/retry", json={"run_id": run["runId"], "only": only})
        assert answer.status_code == 422
        (fault,) = answer.json()["detail"]
        assert (fault["loc"], len(fault["input"])) == (["body", "only"], len(only))
        assert fault["msg"].endswith("failed in this run: m1 ext:break")
    assert len(house.calls) == 3


async def test_unknown_keys_are_named_in_the_response(house: House) -> None:
    answer = await house.run(mesages=[], settings={"paralel": True})
    assert answer["ignored"] == ["mesages", "settings.paralel"]
    again = await house.post("retry", run_id=answer["runId"], onyl=[DEEP])
    assert again["ignored"] == ["onyl"]


async def test_a_body_has_a_limit_and_a_web_page_is_refused(house: House) -> None:
    answer = await house.http.post("/api/council/run", content=b'{"persona":"' + b"x" * (1 << 20) + b'"}')
    assert answer.status_code == 413
    for path in ("", "/tools", "/events"):
        answer = await house.http.get(f"/api/council{path}", headers={"Origin": "http://example.com"})
        assert answer.status_code == 403


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with bus_on_thread() as bus:
        yield f"http://{bus.http_address}"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
_MEMBER = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("id", "name", "itemName", "tools", "chance", "role", "toolHistoryRetention"), _JSON)
)
_SETTINGS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("mode", "timeoutMs", "toolsSettings", "parallel", "resultBytes", "members"), _JSON)
)
_BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(st.fixed_dictionaries({}, optional={"role": _JSON, "content": _JSON, "name": _JSON}))
        | _JSON,
        "members": st.lists(_MEMBER, max_size=3) | _JSON,
        "settings": _SETTINGS | _JSON,
        "attributes": _JSON,
        "regenerates": _JSON,
        "chat_id": _JSON,
    },
)


@settings(max_examples=examples(10), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(body=_BODY)
def test_whatever_is_posted_is_answered_with_a_run_or_a_refusal(address: str, body: Any) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        f"{address}/api/council/run",
        content=json.dumps(body),
        headers=headers,
        trust_env=False,
        verify=False,
        timeout=WAIT_SECONDS,
    )
    assert answer.status_code in (200, 400, 422), answer.text
    if answer.status_code == 200:
        CouncilAnswer.model_validate(answer.json(), by_name=False)
    else:
        assert answer.json()["detail"]
