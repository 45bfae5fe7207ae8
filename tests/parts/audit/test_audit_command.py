"""``toolbus audit`` and ``toolbus audit verify``: reading, following and checking the files of a data directory."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts.audit.chains import entries, line, raw_lines, write, writing
from tests.support.processes import Running, environment, toolbus
from tests.support.served_bus import address_of, run_json, start_grpc_bus
from tests.support.waiting import until_sync
from toolbus.parts.audit.audit_log import FOLDER, files_of, verify


def test_the_newest_lines_are_printed_oldest_first(tmp_path: Path) -> None:
    write(tmp_path / FOLDER, 12, max_file=600)
    shown = toolbus("audit", "--data-dir", tmp_path, "--limit", "5").stdout.splitlines()
    assert shown[0].split() == ["TIME", "ACT", "OUTCOME", "WHO", "SOURCE", "TARGET", "HOW", "DETAIL"]
    assert [row.split()[-3] for row in shown[1:]] == ["7", "8", "9", "10", "11"]
    found = [json.loads(row) for row in toolbus("audit", "--json", TOOLBUS_DATA_DIR=str(tmp_path)).stdout.splitlines()]
    assert found == entries(tmp_path / FOLDER)


def test_a_line_cannot_change_the_terminal(tmp_path: Path) -> None:
    with writing(tmp_path / FOLDER) as writer:
        writer.put(line("\x1b]0;title\x07\nforged line"))
    shown = toolbus("audit", "--data-dir", tmp_path).stdout
    assert len(shown.splitlines()) == 2
    assert "\x1b" not in shown


@pytest.mark.parametrize("moment", ['"now"', "null", "1e300", "[]"])
def test_a_line_that_was_tampered_with_is_shown_as_damaged_among_the_others(tmp_path: Path, moment: str) -> None:
    write(tmp_path / FOLDER, 3)
    first, second, third = raw_lines(tmp_path / FOLDER)
    (file,) = files_of(tmp_path / FOLDER)
    tampered = re.sub(rb'"time":\s*[\d.]+', b'"time":' + moment.encode(), second)
    file.write_bytes(first + tampered + third)
    shown = toolbus("audit", "--data-dir", tmp_path).stdout.splitlines()
    assert tampered != second
    assert [row.split()[1 if "damaged" in row else 2] for row in shown[1:]] == ["role", "damaged", "role"]


def test_a_reader_that_ends_early_is_not_an_error(tmp_path: Path) -> None:
    write(tmp_path / FOLDER, 12)
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "toolbus.cli", "audit", "--json", "--data-dir", str(tmp_path)],
            stdout=closed,
            stderr=subprocess.PIPE,
            env=environment({"PYTHONUNBUFFERED": "1"}),
        )
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_verify_says_that_a_chain_is_whole_or_names_the_first_line_that_is_not(tmp_path: Path) -> None:
    _, head = write(tmp_path / FOLDER, 12, max_file=600)
    words = ("audit", "verify", "--data-dir", tmp_path)
    for more in ((), ("--head", head), ("--head", head.upper())):
        ended = toolbus(*words, *more)
        assert (ended.returncode, ended.stdout) == (0, f"12 lines in {tmp_path / FOLDER} are whole, head {head}\n")
    assert json.loads(toolbus(*words, "--json").stdout) == {"ok": True, "lines": 12, "head": head, "fault": ""}
    second = files_of(tmp_path / FOLDER)[1]
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join(lines[1:]))
    number = json.loads(lines[0])["seq"]
    ended = toolbus(*words)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"toolbus: line {number} was cut after line {number - 1} (000001.jsonl:")
    ended = toolbus(*words, "--json")
    assert (ended.returncode, json.loads(ended.stdout)["ok"]) == (1, False)


def test_verify_with_a_head_finds_a_cut_end(tmp_path: Path) -> None:
    _, head = write(tmp_path / FOLDER, 3)
    (file,) = files_of(tmp_path / FOLDER)
    file.write_bytes(b"".join(raw_lines(tmp_path / FOLDER)[:2]))
    assert toolbus("audit", "verify", "--data-dir", tmp_path).returncode == 0
    ended = toolbus("audit", "verify", "--data-dir", tmp_path, "--head", head)
    assert ended.returncode == 1
    assert f"no line has the hash {head}" in ended.stderr


@pytest.mark.parametrize("words", [("audit",), ("audit", "verify")])
def test_a_directory_without_an_audit_is_an_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = toolbus(*words, "--data-dir", tmp_path)
    assert ended.returncode == 1
    assert f"no audit was found in {tmp_path}" in ended.stderr
    assert toolbus("audit", "verify", "--data-dir", tmp_path, "--head", "x").returncode == 2


def test_follow_prints_each_line_as_it_is_written_across_files_until_ctrl_c(tmp_path: Path) -> None:
    write(tmp_path / FOLDER, 2)
    with Running(tmp_path, "audit", "--follow", "--json", "--data-dir", tmp_path) as following:
        following.says('"target":"1"')
        write(tmp_path / FOLDER, 8, max_file=600)
        until_sync(lambda: following.out.count("\n") == 10, "the further lines")
        following.send(signal.SIGINT)
        assert following.code() == 130
        assert following.err == ""
    assert [json.loads(each) for each in following.out.splitlines()] == entries(tmp_path / FOLDER)


def test_a_killed_bus_breaks_no_line_and_the_next_one_continues_the_chain(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for attempt in range(2):
        with start_grpc_bus(tmp_path, "--data-dir", data) as serving:
            for number in range(3):
                run_json(address_of(serving), "call", "toolbus:role_add", f"role=r{attempt}{number}")
            until_sync(lambda: "r02" in (data / FOLDER / "000001.jsonl").read_text(), "the lines")
            serving.send(signal.SIGKILL)
            serving.code()
        with open(data / FOLDER / "000001.jsonl", "ab") as file:
            file.write(b'{"seq":7,"time":1')
        assert toolbus("audit", "verify", "--data-dir", data).returncode == 1
    with start_grpc_bus(tmp_path, "--data-dir", data):
        pass
    verdict = verify(data / FOLDER)
    assert not verdict.fault
    acts = [each["act"] for each in entries(data / FOLDER)]
    assert (acts.count("start"), acts.count("torn"), acts.count("stop")) == (3, 2, 1)
    assert [each["target"] for each in entries(data / FOLDER) if each["act"] == "role"][:3] == ["r00", "r01", "r02"]
