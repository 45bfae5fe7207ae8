"""Writes the credential of the client under test, and loads the certificates of the scripted bus.

The certificates are for this program only, and valid for 127.0.0.1 until 2126.
"""

from __future__ import annotations

import json
from pathlib import Path

import grpc

HERE = Path(__file__).parent / "certificates"
# How a client reaches a bus: on this machine without a key, or with a part of its credential.
ACCESS = ("none", "token", "tls", "mtls", "foreign")
FIRST_TOKEN = "first-token"


def server_credentials(access: str) -> grpc.ServerCredentials | None:
    """Returns the TLS credentials of the scripted bus; None without TLS.

    Args:
        access: one of `ACCESS`; `foreign` shows a certificate of another authority than that of the credential.
    """
    if access in ("none", "token"):
        return None
    pem = (HERE / ("foreign.pem" if access == "foreign" else "bus.pem")).read_bytes()
    if access == "mtls":
        authority = (HERE / "authority.pem").read_bytes()
        return grpc.ssl_server_credentials([(pem, pem)], authority, require_client_auth=True)
    return grpc.ssl_server_credentials([(pem, pem)])


def address_of(access: str, place: str) -> str:
    """Returns an address with the prefix for an access."""
    prefix = {"tls": "tls:", "foreign": "tls:", "mtls": "mtls:"}.get(access, "")
    return f"{prefix}{place}"


def write_credential(path: Path, access: str, address: str, token: str, *, mode: int = 0o600) -> None:
    """Writes the file that TOOLBUS_CREDENTIAL names."""
    values = {"address": address, "name": "conformance", "token": token}
    if access not in ("none", "token"):
        values["ca"] = (HERE / "authority.pem").read_text("ascii")
    if access == "mtls":
        values["certificate"] = values["key"] = (HERE / "client.pem").read_text("ascii")
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())  # a JSON string is one of TOML
    path.touch(mode=0o600)
    path.write_text(lines, encoding="ascii")
    path.chmod(mode)
