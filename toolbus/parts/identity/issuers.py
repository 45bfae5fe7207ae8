"""Finds the identity that a token of an issuer proves: a JWT, as OIDC issues them.

A token gets the scopes of an identity of ``keys.toml`` by its groups, and a name of its own: ``chat/ann``. A verified
token is cached by its SHA-256 until it expires.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote as percent

import aiohttp

from toolbus.bus.access.identity import Identity, Scopes, day_of
from toolbus.common import path_ownership
from toolbus.common.newest import NewestCache
from toolbus.common.text import list_names, quote
from toolbus.common.version import VERSION
from toolbus.errors import SetupError, Unauthenticated
from toolbus.parts.identity.settings import ANY_GROUP, Issuer

# A new set replaces the one before, so that a key which the issuer dropped is no longer valid. Where fetching fails,
# the set before is valid for a day. No client can make the bus fetch more often than every 30 seconds.

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
        except (SetupError, OSError, aiohttp.ClientError, UnicodeError, TimeoutError) as error:  # one of names: a..b
            reason = str(error) or type(error).__name__
            why = f"not fetched, the earlier ones are valid for a day: {reason}"
            log.warning("keys of issuer %s %s", self._issuer.host, why)
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


try:
    import jwt
except ImportError as error:
    raise SetupError(f"issuers need more libraries ({error}): run `pip install 'toolbus[jwt]'`") from None

MAX_VERIFIED = 1_000  # tokens in the cache
MAX_TOKEN = 8_192  # characters
MAX_NAME = 128  # characters of a client's name
MAX_TIME = 253_402_300_799  # the end of the year 9999, in seconds since the epoch
LEEWAY_SECONDS = 30.0  # how far an issuer's clock may be ahead

_OPTIONS: Any = {
    "require": ["exp", "iss", "aud"],
    "enforce_minimum_key_length": True,
    # Checked below, by our clock.
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    # The configuration says which claim names the client, and it may be any text.
    "verify_sub": False,
    "verify_jti": False,
}
_UNKNOWN = Scopes()  # of a token whose identity has not been looked up yet: nothing


@dataclass(frozen=True, slots=True)
class _Verified:
    """A verified token.

    Attributes:
        template: the identity of `keys.toml` whose scopes apply.
    """

    identity: Identity
    template: str
    keys: IssuerKeys


class Issuers:
    """The issuers of one bus. All methods belong to one loop.

    Args:
        identities: returns the scopes of each identity of `keys.toml`, as they are now.
        fetch: returns the content of an https URL.
        clock: tells seconds since the epoch.
        ticks: tells seconds of a clock that never goes back.
    """

    def __init__(
        self,
        issuers: Sequence[Issuer],
        identities: Callable[[], Mapping[str, Scopes]],
        fetch: Fetch = fetch_jwks,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._issuers = {each.issuer: (each, IssuerKeys(each, fetch, ticks)) for each in issuers}
        self._shown, self._owners = _tell_apart(issuers)
        self._identities = identities
        self._clock = clock
        self._verified = NewestCache[bytes, _Verified](MAX_VERIFIED)
        self._newest = NewestCache[str, tuple[str, float]](MAX_VERIFIED)  # by identity: its newest token, and its end

    @property
    def names(self) -> Sequence[str]:
        """The issuers, as tokens name them."""
        return list(self._issuers)

    def __repr__(self) -> str:
        hosts = " ".join(issuer.host for issuer, _ in self._issuers.values())
        return f"<Issuers {hosts} verified={len(self._verified)}>"

    async def identity_of(self, token: str) -> Identity:
        """Returns the identity that a token proves.

        Raises:
            Unauthenticated: the token is not of a known issuer, not for this bus, has expired, or cannot be checked.
                The error does not show it.
        """
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        verified = self._verified.get(digest)
        if verified is None or not verified.keys.holds(verified.identity.proof):
            verified = await self._verify(token)
            self._newest[verified.identity.name] = token, verified.identity.expires
        identity = self._as_now(verified.identity, verified.template)
        if identity is not verified.identity:
            self._verified[digest] = replace(verified, identity=identity)
        return identity

    def token_of(self, name: str) -> str:
        """Returns the newest token of an identity that has not expired; "" if there is none."""
        token, expires = self._newest.get(name, ("", 0.0))
        return token if self._clock() < expires else ""

    def current(self, identity: Identity) -> Identity:
        """Returns an identity that a token proved earlier, with the scopes of now.

        Raises:
            Unauthenticated: the token has expired, its issuer has dropped the key that signed it, or the identity whose
                scopes it had was removed.
        """
        own = [keys for issuer, keys in self._issuers.values() if self._shown[issuer.issuer] == identity.key]
        if not any(keys.holds(identity.proof) for keys in own):
            raise Unauthenticated(
                f"the token of {identity.shown} was signed with key {quote(identity.proof)}, which its issuer "
                f"{identity.key} does not publish any more: get a new token"
            )
        return self._as_now(identity, identity.name.partition("/")[0].partition("@")[0])

    async def close(self) -> None:
        """Cancels fetches of keys."""
        for _, keys in self._issuers.values():
            await keys.close()

    def _as_now(self, identity: Identity, template: str) -> Identity:
        if identity.has_expired(self._clock()):
            raise Unauthenticated(
                f"the token of {identity.shown} expired on {day_of(identity.expires)}: get a new one from its issuer"
            )
        scopes = self._identities().get(template)
        if scopes is None:
            raise Unauthenticated(
                f"{identity.shown} gets its scopes from identity {template!r}, which keys.toml does not have: ask an "
                "operator of the bus to add it"
            )
        return identity if scopes is identity.scopes else replace(identity, scopes=scopes)

    async def _verify(self, token: str) -> _Verified:
        if len(token) > MAX_TOKEN:
            raise Unauthenticated(f"the token has more than {MAX_TOKEN} characters: get one with fewer claims")
        try:
            header = jwt.get_unverified_header(token)
            name = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise Unauthenticated("the token is not a JWT: get one from an issuer that this bus knows") from None
        if not isinstance(name, str) or name not in self._issuers:
            raise Unauthenticated(
                f"the token is of issuer {quote(str(name))}, this bus knows {list_names(map(quote, self._issuers))}: "
                "get one from there"
            )
        issuer, keys = self._issuers[name]
        algorithm, kid = header.get("alg"), header.get("kid", "")
        if algorithm not in issuer.algorithms or not isinstance(kid, str):
            raise Unauthenticated(
                f"the token of issuer {issuer.host} is signed with {quote(str(algorithm))}, it may be signed with "
                f"{', '.join(issuer.algorithms)}: have the issuer use one of them, or add it to algorithms"
            )
        key = await keys.find(kid)
        claims = _claims(token, issuer, key, algorithm)
        self._check_times(claims, issuer)
        who, template = _name(claims, issuer), _template(claims, issuer)
        proof = str(key.get("kid", ""))
        group = template if self._owners[template] == issuer.issuer else f"{template}@{self._shown[issuer.issuer]}"
        shown = self._shown[issuer.issuer]
        identity = Identity(f"{group}/{who}", _UNKNOWN, shown, "jwt", float(claims["exp"]), proof)
        return _Verified(identity, template, keys)

    def _check_times(self, claims: Mapping[str, Any], issuer: Issuer) -> None:
        now = self._clock()
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
                raise Unauthenticated(f"the token's claim {name} is not a time: have {issuer.host} issue another")
        if claims["exp"] <= now:
            when = day_of(claims["exp"])
            raise Unauthenticated(f"the token of issuer {issuer.host} expired on {when}: get a new one")
        if max(claims.get("nbf", 0), claims.get("iat", 0)) > now + LEEWAY_SECONDS:
            raise Unauthenticated(
                f"the token of issuer {issuer.host} is not valid yet: set the clocks of issuer and bus by a time server"
            )


def _tell_apart(issuers: Sequence[Issuer]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns how each issuer is shown, and for each identity of `keys.toml` the first issuer that proves it.

    A client of that issuer has the name ``IDENTITY/CLIENT``, one of a later issuer ``IDENTITY@ISSUER/CLIENT``: issuer
    and client together are who it is, and what it owns. An issuer is shown by its host, or where several have that host
    by the whole of its name.
    """
    hosts = [each.host for each in issuers]
    shown = {}
    for each in issuers:
        alone = hosts.count(each.host) == 1
        shown[each.issuer] = each.host if alone else percent(each.issuer.removeprefix("https://"), safe="")
    owners: dict[str, str] = {}
    for each in issuers:
        for template in each.groups.values():
            owners.setdefault(template, each.issuer)
    return shown, owners


