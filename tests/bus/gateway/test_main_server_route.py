"""POST /api/llm-tools/callback/…: the bus as the plugin host that a main server knows (REST-50 to REST-52)."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.bus.gateway.calling import Connection, client, legacy_plugin
from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.errors import Code
from toolbus.sdk import Plugin, Reply, ToolScope, image, text
from toolbus.testing import running_bus

Envelope = dict[str, Any]


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", roles=("Yui", "Ran"), grace_seconds=WAIT_SECONDS) as bus:
        yield bus


@pytest.fixture
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus) as http:
        yield http


def _path(plugin_id: str, name: str) -> str:
    return f"/api/llm-tools/callback/{quote(plugin_id, safe='')}/{quote(name, safe='')}"


async def _post(
    http: httpx.AsyncClient, plugin_id: str, name: str, arguments: Any = None, call_id: Any = "call_1"
) -> Envelope:
    """Calls as a main server does (REST-40)."""
    body = {"name": name, "arguments": arguments or {}, "call_id": call_id, "raw_arguments": json.dumps(arguments)}
    answer = await http.post(_path(plugin_id, name), content=json.dumps(body))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    said: Envelope = answer.json()
    assert list(said) == ["output", "is_error", *(["error"] if said["is_error"] else [])]
    return said


class CityUnknown(Exception):
    """Raised by a tool."""


async def test_every_way_in_which_a_tool_ends_has_its_envelope(bus: Bus, http: httpx.AsyncClient) -> None:
    async with Plugin("plugin:weather", address=bus.grpc_addresses[0]) as plugin:

        @plugin.tool
        def value(value: Any = None) -> Any:
            return value

        @plugin.tool
        def typed(days: int) -> int:
            return days

        @plugin.tool
        def refuses() -> dict[str, Any]:
            return {"output": {"tried": 5.0}, "is_error": True, "error": "NO_SUCH_CITY"}

        @plugin.tool
        def only_says_so() -> dict[str, Any]:
            return {"is_error": True, "error": "NO_SUCH_CITY"}

        @plugin.tool
        def raises() -> None:
            raise CityUnknown("no city 東京 here")

        @plugin.tool
        def raises_in_silence() -> None:
            raise CityUnknown

        @plugin.tool(timeout=0.05)
        async def slow() -> None:
            await asyncio.Event().wait()

        await plugin.ready()
        values: list[Any] = [5, 5.0, 10**30, "東京", None, [], {"a": 1}]
        for each in values:
            said = await _post(http, "weather", "value", {"value": each})
            assert repr(said) == repr({"output": each, "is_error": False})
        own = {"output": [1], "is_error": False}
        assert await _post(http, "weather", "value", {"value": own}) == own
        said = await _post(http, "weather", "refuses")
        assert repr(said) == repr({"output": {"tried": 5.0}, "is_error": True, "error": "NO_SUCH_CITY"})
        said = await _post(http, "weather", "only_says_so")
        assert said == {"output": {"error": "NO_SUCH_CITY"}, "is_error": True, "error": "NO_SUCH_CITY"}
        said = await _post(http, "weather", "raises")
        assert said == {"output": {"error": "no city 東京 here"}, "is_error": True, "error": "CityUnknown"}
        said = await _post(http, "weather", "raises_in_silence")
        assert said == {"output": {"error": "CityUnknown"}, "is_error": True, "error": "CityUnknown"}
        said = await _post(http, "weather", "slow")
        assert (said["error"], list(said["output"])) == ("TOOL_TIMEOUT", ["error"])
        assert "0.05" in said["output"]["error"]
        said = await _post(http, "weather", "nothing")
        assert said["error"] == "TOOL_NOT_REGISTERED"
        assert "'nothing'" in said["output"]["error"]
        assert (await _post(http, "weather", "typed", {"days": "two"}))["error"] == "INVALID_ARGUMENTS"


async def test_pictures_of_a_tool_reach_the_main_server(bus: Bus, http: httpx.AsyncClient) -> None:
    async with Plugin("plugin:camera", address=bus.grpc_addresses[0]) as plugin:

        @plugin.tool
        def shoot(kind: str) -> Any:
            if kind == "reply":
                return Reply(output=7, content=[text("Look."), image(b"png", "image/png")])
            if kind == "content":
                return [text("Look."), image(b"png", "image/png")]
            return {"output": 7, "images": [{"data_b64": "cG5n", "mime": "image/png", "vision_prompt": "Look."}]}

        await plugin.ready()
        picture = {"data_b64": "cG5n", "mime": "image/png"}
        for kind in ("reply", "dict", "content"):
            body = {"name": "shoot", "arguments": {"kind": kind}, "call_id": "c", "raw_arguments": ""}
            answer = (await http.post(_path("camera", "shoot"), json=body)).json()
            output, images = ("Look.", [picture]) if kind == "content" else (7, [picture | {"vision_prompt": "Look."}])
            assert answer == {"output": output, "is_error": False, "images": images}


async def test_an_absent_plugin_is_not_running_for_whatever_reason(bus: Bus, http: httpx.AsyncClient) -> None:
    assert (await _post(http, "never", "seen"))["error"] == "PLUGIN_NOT_RUNNING"
    peer = RawPeer(bus.grpc_addresses[0], answer=echo)
    peer.open()
    await peer.attach("plugin:flaky", tool("flaky"))
    assert not (await _post(http, "flaky", "flaky"))["is_error"]
    peer.answer = lambda call: None
    running = asyncio.create_task(_post(http, "flaky", "flaky"))
    await peer.received(2)
    await peer.close()  # without a drain
    assert (await running)["error"] == "PLUGIN_NOT_RUNNING"
    said = await _post(http, "flaky", "flaky")  # offline, in its grace period
    assert said["error"] == "PLUGIN_NOT_RUNNING"
    assert "'flaky' is not running (" in said["output"]["error"]
    async with Plugin("plugin:polite", address=bus.grpc_addresses[0]) as plugin:
        plugin.add_tool(lambda: 1, name="polite")
        await plugin.ready()
        assert (await _post(http, "polite", "polite"))["output"] == 1
    assert (await _post(http, "polite", "polite"))["error"] == "PLUGIN_NOT_RUNNING"
    assert bus.list() == []


@pytest.mark.parametrize(
    ("arguments", "raw", "words"),
    [
        ({"_raw": "{bad"}, "{bad", "arguments are not JSON"),
        ({"value": [1]}, "[1]", "must be a JSON object"),
        ({}, "", "'city' is a required property"),
    ],
)
async def test_arguments_that_are_no_object_are_refused_for_that(
    bus: Bus, http: httpx.AsyncClient, arguments: Envelope, raw: str, words: str
) -> None:
    async with Plugin("plugin:weather", address=bus.grpc_addresses[0]) as plugin:

        @plugin.tool
        def forecast(city: str) -> str:
            return city

        await plugin.ready()
        body = {"name": "forecast", "arguments": arguments, "call_id": "c", "raw_arguments": raw}
        said = (await http.post(_path("weather", "forecast"), json=body)).json()
        assert said["error"] == "INVALID_ARGUMENTS"
        assert words in said["output"]["error"].replace('"', "'")


async def test_a_tool_is_told_a_role_only_where_one_was_chosen(bus: Bus, http: httpx.AsyncClient) -> None:
    async with Plugin("plugin:weather", address=bus.grpc_addresses[0]) as plugin:

        @plugin.tool
        def role(scope: ToolScope) -> str:
            return scope.role

        await plugin.ready()
        assert (await _post(http, "weather", "role"))["output"] == ""


async def test_a_plugin_without_tools_is_running_all_the_same(bus: Bus, http: httpx.AsyncClient) -> None:
    async with RawPeer(bus.grpc_addresses[0]) as peer:
        peer.open()
        await peer.attach("plugin:bare")
        assert (await _post(http, "bare", "any"))["error"] == "TOOL_NOT_REGISTERED"


async def test_a_body_that_is_not_an_object_is_a_422_and_odd_fields_are_not(bus: Bus, http: httpx.AsyncClient) -> None:
    @bus.tool
    def count(value: int = 0) -> int:
        return value

    for body in ("[]", "5", '"x"', "null", "{half", ""):
        answer = await http.post(_path("local", "count"), content=body)
        assert answer.status_code == 422, body
    odd: list[Any] = [None, [], "x", 5, True]
    for arguments in odd:
        sent = {"name": 7, "arguments": arguments, "call_id": arguments, "raw_arguments": []}
        answer = await http.post(_path("local", "count"), json=sent)
        assert (answer.status_code, answer.json()) == (200, {"output": 0, "is_error": False})
    assert (await http.post(_path("local", "count"), content="{}")).json() == {"output": 0, "is_error": False}


async def test_names_of_any_kind_reach_their_tools(bus: Bus, http: httpx.AsyncClient) -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        return json.dumps({"output": body["name"]}).encode()

    names = ["天気 を/調べる", "a/b/c", "a b", "100%", "50%25", "?x=1#y", "a;b", "ünï"]
    async with legacy_plugin(answer) as url:
        for source, plugin_id in (("plugin:日本 plugin", "日本 plugin"), ("bare source", "bare source")):
            for name in names:
                body = {"name": name, "callback_url": url, "source": source, "role": "Yui"}
                assert (await http.post("/api/tools/register", json=body)).json()["ok"]
                assert await _post(http, plugin_id, name) == {"output": name, "is_error": False}


async def test_both_spellings_of_a_source_are_found_and_no_other_sources_tool_is_run(
    bus: Bus, http: httpx.AsyncClient
) -> None:
    async with (
        Plugin("plugin:one", address=bus.grpc_addresses[0]) as one,
        Plugin("two", address=bus.grpc_addresses[0]) as two,
        Plugin("plugin:plugin:three", address=bus.grpc_addresses[0]) as three,
    ):
        for plugin, name in ((one, "ones"), (two, "twos"), (three, "threes")):
            plugin.add_tool(lambda name=name: name, name=name, parameters={"type": "object"})
            await plugin.ready()
        assert (await _post(http, "one", "ones"))["output"] == "ones"
        assert (await _post(http, "plugin:one", "ones"))["output"] == "ones"
        assert (await _post(http, "two", "twos"))["output"] == "twos"
        assert (await _post(http, "plugin:three", "threes"))["output"] == "threes"
        assert (await _post(http, "one", "twos"))["error"] == "TOOL_NOT_REGISTERED"
        assert (await _post(http, "three", "threes"))["error"] == "PLUGIN_NOT_RUNNING"
        assert (await _post(http, "toolbus", "drain"))["is_error"]
        assert (await _post(http, "toolbus", "toolbus:drain"))["is_error"]
        assert (await _post(http, "local", "ones"))["error"] == "PLUGIN_NOT_RUNNING"


async def test_qualified_tools_answer_to_their_bare_name_if_others_have_it(bus: Bus, http: httpx.AsyncClient) -> None:
    @bus.tool(name="shared")  # type: ignore[untyped-decorator]
    def mine() -> str:
        return "local"

    async with Plugin("plugin:q", address=bus.grpc_addresses[0], qualified=True) as plugin:
        plugin.add_tool(lambda: "qualified", name="shared")
        await plugin.ready()
        assert "plugin:q:shared" in [each.tool.name for each in bus.list()]
        assert (await _post(http, "q", "shared"))["output"] == "qualified"
        assert (await _post(http, "local", "shared"))["output"] == "local"


async def test_a_tool_that_has_a_namesake_in_another_role_runs_where_it_is(bus: Bus, http: httpx.AsyncClient) -> None:
    async with (
        Plugin("plugin:yui", address=bus.grpc_addresses[0]) as yui,
        Plugin("plugin:ran", address=bus.grpc_addresses[0]) as ran,
    ):
        yui.add_tool(lambda: "yui's", name="both")
        yui.add_tool(lambda: "in both", name="same")
        await yui.ready()
        ran.add_tool(lambda: "ran's", name="both", role="Ran")
        await ran.ready()
        for _ in range(2):
            assert (await _post(http, "yui", "both"))["output"] == "yui's"
            assert (await _post(http, "ran", "both"))["output"] == "ran's"
            assert (await _post(http, "yui", "same"))["output"] == "in both"


async def test_the_same_call_id_at_once_is_two_calls_and_the_records_show_it(bus: Bus, http: httpx.AsyncClient) -> None:
    both = asyncio.Barrier(3)
    seen: list[str] = []
    async with (
        Plugin("plugin:a", address=bus.grpc_addresses[0]) as a,
        Plugin("plugin:b", address=bus.grpc_addresses[0]) as b,
    ):

        async def meet(scope: ToolScope) -> str:
            seen.append(scope.call_id)
            async with asyncio.timeout(WAIT_SECONDS), both:
                return "met"

        for plugin in (a, b):
            plugin.add_tool(meet, name=f"meet_{plugin.source[-1]}")
            await plugin.ready()
        asked = [("a", "meet_a"), ("a", "meet_a"), ("b", "meet_b")]
        said = await asyncio.gather(*(_post(http, *each, call_id="main-7") for each in asked))
        assert said == [{"output": "met", "is_error": False}] * 3
    assert [(record.call_id, record.caller) for record in bus.records] == [("main-7", "http")] * 3
    assert len({*seen}) == 3  # towards a plugin the bus has ids of its own


async def test_a_main_server_that_disconnects_cancels_its_call(bus: Bus) -> None:
    async with RawPeer(bus.grpc_addresses[0]) as peer, Connection(bus) as connection:
        peer.open()
        await peer.attach("plugin:naps", tool("nap"))
        await connection.ask("POST", "/api/llm-tools/callback/naps/nap", {"arguments": {}, "call_id": "c"})
        await peer.received(1)
        connection.cut()
        await until(lambda: peer.cancels, "the cancel")
        assert bus.records.outcomes[Code.CANCELLED] == 1


async def test_a_plugin_that_stops_is_cleared_and_not_running_from_then_on(bus: Bus, http: httpx.AsyncClient) -> None:
    async def answer(body: dict[str, Any]) -> bytes:
        return b'"here"'

    async with legacy_plugin(answer) as url:
        await http.post("/api/tools/register", json={"name": "t", "callback_url": url, "source": "plugin:old"})
        assert (await _post(http, "old", "t"))["output"] == "here"
        await http.post("/api/tools/clear", json={"source": "plugin:old"})
        assert (await _post(http, "old", "t"))["error"] == "PLUGIN_NOT_RUNNING"


async def test_of_a_sources_tools_of_one_name_the_one_for_the_role_in_the_url_runs(
    bus: Bus, http: httpx.AsyncClient
) -> None:
    def offer(role: str | None) -> None:
        bus.tool(lambda: role or "all", name="t", role=role)

    offer(None)
    offer("Yui")  # whose place comes first

    async def ran(query: str) -> Any:
        return (await http.post(f"{_path('local', 't')}{query}", json={})).json()["output"]

    assert [await ran(query) for query in ("", "?role=", "?role=Yui")] == ["all", "all", "Yui"]


async def test_a_tool_that_requires_an_access_level_is_hidden(bus: Bus, http: httpx.AsyncClient) -> None:
    async with Plugin("plugin:one", address=bus.grpc_addresses[0]) as one:
        one.add_tool(lambda: "", name="hidden", parameters={"type": "object"}, min_level=5)
        await one.ready()
        hidden, unknown = await _post(http, "one", "hidden"), await _post(http, "one", "nobody")
        assert hidden["error"] == "TOOL_NOT_REGISTERED"
        assert json.dumps(hidden).replace("hidden", "nobody") == json.dumps(unknown)
