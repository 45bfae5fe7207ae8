from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.core_model import PeerDouble, offered, tool
from toolbus.bus.catalog.registry import Registry
from toolbus.parts.moving.upstream.plan import UpstreamPlan, make_plan
from toolbus.protocol.tool import Tool

BASE, UPSTREAM = "http://127.0.0.1:48916", "http://127.0.0.1:48911"


def plan(registry: Registry, upstream: str = UPSTREAM) -> UpstreamPlan:
    listings = [item for role in registry.roles for item in registry.listings(role, include_offline=True)]
    return make_plan(sorted(listings, key=lambda item: item.entry.place), BASE, upstream)


def offers(registry: Registry, source: str, *tools: Tool, qualified: bool = False) -> PeerDouble:
    handler = PeerDouble(source)
    registry.register(handler, offered(*tools), qualified=qualified)
    return handler


def body(made: UpstreamPlan, name: str, role: str | None = None) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(made.tools[name, role].body(role, "bus-1"))
    return parsed


def test_a_tool_is_registered_with_its_schema_its_description_and_the_name_of_the_bus() -> None:
    registry = Registry()
    schema = '{"type":"object","properties":{"n":{"type":"integer","maximum":123456789012345678901234567890}}}'
    offers(registry, "weather", Tool("ask", "the weather – 天气", schema))
    assert body(plan(registry), "ask") == {
        "name": "ask",
        "description": "the weather – 天气",
        "parameters": json.loads(schema),
        "callback_url": f"{BASE}/api/llm-tools/callback/weather/ask",
        "role": None,
        "source": "plugin:weather",
        "timeout_seconds": 32.0,
        "via": ["bus-1"],
    }


def test_the_schema_crosses_byte_for_byte() -> None:
    registry = Registry()
    text = '{ "type":"object", "x": 1E40, "big": 12345678901234567890123 }'
    offers(registry, "s", tool("t", parameters_json=text))
    assert text.encode() in plan(registry).tools["t", None].body(None, "b")


@pytest.mark.parametrize(
    ("source", "theirs", "part"),
    [
        ("weather", "plugin:weather", "weather"),
        ("plugin:weather", "plugin:weather", "weather"),
        ("a:b", "plugin:a:b", "a%3Ab"),
        ("wetter/天", "plugin:wetter/天", "wetter%2F%E5%A4%A9"),
    ],
)
def test_the_prefix_of_a_source_is_set_once_and_never_doubled(source: str, theirs: str, part: str) -> None:
    registry = Registry()
    offers(registry, source, tool("t"))
    made = body(plan(registry), "t")
    assert (made["source"], made["callback_url"]) == (theirs, f"{BASE}/api/llm-tools/callback/{part}/t")


@pytest.mark.parametrize(("own", "theirs"), [(0.0, 32.0), (1.5, 3.5), (298.0, 300.0), (299.0, 300.0), (300.0, 300.0)])
def test_the_other_side_waits_longer_than_our_own_limit_but_never_more_than_its_own(own: float, theirs: float) -> None:
    registry = Registry()
    offers(registry, "s", tool("t", timeout_seconds=own))
    assert body(plan(registry), "t")["timeout_seconds"] == theirs  # REST-53: our error arrives, not an empty timeout


def test_a_name_of_a_rest_tool_stays_as_it_is_and_is_quoted_in_the_url() -> None:
    registry = Registry()
    offers(registry, "s", tool("天 气/now"))
    made = body(plan(registry), "天 气/now")
    assert made["callback_url"].endswith("/s/%E5%A4%A9%20%E6%B0%94%2Fnow")


def test_a_qualified_name_is_spelled_as_model_providers_take_it() -> None:
    registry = Registry()
    offers(registry, "plugin:a", tool("t"), qualified=True)
    made = body(plan(registry), "plugin_a_t")
    assert made["callback_url"] == f"{BASE}/api/llm-tools/callback/a/t"


