"""Tests deferred mode: search and injection of tools in one conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.search_catalog import CATALOG, INDEX, names, tool
from toolbus.parts.models.loop.loop_tools import DeferredTools, injection_tool
from toolbus.parts.models.search import REQUEST_TOOL_INJECTION, SEARCH_TOOLS, IndexCache, search_tool
from toolbus.protocol.tool import Result, Tool

# -- deferred: what is offered ---------------------------------------------------------------------------------------

META = [SEARCH_TOOLS, REQUEST_TOOL_INJECTION]


def _deferred(pinned: Any = (), *, cache: IndexCache | None = None) -> DeferredTools:
    """Searches by words, also where the extra `semantic` is installed."""
    return DeferredTools(pinned, cache=cache or IndexCache(False))


def offered(deferred: DeferredTools, tools: Sequence[Tool] = CATALOG) -> list[str]:
    return [each.name for each in deferred.offered(tools)]


def inject(deferred: DeferredTools, *names: str) -> Any:
    return deferred.inject({"names": [*names]}).output


def test_a_conversation_starts_with_the_two_tools_and_the_pinned_ones_in_the_order_of_the_catalog() -> None:
    assert offered(_deferred()) == META
    assert offered(_deferred(["send_email", "get_weather", "not_there"])) == [*META, "get_weather", "send_email"]


def test_injected_tools_come_last_in_the_order_of_the_requests_so_the_prefix_stays() -> None:
    deferred = _deferred(["send_email"])
    seen = [offered(deferred)]
    for name in ("yotei", "get_weather", "kensaku"):
        inject(deferred, name)
        seen.append(offered(deferred))
    assert seen[-1] == [*META, "send_email", "yotei", "get_weather", "kensaku"]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(seen))
    assert deferred.injected == ("yotei", "get_weather", "kensaku")


def test_a_tool_that_comes_back_to_the_catalog_has_its_place_again() -> None:
    deferred = _deferred()
    offered(deferred)
    inject(deferred, "yotei", "kensaku")
    without = [each for each in CATALOG if each.name != "yotei"]
    assert offered(deferred, without) == [*META, "kensaku"]
    assert list(inject(deferred, "yotei")["unknown"]) == ["yotei"]
    assert offered(deferred) == [*META, "yotei", "kensaku"]


def test_a_changed_tool_is_offered_and_found_with_its_new_declaration() -> None:
    deferred = _deferred(["get_weather"])
    offered(deferred)
    assert names(deferred.search({"query": "volcano"}).output) == []
    changed = tool("get_weather", "Erupting volcanoes.")
    assert deferred.offered([changed, *CATALOG[1:]])[2:] == [changed]
    assert names(deferred.search({"query": "volcano"}).output) == ["get_weather"]


def test_a_tool_with_the_name_of_one_of_the_two_does_not_replace_it() -> None:
    deferred = _deferred([SEARCH_TOOLS])
    tools = deferred.offered([tool(SEARCH_TOOLS, "An impostor."), *CATALOG])
    assert tools == [search_tool(), injection_tool()]
    assert names(deferred.search({"query": "impostor"}).output) == []
    assert inject(deferred, SEARCH_TOOLS)["already_offered"] == [SEARCH_TOOLS]


def test_conversations_share_the_index_of_a_catalog_but_not_injected_tools() -> None:
    cache = IndexCache(False)
    first, second = _deferred(cache=cache), _deferred(cache=cache)
    for each in (first, second):
        offered(each)
        assert names(each.search({"query": "github"}).output) == ["repo_issues"]
    inject(first, "yotei")
    assert (offered(first), offered(second)) == ([*META, "yotei"], META)
    assert len(cache._indexes) == 1


# -- deferred: answers -----------------------------------------------------------------------------------------------


def refusal(result: Result) -> str:
    assert result.is_error
    output = result.output
    assert output["success"] is False
    assert isinstance(output["error"], str)
    return output["error"]


def test_a_search_is_answered_with_the_index_s_own_answer() -> None:
    deferred = _deferred()
    offered(deferred)
    arguments = {"query": "weather", "mode": "keyword", "top_k": 1, "include_parameters": True}
    result = deferred.search(arguments)
    assert not result.is_error
    assert result.output == INDEX.search("weather", mode="keyword", top_k=1, include_parameters=True)
    assert deferred.search(json.dumps(arguments)) == result
    assert "天气" in deferred.search({"query": "天气"}).output_json


def test_null_counts_as_missing_and_a_whole_float_as_an_integer() -> None:
    deferred = _deferred()
    offered(deferred)
    nulls = {"query": "weather", "mode": None, "top_k": 1.0, "include_parameters": None, "unheard_of": 1}
    assert deferred.search(nulls).output == INDEX.search("weather", top_k=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"query": 5}, "query is 5, it must be a string"),
        ({"query": "a", "mode": ["x"]}, "mode is ['x'], it must be one of bm25"),
        ({"query": "a", "mode": "fuzzy"}, "mode is 'fuzzy', it must be one of bm25"),
        ({"query": "a", "top_k": "ten"}, "top_k is 'ten', it must be an integer from 1 to 50"),
        ({"query": "a", "top_k": True}, "top_k is True, it must be an integer"),
        ({"query": "a", "top_k": float("inf")}, "top_k is inf, it must be an integer"),
        ({"query": "a", "include_parameters": "yes"}, "include_parameters is 'yes', it must be true or false"),
        ("{broken", "the arguments are not JSON"),
        ("[" * 100_000, "the arguments are not JSON"),
        ("[1]", "the arguments are [1], they must be one JSON object"),
    ],
)
def test_invalid_arguments_of_a_search_are_refused_with_value_rule_and_fix(arguments: Any, sentence: str) -> None:
    assert refusal(_deferred().search(arguments)).startswith(sentence)


def test_a_search_without_a_query_finds_nothing() -> None:
    assert _deferred().search("").output["result_count"] == 0


def test_injected_tools_are_distinguished_from_tools_that_were_offered_already() -> None:
    deferred = _deferred(["send_email"])
    offered(deferred)
    assert inject(deferred, "yotei", "yotei", "send_email", SEARCH_TOOLS) == {
        "success": True,
        "injected": ["yotei"],
        "already_offered": ["send_email", SEARCH_TOOLS],
        "unknown": {},
    }
    assert inject(deferred, "yotei")["already_offered"] == ["yotei"]
    assert deferred.inject('{"names": "kensaku"}').output["injected"] == ["kensaku"]


def test_unknown_names_get_similar_names_and_the_others_are_injected() -> None:
    deferred = _deferred()
    offered(deferred)
    answer = inject(deferred, "yotei", "get_wether", "email", "qqqq")
    assert (answer["success"], answer["injected"]) == (True, ["yotei"])
    assert answer["unknown"]["get_wether"][0] == "get_weather"
    assert answer["unknown"]["email"] == ["send_email"]
    assert answer["unknown"]["qqqq"] == []
    assert offered(deferred) == [*META, "yotei"]


def test_only_the_first_five_unknown_names_get_similar_names() -> None:
    deferred = _deferred()
    offered(deferred)
    unknown = inject(deferred, *(f"get_wether{number}" for number in range(20)))["unknown"]
    assert [bool(near) for near in unknown.values()] == [True] * 5 + [False] * 15


def test_only_unknown_names_are_an_error() -> None:
    deferred = _deferred()
    offered(deferred)
    result = deferred.inject({"names": ["get_wether", "\ud800" * 9000]})
    assert "no tool has such a name" in refusal(result)
    assert len(result.output_json.encode()) < 2000
    assert offered(deferred) == META


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "names is missing: give a list of tool names"),
        ({"names": None}, "names is missing: give a list of tool names"),
        ({"names": []}, "names is [], it must be a list of tool names"),
        ({"names": [5]}, "names is [5], it must be a list of tool names"),
        ({"names": {"a": 1}}, "names is {'a': 1}, it must be a list of tool names"),
        ({"names": [f"tool_{n}" for n in range(21)]}, "names has 21 names, at most 20 are added at once"),
        ("null", "the arguments are None, they must be one JSON object"),
    ],
)
def test_invalid_arguments_of_an_injection_are_refused_and_change_nothing(arguments: Any, sentence: str) -> None:
    deferred = _deferred()
    offered(deferred)
    assert refusal(deferred.inject(arguments)).startswith(sentence)
    assert offered(deferred) == META


def test_twenty_names_are_injected_at_once() -> None:
    tools = [tool(f"tool_{number}") for number in range(20)]
    deferred = _deferred()
    offered(deferred, tools)
    assert len(inject(deferred, *(each.name for each in tools))["injected"]) == 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["query", "mode", "top_k", "include_parameters", "names"])


@given(st.dictionaries(FIELDS, JSON) | JSON)
def test_whatever_a_model_writes_both_tools_answer_with_an_object(arguments: Any) -> None:
    deferred = _deferred(["get_weather"])
    offered(deferred)
    for result in (deferred.search(arguments), deferred.inject(arguments)):
        assert result.is_error is not result.output["success"]
        result.output_json.encode()


# -- declarations ----------------------------------------------------------------------------------------------------


def test_the_two_declarations_say_when_to_call_them_and_name_each_other() -> None:
    for declared, other in ((search_tool(), REQUEST_TOOL_INJECTION), (injection_tool(), SEARCH_TOOLS)):
        assert "Call this" in declared.description
        assert "Do NOT call it" in declared.description
        assert other in declared.description
    assert search_tool().parameters["properties"].keys() == {"query", "mode", "top_k", "include_parameters"}
    assert injection_tool().parameters["required"] == ["names"]
