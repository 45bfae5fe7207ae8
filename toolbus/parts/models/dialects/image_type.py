"""Tells the type of an image from its bytes, and whether they are all there.

Only the structure is read, no picture is decoded: chunks, segments and boxes have to end where the file says they end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))  # markers without a length
_JPEG_FRAMES = frozenset((*range(0xC0, 0xD0),)) - {0xC4, 0xC8, 0xCC}  # markers with the size of the picture
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, b"\xff\xd9"
_HEIC = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"))
_HEIF = frozenset((b"mif1", b"msf1", b"heif"))


def image_type(data: bytes) -> str:
    """Returns the MIME type of a whole image; "" for any other bytes, a cut or empty picture included."""
    for begins, is_whole, mime_type in _KINDS:
        if begins(data):
            try:
                return mime_type if is_whole(data) else ""
            except (IndexError, struct.error):  # the bytes end in the middle of a field
                return ""
    brand = data[8:12]
    if data[4:8] == b"ftyp" and (brand in _HEIC or brand in _HEIF) and _boxes_are_whole(data):
        return "image/heic" if brand in _HEIC else "image/heif"
    return ""


def _png_is_whole(data: bytes) -> bool:
    place, has_pixels = len(_PNG), False
    if data[place + 4 : place + 8] != b"IHDR" or 0 in struct.unpack_from(">II", data, place + 8):
        return False
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        (checksum,) = struct.unpack_from(">I", data, place + 8 + length)
        if zlib.crc32(memoryview(data)[place + 4 : place + 8 + length]) != checksum:
            return False
        if kind == b"IEND":
            return has_pixels
        has_pixels = has_pixels or kind == b"IDAT"
        place += 12 + length
    return False


def _jpeg_is_whole(data: bytes) -> bool:
    place, has_size = 2, False
    while data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in _JPEG_ALONE:
            place += 2
            continue
        (length,) = struct.unpack_from(">H", data, place + 2)
        if marker in _JPEG_FRAMES:
            has_size = 0 not in struct.unpack_from(">HH", data, place + 5)
        if marker == _START_OF_SCAN:
            return has_size and data.find(_END_OF_IMAGE, place + 2 + length) >= 0
        place += 2 + length
    return False


def _gif_is_whole(data: bytes) -> bool:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place, has_pixels = 13 + _colours(flags), False
    while width and height:
        kind = data[place]
        if kind == 0x3B:
            return has_pixels
        if kind == 0x2C:
            place += 11 + _colours(data[place + 9])  # the descriptor, its colours, and the size of the codes
            has_pixels = True
        elif kind == 0x21:
            place += 2
        else:
            return False
        while data[place]:  # blocks of data
            place += 1 + data[place]
        place += 1
    return False


def _colours(flags: int) -> int:
    """Returns the bytes of a table of colours."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp_is_whole(data: bytes) -> bool:
    (length,) = struct.unpack_from("<I", data, 4)
    return data[12:16] in (b"VP8 ", b"VP8L", b"VP8X") and length > 12 and len(data) >= 8 + length


def _boxes_are_whole(data: bytes) -> bool:
    place, has_pixels = 0, False
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if length == 1 and place + 16 <= len(data):
            (length,) = struct.unpack_from(">Q", data, place + 8)
        has_pixels = has_pixels or kind == b"mdat"
        if length == 0:  # the last box: it goes on to the end
            return has_pixels
        if length < 8:
            return False
        place += length
    return has_pixels and place == len(data)


_KINDS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], bool], str], ...] = (
    (lambda data: data.startswith(_PNG), _png_is_whole, "image/png"),
    (lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg_is_whole, "image/jpeg"),
    (lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _gif_is_whole, "image/gif"),
    (lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _webp_is_whole, "image/webp"),
)
