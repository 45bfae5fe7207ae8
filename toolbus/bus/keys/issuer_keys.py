"""Fetches the public keys of an issuer (JWKS) and caches them: over https, or from a file.

A new set replaces the one before, so that a key which the issuer dropped is no longer valid. Where fetching fails, the
set before is valid for a day. No client can make the bus fetch more often than every 30 seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from toolbus.bus import path_ownership
from toolbus.bus.keys.issuer_settings import Issuer
from toolbus.errors import SetupError, Unauthenticated
from toolbus.text import quote
from toolbus.version import VERSION

MAX_JWKS = 64 * 1024  # bytes
MAX_KEYS = 100
FETCH_SECONDS = 5.0
RETRY_SECONDS = 30.0  # between two attempts
REFRESH_SECONDS = 3600.0  # after which a set is fetched again in the background
HOLD_SECONDS = 86_400.0  # how long a set is valid that cannot be fetched again

log = logging.getLogger("toolbus.keys")

Jwk = Mapping[str, Any]
Fetch = Callable[[str], Awaitable[bytes]]


class IssuerKeys:
    """The keys of one issuer.

    Args:
        fetch: returns the content of an https URL.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, issuer: Issuer, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._fetch = fetch
        self._clock = clock
        self._keys: dict[str, Jwk] = {}  # by kid; "" for a key without
        self._fetched = -HOLD_SECONDS  # when the set was fetched
        self._tried = -RETRY_SECONDS  # when fetching began last
        self._fetching: asyncio.Task[None] | None = None  # None while nothing is fetched

    def holds(self, kid: str) -> bool:
        """Tells whether a key is valid now; an old set is fetched again in the background."""
        self._refresh_if_old()
        return kid in self._keys and self._clock() - self._fetched < HOLD_SECONDS

    async def find(self, kid: str) -> Jwk:
        """Returns a key; fetches the set where the key is not in it.

        Args:
            kid: of the token; "" means the only key of the issuer.

        Raises:
            Unauthenticated: the issuer has no such key, or its keys cannot be fetched.
        """
        key = self._find(kid)
        if key is None:
            await self._refresh()
            key = self._find(kid)
        else:
            self._refresh_if_old()
        if key is not None:
            return key
        if self._clock() - self._fetched >= HOLD_SECONDS:
            raise Unauthenticated(
                f"the token cannot be checked, because the keys of its issuer {self._issuer.host} cannot be fetched: "
                "try again later (the log of the bus says why)"
            )
        raise Unauthenticated(
            f"the token was signed with key {quote(kid)}, which its issuer {self._issuer.host} does not publish: get a "
            "new token"
        )

    async def close(self) -> None:
        """Ends fetching."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _find(self, kid: str) -> Jwk | None:
        if self._clock() - self._fetched >= HOLD_SECONDS:
            return None
        if not kid and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(kid) if kid else None

    async def _refresh(self) -> None:
        self._begin()
        if self._fetching is not None:
            await asyncio.shield(self._fetching)  # others wait for it too

    def _refresh_if_old(self) -> None:
        if self._keys and self._clock() - self._fetched > REFRESH_SECONDS:
            self._begin()

    def _begin(self) -> None:
        """Begins to fetch, unless that goes on or was tried just now."""
        running = self._fetching is not None and not self._fetching.done()
        if running or self._clock() - self._tried < RETRY_SECONDS:
            return
        self._tried = self._clock()
        self._fetching = asyncio.get_running_loop().create_task(self._load(), name="toolbus issuer keys")

    async def _load(self) -> None:
        try:
            file = self._issuer.file
            content = await asyncio.to_thread(_read, file) if file is not None else await self._fetch(self._issuer.jwks)
            self._keys = parse_jwks(content)
        except (SetupError, OSError, aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log.warning(
                "keys of issuer %s not fetched, the earlier ones are valid for a day: %s", self._issuer.host, reason
            )
            return
        self._fetched = self._clock()
        log.info("keys of issuer %s fetched keys=%d", self._issuer.host, len(self._keys))


def parse_jwks(content: bytes) -> dict[str, Jwk]:
    """Reads a set of keys; returns those that sign, by their id.

    Raises:
        SetupError: it is not a set of keys, or holds none that could be used.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise SetupError("it is not JSON") from None
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise SetupError(f'it is not {{"keys": [...]}} with at most {MAX_KEYS} keys')
    keys: dict[str, Jwk] = {}
    for key in listed:
        if not isinstance(key, dict) or key.get("kty") not in ("RSA", "EC", "OKP") or key.get("use", "sig") != "sig":
            continue
        kid = key.get("kid", "")
        if isinstance(kid, str):
            keys[kid] = key
    if not keys:
        raise SetupError("it holds no public key of kind RSA, EC or OKP")
    return keys


async def fetch_jwks(url: str, context: ssl.SSLContext | None = None) -> bytes:
    """Returns the content of an https URL: at most `MAX_JWKS` bytes, in `FETCH_SECONDS`, without redirects and proxies.

    Args:
        context: which certificates are trusted; None: those that the system trusts.

    Raises:
        SetupError: the answer breaks a rule.
        aiohttp.ClientError, TimeoutError, OSError: no answer came.
    """
    if not url.startswith("https://"):
        raise SetupError("the URL is not https")
    async with (
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=FETCH_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "application/json", "User-Agent": f"toolbus/{VERSION}"},
            trust_env=False,
        ) as session,
        session.get(url, allow_redirects=False, ssl=context or ssl.create_default_context()) as response,
    ):
        if response.status != 200:
            raise SetupError(f"the answer is status {response.status}, it must be 200 without a redirect")
        content = bytearray()
        async for chunk in response.content.iter_chunked(MAX_JWKS):
            content += chunk
            if len(content) > MAX_JWKS:
                raise SetupError(f"the answer is larger than {MAX_JWKS >> 10} KiB")
    return bytes(content)


def _read(file: Path) -> bytes:
    path_ownership.check_path(file, f"the file {file} of keys")
    with open(file, "rb") as opened:
        mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        if mode & 0o022:
            raise SetupError(f"{file} has mode {mode:04o}, and only its owner may write it: run `chmod go-w {file}`")
        content = opened.read(MAX_JWKS + 1)
    if len(content) > MAX_JWKS:
        raise SetupError(f"{file} is larger than {MAX_JWKS >> 10} KiB")
    return content
