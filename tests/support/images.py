"""Small whole images of each kind, written byte by byte: no library for pictures is needed."""

from __future__ import annotations

import struct
import zlib

_HEADER = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PNG = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", _HEADER) + _chunk(b"IDAT", zlib.compress(b"\0\0")) + _chunk(b"IEND", b"")
_APP = b"\xff\xe1" + struct.pack(">H", 6) + b"\xff\xd9\xff\xd8"  # a thumbnail with an end of its own
_FRAME = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, 1, 1, 1) + b"\x01\x11\x00"
_SCAN = b"\xff\xda" + struct.pack(">H", 8) + b"\x01\x01\x00\x00\x3f\x00" + b"\x2a"
JPEG = b"\xff\xd8" + _APP + _FRAME + _SCAN + b"\xff\xd9"
GIF = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff" + (
    b"!\xf9\x04\x00\x00\x00\x00\x00" + b",\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02\x44\x01\x00;"
)
_VP8L = b"VP8L" + struct.pack("<I", 14) + b"\x2f\x00\x00\x00\x00\x07\x10\x11\x11\x88\x88\xfe\x07\x00"
WEBP = b"RIFF" + struct.pack("<I", 4 + len(_VP8L)) + b"WEBP" + _VP8L
HEIC = struct.pack(">I", 16) + b"ftypheic" + bytes(4) + struct.pack(">I", 12) + b"mdat" + bytes(4)
