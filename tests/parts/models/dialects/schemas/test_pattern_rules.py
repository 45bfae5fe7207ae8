"""Tests how patterns are written for engines that know less than ECMAScript: with the same meaning, or not at all."""

from __future__ import annotations

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from toolbus.protocol.patterns import (
    PatternRule,
    Unreadable,
    common_pattern,
    grammar_pattern,
    in_words,
    re2_pattern,
    read_pattern,
)

ALL: tuple[PatternRule, ...] = (common_pattern, re2_pattern, grammar_pattern)
REFUSED = None


def written(rule: PatternRule, text: str) -> str | None:
    """Returns what a rule writes, None where it refuses."""
    try:
        return rule(text)
    except Unreadable:
        return REFUSED


@pytest.mark.parametrize(
    ("text", "common", "re2", "grammar"),
    [
        # What every engine knows stays as it is.
        (r"^[a-z0-9_-]{1,64}$", *[r"^[a-z0-9_-]{1,64}$"] * 3),
        (r"^(on|off)$", *[r"^(on|off)$"] * 3),
        (r"^a{2,}b?c*d+$", *[r"^a{2,}b?c*d+$"] * 3),
        ("^中文$", *["^中文$"] * 3),
        # Escapes and sets with a name: llama.cpp's grammars do not know them.
        (r"^\d{4}-\d\d$", *[r"^\d{4}-\d\d$"] * 2, "^[0-9]{4}-[0-9][0-9]$"),
        (r"^[\w\-\.]+\/$", *[r"^[\w\-\.]+\/$"] * 2, "^[.A-Za-z0-9_-]+/$"),
        (r"^v\.+x$", *[r"^v\.+x$"] * 2, "^v[.]+x$"),
        (r"^\^\"$", *[r"^\^\"$"] * 2, r'^[\x5E]["]$'),
        (r"^\S$", *[r"^\S$"] * 2,
         r"^[^\t-\r \u00A0\u1680\u2000-\u200A\u2028-\u2029\u202F\u205F\u3000\uFEFF]$"),
        (r"^[\s\S]+$", *[r"^[\s\S]+$"] * 2, "^[\\x00-\U0010ffff]+$"),
        (r"^[\W_]$", *[r"^[\W_]$"] * 2, "^[\\x00-/:-@\\[-`{-\U0010ffff]$"),
        ("^é+$", *["^é+$"] * 2, "^[é]+$"),
        (r"^(?:a+?|b)$", *[r"^(?:a+?|b)$"] * 2, "^(a+|b)$"),
        # Other spellings of the same.
        (r"^(?<year>\d+)$", *[r"^(?:\d+)$"] * 2, "^([0-9]+)$"),
        (r"^(?P<year>\d+)$", *[r"^(?:\d+)$"] * 2, "^([0-9]+)$"),
        (r"\Aa\Z", *["^a$"] * 3),
        (r"^\u4e2d\u{4e2d}\ud83d\ude00$", *["^中中😀$"] * 3),
        (r"^a{,3}$", *[None] * 3),  # up to three times for Python, a literal for ECMAScript
        (r"^a{,}$", *[None] * 3),
        (r"^(?:ab){,3}$", *[None] * 3),
        (r"^[ab]{,3}$", *[None] * 3),
        (r"^a\{,3}$", *[r"^a\{,3}$"] * 2, "^a[{],3[}]$"),
        (r"^a{x}$", *[r"^a\{x\}$"] * 2, "^a[{]x[}]$"),
        (r"^\cA[\b]\0$", *[r"^\x01[\x08]\x00$"] * 2, r"^[\x01][\x08][\x00]$"),
        ("^[[(]$", *[r"^[\[(]$"] * 3),
        (r"^[a-\d]$", *[r"^[a\x2D\d]$"] * 2, "^[a0-9-]$"),
        (r"^a$|^b$", *[r"^a$|^b$"] * 2, "^(a|b)$"),
        # What some engines cannot do.
        ("abc", *["abc"] * 2, REFUSED),
        ("^abc", *["^abc"] * 2, REFUSED),
        (r"^abc\$", *[r"^abc\$"] * 2, REFUSED),
        ("^a|b$", *["^a|b$"] * 2, REFUSED),
        ("^(^a$)$", *["^(^a$)$"] * 2, REFUSED),
        (r"\bword\b", *[r"\bword\b"] * 2, REFUSED),
        (r"^(?!a).*$", *[REFUSED] * 3),
        (r"(?<=a)b", *[REFUSED] * 3),
        (r"^(a)\1$", *[REFUSED] * 3),
        (r"^(?<q>.)\k<q>$", *[REFUSED] * 3),
        (r"^[\p{L}\d]+$", REFUSED, r"^[\p{L}\d]+$", REFUSED),
        (r"^\p{Script=Greek}+$", *[REFUSED] * 3),
        ("^.{0,1001}$", "^.{0,1001}$", REFUSED, "^.{0,1001}$"),
        ("^(.{0,100}){11}$", "^(.{0,100}){11}$", REFUSED, "^(.{0,100}){11}$"),
        ("^.{0,2000}$", "^.{0,2000}$", REFUSED, REFUSED),
        # What is not ECMAScript.
        *((text, *[REFUSED] * 3) for text in (
            "(?i)a", "a++", "*a", "(", ")", "[", "[b-a]", "a{2,1}", "^*", r"\e", r"\x1", r"\ud800", "(?#c)", "\\",
            "{1}", r"\u{110000}", "a{9999999}", "(" * 51 + ")" * 51,
        )),
    ],
)  # fmt: skip
def test_each_engine_gets_a_pattern_that_it_reads_or_none(
    text: str, common: str | None, re2: str | None, grammar: str | None
) -> None:
    assert [written(rule, text) for rule in ALL] == [common, re2, grammar]


