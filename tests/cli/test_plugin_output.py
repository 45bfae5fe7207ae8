"""Tests what `toolbus run` prints of its plugins' output."""

import json
import re
import time
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.cli.run_command import PrefixedOutput, print_json_report
from toolbus.common.text import drop_unsafe, keep_colours
from toolbus.processes.supervisor import PluginReport, ReportKind

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[38:2::1:2:3;1mbold", "\x1b[38:2::1:2:3;1mbold\x1b[0m"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]0;title\x1b\\b", "ab"),
        ("a\x9d0;title\x9cb", "ab"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1b]52;c;ZXZpbA==\x07b", "ab"),
        ("a\x1bPq#0\x1b\\b", "ab"),
        ("a\x1b[2J\x1b[1;1Hb\x9b2Kc", "abc"),
        ("a\x1b[?1049hb", "ab"),
        ("a\x1b[>4;2mb", "ab"),
        ("a\x1bcb\x1b7c\x1b(0d", "abcd"),
        ("a\x1b", "a"),
        ("a\x1b[31", "a[31"),
        ("a\x1b]0;title", "a]0;title"),
        ("\x1b\x1b[31mx", "\x1b[31mx\x1b[0m"),
        ("\x1b]0;\x1b[31mx", "]0;\x1b[31mx\x1b[0m"),
        ("a\x07\x08\x00\x7fb", "ab"),
        ("10%\r20%\r30%\r", "10% 20% 30%"),
        ("a\u2028weather | b\x85c", "a weather | b c"),
        ("a\u202eb\u2066c", "abc"),
        ("half \ud800", "half "),
        ("a\tb", "a       b"),
        ("\U0001f469\u200d\U0001f4bb 早上好\u3000", "\U0001f469\u200d\U0001f4bb 早上好\u3000"),
    ],
)
def test_colours_stay_and_every_other_escape_and_control_character_is_dropped(line: str, shown: str) -> None:
    assert keep_colours(line) == shown


def test_no_character_that_is_dropped_counts_as_printable() -> None:
    unsafe: set[str] = set()
    for plane in range(0, 0x110000, 0x10000):  # all at once take 250 MB
        characters = "".join(map(chr, range(plane, plane + 0x10000)))
        unsafe |= set(characters) - set(drop_unsafe(characters))
    assert len(unsafe) > 2_000
    assert not [character for character in unsafe if character.isprintable()]


@given(st.text(st.sampled_from("\x1b\x9b\x9d\x9c\x07[]\\0;mKP?a \r")))
def test_no_mix_of_escapes_leaves_more_than_colours(line: str) -> None:
    shown = keep_colours(line)
    assert not re.search("[\x00-\x1f\x7f-\x9f]", _COLOUR.sub("", shown))
    assert not _COLOUR.search(shown) or shown.endswith("\x1b[0m")


@pytest.mark.parametrize("unit", ["\x9d", "\x9b", "\x9b1", "\x1b]", "\x1b[", "\x1b[1;", "\x1b ", "\x1b]\x9d", "\t"])
def test_a_line_of_nothing_but_beginnings_of_escapes_takes_time_in_proportion_to_its_length(unit: str) -> None:
    def seconds(length: int) -> float:
        line = (unit * length)[:length]
        # Processor time: what other programs do meanwhile does not count.
        return min(timeit.repeat(lambda: keep_colours(line), timer=time.thread_time, number=1, repeat=3))

    assert seconds(64_000) < 160 * seconds(3_200)  # 20 times as long; a square would be 400


def test_an_escape_that_is_split_over_lines_or_reads_does_not_slip_through(capsys: pytest.CaptureFixture[str]) -> None:
    prints = PrefixedOutput()
    for part in ("a\x1b", "]0;title\x07b", "c\x1b[", "31mred"):
        prints(PluginReport("p", ReportKind.OUTPUT, part, "stdout"))
    assert capsys.readouterr().out == "p | a\np | ]0;titleb\np | c[\np | 31mred\n"


def test_each_line_of_a_text_has_the_name_of_its_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    PrefixedOutput()(PluginReport("a\x1b[2J\n", ReportKind.DIED, "died\nweather | all is well"))
    assert capsys.readouterr().err == "a[2J * died\na[2J * weather | all is well\n"


def test_json_lines_keep_every_character_as_an_escape(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b]0;t\x07\x9b2J\u202e\u2028\U000e0041é"
    print_json_report(PluginReport("p", ReportKind.OUTPUT, text, "stdout"))
    out = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\U000e0041]", out)
    assert json.loads(out)["text"] == text
    assert "é" in out
