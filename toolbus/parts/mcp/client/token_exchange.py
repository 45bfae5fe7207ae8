"""Exchanges the tokens of callers for tokens of a mounted server (OAuth 2.0 Token Exchange, RFC 8693).

Only a caller who has proven a JWT has one to exchange; the bus holds it in memory, as long as it is valid. An exchanged
token is cached for its user until it expires.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote as percent
from urllib.parse import urlencode, urlsplit

import aiohttp

from toolbus.bus.core import Core
from toolbus.common.newest import NewestCache
from toolbus.common.text import clean_line, quote, shorten
from toolbus.parts.mcp.client.authorization import EARLY_SECONDS
from toolbus.parts.mcp.client.calls import number_of
from toolbus.parts.mcp.client.entries import MountEntry, OAuthClient
from toolbus.parts.mcp.client.http_link import MAX_ERROR_BYTES, is_private_host, open_session, read_body
from toolbus.parts.mcp.client.transport import Challenge, NeedsLogin
from toolbus.parts.mcp.client.user_logins import User

GRANT = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
MAX_TOKENS = 1_000  # of one mount in the cache
UNKNOWN_SECONDS = 60.0  # how long a token is cached whose endpoint does not say when it expires
_SECONDS = 15.0  # for the endpoint to answer


@runtime_checkable
class TokenHolder(Protocol):
    """Knows the tokens that have proven identities."""

    def token_of(self, name: str) -> str:
        """Returns the newest token of an identity that has not expired; "" if there is none."""


class TokenExchange:
    """The exchanged tokens of one mount.

    Args:
        token_of: returns the caller's own token, by the name of the identity; "" without one.
    """

    def __init__(self, entry: MountEntry, token_of: Callable[[str], str]) -> None:
        self._name = entry.name
        self._rules = entry.oauth or OAuthClient()
        self._token_of = token_of
        self._tokens = NewestCache[User, tuple[str, float]](MAX_TOKENS)  # with the time until which each is used
        self._locks = NewestCache[User, asyncio.Lock](MAX_TOKENS)  # each held while the token of a user is exchanged

    def __repr__(self) -> str:
        return f"<TokenExchange {self._name} tokens={len(self._tokens)}>"

    async def token(self, user: User, refused: str = "") -> str:
        """Returns the token of a user at the server.

        Args:
            refused: a token that the server does not accept.

        Raises:
            NeedsLogin: there is none; the text says why.
        """
        lock = self._locks.get(user)
        if lock is None:
            lock = self._locks[user] = asyncio.Lock()
        async with lock:
            token, until = self._tokens.get(user, ("", 0.0))
            if not token or token == refused or time.monotonic() >= until:
                token, seconds = await self._exchange(self._subject(user))
                self._tokens[user] = token, time.monotonic() + max(seconds - EARLY_SECONDS, seconds / 2)
            return token

    def seconds(self, user: User) -> float:
        """Returns for how long the token of a user is used before the next exchange."""
        return self._tokens.get(user, ("", 0.0))[1] - time.monotonic()

    def forget(self, user: User) -> None:
        """Removes the token of a user from the cache."""
        self._tokens.pop(user, None)

    def _subject(self, user: User) -> str:
        token = self._token_of(user.identity) if user.identity else ""
        if not token:
            why = "has proven no JWT, whose exchange gives access: call with one of an issuer"
            raise self._error(f"{user.shown} {why}")
        if user.id and user.id != user.identity.rpartition("/")[2]:
            raise self._error(f"{user.shown} cannot use the token of another user: call without a user")
        return token

    async def _exchange(self, subject: str) -> tuple[str, float]:
        """Returns a new token, and for how many seconds it is valid."""
        rules = self._rules
        url, parts = rules.exchange_at, urlsplit(rules.exchange_at)
        if parts.scheme != "https" and not is_private_host(parts.hostname or ""):
            raise self._error(f"{quote(url)} is not https: nothing is sent")
        form = {"grant_type": GRANT, "subject_token": subject, "subject_token_type": ACCESS_TOKEN}
        form |= {name: value for name in ("audience", "resource", "scope") if (value := getattr(rules, name))}
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        if rules.client_secret:
            pair = f"{percent(rules.client_id, safe='')}:{percent(rules.client_secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        elif rules.client_id:
            form["client_id"] = rules.client_id
        try:
            async with (
                asyncio.timeout(_SECONDS),
                open_session([url]) as session,
                session.post(url, data=urlencode(form), headers=headers, allow_redirects=False) as response,
            ):
                status, body = response.status, await read_body(response, MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._error(f"{url} does not answer ({str(error) or 'in time'})") from None
        return self._read(status, body)

    def _read(self, status: int, body: bytes) -> tuple[str, float]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        fields: dict[str, Any] = answer if isinstance(answer, dict) else {}
        token, kind = fields.get("access_token"), str(fields.get("token_type") or "")
        if status != 200 or not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            texts = [str(fields[name]) for name in ("error", "error_description") if fields.get(name)]
            said = ": ".join(texts) or ("" if fields else body.decode("utf-8", "replace"))
            raise self._error(f"{self._rules.exchange_at} answered {status} ({shorten(clean_line(said), 300)})")
        if kind.lower() not in ("bearer", "n_a"):
            raise self._error(f"{self._rules.exchange_at} gave a token of type {quote(kind)}, it must be Bearer")
        seconds = number_of(fields.get("expires_in"))
        return token, seconds if seconds > 0 else UNKNOWN_SECONDS

    def _error(self, why: str) -> NeedsLogin:
        return NeedsLogin(f"server {self._name!r} gets no token: {why}")


class ExchangedAuthorization:
    """The exchanged token of one user, as the `Authorization` of a connection."""

    def __init__(self, exchange: TokenExchange, user: User) -> None:
        self._exchange = exchange
        self._user = user

    async def header(self) -> str:
        """Returns the Authorization header.

        Raises:
            NeedsLogin: there is no token.
        """
        return f"Bearer {await self._exchange.token(self._user)}"

    async def renew(self, challenge: Challenge) -> bool:
        """Exchanges the token again after a refusal; False if another token would not help.

        Raises:
            NeedsLogin: there is no token.
        """
        if challenge.status != 401:
            return False
        refused = challenge.used.removeprefix("Bearer ")
        return await self._exchange.token(self._user, refused) != refused

    async def close(self) -> None:
        """Does nothing."""


def token_of(core: Core, name: str) -> str:
    """Returns the newest token that has proven an identity of a bus; "" if there is none."""
    issuers: object = core.sessions.doorman.issuers
    return issuers.token_of(name) if isinstance(issuers, TokenHolder) else ""
