"""Tests of the chain of the audit: what was changed, cut or moved is named."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts.audit.chains import entries, raw_lines, targets, write
from tests.support.examples import examples
from toolbus.parts.audit.audit_log import FIRST_PREV, files_of, find_end, hash_of, verify

Lines = list[bytes]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Ten lines of a chain."""
    directory = tmp_path_factory.mktemp("audit")
    write(directory, 10)
    return raw_lines(directory)


def _changed(lines: Lines, number: int, **fields: object) -> Lines:
    entry = json.loads(lines[number - 1]) | fields
    return [*lines[: number - 1], json.dumps(entry, separators=(",", ":")).encode() + b"\n", *lines[number:]]


def _chained_anew(lines: Lines, number: int) -> Lines:
    """Writes a line of a chain differently, and all lines after it so that they fit."""
    lines = _changed(lines, number, target="forged")
    for later in range(number + 1, len(lines) + 1):
        lines = _changed(lines, later, prev=hash_of(lines[later - 2].strip()))
    return lines


def test_a_whole_chain_is_whole_and_has_its_heads(tmp_path: Path) -> None:
    seq, head = write(tmp_path, 10)
    verdict = verify(tmp_path)
    assert (verdict.lines, verdict.head, verdict.fault) == (10, head, "")
    assert (seq, targets(tmp_path)) == (10, [str(number) for number in range(10)])
    for raw in raw_lines(tmp_path):
        assert not verify(tmp_path, hash_of(raw.strip())).fault
    assert verify(tmp_path, "0" * 64).fault.startswith(f"no line has the hash {'0' * 64}: lines were cut")


@pytest.mark.parametrize(
    ("tamper", "lines", "fault"),
    [
        (lambda lines: _changed(lines, 4, who="somebody else"), 3, "line 4 (000001.jsonl:4) was changed: line 5 "),
        (lambda lines: _changed(lines, 1, time=0), 0, "line 1 (000001.jsonl:1) was changed: line 2 "),
        (lambda lines: _changed(lines, 4, prev="f" * 64), 3, "line 4 (000001.jsonl:4) was changed: it has another"),
        (lambda lines: [*lines[:3], *lines[4:]], 3, "line 4 was cut after line 3 (000001.jsonl:3): line 5 (0"),
        (lambda lines: [*lines[:3], *lines[7:]], 3, "lines 4 to 7 were cut after line 3 (000001.jsonl:3): line 8 (0"),
        (lambda lines: lines[2:], 0, "lines 1 to 2 were cut at the beginning: line 3 (000001.jsonl:1) follows"),
        (
            lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]],
            3,
            "line 4 was moved: it is at 000001.jsonl:5, and line 5 (000001.jsonl:4) is in its place",
        ),
        (lambda lines: [*lines, lines[8]], 10, "line 9 (000001.jsonl:11) was moved or repeated: line 11 is missing"),
        (lambda lines: [*lines[:3], b"rubbish\n", *lines[4:]], 3, "line 4 (000001.jsonl:4) was changed: it is not a"),
        (lambda lines: [*lines[:3], b"\n", *lines[4:]], 3, "line 4 (000001.jsonl:4) was changed: it is not a line"),
        (lambda lines: [*lines[:9], lines[9][:20]], 9, "line 10 (000001.jsonl:10) was changed: it is not a line of"),
    ],
)
def test_the_first_line_that_was_changed_cut_or_moved_is_named(
    chain: Lines, tmp_path: Path, tamper: Callable[[Lines], Lines], lines: int, fault: str
) -> None:
    (tmp_path / "000001.jsonl").write_bytes(b"".join(tamper(chain)))
    verdict = verify(tmp_path)
    assert (verdict.lines, verdict.fault[: len(fault)]) == (lines, fault)
    assert verdict.head == (hash_of(chain[lines - 1].strip()) if lines else FIRST_PREV)


@pytest.mark.parametrize("tamper", [lambda lines: lines[:7], lambda lines: _chained_anew(lines, 5)])
def test_a_cut_end_and_a_chain_written_anew_show_to_who_has_a_head(
    chain: Lines, tmp_path: Path, tamper: Callable[[Lines], Lines]
) -> None:
    (tmp_path / "000001.jsonl").write_bytes(b"".join(tamper(chain)))
    assert not verify(tmp_path).fault
    assert "no line has the hash" in verify(tmp_path, hash_of(chain[-1].strip())).fault


@settings(max_examples=examples(75))
@given(st.data())
def test_no_change_of_a_byte_before_the_last_line_goes_unnoticed(chain: Lines, data: st.DataObject) -> None:
    whole = b"".join(chain)
    place = data.draw(st.integers(0, len(whole) - len(chain[-1]) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[place]))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "000001.jsonl").write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        assert verify(Path(folder)).fault


def test_a_chain_goes_on_across_files(tmp_path: Path) -> None:
    write(tmp_path, 10, max_file=600)
    files = files_of(tmp_path)
    assert len(files) > 3
    assert [entry["seq"] for entry in entries(tmp_path)] == list(range(1, 11))
    assert not verify(tmp_path).fault
    files[1].unlink()
    assert "were cut after line" in verify(tmp_path).fault
    files[0].unlink()
    assert "were cut at the beginning" in verify(tmp_path).fault


def test_the_end_of_a_chain_is_its_last_whole_line(tmp_path: Path) -> None:
    assert find_end(tmp_path) == find_end(tmp_path)
    assert (find_end(tmp_path).seq, find_end(tmp_path).head, find_end(tmp_path).file) == (0, FIRST_PREV, None)
    seq, head = write(tmp_path, 3)
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    for torn in (b"", b"{", b'{"seq":4,"prev":"x"}', b"\x00\x00\n\x00", b"rubbish\n", b"\n\n"):
        file.write_bytes(whole + torn)
        end = find_end(tmp_path)
        assert (end.seq, end.head, end.size, end.torn) == (seq, head, len(whole), torn)
    later = tmp_path / "000002.jsonl"
    for torn in (b"", b'{"seq":4'):
        later.write_bytes(torn)
        end = find_end(tmp_path)
        assert (end.seq, end.head, end.file, end.size, end.torn) == (seq, head, later, 0, torn)
