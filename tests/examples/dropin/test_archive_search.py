"""`archive_search` ranks pages by plain counts, and finds nothing rather than anything."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import pytest

from tests.examples.dropin.conftest import FOLDER, Folder, load


def page(title: str, summary: str, *tags: str) -> dict[str, Any]:
    return {"title": title, "url": f"https://example.org/{title}", "summary": summary, "tags": list(tags)}


PAGES = [
    page("one", "about cats and dogs", "animals"),
    page("two", "a cat sleeps", "cats", "house cats"),
    page("three", "the concatenation of texts", "strings"),
    page("four", "cats, dogs and other animals", "cats", "dogs"),
    page("five", "a house of stone", "stone houses"),
]


@pytest.fixture
def few(folder: Folder) -> Folder:
    module = folder.modules["archive_search"]
    module.ENTRIES[:] = module.read(PAGES)
    return folder


def found(folder: Folder, query: str, **more: Any) -> list[str]:
    return [each["title"] for each in folder.call("archive_search", {"query": query, **more})["results"]]


def test_a_hit_is_shown_with_its_url_and_summary(few: Folder) -> None:
    assert few.call("archive_search", {"query": "strings"}) == {
        "searched_for": ["strings"],
        "count": 1,
        "shown": 1,
        "results": [{"title": "three", "url": "https://example.org/three", "summary": "the concatenation of texts"}],
    }


def test_a_single_term_has_to_be_in_a_tag(few: Folder) -> None:
    assert found(few, "cats") == ["two", "four"]
    assert found(few, "sleeps") == [], "it is in a text only"
    assert found(few, "stone") == ["five"], "it is a word of a tag"


def test_words_are_matched_whole(few: Folder) -> None:
    assert found(few, "cat") == []
    assert found(few, "string") == []


def test_of_several_terms_two_have_to_match_or_one_is_a_tag_itself(few: Folder) -> None:
    assert found(few, "cats zebra") == ["two", "four"], "a tag itself"
    assert found(few, "stone zebra") == [], "a word of a tag is not enough"
    assert found(few, "sleeps zebra") == []
    assert found(few, "dogs sleeps cats")[-1] == "one", "two words of a text are"


def test_the_whole_query_may_be_a_tag_of_several_words(few: Folder) -> None:
    few.modules["archive_search"].ENTRIES[:] = few.modules["archive_search"].read([page("x", "", "show of hands")])
    assert found(few, "Show  of hands zebra") == []
    assert found(few, "hands zebra") == []
    few.modules["archive_search"].ENTRIES[:] = few.modules["archive_search"].read([page("x", "", "hands up now")])
    assert found(few, "hands UP  now") == ["x"]


def test_tags_and_words_of_tags_count_two_and_texts_one(few: Folder) -> None:
    module = few.modules["archive_search"]
    hits = module.ranked(module.ENTRIES, ["cats", "house", "dogs"])
    assert [(hit.entry.shown["title"], hit.distinct, hit.score) for hit in hits] == [
        ("two", 2, 4),
        ("four", 2, 4),
        ("one", 2, 2),
    ]


def test_more_different_terms_come_first_then_more_points_then_the_order_of_the_index(few: Folder) -> None:
    module = few.modules["archive_search"]
    module.ENTRIES[:] = module.read(
        [page("a", "x y"), page("b", "x y", "x"), page("c", "x y z"), page("d", "x y"), page("e", "", "x")]
    )
    assert found(few, "x y z") == ["c", "b", "a", "d", "e"]


@pytest.mark.parametrize("query", ["how do I use the Python docs?", "the", "documentation examples", "???"])
def test_a_query_of_stop_words_finds_nothing_and_has_a_note(few: Folder, query: str) -> None:
    answer = few.call("archive_search", {"query": query})
    assert (answer["count"], answer["shown"], answer["results"]) == (0, 0, [])
    assert "has only general words" in answer["note"]


def test_a_keyword_of_the_language_alone_is_not_a_stop_word(folder: Folder) -> None:
    assert found(folder, "with") == ["The with statement"]
    assert found(folder, "for") == ["The for statement"]


def test_no_result_tells_the_model_not_to_invent(few: Folder) -> None:
    answer = few.call("archive_search", {"query": "zebra"})
    assert answer["count"] == 0
    assert answer["note"] == (
        "The index has nothing on this. Tell the user so. Do not give a URL or a title from memory."
    )


@pytest.mark.parametrize("query", [None, "", "  "])
def test_an_empty_query_is_refused_with_an_example(few: Folder, query: str | None) -> None:
    assert "such as 'json parse'" in few.call("archive_search", {"query": query})["error"]


@pytest.mark.parametrize(("limit", "shown"), [(None, 5), (0, 1), (7, 7), (100, 10)])
def test_5_results_are_shown_and_never_more_than_10_and_all_are_counted(
    folder: Folder, limit: int | None, shown: int
) -> None:
    answer = folder.call("archive_search", {"query": "concurrency", "limit": limit})
    assert (answer["count"], answer["shown"], len(answer["results"])) == (8, min(shown, 8), min(shown, 8))


def test_a_long_query_is_shortened_to_its_first_terms(few: Folder) -> None:
    query = " ".join(f"word{number}" for number in range(1000))
    assert len(few.call("archive_search", {"query": query})["searched_for"]) == 12


@pytest.mark.parametrize(
    ("query", "best"),
    [
        *(("parse json", "json"), ("json.dumps", "json"), ("lru_cache", "functools"), ("OS.path", "os.path")),
        *(("regular expressions", "re"), ("temporary files", "tempfile"), ("which module reads csv files", "csv")),
        *(("docs for namedtuple", "collections"), ("link to the try statement", "The try statement")),
        *(("lambda", "Lambdas"), ("shared memory", "multiprocessing.shared_memory")),
    ],
)
def test_the_bundled_index_answers_common_queries(folder: Folder, query: str, best: str) -> None:
    assert found(folder, query)[0] == best


def test_the_bundled_index_is_what_its_script_makes() -> None:
    text = (FOLDER / "data" / "archive_index.json").read_text(encoding="utf-8")
    made_by = json.loads(text)["origin"]["python"]
    if platform.python_version() != made_by or sys.platform != "linux":
        pytest.skip(f"the index is of Python {made_by} on Linux, whose texts another version need not have")
    script = load(FOLDER / "data" / "make_index.py")
    assert script.as_text(script.make_index()) == text


def test_every_entry_of_the_index_has_a_page_a_summary_and_tags() -> None:
    entries = json.loads((FOLDER / "data" / "archive_index.json").read_text(encoding="utf-8"))["entries"]
    assert len({each["url"] for each in entries}) == len(entries) > 250
    for each in entries:
        assert each["url"].startswith("https://docs.python.org/3."), each
        assert 10 <= len(each["summary"]) <= 242, each
        assert each["tags"], each
        assert all(tag == tag.lower().strip() for tag in each["tags"]), each