def _claims(token: str, issuer: Issuer, key: Jwk, algorithm: str) -> dict[str, Any]:
    """Returns the claims of a token whose signature, issuer and audience are valid."""
    try:
        if key.get("alg", algorithm) != algorithm:
            raise jwt.InvalidKeyError("its key is for another algorithm")
        return jwt.decode(
            token,
            jwt.PyJWK(dict(key), algorithm),
            algorithms=list(issuer.algorithms),
            audience=issuer.audience,
            issuer=issuer.issuer,
            options=_OPTIONS,
        )
    except jwt.InvalidAudienceError:
        raise Unauthenticated(
            f"the token of issuer {issuer.host} is not for this bus: get one for audience {quote(issuer.audience)}"
        ) from None
    except jwt.MissingRequiredClaimError as error:
        raise Unauthenticated(
            f"the token of issuer {issuer.host} has no claim {error.claim}: have the issuer add it"
        ) from None
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        reason = type(error).__name__  # its text may repeat what the token holds
        raise Unauthenticated(
            f"the token does not prove that issuer {issuer.host} issued it ({reason}): get a new one"
        ) from None


def _name(claims: Mapping[str, Any], issuer: Issuer) -> str:
    name = claims.get(issuer.name)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise Unauthenticated(
            f"the claim {quote(issuer.name)} of the token of issuer {issuer.host} is not a name of 1 to {MAX_NAME} "
            "printable characters: have the issuer set it, or name another claim in the configuration"
        )
    return name


def _template(claims: Mapping[str, Any], issuer: Issuer) -> str:
    groups = claims.get(issuer.groups_claim, [])
    listed = {groups} if isinstance(groups, str) else set(map(str, groups)) if isinstance(groups, list) else set()
    for group, template in issuer.groups.items():
        if group == ANY_GROUP or group in listed:
            return template
    raise Unauthenticated(
        f"the token of issuer {issuer.host} is in none of the groups {list_names(map(quote, issuer.groups))} (its "
        f"claim {quote(issuer.groups_claim)}): ask an operator of the issuer to add you to one"
    )
