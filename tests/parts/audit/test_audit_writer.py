"""Tests of the thread that writes the audit: order, disk, full disk, torn lines, losses."""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.parts.audit.chains import entries, line, targets, write, writing
from tests.support.waiting import until_sync
from toolbus.bus.audit import AuditRecord
from toolbus.errors import NotAudited, SetupError
from toolbus.parts.audit.audit_log import MAX_TEXT, AuditWriter, files_of, verify


@contextmanager
def full_disk(directory: Path, room: int = 10) -> Iterator[None]:
    """Lets the newest file grow by some bytes only, as on a full disk: what is beyond fails after a partial write."""
    size = files_of(directory)[-1].stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def filled(directory: Path) -> int:
    """Writes so much that no other file of the process is as large; returns how many lines."""
    with writing(directory) as writer:
        for number in range(4_000):
            writer.put(AuditRecord(0.0, {"act": "role", "target": str(number), "why": "x" * MAX_TEXT}))
    return 4_000


def watch_syncs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of lines whenever a file is forced to disk."""
    synced: list[int] = []
    sync = os.fsync

    def watched(handle: int) -> None:
        sync(handle)
        synced.append(len(targets(directory)))

    monkeypatch.setattr(os, "fsync", watched)
    return synced


def test_lines_have_every_field_in_order_and_are_only_for_their_owner(tmp_path: Path) -> None:
    with writing(tmp_path / "audit") as writer:
        writer.put(AuditRecord(1.25, {"act": "role", "who": "ann", "why": "ü" * 1_000, "target": "half \ud800"}))
    (entry,) = entries(tmp_path / "audit")
    assert list(entry) == [
        *("seq", "time", "boot", "act", "who", "key", "how", "peer", "source", "target", "outcome", "why", "prev")
    ]
    assert (entry["seq"], entry["time"], entry["boot"], entry["outcome"]) == (1, 1.25, "boot", "ok")
    assert (len(entry["why"]), entry["target"]) == (MAX_TEXT, "half \ud800")
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o700
    assert files_of(tmp_path / "audit")[0].stat().st_mode & 0o777 == 0o600


def test_lines_of_many_threads_form_one_chain(tmp_path: Path) -> None:
    def put(writer: AuditWriter) -> None:
        for _ in range(200):
            writer.put(line())

    with writing(tmp_path) as writer:
        threads = [threading.Thread(target=put, args=(writer,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(tmp_path).lines == 1_000


def test_a_line_that_is_awaited_is_on_disk_when_the_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = watch_syncs(tmp_path, monkeypatch)
    with writing(tmp_path, sync_seconds=3_600) as writer:
        writer.put_now(line("now"))
        assert targets(tmp_path) == ["now"]
        assert synced[-1] == 1
        writer.put(line("later"))
        until_sync(lambda: targets(tmp_path) == ["now", "later"], "the line")
        assert synced[-1] == 1
    assert synced[-1] == 2


def test_lines_for_which_no_act_waits_are_on_disk_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = watch_syncs(tmp_path, monkeypatch)
    with writing(tmp_path, sync_seconds=0.05) as writer:
        writer.put(line())
        until_sync(lambda: synced[-1:] == [1], "the line on disk")


@pytest.mark.parametrize(
    "torn", [b"{", b'{"seq":11,"time":1', b"\x00" * 100, b"rubbish\n{", b'{"seq":11,"why":"' + b"x" * 5_000]
)
def test_a_line_that_was_torn_is_removed_and_the_chain_says_so(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, 10)
    (file,) = files_of(tmp_path)
    file.write_bytes(file.read_bytes() + torn)
    assert verify(tmp_path).fault
    write(tmp_path, 1)
    assert verify(tmp_path).lines == 12
    found = entries(tmp_path)[10]
    assert (found["act"], found["outcome"]) == ("torn", "failed")
    assert found["why"].startswith(f"{len(torn)} bytes of a line that was not written to its end were removed")


def test_a_chain_goes_on_after_an_empty_or_torn_new_file(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for number, torn in ((2, b""), (3, b'{"seq"')):
        (tmp_path / f"00000{number}.jsonl").write_bytes(torn)
        write(tmp_path, 1)
        assert not verify(tmp_path).fault
    assert [entry["act"] for entry in entries(tmp_path)] == [*["role"] * 4, "torn", "role"]


def test_a_full_disk_refuses_waiting_acts_and_loses_and_breaks_no_queued_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = filled(tmp_path)
    with writing(tmp_path) as writer:
        with full_disk(tmp_path):
            with pytest.raises(NotAudited, match="File too large"):
                writer.put_now(line("refused"))
            assert (verify(tmp_path).lines, verify(tmp_path).fault) == (count, "")
            writer.put(line("waits"))
            with pytest.raises(NotAudited):
                writer.put_now(line("refused too"))
        writer.put_now(line("done"))
    assert [(each["target"], each["outcome"]) for each in entries(tmp_path)[count:]] == [
        *(("refused", "refused"), ("waits", "ok"), ("refused too", "refused"), ("done", "ok"))
    ]
    assert verify(tmp_path).lines == count + 4
    assert [record.levelno for record in caplog.records if "cannot write" in record.message] == [logging.ERROR]


def test_lines_that_find_no_room_are_counted_in_the_chain(tmp_path: Path) -> None:
    count = filled(tmp_path)
    row = ("c-1", "echo", "local", "host", 1.0, 1.5, 0, 2, 2, None, None)
    with writing(tmp_path, max_waiting=200) as writer:
        with full_disk(tmp_path):
            with pytest.raises(NotAudited):
                writer.put_now(line("first"))
            for number in range(250):
                writer.put(line(str(number)))
            writer.put(AuditRecord(0.0, {"act": "calls", "count": 3}, calls=([row] * 3, 0.0)))
        until_sync(lambda: not writer.failing, "the disk to have room")
    written = entries(tmp_path)[count:]
    (lost,) = [each for each in written if each["act"] == "lost"]
    assert len(written) - 2 + lost["lines"] == 251
    assert lost["calls"] == 3
    assert not verify(tmp_path).fault


def test_calls_are_written_without_their_contents(tmp_path: Path) -> None:
    rows = [
        ("c-1", "echo", "plugin", "host", 10.0, 10.5, 0, 2, 2, ("ann", 1, 0), ("secret arguments", "secret output")),
        ("c-2", "echo", "plugin", "host", 11.0, 12.0, 99, 2, 2, None, None),
    ]
    with writing(tmp_path) as writer:
        writer.put(AuditRecord(0.0, {"act": "calls", "count": 2}, calls=(rows, 1_000.0)))
    (entry,) = entries(tmp_path)
    assert entry["calls"] == [
        ["c-1", "echo", "plugin", "host", "ann", "OK", 1010.0, 0.5],
        ["c-2", "echo", "plugin", "host", "", "INTERNAL", 1011.0, 1.0],
    ]
    assert b"secret" not in files_of(tmp_path)[0].read_bytes()


def test_two_writers_cannot_share_a_directory(tmp_path: Path) -> None:
    with writing(tmp_path), pytest.raises(SetupError, match="another bus writes the audit"):
        AuditWriter(tmp_path, "boot").open()
    write(tmp_path, 1)


def test_a_directory_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(SetupError, match="cannot write the audit in"):
        AuditWriter(tmp_path / "audit", "boot").open()


def test_the_head_is_logged_regularly_and_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolbus.audit")
    with writing(tmp_path, head_seconds=0.01) as writer:
        writer.put_now(line())
        until_sync(lambda: f"audit head={writer.head[1]} seq=1" in caplog.text, "the head")
        caplog.clear()
        until_sync(lambda: "audit head" in caplog.text, "the head again")
    with writing(tmp_path) as writer:
        caplog.clear()
        writer.put_now(line())
    assert f"audit head={writer.head[1]} seq=2" in caplog.text
