"""Authenticates bus and plugin to each other with the secret of a registration, which neither of them sends.

The plugin registers with a `callback_secret`. Before the first call at a listening socket, the bus sends a
challenge: a GET of the callback URL with a nonce and without arguments. A program without the secret cannot answer it,
gets no calls, and learns nothing about the secret. Each call is signed, so that the plugin knows the bus.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

CHALLENGE = "X-Toolbus-Challenge"  # of a request for a proof: the nonce
PROOF = "X-Toolbus-Proof"  # of its answer
SIGNATURE = "X-Toolbus-Signature"  # of a call: NONCE:SIGNATURE
MIN_SECRET, MAX_SECRET = 16, 256  # characters
_SECRET = re.compile(r"[A-Za-z0-9._~+/=:-]*", re.ASCII)


def is_secret(text: str) -> bool:
    """Tells whether a text may be a `callback_secret`."""
    return MIN_SECRET <= len(text) <= MAX_SECRET and _SECRET.fullmatch(text) is not None


def nonce() -> str:
    """Returns a nonce, 32 hexadecimal digits."""
    return secrets.token_hex(16)


def proof(secret: str, nonce: str, callback_url: str) -> str:
    """Returns a plugin's answer to a challenge.

    Args:
        callback_url: as the plugin registered it, so that the proof of another of its ports is of no use.
    """
    return _mac(secret, b"proof", nonce, callback_url.encode())


def signature(secret: str, nonce: str, body: bytes) -> str:
    """Returns the bus's signature of the body of a call."""
    return _mac(secret, b"call", nonce, body)


def is_proof(answer: str, secret: str, nonce: str, callback_url: str) -> bool:
    """Tells whether an answer to a challenge proves the secret."""
    expected = proof(secret, nonce, callback_url)
    return hmac.compare_digest(answer.strip().lower().encode("utf-8", "replace"), expected.encode())


def _mac(secret: str, purpose: bytes, nonce: str, data: bytes) -> str:
    """Returns a MAC; the purpose separates signatures of the bus from proofs of plugins."""
    return hmac.new(secret.encode(), b"%b:%b:%b" % (purpose, nonce.encode(), data), hashlib.sha256).hexdigest()
