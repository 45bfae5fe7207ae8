"""Declares issuers whose tokens (JWT, as OIDC issues them) prove identities; read from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolbus.bus.access.identity import NAME
from toolbus.common.reader import Keys, Reader
from toolbus.common.setting import CheckedRecord, setting, table
from toolbus.common.text import quote
from toolbus.errors import SetupError

# Asymmetric ones only: with a shared secret, every server that checks tokens could also issue them.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
DEFAULT_ALGORITHMS = ("RS256", "ES256", "EdDSA")
ANY_GROUP = "*"  # stands for every token of the issuer
MAX_ISSUERS = 100


@dataclass(frozen=True, slots=True)
class Issuer:
    """An issuer whose tokens prove identities.

    Attributes:
        issuer: its name, the claim ``iss`` of its tokens.
        audience: the value that the claim ``aud`` must hold.
        jwks: the https URL of its keys, or a file of them.
        groups: identity of `keys.toml` by group, the first that fits counts; its scopes apply. The group ``*`` stands
            for every token.
        name: the claim that names the client.
        groups_claim: the claim that lists the groups.
        algorithms: with which its tokens may be signed.

    Raises:
        SetupError: from the constructor; a value breaks a rule.
    """

    issuer: str
    audience: str
    jwks: str
    groups: Mapping[str, str] = field(default_factory=dict)
    name: str = "sub"
    groups_claim: str = "groups"
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS

    def __post_init__(self) -> None:
        for key in ("issuer", "audience", "jwks", "name", "groups_claim"):
            if not getattr(self, key):
                raise SetupError(f"{key} is missing: fill it in")
        if "://" in self.jwks:
            url = urlsplit(self.jwks)
            if url.scheme != "https" or not url.hostname or url.username is not None:
                raise SetupError(
                    f"jwks is {quote(self.jwks)}, it must be https://HOST/PATH or a file: over http others could "
                    "change the keys on their way and issue tokens"
                )
        if not self.groups:
            raise SetupError(
                f"groups is empty, so no token of {quote(self.issuer)} proves anything: write "
                'groups = {"*" = "NAME"} with an identity of keys.toml, or one for each group'
            )
        for group, identity in self.groups.items():
            if not NAME.fullmatch(identity):
                raise SetupError(f"groups.{group} is {quote(identity)}, it must name an identity of keys.toml")
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise SetupError(f"algorithms is {list(self.algorithms)}, it must hold some of {', '.join(ALGORITHMS)}")

    @property
    def host(self) -> str:
        """Names the issuer in logs and messages."""
        return urlsplit(self.issuer).hostname or self.issuer

    @property
    def file(self) -> Path | None:
        """The file of its keys; None where they are fetched."""
        return None if "://" in self.jwks else Path(self.jwks).expanduser()


def read_issuers(reader: Reader) -> tuple[Issuer, ...]:
    """Reads a list of issuers.

    Raises:
        SetupError: naming the place, the value, the rule and how to fix it.
    """
    count = len(reader.items())
    if count > MAX_ISSUERS:
        raise SetupError(f"{reader.place} has {count} issuers, at most {MAX_ISSUERS} are possible")
    issuers = reader.records(Issuer, _KEYS, issuer="", audience="", jwks="")
    _check_issuers(reader.place, issuers)
    return issuers


def _check_issuers(_: str, issuers: tuple[Issuer, ...]) -> None:
    names = [each.issuer for each in issuers]
    for name in names:
        if names.count(name) > 1:
            raise SetupError(f"issuer {quote(name)} is configured twice: keep one record")


_KEYS: Keys = {
    **{name: (name, Reader.text) for name in ("issuer", "audience", "jwks", "name", "groups_claim")},
    "groups": ("groups", lambda reader: {group: name.text() for group, name in reader.entries().items()}),
    "algorithms": ("algorithms", lambda reader: tuple(each.choice(ALGORITHMS) for each in reader.items())),
}


@dataclass(frozen=True, slots=True)
class IssuerSettings(CheckedRecord):
    """Whose tokens prove identities, in addition to those of `keys.toml`."""

    issuers: tuple[Issuer, ...] = setting((), table(read_issuers), check=_check_issuers)

    def check_beside(self, config: Any) -> None:
        """Checks that the bus has addresses where tokens are for.

        Raises:
            SetupError: it has none.
        """
        if self.issuers and not config.needs_keys:
            raise SetupError(
                "issuers are for the addresses tls:, mtls: and https, and this bus has none of them: add one, or drop "
                "the issuers"
            )
