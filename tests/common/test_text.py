"""Texts of peers, made fit for a terminal or log."""

import json
import re
import sys

from hypothesis import given
from hypothesis import strategies as st

from toolbus.common.text import clean_chunk, clean_line, clean_lines, escape_unsafe

_BAD = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_TEXTS = st.text(st.characters(exclude_categories=()) | st.sampled_from("\n\r\t\x1b\x9b\u2028\u202e\x85 "))


@given(_TEXTS)
def test_a_clean_line_has_no_line_break_and_no_control_character(text: str) -> None:
    shown = clean_line(text)
    assert not _BAD.search(shown)
    assert len(shown.splitlines()) <= 1
    shown.encode()


@given(_TEXTS)
def test_each_line_of_clean_lines_but_the_first_is_indented(text: str) -> None:
    shown = clean_lines(text)
    assert not _BAD.search(re.sub("[\n\t]", "", shown))
    assert all(line.startswith("  ") for line in shown.split("\n")[1:])


@given(_TEXTS)
def test_escaped_json_means_the_same_and_holds_no_control_character(text: str) -> None:
    written = escape_unsafe(json.dumps({text: [text]}, ensure_ascii=False, indent=2))
    assert json.loads(written) == {text: [text]}
    assert not _BAD.search(written.replace("\n", ""))


def test_texts_of_people_stay_as_they_are() -> None:
    for text in (
        "Grüße, 早上好\u3000世界",
        "مرحبا",
        "می\u200cخواهم",
        "\U0001f469\u200d\U0001f4bb\ufe0f",
        "葛\U000e0100",
    ):
        assert clean_chunk(text) == escape_unsafe(text) == text


def test_a_chunk_keeps_line_breaks_and_tabs_and_its_other_control_characters_are_replaced() -> None:
    assert clean_chunk("a\n\tb\x1b[2Jc\r") == "a\n\tb�[2Jc�"


def test_everything_that_python_takes_for_a_line_break_is_one() -> None:
    breaks = [chr(code) for code in range(sys.maxunicode + 1) if len(f"a{chr(code)}b".splitlines()) > 1]
    assert len(breaks) > 5
    assert {clean_lines(f"a{each}b") for each in breaks} == {"a\n  b"}
    assert {clean_line(f"a{each}b") for each in breaks} == {"a b"}
