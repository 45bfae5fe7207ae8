"""Finds the identity that a token of an issuer proves: a JWT, as OIDC issues them.

A token gets the scopes of an identity of ``keys.toml`` by its groups, and a name of its own: ``chat/ann``. A verified
token is cached by its SHA-256 until it expires.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolbus.bus.access.identity import Identity, Scopes, day_of
from toolbus.bus.keys.issuer_keys import Fetch, IssuerKeys, Jwk, fetch_jwks
from toolbus.bus.keys.issuer_settings import ANY_GROUP, Issuer
from toolbus.errors import SetupError, Unauthenticated
from toolbus.newest import NewestCache
from toolbus.text import list_names, quote

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
        self._identities = identities
        self._clock = clock
        self._verified = NewestCache[bytes, _Verified](MAX_VERIFIED)

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
        identity = self._as_now(verified.identity, verified.template)
        if identity is not verified.identity:
            self._verified[digest] = replace(verified, identity=identity)
        return identity

    def current(self, identity: Identity) -> Identity:
        """Returns an identity that a token proved earlier, with the scopes of now.

        Raises:
            Unauthenticated: the token has expired, its issuer has dropped the key that signed it, or the identity whose
                scopes it had was removed.
        """
        if not any(
            keys.holds(identity.proof) for issuer, keys in self._issuers.values() if issuer.host == identity.key
        ):
            raise Unauthenticated(
                f"the token of {identity.shown} was signed with key {quote(identity.proof)}, which its issuer "
                f"{identity.key} does not publish any more: get a new token"
            )
        return self._as_now(identity, identity.name.partition("/")[0])

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
        if scopes is identity.scopes:
            return identity
        return replace(identity, scopes=scopes)

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
        identity = Identity(f"{template}/{who}", _UNKNOWN, issuer.host, "jwt", float(claims["exp"]), proof)
        return _Verified(identity, template, keys)

    def _check_times(self, claims: Mapping[str, Any], issuer: Issuer) -> None:
        now = self._clock()
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
                raise Unauthenticated(f"the token's claim {name} is not a time: have {issuer.host} issue another")
        if claims["exp"] <= now:
            raise Unauthenticated(
                f"the token of issuer {issuer.host} expired on {day_of(claims['exp'])}: get a new one"
            )
        if max(claims.get("nbf", 0), claims.get("iat", 0)) > now + LEEWAY_SECONDS:
            raise Unauthenticated(
                f"the token of issuer {issuer.host} is not valid yet: set the clocks of issuer and bus by a time server"
            )


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