def test_a_pattern_in_words_is_shortened() -> None:
    assert in_words("^a$") == "Matches the pattern ^a$"
    assert len(in_words("a" * 100_000)) < 400


ATOMS = st.sampled_from(
    [*"ab0_-. é😀", r"\d", r"\w", r"\.", r"\/", r"\-", "[a-c]", "[^b]", r"[\w.-]", r"[^\d]", r"\n", r"\u0061", r"[\D]"]
)
REPEATED = st.tuples(ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "+?"])).map("".join)
GROUPS = st.recursive(
    st.lists(REPEATED, max_size=4).map("".join),
    lambda inner: st.tuples(
        st.sampled_from(["(", "(?:"]), st.lists(inner, min_size=1, max_size=3).map("|".join), st.sampled_from(")?")
    ).map(lambda parts: parts[0] + parts[1] + (")" if parts[2] == ")" else ")?")),
    max_leaves=4,
)


@settings(max_examples=examples(40), deadline=None)
@given(body=GROUPS, texts=st.lists(st.text("ab0_-. é😀/\n", max_size=5), min_size=1, max_size=8))
def test_a_written_pattern_matches_the_same_texts(body: str, texts: list[str]) -> None:
    original = re.compile(f"(?:{body})", re.ASCII)
    for rule in ALL:
        again = rule(f"^(?:{body})$")
        assert rule(again) == again
        compiled = re.compile(again, re.ASCII)
        for text in texts:
            expected = original.fullmatch(text) is not None
            # Python's $ also matches before a line break at the end.
            assert (compiled.fullmatch(text) is not None) == expected, (again, text)


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(r"()[]{}|\^$*+?.-:=!<>Pkpu0123abdDwWsSxc,é", max_size=30))
def test_any_text_is_read_or_refused_and_a_written_pattern_can_be_read_again(text: str) -> None:
    for rule in ALL:
        again = written(rule, text)
        if again is not None:
            assert written(rule, again) == again
            read_pattern(again)
            if rule in (common_pattern, grammar_pattern):
                with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of ||, && and ~~ in a set
                    re.compile(again)


@pytest.mark.parametrize(
    "unit", ["(", "[", "(a+)+", "(a|a)*", "{1,", r"\u", "[^", "(?<", r"\ud83d", "a{1}", "(?:", "[a-", "|", r"[\s\S]"]
)
def test_reading_takes_time_in_proportion_to_the_length(unit: str) -> None:
    def seconds(length: int) -> float:
        text = (unit * length)[: length // len(unit) * len(unit)]
        runs = []
        for _ in range(3):  # one may hold a garbage collection of all that the tests before have left
            started = time.process_time()
            for rule in ALL:
                written(rule, text)
            runs.append(time.process_time() - started)
        return min(runs)

    seconds(1_000)
    assert seconds(10_000) < 100 * max(seconds(1_000), 0.001)
