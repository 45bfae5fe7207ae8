"""Reads what the sniffer recorded: the frames, and the bytes of each direction of each TCP connection in order."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IPV4, TCP = 0x0800, 6
TLS_TYPES = range(20, 25)  # of records: change of ciphers, alert, handshake, application data, heartbeat


class Direction(NamedTuple):
    """One direction of a TCP connection."""

    source: tuple[str, int]
    to: tuple[str, int]


def frames(file: Path) -> Iterator[bytes]:
    """Yields the recorded frames."""
    content, at = file.read_bytes(), 0
    while at + 4 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        yield content[at + 4 : at + 4 + length]
        at += 4 + length


def streams(file: Path) -> dict[Direction, bytes]:
    """Returns what each direction of each connection carried; one that carried nothing is there too.

    Raises:
        AssertionError: something is missing, so that it could hide what is looked for.
    """
    parts: dict[Direction, dict[int, bytes]] = {}
    for frame in frames(file):
        if (segment := _segment(frame)) is not None:
            direction, sequence, payload = segment
            known = parts.setdefault(direction, {})
            if payload and len(payload) > len(known.get(sequence, b"")):
                known[sequence] = payload
    return {direction: _joined(known) for direction, known in parts.items()}


def _segment(frame: bytes) -> tuple[Direction, int, bytes] | None:
    if len(frame) < 54 or struct.unpack_from("!H", frame, 12)[0] != IPV4 or frame[23] != TCP:
        return None
    header = 14 + (frame[14] & 15) * 4
    end = 14 + struct.unpack_from("!H", frame, 16)[0]
    source_port, to_port, sequence = struct.unpack_from("!HHI", frame, header)
    source, to = (".".join(map(str, frame[at : at + 4])) for at in (26, 30))
    return (
        Direction((source, source_port), (to, to_port)),
        sequence,
        frame[header + (frame[header + 12] >> 4) * 4 : end],
    )


def _joined(parts: dict[int, bytes]) -> bytes:
    joined, expected = b"", None
    for sequence in sorted(parts):
        payload = parts[sequence]
        if expected is not None:
            assert sequence <= expected, f"{sequence - expected} bytes were not recorded"
            payload = payload[expected - sequence :]
        joined += payload
        expected = max(expected or 0, sequence + len(parts[sequence]))
    return joined


def is_tls(content: bytes) -> bool:
    """Tells whether bytes are records of TLS and nothing else; the last one may be cut off."""
    at = 0
    while at + 5 <= len(content):
        kind, version, length = struct.unpack_from("!BHH", content, at)
        if kind not in TLS_TYPES or version >> 8 != 3 or length > (1 << 14) + 256:
            return False
        at += 5 + length
    return bool(content)
