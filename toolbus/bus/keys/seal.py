"""Seals texts that clients send back: states of questions, cursors, ids of tasks and of sessions.

A client can read a sealed text, but neither change it nor use it elsewhere: the seal (HMAC-SHA-256, cut to 18 bytes)
covers the text, its expiry, and its scope, such as the tool and the user. The key is in the data directory,
so sealed texts stay valid across restarts.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from toolbus.bus.keys.private_files import read_private, write_private
from toolbus.errors import SetupError, ToolBusError

KEY_FILE = "mcp.key"  # in the data directory, 0600
KEY_BYTES = 32
SEAL_BYTES = 18  # 144 bits cannot be guessed, and have 24 characters
STATE_SECONDS = 3600.0  # users answer slowly
_END_BYTES = 6  # of the moment, in whole seconds since the epoch; 0: none
_LENGTH_BYTES = 4


class BrokenSeal(ToolBusError):
    """A text was not sealed by this bus, is for another purpose or caller, or has expired."""


class Sealer:
    """Seals texts with one key.

    Args:
        key: `KEY_BYTES` random bytes.
        clock: seconds since the epoch.
    """

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock

    def __repr__(self) -> str:
        return "<Sealer>"

    @classmethod
    def of(cls, data_dir: Path | None, clock: Callable[[], float] = time.time, shared: bytes | None = None) -> Sealer:
        """Returns the sealer with a key that several buses share, else with that of a data directory.

        The key of a directory is created at first use; without either it is a temporary one.

        Raises:
            SetupError: the key's file cannot be used.
        """
        own = secrets.token_bytes(KEY_BYTES) if data_dir is None or shared else _key_in(data_dir / KEY_FILE)
        return cls(shared or own, clock)

    def seal(self, content: bytes, *bound: str, seconds: float = 0.0) -> str:
        """Returns content as a sealed text of letters, digits, ``-``, ``_`` and one dot.

        Args:
            bound: the scope, the purpose first: opening it needs the same texts.
            seconds: how long it is valid; 0: as long as the key.
        """
        end = int(self._clock() + seconds) + 1 if seconds else 0
        body = end.to_bytes(_END_BYTES, "big") + content
        return f"{_text(body)}.{_text(self._mac(body, bound))}"

    def open(self, sealed: str, *bound: str) -> bytes:
        """Returns the content of a sealed text.

        Raises:
            BrokenSeal: it was not sealed by this key for ``bound``, or has expired.
        """
        body_text, _, mac_text = sealed.rpartition(".")
        body, mac = _bytes(body_text), _bytes(mac_text)
        if len(body) < _END_BYTES or not hmac.compare_digest(mac, self._mac(body, bound)):
            raise BrokenSeal("it was not issued by this bus for this request")
        end = int.from_bytes(body[:_END_BYTES], "big")
        if end and end <= self._clock():
            raise BrokenSeal("it has expired")
        return body[_END_BYTES:]

    def sign(self, text: str, *bound: str) -> str:
        """Returns a text followed by its seal. The text stays readable, and never expires."""
        return f"{text}.{_text(self._mac(text.encode('utf-8', 'surrogatepass'), bound))}"

    def verify(self, signed: str, *bound: str) -> str:
        """Returns a signed text without its seal.

        Raises:
            BrokenSeal: it was not signed by this key for ``bound``.
        """
        text, _, mac = signed.rpartition(".")
        if not hmac.compare_digest(_bytes(mac), self._mac(text.encode("utf-8", "surrogatepass"), bound)):
            raise BrokenSeal("it was not issued by this bus for this request")
        return text

    def _mac(self, content: bytes, bound: tuple[str, ...]) -> bytes:
        """Each part is preceded by its length, so that different parts never give the same bytes."""
        parts = [*(each.encode("utf-8", "surrogatepass") for each in bound), content]
        message = b"".join(len(each).to_bytes(_LENGTH_BYTES, "big") + each for each in parts)
        return hmac.digest(self._key, message, "sha256")[:SEAL_BYTES]


def _key_in(path: Path) -> bytes:
    """Returns the key of a file, which is created if missing. Only one bus uses the data directory."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secrets.token_bytes(KEY_BYTES))
    key, _ = read_private(path)
    if len(key) != KEY_BYTES:
        raise SetupError(
            f"{path} has {len(key)} bytes, it must have {KEY_BYTES}: delete it, and a new one is made (MCP clients "
            "then begin new sessions)"
        )
    return key


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Returns the content of a text of `_text`; b"" for any other text, or another spelling."""
    try:
        content = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""
    return content if _text(content) == text else b""
