"""Tests the search index of a catalog and its cache."""

from __future__ import annotations

import gc
import json
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.search_catalog import CATALOG, INDEX, concepts, names, tool
from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.models.embeddings import Embeddings
from toolbus.parts.models.search import (
    MAX_INDEXES,
    MEANING_MODES,
    MODES,
    WORD_MODES,
    IndexCache,
    ToolIndex,
    search_tool,
)
from toolbus.protocol.tool import Tool

MEANING = ToolIndex(CATALOG, embeddings=Embeddings(concepts))
KEYS = {"success", "mode", "fallback", "query", "result_count", "results"}


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("get_weather", "get_weather"),
        ("getWeather", "get_weather"),
        ("GETWEATHER", "get_weather"),
        ("get weather forecast", "getWeatherForecast"),
        ("weather.forecast", "getWeatherForecast"),
        ("today", "calendar.today"),
        ("calendar.today", "calendar.today"),
        ("notes find", "notes:find"),
        ("notes:find", "notes:find"),
        ("searching for a flight", "search_flights"),
        ("github", "repo_issues"),
        ("GitHub", "repo_issues"),
        ("emails", "send_email"),
        ("how can I send an email to my boss?", "send_email"),
        ("ｇｅｔ＿ｗｅａｔｈｅｒ", "get_weather"),
        ("fahrenheit", "get_weather"),
        ("recipients", "send_email"),
    ],
)
def test_a_name_a_word_and_a_sentence_find_their_tool_first(query: str, best: str) -> None:
    assert names(INDEX.search(query))[0] == best


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("天气", ["查询天气"]),
        ("明天的天气怎么样", ["查询天气"]),
        ("音乐", ["播放音乐"]),
        ("歌", ["播放音乐"]),
        ("予定", ["yotei"]),
        ("カレンダー", ["yotei"]),
        ("ｶﾚﾝﾀﾞｰ", ["yotei"]),
        ("検索したい", ["kensaku"]),
        ("날씨", ["nalssi"]),
        ("東京", []),
    ],
)
def test_chinese_japanese_and_korean_queries_find_their_tools_and_no_others(query: str, expected: list[str]) -> None:
    assert names(INDEX.search(query)) == expected


def test_a_word_in_the_name_counts_more_than_in_the_description_and_that_more_than_in_a_parameter() -> None:
    index = ToolIndex(
        [
            tool("one", "Does this and that.", invoice="which"),
            tool("two", "Prints an invoice now."),
            tool("invoice", "Does this and that."),
            *(tool(f"other_{number}", "Does something else.") for number in range(20)),
        ]
    )
    assert names(index.search("invoice")) == ["invoice", "two", "one"]


def test_parameters_are_found_at_any_depth_by_name_and_by_description() -> None:
    inner = {"type": "object", "properties": {"postalCode": {"description": "of the parcel"}}}
    schema = {"properties": {"a": {"anyOf": [{"items": {"$ref": "#/$defs/x"}}]}}, "$defs": {"x": inner}}
    index = ToolIndex([Tool("ship", "", json.dumps(schema)), tool("other")])
    assert names(index.search("postal")) == names(index.search("parcels")) == ["ship"]


def test_a_property_that_is_called_description_or_properties_does_no_harm() -> None:
    schema = {"properties": {"description": {"type": "string"}, "properties": {"type": "array"}}, "description": 5}
    index = ToolIndex([Tool("odd", "", json.dumps(schema))])
    assert index.search("properties")["result_count"] == 1


def test_stop_words_are_ignored_beside_other_words_but_searched_alone() -> None:
    index = ToolIndex([tool("a", "Use this for the thing with a name."), tool("pizza", "Orders food.")])
    assert names(index.search("I want a tool for pizza, please")) == ["pizza"]
    assert names(index.search("with")) == ["a"]