def test_a_name_that_two_tools_would_have_goes_to_the_one_that_has_it_already() -> None:
    registry = Registry()
    offers(registry, "a", tool("t"), qualified=True)
    offers(registry, "b", tool("a_t"))
    made = plan(registry)
    assert made.tools["a_t", None].source == "plugin:b"
    ((entry, why),) = made.refused.items()
    assert (entry.name, "which 'a_t' has" in why) == ("a:t", True)


def test_a_name_too_long_for_the_other_side_refuses_that_tool_only() -> None:
    registry = Registry()
    offers(registry, "s" * 40, tool("t" * 40), tool("u"), qualified=True)
    made = plan(registry)
    assert list(made.tools) == [("s" * 40 + "_u", None)]
    (why,) = made.refused.values()
    assert "81 characters of at most 64" in why


@pytest.mark.parametrize(("source", "name"), [("", "t"), ("plugin:", "t"), ("..", "t"), ("s", "."), ("s", "..")])
def test_what_cannot_stand_in_a_url_is_refused_with_the_reason(source: str, name: str) -> None:
    registry = Registry()
    offers(registry, source, tool(name))
    made = plan(registry)
    assert not made.tools
    assert "cannot stand in a callback URL" in next(iter(made.refused.values()))


def test_the_buss_own_tools_and_suspended_ones_are_not_sent_and_offline_ones_are() -> None:
    registry = Registry()
    offers(registry, "toolbus", tool("drain"), qualified=True)
    lost = offers(registry, "s", tool("offline"))
    registry.lose(lost, "broke", 0.0)
    away = offers(registry, "w", tool("away"))
    registry.suspend([away], "no answer")
    assert list(plan(registry).tools) == [("offline", None)]


@pytest.mark.parametrize(
    "callback",
    ["http://127.0.0.1:48911/x", "http://localhost:48911/x", "http://[::1]:48911/", "http://u:p@LOCALHOST:48911/"],
)
def test_a_tool_that_the_upstream_serves_is_never_sent_back(callback: str) -> None:
    registry = Registry()
    offers(registry, "s", tool("t", callback_url=callback), tool("u", callback_url="http://127.0.0.1:48912/x"))
    for upstream in ("http://127.0.0.1:48911", "http://localhost:48911", "http://[::1]:48911"):
        assert list(plan(registry, upstream).tools) == [("u", None)]


@pytest.mark.parametrize(
    ("metadata", "sent"),
    [('{"via": ["b2"]}', False), ('{"via": []}', True), ('["via"]', True), ('{"via', True), ('{"x": "via"}', True)],
)
def test_a_tool_that_another_bus_registered_goes_no_further(metadata: str, sent: bool) -> None:
    registry = Registry()
    offers(registry, "s", tool("t", metadata_json=metadata))
    assert bool(plan(registry).tools) is sent


def test_a_tool_of_two_roles_is_registered_for_both_though_its_schema_is_one() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "s", tool("t", role="r1"), tool("t", role="r2"))
    assert list(plan(registry).tools) == [("t", "r1"), ("t", "r2")]


def test_a_tool_for_one_role_says_so_in_its_url_since_its_source_may_have_several_of_the_name() -> None:
    registry = Registry(("r1", "猫"))
    offers(registry, "s", tool("t", role="r1"), tool("t", role="猫"), tool("u"))
    made = plan(registry)
    urls = [body(made, *key)["callback_url"].removeprefix(f"{BASE}/api/llm-tools/callback/") for key in made.tools]
    assert urls == ["s/t?role=r1", "s/t?role=%E7%8C%AB", "s/u"]


def test_what_is_for_all_roles_goes_before_what_is_for_one() -> None:
    registry = Registry(("r1", "r2"))
    offers(registry, "a", tool("t"))
    offers(registry, "b", tool("t", role="r1"))
    made = plan(registry)
    assert [item.source for item in made.by_name["t"].values()] == ["plugin:a", "plugin:b"]
    assert made.tools["t", None].entries == [registry.find("t", "r2")]
