"""Plays an issuer of tokens: its keys, the tokens that it signs, and what it publishes."""

from __future__ import annotations

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from toolbus.bus.access.identity import Scopes
from toolbus.parts.identity.issuers import Issuers
from toolbus.parts.identity.settings import Issuer

NAME = "https://login.example"
NOW = 1_800_000_000.0
RSA = rsa.generate_private_key(65537, 2048)
RECORD = Issuer(NAME, "toolbus", f"{NAME}/keys", {"ops": "operator", "bots": "chat"})


class PlayedIssuer:
    """An issuer, and a bus that knows it."""

    def __init__(self, record: Issuer = RECORD) -> None:
        self.keys: dict[str, Any] = {"r": RSA, "e": ec.generate_private_key(ec.SECP256R1())}
        self.fetches = 0
        self.answers = True  # whether its keys can be fetched
        self.now = NOW
        self.identities = {"chat": Scopes(), "operator": Scopes()}
        self.issuers = Issuers([record], lambda: self.identities, self.fetch, self.clock, self.clock)

    def clock(self) -> float:
        return self.now

    async def fetch(self, url: str) -> bytes:
        assert url == f"{NAME}/keys"
        self.fetches += 1
        if not self.answers:
            raise OSError("no answer")
        return self.jwks()

    def jwks(self) -> bytes:
        return json.dumps({"keys": [{**_public(key), "kid": kid} for kid, key in self.keys.items()]}).encode()

    def token(self, kid: str = "r", key: Any = None, algorithm: str = "", **claims: Any) -> str:
        """Signs a token; a claim of None is left out."""
        key = key or self.keys[kid]
        default = {rsa.RSAPrivateKey: "RS256", ed25519.Ed25519PrivateKey: "EdDSA"}
        chosen = algorithm or next((each for kind, each in default.items() if isinstance(key, kind)), "ES256")
        basic = {"iss": NAME, "aud": "toolbus", "sub": "ann", "exp": self.now + 3600, "groups": ["bots"]}
        payload = {name: value for name, value in {**basic, **claims}.items() if value is not None}
        return jwt.encode(payload, key, chosen, headers={"kid": kid} if kid else {})


def _public(key: Any) -> dict[str, Any]:
    kinds: dict[Any, Any] = {rsa.RSAPrivateKey: RSAAlgorithm, ed25519.Ed25519PrivateKey: OKPAlgorithm}
    algorithm = next((each for kind, each in kinds.items() if isinstance(key, kind)), ECAlgorithm)
    described: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return described