def test_equal_scores_keep_the_order_of_the_catalog() -> None:
    index = ToolIndex(tool(f"{letter}_lamp") for letter in "zyxabc")
    assert names(index.search("lamp")) == ["z_lamp", "y_lamp", "x_lamp", "a_lamp", "b_lamp", "c_lamp"]


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bm25", "keyword"])
def test_an_answer_has_exactly_its_six_keys_and_scores_that_fall(mode: str) -> None:
    answer = INDEX.search("weather", mode=mode)
    assert answer.keys() == KEYS
    assert (answer["success"], answer["mode"], answer["fallback"], answer["query"]) == (True, mode, False, "weather")
    assert answer["result_count"] == len(answer["results"]) == 2
    assert answer["results"][0].keys() == {"name", "description", "score"}
    scores = [result["score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)


def test_parameters_come_only_on_request() -> None:
    (result,) = INDEX.search("send_email", top_k=1, include_parameters=True)["results"]
    assert result["parameters"] == CATALOG[2].parameters


def test_keyword_finds_a_part_of_a_word_in_any_case_names_before_descriptions() -> None:
    index = ToolIndex([tool("a", "A ForeCast."), tool("b"), tool("castle"), tool("STRASSE")])
    assert names(index.search("CAST", mode="keyword")) == ["castle", "a"]
    assert names(index.search("straße", mode="keyword")) == ["STRASSE"]
    assert names(index.search("ForeCast b", mode="keyword")) == []


@pytest.mark.parametrize(
    ("mode", "query"),
    [(mode, query) for mode in MODES for query in ("", "  ", *(("!?*", "zzzzz") if mode in WORD_MODES else ()))],
)
def test_an_empty_query_and_one_without_a_match_give_no_results(mode: str, query: str) -> None:
    answer = meaning().search(query, mode=mode)
    assert (answer["success"], answer["result_count"], answer["results"]) == (True, 0, [])


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_catalog_can_be_searched(mode: str) -> None:
    assert meaning(tools=[]).search("weather", mode=mode)["result_count"] == 0


@pytest.mark.parametrize(("top_k", "count"), [(-5, 1), (0, 1), (1, 1), (7, 7), (50, 50), (51, 50), (10**30, 50)])
@pytest.mark.parametrize("mode", MODES)
def test_top_k_is_clamped_to_1_to_50(mode: str, top_k: int, count: int) -> None:
    tools = [tool(f"lamp_{number}") for number in range(60)]
    index = meaning(tools=tools)
    assert index.search("lamp", mode=mode, top_k=top_k)["result_count"] == count


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    answer = INDEX.search("weather", mode="regex")
    assert answer.keys() == KEYS | {"error"}
    assert (answer["success"], answer["results"]) == (False, [])
    assert answer["error"] == "mode is 'regex', it must be one of bm25, keyword: leave it out for bm25"
    answer = meaning().search("weather", mode="regex")
    assert answer["error"].endswith("one of bm25, keyword, semantic, hybrid: leave it out for hybrid")


# -- hostile queries -------------------------------------------------------------------------------------------------

SYNTAX = ['"', '""', "'", "(", ")", "AND", "OR", "NOT", "NEAR(", "NEAR/2", "*", "^", ":", "-", "+", "{name}", "name:"]
PIECES = st.sampled_from(
    [*SYNTAX, "weather", "get_weather", "天气", "ー", "\0", "\ud800", "%", "\\", "; DROP TABLE tools"]
)


@given(st.lists(PIECES, max_size=12).map(" ".join) | st.lists(PIECES, max_size=8).map("".join) | st.text())
def test_any_query_is_data_and_gets_an_answer(query: str) -> None:
    for mode in MODES:
        answer = MEANING.search(query, mode=mode)
        assert answer["success"] is True
        json.dumps(answer, ensure_ascii=False).encode()


@pytest.mark.parametrize("query", ['wea" OR "ther', "email*", "name:email", "NOT email", "^email", "{name}: email"])
def test_operators_of_the_database_have_no_effect(query: str) -> None:
    plain = "".join(letter if letter.isalpha() else " " for letter in query)
    assert names(INDEX.search(query)) == names(INDEX.search(plain))


def test_a_word_of_syntax_is_searched_as_a_word() -> None:
    index = ToolIndex([tool("near", "What is close."), tool("far")])
    assert names(index.search("NEAR")) == ["near"]


def test_only_the_first_64_words_of_a_query_are_searched() -> None:
    others = " ".join(f"w{number}" for number in range(63))
    assert names(INDEX.search(f"{others} github")) == ["repo_issues"]
    assert names(INDEX.search(f"{others} w63 github")) == []


def test_a_too_long_query_is_cut() -> None:
    endless = " ".join(f"word{number}" for number in range(100_000))
    assert len(INDEX.search(endless)["query"]) == 1000
    assert INDEX.search("天" * 100_000 + "气")["success"] is True


# -- meaning ---------------------------------------------------------------------------------------------------------


def meaning(embedder: Any = concepts, tools: Sequence[Tool] = CATALOG) -> ToolIndex:
    return ToolIndex(tools, embeddings=Embeddings(embedder))


@pytest.mark.parametrize("mode", ["semantic", "hybrid", ""])
def test_a_query_without_a_common_word_finds_what_it_means(mode: str) -> None:
    index = meaning()
    assert names(INDEX.search("do I need an umbrella", mode="bm25")) == []
    answer = index.search("do I need an umbrella", mode=mode, top_k=4)
    assert (answer["success"], answer["mode"], answer["fallback"]) == (True, mode or "hybrid", False)
    assert sorted(names(answer)) == ["getWeatherForecast", "get_weather", "nalssi", "查询天气"]
    scores = [result["score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)


def test_words_count_beside_the_meaning_in_mode_hybrid_only() -> None:
    tools = [*CATALOG, tool("zx81", "Runs a tape with a song.")]
    best = {mode: names(meaning(tools=tools).search("zx81", mode=mode, top_k=1)) for mode in MEANING_MODES}
    assert best["hybrid"] == ["zx81"] != best["semantic"]


@pytest.mark.parametrize("each", CATALOG, ids=lambda each: each.name)
def test_mode_hybrid_finds_a_tool_by_its_name(each: Tool) -> None:
    assert names(meaning().search(each.name, mode="hybrid", top_k=1)) == [each.name]


@pytest.mark.parametrize("mode", ["semantic", "hybrid"])
def test_without_embeddings_the_modes_of_meaning_do_not_exist_and_the_error_says_what_to_install(mode: str) -> None:
    for index in (INDEX, ToolIndex(CATALOG, embeddings=Embeddings(False))):
        assert index.modes == ("bm25", "keyword")
        answer = index.search("umbrella", mode=mode)
        assert answer.keys() == KEYS | {"error"}
        assert (answer["success"], answer["fallback"], answer["results"]) == (False, False, [])
        assert answer["error"] == (
            f"mode {mode} needs embeddings, which are not installed here: leave mode out for bm25, or install the "
            "extra: pip install 'toolbus[semantic]'"
        )
        assert index.search("weather")["mode"] == "bm25"


def test_the_declaration_names_the_modes_that_there_are_and_the_default() -> None:
    for modes, default in ((WORD_MODES, "bm25"), (MODES, "hybrid")):
        mode = search_tool(modes).parameters["properties"]["mode"]
        assert (mode["enum"], mode["default"]) == ([*modes], default)
        assert all(f"{each}: " in mode["description"] for each in modes)


def failing(texts: Sequence[str]) -> Any:
    raise ConnectionError(texts)


@pytest.mark.parametrize("mode", ["semantic", "hybrid"])
@pytest.mark.parametrize(
    "embedder",
    [
        failing,
        lambda texts: None,
        lambda texts: [[1.0, 2.0]],
        lambda texts: [1.0 for _ in texts],
        lambda texts: [["high"] for _ in texts],
        lambda texts: [[float("nan")] for _ in texts],
        lambda texts: [[] for _ in texts],
        lambda texts: [[1.0] * 8193 for _ in texts],
        lambda texts: [[1.0] * len(texts) for _ in texts],
    ],
)
def test_where_the_embedder_fails_bm25_answers_and_says_so(embedder: Any, mode: str) -> None:
    answer = meaning(embedder).search("get_weather", mode=mode)
    assert (answer["success"], answer["mode"], answer["fallback"]) == (True, "bm25", True)
    assert names(answer) == names(INDEX.search("get_weather"))


def test_an_embedder_that_fails_is_logged_without_the_query(caplog: pytest.LogCaptureFixture) -> None:
    meaning(failing).search("my secret", mode="semantic")
    assert [record.getMessage() for record in caplog.records] == [
        "the embedder failed with ConnectionError; bm25 answers instead"
    ]


def test_words_and_meaning_can_be_searched_by_any_number_of_threads_at_once() -> None:
    index, queries = meaning(), ["umbrella", "boss", "天气", "github", "flights"] * 20
    expected = [meaning().search(query) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(index.search, queries)) == expected


def test_a_catalog_that_changed_has_only_its_new_texts_embedded() -> None:
    texts: list[str] = []

    def noting(batch: Sequence[str]) -> Any:
        texts.extend(batch)
        return concepts(batch)

    cache = IndexCache(noting)
    assert cache.modes == MODES
    cache.index_of(1, CATALOG).search("umbrella")
    assert len(texts) == len(CATALOG) + 1  # the query
    texts.clear()
    changed = [*CATALOG[1:], tool("book_table", "Reserves a seat at a restaurant.")]
    assert names(cache.index_of(2, changed).search("umbrella", top_k=1)) == ["getWeatherForecast"]
    assert texts == ["book table. Reserves a seat at a restaurant.", "umbrella"]


# -- threads and revisions -------------------------------------------------------------------------------------------


def test_many_threads_search_one_index_and_get_what_one_thread_gets() -> None:
    queries = ["weather", "send email", "天气", "github", "flights"] * 40
    expected = [INDEX.search(query) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(INDEX.search, queries)) == expected


def test_a_revision_is_indexed_once_by_any_number_of_threads() -> None:
    cache = IndexCache()
    together = threading.Barrier(4, timeout=WAIT_SECONDS)

    def get(_: int) -> ToolIndex:
        together.wait()
        return cache.index_of(7, CATALOG)

    with ThreadPoolExecutor(4) as pool:
        assert len({id(index) for index in pool.map(get, range(4))}) == 1


def test_the_index_of_an_empty_catalog_is_cached_like_any_other() -> None:
    cache = IndexCache()
    assert cache.index_of(1, []) is cache.index_of(1, [])


def test_another_revision_gets_its_own_index_and_the_least_recently_used_is_evicted() -> None:
    cache = IndexCache()
    first = cache.index_of(0, CATALOG)
    second = cache.index_of(1, CATALOG[:1])
    assert (len(first), len(second)) == (len(CATALOG), 1)
    for revision in range(2, MAX_INDEXES + 1):
        assert cache.index_of(0, ()) is first
        cache.index_of(revision, CATALOG)
    assert cache.index_of(0, ()) is first
    assert cache.index_of(1, CATALOG) is not second
    assert names(second.search("weather")) == ["get_weather"]  # an index in use can be searched on


def test_an_index_without_references_closes_its_database() -> None:
    index = ToolIndex(CATALOG)
    database = index._database
    del index
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError):
        database.execute("SELECT 1")
