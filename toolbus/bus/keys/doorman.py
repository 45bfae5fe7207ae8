"""Authenticates requests of other machines: by their token, their certificate, or both.

The servers of gRPC and HTTP pass in the credentials of a request; the key ring knows the keys. A request without a
valid key is refused with a text that says how to fix it, and logged at most once a minute for each peer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from toolbus.bus.access.identity import Identity
from toolbus.bus.keys.keyring import Changed, Keyring
from toolbus.common.newest import NewestCache
from toolbus.errors import Unauthenticated

log = logging.getLogger("toolbus.keys")

SECURE = ("tls", "mtls")  # prefixes of gRPC addresses where each request needs a key
REFRESH_SECONDS = 0.1  # between two reads of the files because of unknown keys
MAX_SETTLING = 5  # reads of a file that is being written, before an unknown key is refused
QUIET_SECONDS = 60.0  # between two log lines about the same peer
MAX_PEERS = 10_000  # whose last log line is remembered
MAX_TOKEN = 8_192  # characters; a JWT with many groups has some thousand


class TokenIssuers(Protocol):
    """Proves identities by the tokens of others: JWTs."""

    @property
    def names(self) -> Sequence[str]:
        """The issuers, as tokens name them."""

    async def identity_of(self, token: str) -> Identity:
        """Returns the identity that a token proves.

        Raises:
            Unauthenticated: it proves none.
        """

    def current(self, identity: Identity) -> Identity:
        """Returns an identity that a token proved earlier, with the scopes of now.

        Raises:
            Unauthenticated: the token is no longer in force.
        """

    async def close(self) -> None:
        """Cancels what it fetches."""


class Doorman:
    """Authenticates requests by the keys of one bus.

    Args:
        keys: None where the bus has none; every key is then refused.

    Attributes:
        issuers: None where no issuer is configured; every JWT is then refused.
        on_refresh: listeners, called with the changes that each read of the key files found.
    """

    def __init__(self, keys: Keyring | None) -> None:
        self.keys = keys
        self.issuers: TokenIssuers | None = None
        self.on_refresh: list[Callable[[Changed], object]] = []
        self._refreshing = asyncio.Lock()
        self._refreshed_at = 0.0  # by the monotonic clock
        self._logged = NewestCache[str, float](MAX_PEERS)  # by peer, when it was last logged

    async def identify(self, authorization: str | None, certificate: bytes | None, peer: str) -> Identity:
        """Returns who makes a request.

        Args:
            authorization: the header or metadata of that name; None without one.
            certificate: the client's, whose key it has proved to have, as DER; None without one.
            peer: its address, for the log.

        Raises:
            Unauthenticated: neither proves an identity, or they prove two.
        """
        try:
            return await self._identify(authorization, certificate)
        except Unauthenticated:
            if authorization is not None or certificate is not None:
                await self.refresh(time.monotonic())  # the key may have been made a moment ago
        try:
            return await self._identify(authorization, certificate)
        except Unauthenticated as error:
            now = time.monotonic()
            host = peer.rpartition(":")[0]  # each connection has another port
            if now - self._logged.get(host, -QUIET_SECONDS) >= QUIET_SECONDS:
                self._logged[host] = now
                log.warning("refused peer=%s why=%s", peer, error)
            raise

    async def close(self) -> None:
        """Cancels fetches of issuers' keys."""
        if self.issuers is not None:
            await self.issuers.close()

    async def refresh(self, since: float = math.inf) -> None:
        """Reads the key files again where they changed.

        Args:
            since: a time of the monotonic clock: does nothing where they were read after that.
        """
        if self.keys is None:
            return
        async with self._refreshing:
            if self._refreshed_at >= since:
                return
            if since < math.inf:  # for an unknown key; many of them share one read
                await asyncio.sleep(self._refreshed_at + REFRESH_SECONDS - since)
            self._refreshed_at = time.monotonic()
            await self._reload(self.keys)
            for _ in range(MAX_SETTLING if since < math.inf else 0):
                if not self.keys.settling:
                    break
                await asyncio.sleep(REFRESH_SECONDS)
                await self._reload(self.keys)

    async def _reload(self, keys: Keyring) -> None:
        changed = await asyncio.to_thread(keys.reload)
        for listener in self.on_refresh:
            listener(changed)

    def current(self, identity: Identity) -> Identity:
        """Returns an identity that was proven earlier as it is now.

        Raises:
            Unauthenticated: its key is no longer in force.
        """
        if identity.scopes is None:
            return identity
        if identity.how == "jwt" and self.issuers is not None:
            return self.issuers.current(identity)
        assert self.keys is not None  # it has proven the identity
        return self.keys.current(identity)

    async def _identify(self, authorization: str | None, certificate: bytes | None) -> Identity:
        if self.keys is None or (authorization is None and certificate is None):
            raise Unauthenticated(
                "this address of the bus needs a key, and the request carries none: use the credential of "
                "`toolbus keys add NAME` (TOOLBUS_CREDENTIAL=FILE; over HTTPS its token: Authorization: Bearer TOKEN)"
            )
        by_certificate = None
        if certificate is not None:
            by_certificate = self.keys.identity_of_certificate(hashlib.sha256(certificate).hexdigest())
        if authorization is None:
            assert by_certificate is not None
            return by_certificate
        by_token = await self._identity_of_token(_token_of(authorization))
        # A JWT proves one of many who share the scopes of an identity: NAME/WHO.
        if by_certificate is not None and by_certificate.name != by_token.name.partition("/")[0]:
            raise Unauthenticated(
                f"the certificate is of identity {by_certificate.name!r}, the token of {by_token.name!r}: use both of "
                "one credential"
            )
        return by_token

    async def _identity_of_token(self, token: str) -> Identity:
        assert self.keys is not None
        if self.issuers is not None and token.count(".") == 2:
            return await self.issuers.identity_of(token)
        return self.keys.identity_of_token(token)


def split_secure(address: str) -> tuple[str, str]:
    """Splits a gRPC address into ``tls``, ``mtls`` or nothing, and the rest."""
    prefix, colon, rest = address.partition(":")
    return (prefix, rest) if colon and prefix in SECURE else ("", address)


def der_of(pem: bytes) -> bytes:
    """Returns the DER form of a certificate."""
    return ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))


def _token_of(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN:
        raise Unauthenticated(
            f"the authorization is not 'Bearer TOKEN' with a token of 1 to {MAX_TOKEN} characters: send the token of "
            "the credential so"
        )
    return token
