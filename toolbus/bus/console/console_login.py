"""Logs a browser in over HTTPS: with a code that is valid once, for a minute, in exchange for a cookie.

A browser must not hold a credential. `toolbus console` exchanges it for a code, and the browser the code for a cookie.
The cookie holds no secret of the key: the bus seals it, it names its key and ends with it. With a data directory it is
valid after a restart of the bus too.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from toolbus.bus.access.identity import Identity, Scopes
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.mcp_server.seal import BrokenSeal, Sealer
from toolbus.errors import Unauthenticated

COOKIE = "__Host-toolbus"  # a browser takes a cookie of such a name only from HTTPS, for one host and all its paths
COOKIE_SECONDS = 12 * 3600.0
CODE_SECONDS = 60.0
CODE_BYTES = 24
MAX_CODES = 1_000  # unused; beyond it the oldest is dropped
_PURPOSE = "console cookie"
_AGAIN = "make a new one with `toolbus console --bus ADDRESS`"
_NO_SCOPES = Scopes()  # of a cookie until its key is looked up


class Logins:
    """The codes and cookies of one bus.

    Args:
        doorman: tells whether a key is still in force.
        data_dir: holds the key that seals cookies; None: they end with the bus.
        clock: seconds since the epoch.
    """

    def __init__(self, doorman: Doorman, data_dir: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._doorman = doorman
        self._data_dir = data_dir
        self._clock = clock
        self._made: Sealer | None = None  # None until it is needed
        self._codes: dict[bytes, tuple[Identity, float]] = {}  # by the SHA-256 of a code: its identity, and its end

    def __repr__(self) -> str:
        return f"<Logins codes={len(self._codes)}>"

    @property
    def _sealer(self) -> Sealer:
        if self._made is None:
            self._made = Sealer.of(self._data_dir, self._clock)
        return self._made

    def code_for(self, identity: Identity) -> str:
        """Returns a code that lets a browser act as an identity."""
        now = self._clock()
        self._codes = {digest: each for digest, each in self._codes.items() if each[1] > now}
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(CODE_BYTES)
        self._codes[_digest(code)] = identity, now + CODE_SECONDS
        return code

    def exchange(self, code: str) -> tuple[Identity, str]:
        """Returns the identity of a code, and the header that sets the cookie; the code is used up.

        Raises:
            Unauthenticated: the code is unknown, was used or has expired, or its key has ended.
        """
        identity, end = self._codes.pop(_digest(code), (None, 0.0))
        if identity is None or end <= self._clock():
            raise Unauthenticated(
                f"the code is unknown: it is good once, for {CODE_SECONDS:g} s, and ends with the bus; {_AGAIN}"
            )
        self._doorman.current(identity)
        seconds = min(COOKIE_SECONDS, identity.expires - self._clock())
        ends = self._clock() + seconds
        fields = [identity.name, identity.key, identity.how, identity.proof, min(identity.expires, 1e15), ends]
        sealed = self._sealer.seal(json.dumps(fields).encode(), _PURPOSE, seconds=seconds)
        attributes = f"Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age={int(seconds)}"
        return identity, f"{COOKIE}={sealed}; {attributes}"

    def identity_in(self, header: str) -> Identity | None:
        """Returns the identity that a Cookie header proves, with the scopes of now; None without a cookie of the bus.

        The identity expires with the cookie.

        Raises:
            Unauthenticated: the cookie has expired or is not of this bus, or its key has ended.
        """
        pairs = (pair.strip().partition("=") for pair in header.split(";"))
        cookie = next((value for name, _, value in pairs if name == COOKIE), "")
        if not cookie:
            return None
        try:
            content = self._sealer.open(cookie, _PURPOSE)
        except BrokenSeal as error:
            raise Unauthenticated(f"the login of this browser has ended ({error}): {_AGAIN}") from None
        name, key, how, proof, expires, ends = json.loads(content)
        return replace(self._doorman.current(Identity(name, _NO_SCOPES, key, how, expires, proof)), expires=ends)


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest()
