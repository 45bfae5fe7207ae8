from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import within
from toolbus.protocol.lane import HEADER, FrameKind, LaneConnection, lane_names, program_of

MOST = 64  # bytes of a payload


class Wire(asyncio.Transport):
    """What was written, and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        """Does nothing: a test puts in what arrives."""


class End(LaneConnection):
    """An end that notes what it gets, and writes what a test puts into ``waiting``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(MOST, loop)
        self.wire = Wire()
        self.frames: list[tuple[int, bytes]] = []
        self.refused: list[str] = []
        self.waiting: list[bytes] = []
        self.connection_made(self.wire)

    def frame(self, kind: int, payload: bytes) -> None:
        self.frames.append((kind, payload))

    def refuse(self, status: str, text: str) -> None:
        self.over = True
        self.refused.append(f"{status}: {text}")

    def write_waiting(self) -> None:
        while self.waiting and self.may_write:
            self.write(FrameKind.MESSAGE, self.waiting.pop(0))


class Calls:
    """The part of a loop that a connection uses."""

    def __init__(self) -> None:
        self.soon: list[Any] = []

    def call_soon(self, function: Any) -> None:
        self.soon.append(function)

    def run(self) -> None:
        soon, self.soon = self.soon, []
        for function in soon:
            function()


def end() -> tuple[End, Calls]:
    loop: Any = Calls()
    return End(loop), loop


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=MOST)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 40)))
def test_frames_arrive_as_they_were_sent_wherever_the_bytes_are_cut(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    one, _ = end()
    rest = b"".join(frame(*each) for each in frames)
    for cut in cuts:
        one.data_received(rest[:cut])
        rest = rest[cut:]
    one.data_received(rest)
    assert one.frames == frames
    assert not one.refused


@given(st.lists(st.binary(max_size=90), max_size=8))
def test_no_bytes_raise_or_make_a_frame_above_the_limit(pieces: list[bytes]) -> None:
    one, _ = end()
    for piece in pieces:
        one.data_received(piece)
    assert all(len(payload) <= MOST for _, payload in one.frames)
    assert len(one.refused) <= 1


def test_a_payload_above_the_limit_is_refused_by_its_header_alone() -> None:
    one, _ = end()
    one.data_received(HEADER.pack(MOST + 1, FrameKind.MESSAGE))
    assert one.refused == [
        f"RESOURCE_EXHAUSTED: a message of {MOST + 1} bytes is above the limit message_bytes = {MOST}: send less"
    ]
    one.data_received(b"x" * 20)
    assert not one.frames


def test_what_is_put_in_during_one_turn_is_written_in_order_and_by_one_run() -> None:
    one, loop = end()
    one.waiting += [b"a", b"b"]
    one.wake()
    one.wake()
    assert len(loop.soon) == 1
    loop.run()
    assert one.wire.written == frame(2, b"a") + frame(2, b"b")


def test_nothing_is_written_while_the_other_end_does_not_read() -> None:
    one, loop = end()
    one.pause_writing()
    one.waiting.append(b"a")
    one.wake()
    loop.run()
    assert not one.wire.written
    one.resume_writing()
    loop.run()
    assert one.wire.written == frame(2, b"a")


def test_an_error_while_writing_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    one, loop = end()
    one.waiting.append(None)  # type: ignore[arg-type]
    one.wake()
    loop.run()
    assert one.wire.aborted
    assert "a fault of toolbus" in caplog.text


async def test_what_is_done_for_a_connection_ends_with_it() -> None:
    one, doing = End(asyncio.get_running_loop()), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            doing.set()

    one.hold(work())
    await asyncio.sleep(0)
    one.connection_lost(None)
    await within(doing.wait())


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the lane is on Linux only")


@linux
@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("127.0.0.1:48930", ["127.0.0.1:48930"]),
        ("[::1]:48930", ["::1:48930"]),
        ("localhost:48930", ["127.0.0.1:48930", "::1:48930"]),
        ("LOCALHOST:1", ["127.0.0.1:1", "::1:1"]),
        ("unix:/no/such/file", []),
    ],
)
def test_the_socket_is_named_by_the_address_beside_it(address: str, names: list[str]) -> None:
    assert [name.partition("/")[2] for name in lane_names(address)] == names


@linux
def test_two_paths_of_one_unix_socket_lead_to_one_lane_and_its_successor_to_another(tmp_path: Path) -> None:
    file, link = tmp_path / "bus.sock", tmp_path / "link.sock"
    file.touch()
    link.symlink_to(file)
    first = lane_names(f"unix:{file}")
    assert first == lane_names(f"unix:{link}") == lane_names(f"unix://{file}")
    (tmp_path / "new.sock").touch()
    (tmp_path / "new.sock").replace(file)
    assert lane_names(f"unix:{file}") != first


@linux
def test_the_kernel_names_the_program_at_the_other_end() -> None:
    import os

    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert program_of(one) == (os.getpid(), os.geteuid())
