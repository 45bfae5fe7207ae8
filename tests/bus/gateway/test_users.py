"""Tests that what is listed over REST can be called over REST by the same user, and nothing else can, whatever the
rules are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bus.gateway.calling import client, events, invoke
from tests.support.examples import examples
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.bus.catalog.policy import MAX_USER, AccessRules
from toolbus.bus.gateway.tool_routes import MAX_CACHED_LISTS
from toolbus.functions.tool_spec import spec_of
from toolbus.sdk import llm_tool
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLES = ("Yui", "Ran")
USERS = ("", "ann", "bob")
TOOLS = ("everywhere", "of_yui", "of_ran", "other")

_some = st.lists(st.sampled_from(["*", "ann", "bob"]), max_size=2, unique=True)
rules = st.fixed_dictionaries(
    {
        "tools": st.dictionaries(st.sampled_from(TOOLS), _some, max_size=2),
        "roles": st.dictionaries(st.sampled_from(ROLES), _some, max_size=2),
        "sources": st.dictionaries(st.sampled_from(["p", "q"]), _some, max_size=1),
    }
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0, roles=ROLES) as bus:
        for name, source, role in (
            ("everywhere", "p", None),
            ("of_yui", "p", "Yui"),
            ("of_ran", "q", "Ran"),
            ("other", "q", None),
        ):

            async def answer() -> str:
                return "done"

            bus.add_tool(spec_of(llm_tool(name=name, role=role)(answer)), source)
        yield bus


@pytest_asyncio.fixture(loop_scope="module")
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with client(bus) as http:
        yield http
    bus.dispatcher.view.permit(AccessRules())


async def callable_by(http: httpx.AsyncClient, user: str, role: str) -> list[str]:
    found = []
    for name in TOOLS:
        said = await invoke(http, name, {}, role=role, context={"user_id": user})
        if not said["is_error"]:
            found.append(name)
        else:
            assert said["error"]["code"] in ("PERMISSION_DENIED", "NOT_FOUND"), said
    return found


async def listed_for(http: httpx.AsyncClient, user: str, role: str) -> list[str]:
    answer = await http.get("/api/tools", params={"role": role, "user_id": user})
    by_role = answer.json()["tools_by_role"]
    return list(dict.fromkeys(each["name"] for tools in by_role.values() for each in tools))


@pytest.mark.hypothesis
async def test_whatever_the_rules_a_user_is_listed_what_they_can_call(bus: Bus, http: httpx.AsyncClient) -> None:
    loop = asyncio.get_running_loop()

    async def compare(tables: dict[str, Any]) -> None:
        bus.dispatcher.view.permit(AccessRules.read(tables))
        for user in USERS:
            for role in ("", *ROLES):
                may = await callable_by(http, user, role)
                asked = {"role": role, "user_id": user}
                assert sorted(await listed_for(http, user, role)) == sorted(may), (user, role)
                exported = (await http.get("/api/tools/export", params={"dialect": "openai", **asked})).json()
                assert sorted(exported["names"].values()) == sorted(may), (user, role)
                found = (await http.get("/api/tools/search", params={"q": "e", "mode": "keyword", **asked})).json()
                assert {each["name"] for each in found["results"]} == {name for name in may if "e" in name}

    @settings(max_examples=examples(5), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(tables=rules)
    def holds(tables: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(compare(tables), loop).result(WAIT_SECONDS)

    await asyncio.to_thread(holds)


async def test_a_rule_applies_at_once_to_cached_lists(bus: Bus, http: httpx.AsyncClient) -> None:
    assert "other" in await listed_for(http, "bob", "")
    bus.permit("tools", "other", ["ann"])
    assert "other" not in await listed_for(http, "bob", "")
    assert "other" in await listed_for(http, "ann", "")
    bus.permit("tools", "other", None)
    assert "other" in await listed_for(http, "bob", "")


async def test_many_users_are_each_answered_with_their_own_list(bus: Bus, http: httpx.AsyncClient) -> None:
    bus.permit("tools", "other", [f"u{number}" for number in range(0, MAX_CACHED_LISTS * 2, 2)])
    for number in range(MAX_CACHED_LISTS + 3):
        assert ("other" in await listed_for(http, f"u{number}", "Ran")) == (number % 2 == 0)


async def test_an_event_stream_shows_what_a_call_without_a_user_may_reach(bus: Bus, http: httpx.AsyncClient) -> None:
    bus.permit("tools", "other", ["ann"])
    async with http.stream("GET", "/api/tools/events") as answer:
        stream = events(answer)
        async with asyncio.timeout(WAIT_SECONDS):
            first = (await anext(stream))[1]
            assert sorted(each["name"] for each in first["added"]) == ["everywhere", "of_ran", "of_yui"]
            bus.permit("tools", "other", None)
            assert [each["name"] for each in (await anext(stream))[1]["added"]] == ["other"]
            bus.permit("sources", "q", [])
            gone = (await anext(stream))[1]["removed"]
            assert sorted(each["name"] for each in gone) == ["of_ran", "other"]


@pytest.mark.parametrize(
    "path",
    ["/api/tools", "/api/tools/export?dialect=mcp", "/api/tools/search?q=a", "/api/tasks", "/api/tasks/t"],
)
async def test_a_user_whom_no_rule_can_name_is_refused(http: httpx.AsyncClient, path: str) -> None:
    for longer, status in ((0, {200, 404}), (1, {422})):
        answer = await http.get(path, params={**httpx.URL(path).params, "user_id": "u" * (MAX_USER + longer)})
        assert answer.status_code in status, answer.text
    assert answer.json()["detail"][0]["loc"] == ["query", "user_id"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/tools/export?dialect=openai"),
        ("GET", "/api/tools/search?q=a"),
        ("GET", "/api/tasks"),
        ("GET", "/api/tasks/events"),
        ("GET", "/api/tasks/t"),
        ("GET", "/api/tasks/t/await"),
        ("DELETE", "/api/tasks/t"),
        ("POST", "/api/tasks/t/redirect"),
        ("GET", "/api/calls"),
    ],
)
async def test_a_web_page_is_refused_everywhere(http: httpx.AsyncClient, method: str, path: str) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        answer = await http.request(method, path, headers=headers, content=b"{}")
        assert answer.status_code == 403, answer.text
